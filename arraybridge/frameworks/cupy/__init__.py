"""CuPy: arrays on CUDA or ROCm GPUs."""
