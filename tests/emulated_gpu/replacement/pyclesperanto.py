"""A replacement for pyclesperanto 0.25 with its CUDA backend: the same calls, on memory of CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

CUDA = 2
_devices = [SimpleNamespace(index=i, type="CUDA", name=f"GPU {i}") for i in range(2)]
_current = [_devices[0]]


@cache
def _queue(index: int) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def _on(device: Any) -> Iterator[None]:
    """Run in a separate stream that does not wait for any other."""
    with cupy.cuda.Device(device.index), _queue(device.index):
        yield


class Array:
    mtype = "buffer"

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.shape, self.dtype, self.ndim = memory.shape, memory.dtype, memory.ndim
        self.nbytes = memory.nbytes
        self.device = _devices[memory.device.id]

    def set(self, values: np.ndarray) -> None:
        with _on(self.device):
            self.memory.set(values)

    def get(self, origin: Any = None, region: Any = None) -> np.ndarray:
        with _on(self.device):
            return self.memory.get()

    # Like the original: neither stream= nor max_version=, and always versioned.

    def __dlpack__(self, stream: Any = None, version: tuple[int, int] = (1, 0)) -> Any:
        with _on(self.device):
            return self.memory.__dlpack__(stream=-1, max_version=(1, 0))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self.device.index)


def get_backend_name() -> str:
    return "cuda"


def get_device() -> Any:
    return _current[0]


def list_available_devices(device_type: str = "all") -> list[str]:
    return [] if device_type == "cpu" else [device.name for device in _devices]


def select_device(device_id: int, device_type: str = "all") -> Any:
    _current[0] = _devices[device_id]
    return _current[0]


def create(shape: tuple[int, ...], dtype: Any, device: Any) -> Array:
    with _on(device):
        return Array(cupy.empty(shape, dtype))


def from_dlpack(producer: Any, *, device: Any = None, copy: bool | None = None) -> Array:
    if producer.__dlpack_device__() != (CUDA, device.index):
        raise ValueError("copy=False requested but source device differs")
    with _on(device):
        memory = cupy.from_dlpack(producer)
    assert memory.flags.c_contiguous, "pyclesperanto does not support strides"
    return Array(memory)
