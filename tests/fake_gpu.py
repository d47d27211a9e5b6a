"""Fake GPUs: a framework whose devices are host memory that host code must not read.

Tests add a clock, a slow bus, stream events or a pool by a subclass or a component.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arraybridge.device import Device
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import Interchange

FAKE_GPUS = (Device("gpu", 0), Device("gpu", 1))


class FakeGpuArray:
    """Values that only their framework may read, and the number of the GPU, or -1 on the host."""

    def __init__(self, values: np.ndarray[Any, Any], gpu: int = 0) -> None:
        self.values = values
        self.gpu = gpu

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def _like(self, values: Any) -> FakeGpuArray:
        return type(self)(np.asarray(values), self.gpu)

    def __add__(self, other: Any) -> FakeGpuArray:
        return self._like(self.values + (other.values if isinstance(other, FakeGpuArray) else other))

    def __mul__(self, other: Any) -> FakeGpuArray:
        return self._like(self.values * (other.values if isinstance(other, FakeGpuArray) else other))

    def __getitem__(self, key: Any) -> FakeGpuArray:
        return self._like(self.values[key])

    def sum(self) -> FakeGpuArray:
        return self._like(self.values.sum())


class GpuDevices(Devices):
    framework: FakeGpuFramework

    def device_of(self, x: FakeGpuArray) -> Device:
        return CPU if x.gpu < 0 else Device("gpu", x.gpu)

    def available(self) -> tuple[Device, ...]:
        return (CPU, *self.framework.gpus) if self.framework.has_host else self.framework.gpus

    def default_device(self) -> Device:
        return CPU if self.framework.has_host else self.framework.gpus[self.framework.current]

    @contextmanager
    def select(self, device: Device) -> Iterator[None]:
        before, self.framework.current = self.framework.current, device.index
        try:
            yield
        finally:
            self.framework.current = before


class GpuInterchange(Interchange):
    def strides(self, x: FakeGpuArray) -> tuple[int, ...]:
        return x.values.strides


class GpuBatching(IndexedBatching):
    framework: FakeGpuFramework

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> FakeGpuArray:
        return self.framework.array(np.empty(shape, dtype), -1 if device == CPU else device.index)

    def concatenate(self, parts: list[FakeGpuArray], axis: int) -> FakeGpuArray:
        return self.framework.array(np.concatenate([part.values for part in parts], axis), parts[0].gpu)


class FakeGpuFramework(Framework):
    """A framework with two GPUs, and host arrays if ``has_host``, that records its operations.

    Attributes:
        array: The class of its arrays.
        gpus: Its GPUs.
        done: Descriptions of the operations.
        current: The number of the current GPU.
    """

    name = "cards"
    modules = ("tests.fake_gpu",)
    has_host = False
    array: type[FakeGpuArray] = FakeGpuArray
    gpus: tuple[Device, ...] = FAKE_GPUS
    devices = component(GpuDevices)
    interchange = component(GpuInterchange)
    batching = component(GpuBatching)

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = 0

    def owns(self, x: Any) -> bool:
        return isinstance(x, self.array)

    def host_view(self, x: FakeGpuArray) -> np.ndarray[Any, Any]:
        assert x.gpu < 0, "the host cannot read GPU memory"
        return x.values

    def to_host(self, x: FakeGpuArray) -> np.ndarray[Any, Any]:
        self.done.append("to host")
        return x.values.copy()

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> FakeGpuArray:
        if device == CPU:
            assert self.has_host
            return self.array(view, -1)
        self.done.append(f"to {device}")
        return self.array(view.copy(), device.index)
