"""Decorators that run a function in one framework, and functions for stacks of slices.

On a GPU, each thread has a separate stream, on which decorated functions run. A decorated function waits for
pending work on its arguments, and work that uses its results waits for the function. Libraries
that launch kernels on the default CUDA stream need ``stream=False``, which runs the function on the caller's
stream. See docs/kernels.md.
"""
