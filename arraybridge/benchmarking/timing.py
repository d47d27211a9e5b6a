"""`benchmark`: how long a call takes, until its arrays are really there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from arraybridge.formatting import format_seconds
from arraybridge.frameworks import registry
from arraybridge.frameworks.registry import loaded
from arraybridge.trees import arrays_of
from arraybridge.validation import whole_number

# No more waits follow after this many, if the shortest took hardly longer than one for nothing.
_TRIALS = 5
_NOTHING = 1.2


class Timing(NamedTuple):
    """Seconds that a call takes; prints as one line.

    Attributes:
        median, minimum: of all calls.
        spread: the range of the middle half of them (the third quartile less the first).
        runs: how many calls were timed.
    """

    median: float
    minimum: float
    spread: float
    runs: int

    def cells(self) -> tuple[str, ...]:
        """The numbers as words, for a table."""
        return (*(format_seconds(seconds) for seconds in self[:3]), str(self.runs))

    def __str__(self) -> str:
        return "median {}, minimum {}, spread {}, {} runs".format(*self.cells())


def benchmark(
    fn: Callable[..., Any], *args: Any, warmup: int = 2, seconds: float = 0.5, runs: int | None = None
) -> Timing:
    """How long ``fn(*args)`` takes, until all that it has queued is computed.

    Each call is followed by a wait for the arrays of its result and for every loaded framework on every
    device that it has opened. What such a wait costs where nothing is queued is measured and not counted.

    Args:
        fn: a function, decorated or not.
        args: its arguments; arrays that it changes stay changed.
        warmup: calls before the first that counts, for compilers and caches.
        seconds: how long to go on measuring, at least five calls.
        runs: exactly so many calls instead.

    Raises:
        TypeError: ``fn`` is not a function, or ``warmup`` or ``runs`` is not an int.
        ValueError: a number is too small.
        Exception: what ``fn`` raises.

    >>> import numpy as np
    >>> timing = benchmark(np.sum, np.ones(1000), runs=5)
    >>> 0 < timing.minimum <= timing.median
    True
    """
    if not callable(fn):
        raise TypeError(f"benchmark takes a function and its arguments, not {fn!r}")
    whole_number("warmup", warmup, least=0)
    if runs is not None:
        whole_number("runs", runs, least=1)
    if seconds <= 0:
        raise ValueError(f"seconds={seconds!r} must be greater than 0.")
    for _ in range(warmup):
        fn(*args)
    samples = _samples(fn, args, seconds, runs)
    samples.sort()
    quarter = len(samples) // 4
    median = (samples[len(samples) // 2] + samples[(len(samples) - 1) // 2]) / 2
    return Timing(median, samples[0], samples[-1 - quarter] - samples[quarter], len(samples))


def _samples(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float, runs: int | None) -> list[float]:
    """Return the seconds that each of the calls takes, with its wait."""
    clock = time.perf_counter
    idle = sorted(_synchronize() for _ in range(9))
    samples: list[float] = []
    waits: list[float] = []
    until = clock() + seconds
    while len(samples) < runs if runs is not None else len(samples) < 5 or clock() < until:
        start = clock()
        result = fn(*args)
        _block_until_ready(
            args if result is None else result
        )  # a function may work in place and return nothing
        samples.append(clock() - start)
        del result
        # A wait may cost more than many calls: where nothing was queued five times, none follows.
        if len(waits) < _TRIALS or min(waits) > _NOTHING * idle[0]:
            waits.append(_synchronize())
            samples[-1] += max(0.0, waits[-1] - idle[4])
            until += min(waits[-1], idle[4])  # waits for nothing take nothing from the seconds
    _synchronize()
    return samples


def _block_until_ready(values: Any) -> None:
    for x in arrays_of(values):
        owner = registry.find_owner(x)
        if owner is not None:
            owner.interchange.block_until_ready(x)


def _synchronize() -> float:
    """Wait for every loaded framework; the seconds that this took."""
    start = time.perf_counter()
    for framework in loaded():
        framework.memory.synchronize()
    return time.perf_counter() - start
