"""Threads behind queues: `device_map`, `Pipeline`, and what they have in common."""
