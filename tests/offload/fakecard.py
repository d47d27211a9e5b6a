"""A card that is none, and a clock that moves only when something is said to take time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import arraybridge
from arraybridge.frameworks.parts import Pool
from arraybridge.offload.call import Offload
from arraybridge.offload.cards import Card
from arraybridge.offload.cards import Cards as Machine
from arraybridge.types import Device
from tests.cards import CARDS, CardArray, CardFramework
from tests.helpers import require


class Clock:
    """Seconds that somebody has let pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class CardMemoryError(RuntimeError):
    """The fake card is full."""


class FakeCard(CardFramework):
    """Both directions take a latency and a time for each byte, and a launch takes a time of its own."""

    name = "fakecard"
    cards = CARDS[:1]

    def __init__(
        self,
        clock: Clock,
        *,
        latency: float = 20e-6,
        bandwidth: float = 10e9,
        launch: float = 10e-6,
        memory: int = 0,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.latency, self.bandwidth, self.launch, self.memory = latency, bandwidth, launch, memory
        self.pool = CardPool(self)
        self.moved: list[tuple[str, int]] = []
        #: Rows of the largest array that fits; more of them run out of memory.
        self.rows: int | None = None

    def travel(self, where: str, nbytes: int) -> None:
        self.moved.append((where, nbytes))
        self.clock.sleep(self.latency + nbytes / self.bandwidth)

    def to_host(self, x: CardArray) -> np.ndarray:
        self.travel("host", x.nbytes)
        return x.values

    def from_host(self, view: np.ndarray, device: Device) -> CardArray:
        if self.rows is not None and view.shape and view.shape[0] > self.rows:
            raise CardMemoryError(f"{view.shape[0]} rows do not fit")
        self.travel("card", view.nbytes)
        return CardArray(view)  # nobody writes to it, and 64 MiB are quickly moved this way

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, CardMemoryError)

    def settle(self, x: CardArray) -> None:
        self.clock.sleep(1e-6)


class CardPool(Pool):
    def __init__(self, owner: FakeCard) -> None:
        self.owner = owner

    def free_memory_of(self, device: Device) -> int:
        return self.owner.memory


class Work:
    """A function that takes as long as it is told to on either side, and counts where it ran."""

    def __init__(
        self, clock: Clock, cpu: Callable[[int], float], card: Callable[[int], float], first: float = 0.0
    ) -> None:
        self.clock, self.cpu, self.card, self.first = clock, cpu, card, first
        self.ran: list[str] = []
        self._seen: set[tuple[int, ...]] = set()

    def __call__(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            self.ran.append("cpu")
            self.clock.sleep(self.cpu(x.nbytes))
        else:
            self.ran.append("card")
            if x.shape not in self._seen:  # compiled for each shape
                self._seen.add(x.shape)
                self.clock.sleep(self.first)
            self.clock.sleep(self.card(x.nbytes))
        # As large as x, and without memory of its own.
        ones = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), x.shape, (0,) * len(x.shape))
        return ones if isinstance(x, np.ndarray) else CardArray(ones)


def offload(fn: Any, machine: Machine, **options: Any) -> Any:
    """The function as @gpu makes it, with the fake machine behind it."""
    run = Offload(fn, backend="fakecard", cards=machine, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    call.run, call.explain, call.history = run, run.explain, run.history
    return call


class Pretended(Machine):
    """A machine on which a CPU device of a real framework is the card."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__(Clock())
        require(name)
        self.card = Card(arraybridge.framework(name), arraybridge.Device.parse(device), self.clock)
        self._found[name, 0] = self.card


def running_on(name: str, device: str, body: Any, seen: list[str], **options: Any) -> Any:
    """The function ``body``, which NumPy is slow at, with that device for a card."""
    machine = Pretended(name, device)

    def fn(x: Any, *rest: Any) -> Any:
        seen.append(arraybridge.detect_memory_type(x))
        machine.clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)  # type: ignore[attr-defined]
        return body(x, *rest)

    run = Offload(fn, backend=name, cards=machine, **options)

    def call(*args: Any) -> Any:
        return run(args, {})

    call.explain = run.explain
    return call
