"""Memory management: recovery from out-of-memory errors, caches, statistics, pools and shared memory."""
