"""NumPy: arrays in host memory, and SciPy's sparse arrays."""
