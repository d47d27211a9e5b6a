"""Arrays of libraries that arraybridge does not know, through the protocols that they offer."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework, refuse
from arraybridge.types import Device

__all__ = ["FOREIGN_HOST", "foreign_framework"]

# DLPack device types: kDLCPU, kDLCUDAHost (pinned), kDLROCMHost can be read by the processor.
_HOST_TYPES = (1, 3, 11)
_CUDA_TYPES = (2, 13)


class ForeignHost(Framework):
    """Host memory behind ``__array_interface__`` or ``__dlpack__``; its kind of memory is NumPy's."""

    name = "numpy"

    def owns(self, x: Any) -> bool:
        return False

    def host_view(self, x: Any) -> np.ndarray:
        try:
            return np.asarray(x) if hasattr(type(x), "__array_interface__") else np.from_dlpack(x)
        except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
            what = f"an array of type {type(x).__qualname__}"
            raise refuse(self, what, f"its memory cannot be read: {error}") from error

    def check(self, x: Any) -> None:
        registry.framework("numpy").check(self.host_view(x))

    def dtype_name(self, x: Any) -> str:
        return self.host_view(x).dtype.name

    def shape(self, x: Any) -> tuple[int, ...]:
        return self.host_view(x).shape

    def nbytes(self, x: Any) -> int:
        return self.host_view(x).nbytes

    def part(self, x: Any, axis: int, start: int, stop: int) -> np.ndarray:
        host: np.ndarray = super().part(self.host_view(x), axis, start, stop)
        return host

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return registry.framework("numpy").concatenate([self.host_view(x) for x in parts], axis)

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        raise NotImplementedError("foreign arrays are sources alone")


def _import_cuda(x: Any) -> tuple[Framework, Any]:
    """``x`` as an array of the first installed framework that reads CUDA memory, without a copy."""
    for name in ("cupy", "torch"):
        if registry.is_installed(name):
            target = registry.framework(name)
            return target, target.adopt(x, FOREIGN_HOST, CPU)
    raise refuse(FOREIGN_HOST, "a CUDA array", "install cupy or torch, which can read it")


FOREIGN_HOST = ForeignHost()


def foreign_framework(x: Any) -> tuple[Framework, Any]:
    """How to treat an object that offers an array protocol: its framework, and the array to read.

    Raises:
        ArrayNotSupportedError: its memory is of a kind that nothing here can read.
    """
    if hasattr(type(x), "__dlpack_device__"):
        kind, _ = x.__dlpack_device__()
        if int(kind) in _HOST_TYPES:
            return FOREIGN_HOST, x
        if int(kind) in _CUDA_TYPES:
            return _import_cuda(x)
        raise refuse(FOREIGN_HOST, f"an array on DLPack device type {int(kind)}", "copy it to the host first")
    if hasattr(type(x), "__cuda_array_interface__"):
        return _import_cuda(x)
    return FOREIGN_HOST, x
