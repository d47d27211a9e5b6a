"""A second framework with separate streams on CUDA devices, using CuPy's arrays.

Like PyTorch, it queues work in streams that CuPy's functions do not know. With it, tests about two
frameworks also run if CuPy is the only one installed.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

import arraybridge
from arraybridge.device import Device
from arraybridge.frameworks.cupy.framework import CupyStreams, on_gpu
from arraybridge.interface import component, interchange
from arraybridge.interface import devices as device_access
from arraybridge.interface.streams import StreamEvent


class TwinArray:
    """An array of the framework, whose work runs on the framework's stream."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array = array
        self.stream = stream
        self.dtype = array.dtype
        self.shape = array.shape
        self.nbytes = array.nbytes

    def fill(self, value: float) -> None:
        with self.stream:
            self.array.fill(value)

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Export the memory. The consumer's stream waits for this framework's stream."""
        if stream not in (None, -1):
            reached = self.stream.record()
            consumer = 0 if stream == 1 else stream
            cupy.cuda.runtime.streamWaitEvent(consumer, reached.ptr)
        return self.array.__dlpack__(stream=-1, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.array.device.id


class TwinStreams(CupyStreams):
    """One stream per device, shared by all threads."""

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}

    def of(self, device: Device) -> Any:
        if device.index not in self.by_device:
            with on_gpu(device.index):
                self.by_device[device.index] = cupy.cuda.Stream(non_blocking=True)
        return self.by_device[device.index]

    def take_stream(self, device: Device) -> None:
        pass

    def handle(self, device: Device) -> int:
        return int(self.of(device).ptr)

    def record_event(self, device: Device) -> StreamEvent:
        with on_gpu(device.index):
            event = self.of(device).record(cupy.cuda.Event(disable_timing=True))

        def wait() -> None:
            self.of(device).wait_event(event)

        def is_done() -> bool:
            return bool(event.done)

        return StreamEvent(self, device, wait, event.synchronize, is_done)

    def wait_for(self, device: Device, handle: int) -> None:
        with on_gpu(device.index):
            reached = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(reached.ptr, handle)
            self.of(device).wait_event(reached)

    def take_over(self, x: TwinArray) -> TwinArray:
        return x


class TwinInterchange(interchange.Interchange):
    dlpack_device = 2

    def import_from(self, x: Any, source: arraybridge.Framework, device: Device) -> TwinArray:
        """Share the memory. Unlike in CuPy and PyTorch, nothing records when it was read."""
        source.interchange.block_until_ready(x)
        with on_gpu(device.index):
            array = cupy.from_dlpack(source.interchange.export(x, device))
        assert isinstance(self.framework, TwinFramework)
        return TwinArray(array, self.framework.streams.of(device))


class TwinDevices(device_access.Devices):
    def device_of(self, x: TwinArray) -> Device:
        return Device("gpu", x.array.device.id)

    def available(self) -> tuple[Device, ...]:
        return arraybridge.framework("cupy").devices.available()

    def is_started(self) -> bool:
        return True


class TwinFramework(arraybridge.Framework):
    name = "twin"
    modules = (__name__,)
    has_host = False
    interchange = component(TwinInterchange)
    devices = component(TwinDevices)

    def __init__(self) -> None:
        self.streams = TwinStreams()

    def owns(self, x: Any) -> bool:
        return isinstance(x, TwinArray)

    def to_host(self, x: TwinArray) -> np.ndarray:
        with x.stream:
            host: np.ndarray = x.array.get()
        return host

    def copy(self, x: TwinArray) -> TwinArray:
        with x.stream:
            return TwinArray(x.array.copy(), x.stream)

    def cast(self, x: TwinArray, dtype: str) -> TwinArray:
        with x.stream:
            return TwinArray(x.array.astype(dtype), x.stream)

    def from_host(self, view: np.ndarray, device: Device) -> TwinArray:
        with on_gpu(device.index):
            stream = self.streams.of(device)
            with stream:
                array = cupy.asarray(view)
                stream.synchronize()
            return TwinArray(array, stream)
