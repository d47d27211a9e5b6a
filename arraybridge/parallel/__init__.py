"""Parallel execution: `device_map`, `Pipeline` and `prefetch`, with the worker threads that they share."""
