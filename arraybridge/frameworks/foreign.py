"""Arrays of libraries that arraybridge does not know, through the protocols that they offer."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.errors import told
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU, Framework, refuse
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.registry import offers

__all__ = ["FOREIGN_HOST", "foreign_framework"]

# DLPack device types: kDLCPU, kDLCUDAHost (pinned), kDLROCMHost can be read by the processor.
_HOST_TYPES = (1, 3, 11)
_CUDA_TYPES = (2, 13)


class ForeignHost(NumpyFramework):
    """Host memory of other libraries, once it was opened as a NumPy array; its kind of memory is NumPy's.

    ``copied`` says why the memory that was handed out is a copy, or is ``""``.
    """

    def __init__(self, copied: str = "") -> None:
        self._copied = copied

    def owns(self, x: Any) -> bool:
        return False

    def must_copy(self, x: np.ndarray) -> str:
        return self._copied


FOREIGN_HOST = ForeignHost()
_BYTES = ForeignHost("its array interface hands out a copy of its bytes")
_FETCHED = ForeignHost("it was read from a device that no framework here shares")
_SCALAR = ForeignHost("a scalar of NumPy is a value, with no memory to share")


def foreign_framework(x: Any) -> tuple[Framework, Any]:
    """How to treat an object that offers an array protocol: its framework, and the array to read.

    Raises:
        ArrayNotSupportedError: its memory is of a kind that nothing here can read.
    """
    if isinstance(x, np.generic):
        return _SCALAR, np.asarray(x)
    method = registry.fetched_by(type(x))
    if method is not None:
        return _FETCHED, np.asarray(getattr(x, method)())
    if offers(x, "__dlpack_device__"):
        kind, _ = x.__dlpack_device__()
        if int(kind) in _CUDA_TYPES:
            return _import_cuda(x)
        if int(kind) not in _HOST_TYPES:
            what = f"an array on DLPack device type {int(kind)}"
            raise refuse(FOREIGN_HOST, what, "copy it to the host first")
    elif offers(x, "__cuda_array_interface__") and not offers(x, "__array_interface__"):
        return _import_cuda(x)
    try:
        return _open(x)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError, KeyError) as error:
        what = f"an array of type {type(x).__qualname__}"
        raise refuse(FOREIGN_HOST, what, f"its memory cannot be read: {told(error)}") from error


def _open(x: Any) -> tuple[Framework, np.ndarray]:
    if not offers(x, "__array_interface__"):
        return FOREIGN_HOST, hostmemory.from_dlpack(x)
    interface = x.__array_interface__
    if interface.get("data") is None:
        return FOREIGN_HOST, np.asarray(x)  # by the buffer protocol
    memory = np.asarray(hostmemory.Interface(interface, x))
    # Bytes were made for this one question, as Pillow does, or else nobody could ever change them.
    return (_BYTES if isinstance(interface["data"], bytes) else FOREIGN_HOST), memory


def _import_cuda(x: Any) -> tuple[Framework, Any]:
    """``x`` as an array of the first installed framework that reads CUDA memory, without a copy."""
    for name in ("cupy", "torch"):
        target = registry.usable(name)
        if target is not None:
            return target, target.adopt(x, FOREIGN_HOST, CPU)
    raise refuse(FOREIGN_HOST, "a CUDA array", "install cupy or torch, which can read it")
