"""A fake framework with two GPUs made of host memory, which counts requests to free memory."""

from __future__ import annotations

import numpy as np

from arraybridge.device import Device
from arraybridge.host import buffers
from arraybridge.interface.component import component
from arraybridge.interface.memory import GpuMemory, Holding, Memory
from tests.fake_gpu import FakeGpuFramework, GpuDevices


class FakeDevices(GpuDevices):
    def is_started(self) -> bool:
        return True


class FakeMemory(Memory):
    framework: FakeFramework

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        self.framework.freed.append((device, compiled))
        gpus = [i for i in (0, 1) if device is None or device.index == i]
        freed = sum(self.framework.cached[i] for i in gpus)
        for i in gpus:
            self.framework.cached[i] = 0
        return freed

    def usage(self) -> list[Holding]:
        return [
            Holding(
                f"gpu:{i}", "fake", self.framework.used[i], self.framework.cached[i], self.framework.peak[i]
            )
            for i in (0, 1)
        ]

    def reset_peak(self) -> None:
        self.framework.peak = self.framework.used.copy()

    def device_memory(self, device: Device) -> GpuMemory | None:
        return GpuMemory(free=700, total=1000)

    def allocate_pinned(self, nbytes: int) -> np.ndarray | None:
        self.framework.most_pinned += nbytes
        memory = np.empty(nbytes, np.uint8)
        self.framework.locked.append((buffers.address(memory), nbytes))
        return memory


class FakeFramework(FakeGpuFramework):
    """Two GPUs with a cache on each, and host memory that can be pinned."""

    name = "fake"
    devices = component(FakeDevices)
    memory = component(FakeMemory)

    def __init__(self) -> None:
        super().__init__()
        #: Addresses and sizes of pinned memory.
        self.locked: list[tuple[int, int]] = []
        self.used = [100, 0]
        self.cached = [50, 30]
        self.peak = [500, 0]
        self.freed: list[tuple[Device | None, bool]] = []
        self.most_pinned = 0
