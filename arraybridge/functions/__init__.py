"""Running a user's function in its framework: decorators, dtype conversion of results, slices.

**On which CUDA stream a decorated function runs.** On a card each thread has a stream of its own: the
function runs on it, after what its arguments wait for, and what follows waits for it. Libraries whose kernels
are launched on the framework's current stream need nothing:

- CuPy's ``RawKernel``, ``ElementwiseKernel`` and ``ReductionKernel``, under ``@cupy``;
- Triton, ``torch.library`` operators and extensions that ask for torch's current stream, under ``@torch``;
- Pallas and ``jax.ffi``, under ``@jax``: XLA orders its work by itself.

Libraries that launch on CUDA's legacy default stream, unless they are given another one, would read arrays
that are not there yet, and nobody would wait for what they write: ``numba.cuda``, PyCUDA, ``cuda-python``,
and any library that is called by way of ctypes. Give them the stream, or say ``stream=False``: then the
function runs on the stream that its caller is on, which is the default one where nobody chose another.

>>> import numpy as np, torch
>>> from arraybridge import torch as on_torch
>>> @on_torch(stream=False, output_type="input")
... def plus_one(x):
...     out = x.clone()
...     view = out.numpy()  # on a card: add_one.forall(out.numel())(out), a kernel of numba.cuda
...     view += 1
...     return out
>>> plus_one(np.arange(3.0))
array([1., 2., 3.])

On the host there are no streams, and ``stream=False`` changes nothing. docs/kernels.md shows each library.
"""
