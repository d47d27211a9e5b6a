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


def _call(function: str, *arguments: object) -> bool:
    """Call a function of the CUDA driver, and return whether it succeeded; False if there is no driver."""
    library = _driver()
    return library is not None and getattr(library, function)(*arguments) == 0


def is_driver_initialized() -> bool:
    """Return whether this process has initialized CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so avoid initializing the driver unnecessarily.
    """
    return _call("cuDeviceGetCount", ctypes.byref(ctypes.c_int()))


def visible_uuids() -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs (or MIG slices) that CUDA numbers 0, 1, …, as hexadecimal digits.

    The result is None if the driver is not initialized or does not report UUIDs.
    """
    count = ctypes.c_int()
    if not _call("cuDeviceGetCount", ctypes.byref(count)):
        return None
    uuids = []
    for index in range(count.value):
        device = ctypes.c_int()
        uuid = ctypes.create_string_buffer(16)
        if not _call("cuDeviceGet", ctypes.byref(device), index):
            return None
        if not _call("cuDeviceGetUuid_v2", uuid, device):
            return None
        uuids.append(uuid.raw.hex())
    return tuple(uuids)


def has_context(index: int) -> bool:
    """Return whether this process has a context on a GPU, without initializing the driver."""
    flags = ctypes.c_uint()
    active = ctypes.c_int()
    is_known = _call("cuDevicePrimaryCtxGetState", index, ctypes.byref(flags), ctypes.byref(active))
    return is_known and active.value == 1


def device_at(address: int) -> int | None:
    """Return the number of the CUDA device whose memory is at this address; None for unknown memory.

    Unlike the equivalent function of the CUDA runtime, this function does not create a context.
    """
    return _pointer_attribute(_DEVICE_ORDINAL, address) if address else None


def is_page_locked(address: int) -> bool:
    """Return whether CUDA has page-locked the host memory at this address, without creating a context."""
    return _pointer_attribute(_MEMORY_TYPE, address) == _HOST


def _pointer_attribute(attribute: int, address: int) -> int | None:
    value = ctypes.c_int()
    is_known = _call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(address))
    return value.value if is_known else None


@contextmanager
def allow_queries() -> Iterator[None]:
    """Allow queries of events while another thread captures a CUDA graph.

    They would invalidate a capture in the default mode of PyTorch, cudaStreamCaptureModeGlobal
    (pytorch/pytorch#107407), as the documentation of CUDA 13 states.
    """
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def primary_context(index: int) -> Iterator[None]:
    """Make a GPU current within a ``with`` block. Its CUDA context is retained, as after cudaSetDevice."""
    context = ctypes.c_void_p()
    if not _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index):
        raise RuntimeError(f"the CUDA driver cannot create a context on GPU {index}")
    if not _call("cuCtxPushCurrent_v2", context):
        _call("cuDevicePrimaryCtxRelease_v2", index)
        raise RuntimeError(f"the CUDA driver cannot make GPU {index} the current device")
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
