"""A framework of the tests with two cards, which writes down what is asked of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from arraybridge import Device
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.frameworks.parts import Mark, Streams

CARDS = (Device("gpu", 0), Device("gpu", 1))


class Array:
    """Values that a card of the tests holds."""

    def __init__(self, values: np.ndarray, device: Device = CARDS[0]) -> None:
        self.values = values
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, key: Any) -> Array:
        return Array(self.values[key], self.device)


class StreamFramework(Framework):
    """A framework with two cards, each thread's marks in the order in which they were set and waited for."""

    name = "streams"
    modules = ("tests",)

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.count = 0
        self.done = False
        self.taken_over: list[Array] = []
        self.lock = threading.Lock()
        self.streams = NotedStreams(self)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Array)

    def host_view(self, x: Any) -> Any:
        raise NotImplementedError

    def to_host(self, x: Array) -> np.ndarray:
        return x.values.copy()

    def from_host(self, view: np.ndarray, device: Device) -> Array:
        return Array(view.copy(), device)

    def shape(self, x: Array) -> tuple[int, ...]:
        return x.values.shape

    def dtype_name(self, x: Array) -> str:
        return x.values.dtype.name

    def nbytes(self, x: Array) -> int:
        return x.values.nbytes

    def devices(self) -> tuple[Device, ...]:
        return (CPU, *CARDS)

    def device_of(self, x: Array) -> Device:
        return x.device

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        assert all(any(part is known for known in self.taken_over) for part in parts)
        return Array(np.concatenate([part.values for part in parts], axis), parts[0].device)


class NotedStreams(Streams):
    def __init__(self, owner: StreamFramework) -> None:
        self.owner = owner

    def _note(self, what: str, number: int) -> None:
        with self.owner.lock:
            self.owner.log.append((threading.current_thread().name, what, number))

    def take_stream(self, device: Device) -> None:
        self._note("stream", device.index)

    def mark(self, device: Device) -> Mark | None:
        if device.kind == "cpu":
            return None
        with self.owner.lock:
            self.owner.count += 1
            number = self.owner.count
        self._note("mark", number)
        return Mark(
            self,
            device,
            lambda: self._note("wait", number),
            lambda: self._note("synchronize", number),
            lambda: self.owner.done,
        )

    def take_over(self, x: Array) -> Array:
        self.owner.taken_over.append(x)
        return x
