"""Timings of a function on the CPU and on a GPU, and the choice of the faster device.

This module does not depend on any framework. Times are in seconds and include transfers. The caller measures
them with `clock`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.formatting import format_bytes, format_seconds, text_table

CPU = "cpu"
GPU = "gpu"

#: The maximum number of recent runs whose median is the estimated duration.
RUNS = 5
#: The device changes only if the other one takes less than this fraction of the current one's time.
WORTH_A_CHANGE = 0.95
#: The slower device is measured again when its extra time is at most this fraction of the run time since it
#: was last measured.
SPENT_ON_PROBING = 0.02

#: The clock of all timings, in seconds. Call it as ``timing_history.clock()``, because tests replace it.
clock: Callable[[], float] = time.perf_counter

_lock = threading.Lock()


class Timings:
    """The durations of recent runs of one call signature on both devices, with transfers, in seconds."""

    def __init__(self) -> None:
        self.runs: dict[str, list[float]] = {CPU: [], GPU: []}
        self.counts = {CPU: 0, GPU: 0}
        #: The reason why calls with this signature stay on the CPU, or "".
        self.cpu_reason = ""
        self._chosen = CPU
        self._since_probe = 0.0

    def estimate(self, place: str) -> float | None:
        """Return the median duration of the recent runs in seconds, or None if there are none.

        If the number of runs is even, it is the lower of the two middle durations.
        """
        runs = sorted(self.runs[place])
        return runs[(len(runs) - 1) // 2] if runs else None

    def add(self, place: str, seconds: float) -> None:
        """Record a run. The second run on a device replaces the first one, which includes compilation."""
        runs = self.runs[place]
        probing = place != self._chosen
        if probing or self.counts[place] == 1:
            runs.clear()  # drop outdated times, or the first run
        self.counts[place] += 1
        runs.append(seconds)
        del runs[:-RUNS]
        self._since_probe = 0.0 if probing else self._since_probe + seconds

    def choose(self) -> tuple[str, str]:
        """Return the device of the next call, and the reason, once both devices have been measured."""
        cpu = self.estimate(CPU)
        gpu = self.estimate(GPU)
        if cpu is None or gpu is None:
            return CPU, "there are no timings on the GPU for such arguments yet"
        if self.counts[GPU] == 1:
            return GPU, "the first run on the GPU includes compilation and does not count"
        seconds = {CPU: cpu, GPU: gpu}
        other = GPU if self._chosen == CPU else CPU
        if seconds[other] < WORTH_A_CHANGE * seconds[self._chosen]:
            self._chosen, other = other, self._chosen
            self._since_probe = 0.0
        if seconds[other] - seconds[self._chosen] <= SPENT_ON_PROBING * self._since_probe:
            return other, "it is time to measure the other device again"
        return self._chosen, "the GPU is faster" if self._chosen == GPU else "the CPU is faster"


class History(dict[Any, Timings]):
    """The timings of a function, by call signature. Printed as a table.

    ``clear()`` discards all timings, so that everything is measured again.

    >>> print(History())
    no call has been measured yet
    """

    #: The maximum number of signatures. The oldest one is evicted first.
    LIMIT = 256

    def __reduce__(self) -> tuple[Any, ...]:
        return (History, ())  # timings do not apply to other machines

    def __missing__(self, signature: Any) -> Timings:
        with _lock:
            while len(self) >= self.LIMIT:
                self.pop(next(iter(self), None), None)
            return self.setdefault(signature, Timings())

    def __repr__(self) -> str:
        rows = []
        for signature, timings in self.copy().items():
            for place, count in timings.counts.items():
                seconds = timings.estimate(place)
                if seconds is not None:
                    rows.append((_as_text(signature), place, format_seconds(seconds), str(count)))
        head = ("arguments", "device", "time", "runs")
        return text_table(head, rows, right=head[2:]) if rows else "no call has been measured yet"


def _as_text(signature: Any) -> str:
    """Return a signature as text: size, dtypes and ranks, numbers and strings, and types of other values."""
    bits, _names, *kinds = signature
    parts = []
    for kind in kinds:
        first, second = kind if isinstance(kind, tuple) else (type, kind)
        if isinstance(first, np.dtype):
            parts.append(f"{first} {second}-D")
        else:
            parts.append(repr(second) if first is not type else getattr(second, "__name__", "a function"))
    return f"up to {format_bytes(1 << bits)}: {', '.join(parts)}"
