"""The decorators that run a function in its framework, and the functions for stacks of slices.

On a GPU, each thread has a separate stream. A decorated function runs on it and waits for pending work on its
arguments; work that uses the results waits for the function. Libraries that launch kernels on the default
CUDA stream need ``stream=False``, which runs the function on the caller's stream. See docs/kernels.md.
"""
