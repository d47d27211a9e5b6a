"""A framework with two cards made of host memory: it counts, caches, and copies late, as a bus does.

It has a clock of its own, which only its transfers move, so that a test decides how long each takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.parts import Pinning, Pool, Usage
from arraybridge.types import Device
from tests.cards import CardArray, CardFramework


class FakeFramework(CardFramework):
    """Two cards; copies on its queue happen late, in a thread, as those on a bus do.

    Attributes:
        plain_seconds: what a plain call takes: so much each, and so much a MiB.
        queued_seconds: what a queued copy takes, likewise.
        plain: how many plain calls there were, ``[to the card, to the host]``.
        queued: how many queued copies, likewise.
        spoil: ways (0: to the card, 1: to the host) on which queued copies deliver a wrong byte.
        skip: ways on which queued copies deliver nothing.
        fail: ways on which queueing raises.
    """

    name = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.plain_seconds = (0.0, 1.0)
        self.queued_seconds = (0.0, 0.1)
        self.plain = [0, 0]
        self.queued = [0, 0]
        self.spoil: set[int] = set()
        self.skip: set[int] = set()
        self.fail: set[int] = set()
        #: Addresses and sizes of what it has pinned.
        self.locked: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self.used = [100, 0]
        self.cached = [50, 30]
        self.peak = [500, 0]
        self.freed: list[tuple[Device | None, bool]] = []
        self.unfinished = 0
        self.most_pinned = 0
        self.delay = 0.0005
        self.plain_delay = 0.0

        self.pool = FakePool(self)
        self.pinning = FakePinning(self)

    def clock(self) -> float:
        return self.now

    def _spend(self, counts: list[int], way: int, nbytes: int, seconds: tuple[float, float]) -> None:
        with self._lock:
            counts[way] += 1
            self.now += seconds[0] + seconds[1] * nbytes / (1 << 20)

    def to_host(self, x: CardArray) -> np.ndarray:
        self._spend(self.plain, 1, x.nbytes, self.plain_seconds)
        time.sleep(self.plain_delay)
        return super().to_host(x)

    def from_host(self, view: np.ndarray, device: Device) -> CardArray:
        if device != CPU:
            self._spend(self.plain, 0, view.nbytes, self.plain_seconds)
            time.sleep(self.plain_delay)
        return super().from_host(view, device)


class HostedFake(FakeFramework):
    """The same, with arrays on the host as well."""

    has_host = True


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

    def usage(self) -> list[Usage]:
        return [
            Usage(Device("gpu", i), self.owner.used[i], self.owner.cached[i], self.owner.peak[i])
            for i in (0, 1)
        ]

    def reset_peak(self, device: Device) -> bool:
        self.owner.peak[device.index] = self.owner.used[device.index]
        return True

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        return 700, 1000


class FakePinning(Pinning):
    def __init__(self, owner: FakeFramework) -> None:
        self.owner = owner

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        self.owner.most_pinned += nbytes
        memory = np.empty(nbytes, np.uint8)
        self.owner.locked.append((hostmemory.address(memory), nbytes))
        return memory

    def is_pinned(self, memory: np.ndarray) -> bool:
        return any(start <= hostmemory.address(memory) < start + size for start, size in self.owner.locked)

    def can_stage(self, x: CardArray) -> bool:
        return type(x) is CardArray

    def enqueue_copy(self, host: np.ndarray, x: CardArray, offset: int, to_host: bool) -> Callable[[], None]:
        place = x.values.reshape(-1).view(np.uint8)[offset : offset + host.size]
        if to_host in self.owner.fail:
            raise RuntimeError("the bus is gone")
        self.owner._spend(self.owner.queued, to_host, host.size, self.owner.queued_seconds)
        with self.owner._lock:
            self.owner.unfinished += 1

        def copy() -> None:
            time.sleep(self.owner.delay)
            source, target = (place, host) if to_host else (host, place)
            if to_host not in self.owner.skip:
                np.copyto(target, source)
            if to_host in self.owner.spoil:
                target[-1] ^= 1
            with self.owner._lock:
                self.owner.unfinished -= 1

        bus = threading.Thread(target=copy)
        bus.start()
        return bus.join

    def own_bytes(self, x: CardArray) -> np.ndarray | None:
        return x.values.reshape(-1).view(np.uint8) if x.values.flags.c_contiguous else None
