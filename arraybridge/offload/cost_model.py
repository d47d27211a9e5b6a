"""How long a function takes on the CPU and on a card, end to end, and where it is to run next.

Nothing here knows a framework; seconds are those of whatever clock the caller measures with.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from arraybridge.formatting import format_bytes, format_seconds, text_table

CPU, GPU = "cpu", "card"

#: An estimate is the median of so many runs.
RUNS = 5
#: The place changes only where the other one takes less than this share of the present one's time.
WORTH_A_CHANGE = 0.95
#: The slower place is measured again as soon as that costs no more than this share of the time spent since.
SPENT_ON_PROBING = 0.02

_lock = threading.Lock()


class Timings:
    """Of one footprint: seconds of the last runs in both places, transfers included."""

    def __init__(self) -> None:
        self.runs: dict[str, list[float]] = {CPU: [], GPU: []}
        self.counts = {CPU: 0, GPU: 0}
        #: Why the footprint stays on the CPU, or "".
        self.refused = ""
        self._chosen = CPU
        self._since_probe = 0.0

    def estimate(self, place: str) -> float | None:
        """The median of the last runs; of an even number, the lower of the two in the middle."""
        runs = sorted(self.runs[place])
        return runs[(len(runs) - 1) // 2] if runs else None

    def add(self, place: str, seconds: float) -> None:
        """Note a run. The first one in a place, which loads and compiles, counts until there is another."""
        runs = self.runs[place]
        probing = place != self._chosen
        if probing or self.counts[place] == 1:
            runs.clear()  # of old times, or of the first run
        self.counts[place] += 1
        runs.append(seconds)
        del runs[:-RUNS]
        self._since_probe = 0.0 if probing else self._since_probe + seconds

    def choose(self) -> tuple[str, str]:
        """Where the next call runs, and why. Both places have been measured."""
        cpu = self.estimate(CPU)
        gpu = self.estimate(GPU)
        if cpu is None or gpu is None:
            return CPU, "the card has not been tried with such arrays yet"
        if self.counts[GPU] == 1:
            return GPU, "the first run on the card does not count"
        seconds = {CPU: cpu, GPU: gpu}
        other = GPU if self._chosen == CPU else CPU
        if seconds[other] < WORTH_A_CHANGE * seconds[self._chosen]:
            self._chosen, other = other, self._chosen
            self._since_probe = 0.0
        if seconds[other] - seconds[self._chosen] <= SPENT_ON_PROBING * self._since_probe:
            return other, "it is time to look whether the other place is faster"
        return self._chosen, "the card is faster" if self._chosen == GPU else "the CPU is faster"


class History(dict[Any, Timings]):
    """The timings of a function, by footprint. Prints as a table; ``clear()`` has all measured anew.

    >>> print(History())
    no call has been measured yet
    """

    #: Footprints that are kept; the one that was new first goes first.
    LIMIT = 256

    def __reduce__(self) -> tuple[Any, ...]:
        return (History, ())  # elsewhere other times hold

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
        head = ("arguments", "place", "time", "runs")
        return text_table(head, rows, right=head[2:]) if rows else "no call has been measured yet"


def _as_text(signature: Any) -> str:
    """What is told apart: size, dtypes and ranks, numbers and words, and the types of all else."""
    bits, _names, *kinds = signature
    words = []
    for kind in kinds:
        first, second = kind if isinstance(kind, tuple) else (type, kind)
        if isinstance(first, np.dtype):
            words.append(f"{first} {second}-D")
        else:
            words.append(repr(second) if first is not type else getattr(second, "__name__", "a function"))
    return f"up to {format_bytes(1 << bits)}: {', '.join(words)}"
