"""What a call costs on the CPU and on a card: transfer rates, a function's own history, and the choice.

Nothing here knows a framework. Seconds are those of whatever clock the caller measures with, and sizes are
bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from arraybridge.show import format_seconds, text_table

__all__ = [
    "CardTimes",
    "Entry",
    "Family",
    "History",
    "Link",
    "Moves",
    "Rates",
    "Record",
    "Times",
    "Verdict",
    "choose",
    "measure_rates",
]


def middle(values: Collection[float]) -> float:
    """The median; of an even number, the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


# -- moving ------------------------------------------------------------------------------------------


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


# -- history -----------------------------------------------------------------------------------------

#: Samples that an estimate is made of; their median bears three outliers.
WINDOW = 7
#: A sample so many times larger or smaller than the estimate counts as an outlier.
OUTLIER = 3.0


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

    __slots__ = ("moved", "on_card", "oom_free", "ratio")

    def __init__(self) -> None:
        super().__init__()
        #: Measured seconds of the transfers over those that the rates foretell.
        self.ratio = 1.0
        self.moved = 0
        #: Where the last call ran; None before the first choice.
        self.on_card: bool | None = None
        #: Free bytes of the card when it ran out of memory.
        self.oom_free: int | None = None

    def add_transfer(self, ratio: float) -> None:
        self.moved += 1
        if self.moved > 1:  # the first one allocates
            self.ratio += 0.5 * (min(max(ratio, 0.1), 1000.0) - self.ratio)


class Family:
    """Calls with arrays of the same dtypes and ranks, which differ in size alone."""

    __slots__ = ("blocked", "entries", "result")

    def __init__(self) -> None:
        #: Some of them, by which new ones are judged.
        self.entries: list[Entry] = []
        #: dtypes of the result's arrays as NumPy gives them; None before the first run on the CPU.
        self.result: tuple[str, ...] | None = None
        #: Backend → why these calls stay on the CPU; "" for every backend.
        self.blocked: dict[str, str] = {}


class Entry:
    """What is known of one footprint: shapes, dtypes, and the numbers and words among the arguments."""

    __slots__ = ("both", "calls", "cards", "cpu", "family", "key", "nbytes", "out", "trial_at", "trial_wait")

    def __init__(self, key: Any, family: Family, nbytes: int) -> None:
        self.key = key
        self.family = family
        self.nbytes = nbytes
        self.cpu = Times()
        #: Name of a card → times on it.
        self.cards: dict[str, CardTimes] = {}
        #: Arrays and bytes of the result, or None before the first run.
        self.out: tuple[int, int] | None = None
        self.calls = 0
        #: Whether it has run on the CPU and on a card.
        self.both = False
        #: The call at which the slower place may be tried again, and the calls until the next time.
        self.trial_at = self.trial_wait = TRIAL_AFTER

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
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere other times hold: a history begins anew.
        return (History, ())

    def clear(self) -> None:
        """Forget everything, and measure anew."""
        with self.lock:
            self.entries.clear()
            self.families.clear()

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


# -- choosing ----------------------------------------------------------------------------------------

#: The place changes only where the other one is faster than this share of the present one.
SWITCH = 0.95
#: Calls within which a footprint's first, provisional samples are made good.
CALIBRATION = 5
#: After those, an unmeasured place is tried only where it may take less than this share of the other's time.
LATE = 0.5
#: The CPU's first sample is at most so many times too long; a card's, which compiles, may be any times.
CPU_WARM_UP = 4.0
#: After so many calls the slower place is tried again, if it is at most so many times slower.
TRIAL_AFTER, TRIAL_LIMIT, TRIAL_LONGEST = 32, 1.8, 1024
#: A footprint this many times larger or smaller tells what one that was never measured will take.
GUESS_WITHIN = 4.0


@dataclass(slots=True)
class Moves:
    """Seconds of transfers that go with a run in each place, and whether every array is on the card."""

    cpu: float
    card: float
    resident: bool


@dataclass(slots=True)
class Verdict:
    """Where a call is to run, and why. Seconds are with the transfers; None: not known."""

    on_card: bool
    why: str
    cpu: float | None = None
    card: float | None = None
    trial: bool = False


def choose(entry: Entry, times: CardTimes, name: str, moves: Moves, launch: float) -> Verdict:
    """Where a call runs: where it is expected to be done first. Changes nothing.

    What was never measured is tried only where a favourable outcome would change the choice.
    """
    cpu_run, card_run = entry.cpu.seconds, times.seconds
    if cpu_run is None or card_run is None:
        return _choose_unmeasured(entry, name, cpu_run, card_run, moves, launch)
    cpu, card = cpu_run + moves.cpu, card_run + moves.card
    if entry.calls < CALIBRATION:
        if cpu <= card and times.count == 1 and moves.card + launch < cpu:
            return Verdict(True, "the first run on the card does not count", cpu, card)
        if card < cpu <= CPU_WARM_UP * card and entry.cpu.count == 1:
            return Verdict(False, "the first run on the CPU does not count", cpu, card)
        on_card = card < cpu
    elif times.on_card is None:
        on_card = card < cpu
    elif times.on_card:
        on_card = not cpu < SWITCH * card
    else:
        on_card = card < SWITCH * cpu
    chosen, other = (card, cpu) if on_card else (cpu, card)
    if entry.calls >= entry.trial_at and other <= TRIAL_LIMIT * chosen:
        return Verdict(not on_card, "it is time to look whether the other place is faster", cpu, card, True)
    why = "the card is faster" if on_card else "the CPU is faster"
    return Verdict(on_card, why, cpu, card)


def _choose_unmeasured(
    entry: Entry, name: str, cpu_run: float | None, card_run: float | None, moves: Moves, launch: float
) -> Verdict:
    on_cpu, there = _from_others(entry, name)
    cpu_low, cpu_guess, card_low, card_guess = on_cpu.low, on_cpu.guess, there.low, there.guess
    if cpu_run is not None:
        cpu_low = cpu_guess = cpu_run
    if card_run is not None:
        card_low = card_guess = card_run
    card_low = max(card_low, launch)
    cpu = None if cpu_guess is None else cpu_guess + moves.cpu
    card = None if card_guess is None else card_guess + moves.card
    if cpu is not None and card is not None and entry.calls == 0:
        on_card = card < cpu
        why = "judging by other sizes, the {} is faster".format("card" if on_card else "CPU")
        return Verdict(on_card, why, cpu, card)
    if moves.resident and cpu_run is None:
        return Verdict(True, "the arrays are on the card already", cpu, card)
    if cpu_run is None and card_run is None:
        # The CPU comes first: it tells the dtype of the result as well.
        return Verdict(False, "it has not run with such arrays yet", cpu, card)
    # Later on noise must not talk anybody into a try.
    sure = 1.0 if entry.calls < CALIBRATION else LATE
    if card_run is None:
        best = moves.card + card_low
        if cpu is not None and best < cpu * sure:
            return Verdict(True, "the card has not been tried with such arrays yet", cpu, card)
        why = "moving the arrays alone takes longer" if moves.card >= (cpu or 0) else "the CPU is faster"
        return Verdict(False, why, cpu, best)
    if card is not None and moves.cpu + cpu_low < card * sure:
        return Verdict(False, "the CPU has not been tried with such arrays yet", cpu, card)
    return Verdict(True, "the card is faster", cpu, card)


class _Judged:
    """What other sizes say of a run in one place: the least that it can take, and what it is likely to."""

    __slots__ = ("distance", "guess", "low")

    def __init__(self) -> None:
        self.low = 0.0
        self.guess: float | None = None
        self.distance = GUESS_WITHIN

    def add(self, times: Times, ratio: float, *, warm: bool) -> None:
        seconds = times.seconds
        if seconds is None:
            return
        # A larger array takes no less than a smaller one, and a smaller one no less than in proportion to the
        # square of its size. The first sample of a card may be all compilation.
        if warm:
            self.low = max(self.low, seconds * min(1.0, ratio * ratio))
        # As a guess that counts, too: a backend that compiles for each shape does so for this one.
        distance = ratio if ratio >= 1.0 else 1.0 / ratio
        if distance <= self.distance:
            self.guess, self.distance = seconds * ratio, distance


def _from_others(entry: Entry, name: str) -> tuple[_Judged, _Judged]:
    """What other sizes say of a run on the CPU, and of one on the card."""
    cpu, card = _Judged(), _Judged()
    for other in tuple(entry.family.entries):
        if other is not entry and other.nbytes and entry.nbytes:
            ratio = entry.nbytes / other.nbytes
            cpu.add(other.cpu, ratio, warm=True)
            times = other.cards.get(name)
            if times is not None:
                card.add(times, ratio, warm=times.count > 1)
    return cpu, card
