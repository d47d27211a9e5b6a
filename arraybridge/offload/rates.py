"""What it costs to reach a card: seconds for each array and for its bytes, measured once.

Nothing here knows a framework. Seconds are those of whatever clock the caller measures with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["Link", "Rates", "measure_rates", "middle"]


def middle(values: Collection[float]) -> float:
    """The median; of an even number, the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between host and card: seconds for each array, and bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, arrays: int, nbytes: float) -> float:
        return arrays * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card costs before it has computed anything: both directions, and the least that a run takes."""

    to_card: Link
    to_host: Link
    launch: float


SMALL, LARGE = 4 << 10, 32 << 20


def measure_rates(
    put: Callable[[int], Any],
    fetch: Callable[[Any], object],
    launch: Callable[[Any], object],
    clock: Callable[[], float],
    large: int = LARGE,
) -> Rates:
    """Measure a card, in a fraction of a second.

    Args:
        put: brings so many bytes to the card, and returns them when they are there.
        fetch: brings what ``put`` returned back to the host.
        launch: computes something small from it on the card, and returns when it is done.
        clock: seconds.
        large: bytes of the array that tells the bandwidth.
    """

    def median(action: Callable[[], object], rounds: int) -> float:
        action()  # the first one compiles, allocates and pins
        times = []
        for _ in range(rounds):
            started = clock()
            action()
            times.append(clock() - started)
        return max(middle(times), 1e-9)

    def link(small: float, big: float) -> Link:
        # Both measurements hold the latency; what is left of the longer one is the bytes alone.
        return Link(small, (large - SMALL) / max(big - small, 1e-9))

    little = put(SMALL)
    there = link(median(lambda: put(SMALL), 15), median(lambda: put(large), 5))
    much = put(large)
    back = link(median(lambda: fetch(little), 15), median(lambda: fetch(much), 5))
    return Rates(there, back, median(lambda: launch(little), 15))
