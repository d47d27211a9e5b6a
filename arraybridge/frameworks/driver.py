"""What only CUDA's driver tells without opening a card: whose memory lies where, and which cards are open."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["card_at", "driver", "is_awake"]

# The number of CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL.
_DEVICE_ORDINAL = 9


@cache
def driver() -> ctypes.CDLL | None:
    """CUDA's driver as it is, not initialised by this; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_awake() -> bool:
    """Whether something in this process has initialised CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so that nobody should do it without need.
    """
    library = driver()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


def card_at(address: int) -> int | None:
    """The number of the card on which memory lies; None where the driver does not know. Opens none.

    The runtime's question for it, which frameworks ask, opens the current card.
    """
    library, ordinal = driver(), ctypes.c_int()
    if library is None or not address:
        return None
    failed = library.cuPointerGetAttribute(
        ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_ulonglong(address)
    )
    return None if failed else ordinal.value
