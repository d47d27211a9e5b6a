"""A framework with two cards made of host memory, which counts what it is asked to free."""

from __future__ import annotations

import numpy as np

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.parts import Holding, Pool
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
        self.pool = FakePool(self)


class FakePool(Pool):
    def __init__(self, owner: FakeFramework) -> None:
        self.owner = owner

    def is_started(self) -> bool:
        return True

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        self.owner.freed.append((device, compiled))
        cards = [i for i in (0, 1) if device is None or device.index == i]
        freed = sum(self.owner.cached[i] for i in cards)
        for i in cards:
            self.owner.cached[i] = 0
        return freed

    def usage(self) -> list[Holding]:
        return [
            Holding(f"gpu:{i}", "fake", self.owner.used[i], self.owner.cached[i], self.owner.peak[i])
            for i in (0, 1)
        ]

    def reset_peak(self) -> None:
        self.owner.peak = self.owner.used.copy()

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        return 700, 1000

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        self.owner.most_pinned += nbytes
        memory = np.empty(nbytes, np.uint8)
        self.owner.locked.append((hostmemory.address(memory), nbytes))
        return memory
