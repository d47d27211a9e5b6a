"""A fake framework with two GPUs that records its stream operations."""

from __future__ import annotations

import threading

from arraybridge import Device
from arraybridge.interface.component import component
from arraybridge.interface.streams import StreamEvent, Streams
from tests.fake_gpu import FakeGpuArray, FakeGpuFramework, GpuBatching


class StreamBatching(GpuBatching):
    framework: StreamFramework

    def concatenate(self, parts: list[FakeGpuArray], axis: int) -> FakeGpuArray:
        self.framework.log.append((threading.current_thread().name, "concatenate", len(parts)))
        return super().concatenate(parts, axis)


class StreamFramework(FakeGpuFramework):
    """A framework with two GPUs that records each thread's events and waits in order."""

    name = "streams"
    has_host = True
    batching = component(StreamBatching)

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, int]] = []
        self.count = 0
        self.taken_over: list[FakeGpuArray] = []
        self.lock = threading.Lock()
        self.streams = RecordingStreams(self)

    def copy(self, x: FakeGpuArray) -> FakeGpuArray:
        return FakeGpuArray(x.values.copy(), x.gpu)


class RecordingStreams(Streams):
    has_streams = True

    def __init__(self, owner: StreamFramework) -> None:
        self.owner = owner

    def _note(self, what: str, number: int) -> None:
        with self.owner.lock:
            self.owner.log.append((threading.current_thread().name, what, number))

    def take_stream(self, device: Device) -> None:
        self._note("stream", device.index)

    def record_event(self, device: Device) -> StreamEvent | None:
        if device.kind == "cpu":
            return None
        with self.owner.lock:
            self.owner.count += 1
            number = self.owner.count
        self._note("mark", number)
        return StreamEvent(
            self,
            device,
            lambda: self._note("wait", number),
            lambda: self._note("synchronize", number),
            lambda: False,
        )

    def take_over(self, x: FakeGpuArray) -> FakeGpuArray:
        self.owner.taken_over.append(x)
        return x
