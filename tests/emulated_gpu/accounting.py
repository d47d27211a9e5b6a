"""The emulated GPU's own accounting, independent of what frameworks report."""

from __future__ import annotations

import ctypes
import gc

import cupy

_gpu = ctypes.CDLL("libcudart.so.13")
for _name in ("used_bytes", "capacity", "queued_work", "pinned_blocks"):
    getattr(_gpu, f"gpu_{_name}").restype = ctypes.c_size_t


def used(gpu: int = 0) -> int:
    """Return the bytes allocated on the GPU."""
    return int(_gpu.gpu_used_bytes(gpu))


def capacity() -> int:
    """Return the size of each GPU in bytes."""
    return int(_gpu.gpu_capacity())


def queued(gpu: int = 0) -> int:
    """Return the number of tasks queued in all streams of the GPU."""
    return int(_gpu.gpu_queued_work(gpu))


def pinned_blocks() -> int:
    """Return the number of blocks of page-locked memory."""
    return int(_gpu.gpu_pinned_blocks())


def is_open(gpu: int = 0) -> bool:
    """Return whether this process has a context on the GPU."""
    return bool(_gpu.gpu_is_open(gpu))


def is_driver_initialized() -> bool:
    """Return whether the driver was initialized."""
    return bool(_gpu.gpu_is_awake())


def retained_contexts(gpu: int = 0) -> int:
    """Return how often the driver API retained the GPU's primary context without releasing it."""
    return int(_gpu.gpu_retained_contexts(gpu))


def pushed_contexts() -> int:
    """Return how many contexts this thread has pushed and not popped."""
    return int(_gpu.gpu_pushed_contexts())


def fail_next_push() -> None:
    """Make the next cuCtxPushCurrent fail."""
    _gpu.gpu_fail_next_push()


def empty_pools() -> None:
    """Release CuPy's cached memory on every GPU that is open."""
    gc.collect()
    for gpu in filter(is_open, range(cupy.cuda.runtime.getDeviceCount())):
        with cupy.cuda.Device(gpu):
            cupy.cuda.Device(gpu).synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
