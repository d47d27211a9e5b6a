"""What only CUDA's driver tells without opening a card: whose memory lies where, and which cards are open.

The runtime's calls for the same open the current card, and take some hundred megabytes there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# The number of CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL.
_DEVICE_ORDINAL = 9


@cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's driver as it is, not initialised by this; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_awake() -> bool:
    """Whether something in this process has initialised CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so that nobody should do it without need.
    """
    library = _driver()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


def card_at(address: int) -> int | None:
    """The number of the card on which memory lies; None where the driver does not know."""
    library, ordinal = _driver(), ctypes.c_int()
    if library is None or not address:
        return None
    failed = library.cuPointerGetAttribute(
        ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_ulonglong(address)
    )
    return None if failed else ordinal.value


def has_context(index: int) -> bool:
    """Whether this process has a context on the card. Does not wake the driver."""
    library, flags, active = _driver(), ctypes.c_uint(), ctypes.c_int()
    if library is None:
        return False
    failed = library.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return not failed and active.value == 1


@contextmanager
def primary_context(index: int) -> Iterator[None]:
    """Make the card the current one; it stays open, as after cudaSetDevice."""
    library, context = _driver(), ctypes.c_void_p()
    if (
        library is None
        or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
        or library.cuCtxPushCurrent_v2(context)
    ):
        raise RuntimeError(f"CUDA's driver opens no card {index}")
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
