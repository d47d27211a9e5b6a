"""A framework with two cards made of host memory, which counts what it is asked to free."""

from __future__ import annotations

import numpy as np

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.parts import Holding
from arraybridge.types import Device
from tests.cards import CardFramework


class FakeFramework(CardFramework):
    """Two cards, with a cache on each, and host memory that can be pinned."""

    name = "fake"

    def __init__(self) -> None:
        super().__init__()
        #: Addresses and sizes of what it has pinned.
        self.locked: list[tuple[int, int]] = []
        self.used = [100, 0]
        self.cached = [50, 30]
        self.peak = [500, 0]
        self.freed: list[tuple[Device | None, bool]] = []
        self.most_pinned = 0

    def is_started(self) -> bool:
        return True

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        self.freed.append((device, compiled))
        cards = [i for i in (0, 1) if device is None or device.index == i]
        freed = sum(self.cached[i] for i in cards)
        for i in cards:
            self.cached[i] = 0
        return freed

    def usage(self) -> list[Holding]:
        return [Holding(f"gpu:{i}", "fake", self.used[i], self.cached[i], self.peak[i]) for i in (0, 1)]

    def reset_peak(self) -> None:
        self.peak = self.used.copy()

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        return 700, 1000

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        self.most_pinned += nbytes
        memory = np.empty(nbytes, np.uint8)
        self.locked.append((hostmemory.address(memory), nbytes))
        return memory
