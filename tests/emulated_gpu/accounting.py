"""What the emulated card says of itself: its own books, beside those that frameworks keep."""

from __future__ import annotations

import ctypes
import gc

import cupy

_gpu = ctypes.CDLL("libcudart.so.13")
for _name in ("used_bytes", "capacity", "queued_work"):
    getattr(_gpu, f"gpu_{_name}").restype = ctypes.c_size_t


def used(gpu: int = 0) -> int:
    """Bytes that are allocated on the card."""
    return int(_gpu.gpu_used_bytes(gpu))


def capacity() -> int:
    """Bytes of each card."""
    return int(_gpu.gpu_capacity())


def queued(gpu: int = 0) -> int:
    """Pieces of work that wait on all streams of the card."""
    return int(_gpu.gpu_queued_work(gpu))


def is_open(gpu: int = 0) -> bool:
    """Whether this process has a context on the card."""
    return bool(_gpu.gpu_is_open(gpu))


def is_driver_initialized() -> bool:
    """Whether the driver was initialized."""
    return bool(_gpu.gpu_is_awake())


def retained_contexts(gpu: int = 0) -> int:
    """How often the driver's interface retained the primary context of the card without releasing it."""
    return int(_gpu.gpu_retained_contexts(gpu))


def pushed_contexts() -> int:
    """How many contexts this thread has pushed and not popped."""
    return int(_gpu.gpu_pushed_contexts())


def fail_next_push() -> None:
    """Let the next cuCtxPushCurrent fail."""
    _gpu.gpu_fail_next_push()


def empty_pools() -> None:
    """Let CuPy give back what it caches, on both cards."""
    gc.collect()
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            cupy.cuda.Device(gpu).synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
