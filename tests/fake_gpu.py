"""The cards of the tests: a framework whose devices are host memory, which the host may not look into.

What a test wants to see of them (a clock, a late bus, marks on a queue, a pool) is a subclass or a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arraybridge.frameworks.base import CPU, Devices, Framework, IndexedBatching, Interchange, component
from arraybridge.types import Device

CARDS = (Device("gpu", 0), Device("gpu", 1))


class CardArray:
    """Values that only their framework may read, and the number of the card; on the host that is -1."""

    def __init__(self, values: np.ndarray[Any, Any], card: int = 0) -> None:
        self.values = values
        self.card = card

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def _like(self, values: Any) -> CardArray:
        return type(self)(np.asarray(values), self.card)

    def __add__(self, other: Any) -> CardArray:
        return self._like(self.values + (other.values if isinstance(other, CardArray) else other))

    def __mul__(self, other: Any) -> CardArray:
        return self._like(self.values * (other.values if isinstance(other, CardArray) else other))

    def __getitem__(self, key: Any) -> CardArray:
        return self._like(self.values[key])

    def sum(self) -> CardArray:
        return self._like(self.values.sum())


class CardDevices(Devices):
    framework: CardFramework

    def device_of(self, x: CardArray) -> Device:
        return CPU if x.card < 0 else Device("gpu", x.card)

    def available(self) -> tuple[Device, ...]:
        return (CPU, *self.framework.cards) if self.framework.has_host else self.framework.cards

    def default_device(self) -> Device:
        return CPU if self.framework.has_host else self.framework.cards[self.framework.current]

    @contextmanager
    def selected(self, device: Device) -> Iterator[None]:
        before, self.framework.current = self.framework.current, device.index
        try:
            yield
        finally:
            self.framework.current = before


class CardInterchange(Interchange):
    def strides(self, x: CardArray) -> tuple[int, ...]:
        return x.values.strides


class CardBatching(IndexedBatching):
    framework: CardFramework

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> CardArray:
        return self.framework.array(np.empty(shape, dtype), -1 if device == CPU else device.index)

    def concatenate(self, parts: list[CardArray], axis: int) -> CardArray:
        return self.framework.array(np.concatenate([part.values for part in parts], axis), parts[0].card)


class CardFramework(Framework):
    """Two cards, and arrays on the host where ``has_host`` says so; it writes down what it moves.

    Attributes:
        array: the class of its arrays.
        cards: its cards.
        done: what was asked of it, in words.
        current: the number of the card that is selected.
    """

    name = "cards"
    modules = ("tests.fake_gpu",)
    has_host = False
    array: type[CardArray] = CardArray
    cards: tuple[Device, ...] = CARDS
    devices = component(CardDevices)
    interchange = component(CardInterchange)
    batching = component(CardBatching)

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = 0

    def owns(self, x: Any) -> bool:
        return isinstance(x, self.array)

    def host_view(self, x: CardArray) -> np.ndarray[Any, Any]:
        assert x.card < 0, "the host cannot look into a card"
        return x.values

    def to_host(self, x: CardArray) -> np.ndarray[Any, Any]:
        self.done.append("to host")
        return x.values.copy()

    def from_host(self, view: np.ndarray[Any, Any], device: Device) -> CardArray:
        if device == CPU:
            assert self.has_host
            return self.array(view, -1)
        self.done.append(f"to {device}")
        return self.array(view.copy(), device.index)
