"""A framework with two cards made of host memory: it counts, caches, and copies late, as a bus does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from arraybridge.frameworks.base import Framework, Usage
from arraybridge.types import Device


class FakeArray:
    """An array on a card."""

    def __init__(self, host: np.ndarray, card: int) -> None:
        self.host = host
        self.card = card

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.host.dtype

    @property
    def nbytes(self) -> int:
        return self.host.nbytes


class FakeFramework(Framework):
    """Two cards; copies on its queue happen late, in a thread, as those on a bus do."""

    name = "fake"
    modules = ("tests.memory.fake",)
    has_host = False

    def __init__(self) -> None:
        self.current = 0
        self.used = [100, 0]
        self.cached = [50, 30]
        self.peak = [500, 0]
        self.freed: list[tuple[Device | None, bool]] = []
        self.unfinished = 0
        self.most_pinned = 0
        self.delay = 0.0005

    def owns(self, x: Any) -> bool:
        return isinstance(x, FakeArray)

    def device_of(self, x: FakeArray) -> Device:
        return Device("gpu", x.card)

    def host_view(self, x: FakeArray) -> np.ndarray:
        raise NotImplementedError

    def to_host(self, x: FakeArray) -> np.ndarray:
        return x.host.copy()

    def from_host(self, view: np.ndarray, device: Device) -> FakeArray:
        return FakeArray(view.copy(), device.index)

    def devices(self) -> tuple[Device, ...]:
        return (Device("gpu", 0), Device("gpu", 1))

    def default_device(self) -> Device:
        return Device("gpu", self.current)

    def is_started(self) -> bool:
        return True

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        self.freed.append((device, compiled))
        cards = [i for i in (0, 1) if device is None or device.index == i]
        freed = sum(self.cached[i] for i in cards)
        for i in cards:
            self.cached[i] = 0
        return freed

    def usage(self) -> list[Usage]:
        return [Usage(Device("gpu", i), self.used[i], self.cached[i], self.peak[i]) for i in (0, 1)]

    def reset_peak(self, device: Device) -> bool:
        self.peak[device.index] = self.used[device.index]
        return True

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        return 700, 1000

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return self._selected(device.index)

    @contextmanager
    def _selected(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        self.most_pinned += nbytes
        return np.empty(nbytes, np.uint8)

    def enqueue_copy(self, host: np.ndarray, x: FakeArray, offset: int, to_host: bool) -> Callable[[], None]:
        place = x.host.reshape(-1).view(np.uint8)[offset : offset + host.size]
        self.unfinished += 1

        def copy() -> None:
            time.sleep(self.delay)
            np.copyto(*((host, place) if to_host else (place, host)))
            self.unfinished -= 1

        bus = threading.Thread(target=copy)
        bus.start()
        return bus.join
