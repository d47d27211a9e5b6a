"""Running a user's function in its framework: decorators, dtype conversion of results, slices.

On a card each thread has a stream of its own: a decorated function runs on it, after what its arguments wait
for, and what follows waits for it. Libraries that launch their kernels on CUDA's default stream need
``stream=False``: the function then runs on the stream of its caller. docs/kernels.md shows which these are.
"""
