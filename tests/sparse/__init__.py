"""Sparse arrays of SciPy, PyTorch, JAX, TensorFlow and CuPy."""
