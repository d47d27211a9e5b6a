"""A complete framework in one file: arrays on the host and on a simulated GPU in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraybridge
from arraybridge import Device
from arraybridge.interface.component import component
from arraybridge.interface.devices import Devices
from arraybridge.interface.memory import DeviceDetails, Holding, Memory
from arraybridge.interface.registry import FrameworkMetadata
from arraybridge.interface.runtime import Runtime

__version__ = "3.2.1"

GPU = Device("gpu", 0, "a slate")


class Slate:
    """Values and their device."""

    def __init__(self, values: Any, device: Device) -> None:
        self.values, self.device = np.asarray(values), device

    def __add__(self, other: Any) -> Slate:
        return Slate(self.values + (other.values if isinstance(other, Slate) else other), self.device)

    def __mul__(self, other: Any) -> Slate:
        return Slate(self.values * (other.values if isinstance(other, Slate) else other), self.device)

    def __getitem__(self, key: Any) -> Slate:
        return Slate(self.values[key], self.device)


class SlatesRuntime(Runtime):
    metadata = FrameworkMetadata(
        "slates", distributions=("slates-dist",), runs_numpy_code=True, libraries=("/slates.py",)
    )


class SlatesMemory(Memory):
    def device_details(self, device: Device) -> DeviceDetails:
        return DeviceDetails(device.name, total=1 << 30)

    def free_memory_of(self, device: Device) -> int:
        return 1 << 29

    def usage(self) -> list[Holding]:
        return [Holding("gpu:0", "slates", 100, 20, 300)]


class SlatesDevices(Devices):
    def device_of(self, x: Slate) -> Device:
        return x.device

    def available(self) -> tuple[Device, ...]:
        return (Device("cpu"), GPU)


class SlatesFramework(arraybridge.Framework):
    name = "slates"
    runtime = component(SlatesRuntime)
    memory = component(SlatesMemory)
    devices = component(SlatesDevices)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Slate)

    def dtype_name(self, x: Slate) -> str:
        return x.values.dtype.name

    def shape(self, x: Slate) -> tuple[int, ...]:
        return x.values.shape

    def nbytes(self, x: Slate) -> int:
        return x.values.nbytes

    def host_view(self, x: Slate) -> np.ndarray[Any, Any]:
        return x.values

    def to_host(self, x: Slate) -> np.ndarray[Any, Any]:
        return x.values.copy()

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> Slate:
        return Slate(view if device.kind == "cpu" else view.copy(), device)
