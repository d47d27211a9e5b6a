"""CuPy draws from PyTorch's pool, and refuses to change over when it holds memory already."""

import cupy
import torch

import arraybridge

x = cupy.zeros(1 << 20, "uint8")
try:
    arraybridge.share_gpu_memory("torch")
except arraybridge.SharedPoolError as error:
    assert "free_memory" in str(error)  # noqa: PT017 - a script, not a test
else:
    raise AssertionError("it changed over in spite of an array")
del x
arraybridge.free_memory("cupy")
arraybridge.share_gpu_memory("torch")
before = torch.cuda.memory_allocated()
y = cupy.arange(1 << 20, dtype="float32")
assert torch.cuda.memory_allocated() >= before + y.nbytes
assert float(y.sum()) > 0
del y
assert torch.cuda.memory_allocated() == before
