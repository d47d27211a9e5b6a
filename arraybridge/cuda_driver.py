"""Calls to the CUDA driver: which GPUs have a context, where memory is, and which GPU is current.

The equivalent functions of the CUDA runtime create a context on the current device, which takes several
hundred MB of the device's memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# CU_POINTER_ATTRIBUTE_MEMORY_TYPE, and its value for page-locked host memory: CU_MEMORYTYPE_HOST
_MEMORY_TYPE = 2
_HOST = 1
# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2
# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_DEVICE_ORDINAL = 9


@cache
def _driver() -> ctypes.CDLL | None:
    """Return the CUDA driver library without initializing it; None if there is no driver."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_driver_initialized() -> bool:
    """Return whether this process has initialized CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so avoid initializing the driver unnecessarily.
    """
    library = _driver()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


def visible_uuids() -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs (or MIG slices) that CUDA numbers 0, 1, …, as hexadecimal digits.

    The result is None if the driver is not initialized or does not report UUIDs.
    """
    library = _driver()
    count = ctypes.c_int()
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)):
        return None
    uuids = []
    for index in range(count.value):
        device = ctypes.c_int()
        uuid = ctypes.create_string_buffer(16)
        if library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetUuid_v2(uuid, device):
            return None
        uuids.append(uuid.raw.hex())
    return tuple(uuids)


def has_context(index: int) -> bool:
    """Return whether this process has a context on a GPU, without initializing the driver."""
    library = _driver()
    flags = ctypes.c_uint()
    active = ctypes.c_int()
    if library is None:
        return False
    failed = library.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return not failed and active.value == 1


def device_at(address: int) -> int | None:
    """Return the number of the CUDA device whose memory is at this address; None for unknown memory.

    Unlike the equivalent function of the CUDA runtime, this function does not create a context.
    """
    library = _driver()
    index = ctypes.c_int()
    if library is None or not address:
        return None
    failed = library.cuPointerGetAttribute(ctypes.byref(index), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    return None if failed else index.value


def is_page_locked(address: int) -> bool:
    """Return whether CUDA has page-locked the host memory at this address, without creating a context."""
    library = _driver()
    kind = ctypes.c_uint()
    if library is None:
        return False
    failed = library.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
    return not failed and kind.value == _HOST


@contextmanager
def allow_queries() -> Iterator[None]:
    """Allow queries of events while another thread captures a CUDA graph.

    They would invalidate a capture in the default mode of PyTorch, cudaStreamCaptureModeGlobal
    (pytorch/pytorch#107407), as the documentation of CUDA 13 states.
    """
    library = _driver()
    mode = ctypes.c_int(_RELAXED)
    if library is None:
        yield
        return
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextmanager
def primary_context(index: int) -> Iterator[None]:
    """Make a GPU current within a ``with`` block. Its CUDA context is retained, as after cudaSetDevice."""
    library = _driver()
    context = ctypes.c_void_p()
    if library is None or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index):
        raise RuntimeError(f"the CUDA driver cannot create a context on GPU {index}")
    if library.cuCtxPushCurrent_v2(context):
        library.cuDevicePrimaryCtxRelease_v2(index)
        raise RuntimeError(f"the CUDA driver cannot make GPU {index} the current device")
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
