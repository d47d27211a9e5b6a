"""Use every function of arraybridge.memory that needs no framework, and see that none was imported."""

import sys

import numpy as np

import arraybridge

BANNED = ("cupy", "jax", "pyclesperanto", "pyopencl", "tensorflow", "torch")


def fail(x: np.ndarray) -> np.ndarray:
    """Run out of memory on more than two rows."""
    if len(x) > 2:
        raise MemoryError
    return x + 1


assert arraybridge.is_oom_error(MemoryError())
assert not arraybridge.is_oom_error(ValueError("out of memory"))
assert arraybridge.free_memory() == 0
assert arraybridge.cleanup_torch_gpu() == arraybridge.cleanup_jax_gpu() == 0
assert arraybridge.split_and_retry(fail, np.arange(7)).tolist() == [1, 2, 3, 4, 5, 6, 7]
with arraybridge.gpu_context(None):
    pass
arraybridge.memory_stats().to_dict()
str(arraybridge.memory_stats())
arraybridge.gpu_utilization()
with arraybridge.memory_peak() as peak:
    pass
arraybridge.coexist()
pool = arraybridge.BufferPool(1 << 20)
pool.give(pool.take((4, 4), "float32", "numpy"))
arraybridge.pinned(np.zeros(3))
found = [name for name in BANNED if name in sys.modules]
if found:
    sys.exit(f"imported: {', '.join(found)}")
