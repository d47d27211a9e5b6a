"""Use functions that need no framework, and print the imported frameworks, which should be none."""

import sys
from typing import Any

import numpy as np

import arraybridge as ab


@ab.gpu
def double(x: Any) -> Any:
    return 2 * x


def fail(x: np.ndarray) -> np.ndarray:
    """Run out of memory on more than two rows."""
    if len(x) > 2:
        raise MemoryError
    return x + 1


# devices
ab.gpu_available()
ab.device_info()
ab.least_used_gpu()
ab.get_device()
with ab.use_device("cpu"):
    ab.devices("numpy")
# memory
assert ab.is_oom_error(MemoryError())
assert not ab.is_oom_error(ValueError("out of memory"))
assert ab.free_memory() == 0
assert ab.cleanup_torch_gpu() == ab.cleanup_jax_gpu() == 0
assert ab.split_and_retry(fail, np.arange(7)).tolist() == [1, 2, 3, 4, 5, 6, 7]
with ab.gpu_context(None), ab.memory_peak():
    str(ab.memory_stats())
ab.gpu_utilization()
ab.coexist()
pool = ab.BufferPool(1 << 20)
pool.give(pool.take((4, 4), "float32", "numpy"))
ab.pinned(np.zeros(3))
# small arrays, for which no GPU is searched
for _ in range(20):
    double(np.ones(1000))
assert not double.explain(np.ones(1000)).on_gpu
print(*sorted({"cupy", "torch", "jax", "tensorflow", "pyclesperanto", "pyopencl"} & set(sys.modules)))
