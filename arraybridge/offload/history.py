"""How long a function took before, on the CPU and on each card, by the footprint of its calls.

Nothing here knows a framework. Seconds are those of whatever clock the caller measures with, and sizes are
bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arraybridge.offload.rates import middle
from arraybridge.show import format_seconds, text_table

__all__ = [
    "RECHECK_AFTER",
    "CardTimes",
    "Entry",
    "Family",
    "History",
    "Record",
    "Times",
]

#: Samples that an estimate is made of; their median bears three outliers.
WINDOW = 7
#: A sample so many times larger or smaller than the estimate counts as an outlier.
OUTLIER = 3.0
#: Calls after which the slower place is tried again; twice as many after each time.
RECHECK_AFTER = 32


class Times:
    """Seconds that a function took in one place for one footprint, the transfers left out.

    The first sample, in which libraries load, kernels compile and pages are touched for the first time, is an
    estimate until there is a second one, and then is dropped.
    """

    __slots__ = ("count", "outliers", "samples", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.outliers = 0
        self.samples: tuple[float, ...] = ()
        #: The estimate, or None before the first run.
        self.seconds: float | None = None

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count == 1:
            self.seconds = seconds
            return
        known = self.seconds
        if len(self.samples) >= 2 and known and not known / OUTLIER <= seconds <= known * OUTLIER:
            self.outliers += 1
        self.samples = (*self.samples[1 - WINDOW :], seconds)
        self.seconds = middle(self.samples)


class CardTimes(Times):
    """`Times` on a card, and what else is known of this footprint there."""

    __slots__ = ("moved", "on_card", "oom_free", "proven", "ratio")

    def __init__(self) -> None:
        super().__init__()
        #: Measured seconds of the transfers over those that the rates foretell.
        self.ratio = 1.0
        self.moved = 0
        #: Where the last call ran; None before the first choice.
        self.on_card: bool | None = None
        #: Whether a trial has shown that it gives there what it gives in NumPy.
        self.proven = False
        #: Free bytes of the card when it ran out of memory.
        self.oom_free: int | None = None

    def add_transfer(self, ratio: float) -> None:
        self.moved += 1
        if self.moved > 1:  # the first one allocates
            self.ratio += 0.5 * (min(max(ratio, 0.1), 1000.0) - self.ratio)


class Family:
    """Calls with arrays of the same dtypes and ranks, which differ in size alone."""

    __slots__ = ("blocked", "entries", "in_place")

    def __init__(self) -> None:
        #: Some of them, by which new ones are judged.
        self.entries: list[Entry] = []
        #: Why these calls run where their arrays are, since a copy of those would show; or "".
        self.in_place = ""
        #: Backend → why these calls stay on the CPU; "" for every backend.
        self.blocked: dict[str, str] = {}


class Entry:
    """What is known of one footprint: shapes, dtypes, and the numbers and words among the arguments."""

    __slots__ = (
        "both",
        "calls",
        "cards",
        "cpu",
        "family",
        "form",
        "key",
        "nbytes",
        "out",
        "recheck_at",
        "recheck_wait",
    )

    def __init__(self, key: Any, family: Family, nbytes: int) -> None:
        self.key = key
        self.family = family
        self.nbytes = nbytes
        self.cpu = Times()
        #: Name of a card → times on it.
        self.cards: dict[str, CardTimes] = {}
        #: Arrays and bytes of the result, or None before the first run.
        self.out: tuple[int, int] | None = None
        #: Of each array of the result: its dtype, and whether it is one of NumPy's scalars; None likewise.
        self.form: tuple[tuple[str, bool], ...] | None = None
        self.calls = 0
        #: Whether it has run on the CPU and on a card.
        self.both = False
        #: The call at which the slower place may be tried again, and the calls until the next time.
        self.recheck_at = self.recheck_wait = RECHECK_AFTER

    def card(self, name: str) -> CardTimes:
        return self.cards.get(name) or self.cards.setdefault(name, CardTimes())


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a function's history.

    Attributes:
        shapes: of the arrays among the arguments.
        dtypes: of the same.
        nbytes: of all of them together.
        place: ``"cpu"``, or backend and card: ``"cupy gpu:0"``.
        runs: how many there were.
        seconds: estimate for one run, transfers left out.
        outliers: runs that took more than three times that, or less than a third.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int
    place: str
    runs: int
    seconds: float
    outliers: int


class History:
    """How long a function took, by footprint. Prints as a table.

    >>> print(History())
    no call has been measured yet
    """

    #: Footprints that are kept; the one that was new first goes first.
    LIMIT = 256
    #: Footprints of a family that new ones are judged by.
    JUDGES = 10

    def __init__(self) -> None:
        self.entries: dict[Any, Entry] = {}
        self.families: dict[Any, Family] = {}
        #: Backend → why the function stays on the CPU: a trial found that it gives something else there.
        self.refuted: dict[str, str] = {}
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere other times hold: a history begins anew.
        return (History, ())

    def clear(self) -> None:
        """Forget everything, and measure anew."""
        with self.lock:
            self.entries.clear()
            self.families.clear()
            self.refuted.clear()

    def entry(self, key: Any, family: Any, nbytes: int, *, keep: bool = True) -> Entry:
        """The entry of a footprint, made where there is none; ``keep=False`` leaves no trace of that."""
        found = self.entries.get(key)
        if found is not None:
            return found
        with self.lock:
            if not keep:
                return Entry(key, self.families.get(family) or Family(), nbytes)
            while len(self.entries) >= self.LIMIT:
                del self.entries[next(iter(self.entries))]
            if len(self.families) >= self.LIMIT:
                self.families.clear()
            found = self.entries.get(key)
            if found is None:
                home = self.families.setdefault(family, Family())
                found = self.entries[key] = Entry(key, home, nbytes)
                if len(home.entries) >= self.JUDGES:
                    # One that has run in both places tells more than one that was judged by it.
                    home.entries.remove(next((e for e in home.entries if not e.both), home.entries[0]))
                home.entries.append(found)
            return found

    def __iter__(self) -> Iterator[Record]:
        with self.lock:
            entries = list(self.entries.values())
        for entry in entries:
            dtypes, shapes = entry.key[0], entry.key[1]
            for place, times in (("cpu", entry.cpu), *list(entry.cards.items())):
                if times.seconds is not None:
                    count, seconds = times.count, times.seconds
                    yield Record(shapes, dtypes, entry.nbytes, place, count, seconds, times.outliers)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __str__(self) -> str:
        rows = []
        for r in self:
            arrays = ", ".join(f"{d}{list(s)}" for s, d in zip(r.shapes, r.dtypes, strict=True))
            rows.append(
                (
                    arrays or "no arrays",
                    r.place,
                    format_seconds(r.seconds),
                    str(r.runs),
                    str(r.outliers or ""),
                )
            )
        if not rows:
            return "no call has been measured yet"
        head = ("arrays", "place", "time", "runs", "outliers")
        return text_table(head, rows, right=head[2:])

    def __repr__(self) -> str:
        return f"<history of {len(self.entries)} footprints>"
