"""Timing of calls, including the asynchronous work that they start."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from arraybridge.formatting import format_count, format_seconds
from arraybridge.interface.registry import loaded
from arraybridge.parallel.streams_between_threads import block_until_ready
from arraybridge.validation import add_hints, whole_number

# After `_TRIALS` waits, the remaining calls are timed without a wait as soon as one wait has taken at most
# `_IDLE_FACTOR` times as long as the shortest wait on idle devices.
_TRIALS = 5
_IDLE_FACTOR = 1.2


class Timing(NamedTuple):
    """The duration of a call, in seconds. It prints as one line.

    Attributes:
        median: The median of all timed calls.
        minimum: The shortest call.
        spread: The interquartile range.
        runs: The number of timed calls.
    """

    median: float
    minimum: float
    spread: float
    runs: int

    def cells(self) -> tuple[str, ...]:
        """Return the values as text, for a table."""
        return (*(format_seconds(seconds) for seconds in self[:3]), str(self.runs))

    def __str__(self) -> str:
        return "median {}, minimum {}, spread {}, {}".format(
            *self.cells()[:3], format_count(self.runs, "run")
        )


@add_hints
def benchmark(
    fn: Callable[..., Any], *args: Any, warmup: int = 2, seconds: float = 0.5, runs: int | None = None
) -> Timing:
    """Time ``fn(*args)``, including all asynchronous work that it starts.

    Each call is followed by a wait for the arrays of its result and for every loaded framework on every
    device that it has initialized. The cost of such a wait on idle devices is measured and subtracted. If the
    waits for the frameworks find no pending work, later calls omit them.

    Args:
        fn: The function, decorated or not.
        *args: The arguments. Arrays that the function modifies in place are not restored between calls.
        warmup: The number of calls before the first timed one, for compilers and caches. Defaults to 2.
        seconds: The duration of the measurement, with at least five calls. Defaults to 0.5.
        runs: The exact number of timed calls, instead of ``seconds``. Defaults to None.

    Returns:
        The median, minimum, spread and number of calls.

    Raises:
        TypeError: If ``fn`` is not a function, ``warmup`` or ``runs`` is not an int, or ``seconds`` is not a
            number.
        ValueError: If a number is too small.
        Exception: Any exception raised by ``fn``.

    Example:
        >>> import numpy as np
        >>> timing = benchmark(np.sum, np.ones(1000), runs=5)
        >>> 0 < timing.minimum <= timing.median
        True
    """
    check_function("benchmark", fn)
    warmup = whole_number("warmup", warmup, least=0)
    if runs is not None:
        runs = whole_number("runs", runs, least=1)
    if not isinstance(seconds, Real):
        raise TypeError(f"seconds={seconds!r} must be a number greater than 0.")
    if seconds <= 0:
        raise ValueError(f"seconds={seconds!r} must be greater than 0.")
    for _ in range(warmup):
        fn(*args)
    samples = _samples(fn, args, seconds, runs)
    samples.sort()
    quarter = len(samples) // 4
    median = (samples[len(samples) // 2] + samples[(len(samples) - 1) // 2]) / 2
    return Timing(median, samples[0], samples[-1 - quarter] - samples[quarter], len(samples))


def check_function(caller: str, fn: object) -> None:
    """Raise `TypeError` if the first argument of `benchmark` or `compare` is not a function."""
    if not callable(fn):
        raise TypeError(
            f"{caller}() expected a function, got {type(fn).__name__}. Pass the function and its arguments:"
            f" {caller}(fn, x)."
        )


def _samples(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float, runs: int | None) -> list[float]:
    """Return the duration of each call in seconds, including the asynchronous work that it starts."""
    clock = time.perf_counter
    idle = sorted(_synchronize() for _ in range(9))
    samples: list[float] = []
    waits: list[float] = []
    until = clock() + seconds
    while len(samples) < runs if runs is not None else len(samples) < 5 or clock() < until:
        start = clock()
        result = fn(*args)
        # A function that works in place may return None.
        block_until_ready(args if result is None else result)
        samples.append(clock() - start)
        del result
        # A wait may take longer than many calls. After the fifth wait, waits are therefore omitted as soon as
        # one of them has found no queued work.
        if len(waits) < _TRIALS or min(waits) > _IDLE_FACTOR * idle[0]:
            waits.append(_synchronize())
            samples[-1] += max(0.0, waits[-1] - idle[4])
            until += min(waits[-1], idle[4])  # the time of an idle wait is not part of ``seconds``
    _synchronize()
    return samples


def _synchronize() -> float:
    """Wait until every loaded framework is idle, and return the elapsed time in seconds."""
    start = time.perf_counter()
    for framework in loaded():
        framework.memory.synchronize()
    return time.perf_counter() - start
