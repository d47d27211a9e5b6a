"""The cost model of `@gpu`: where a call is expected to be done first.

Nothing here knows a framework. Seconds are those of whatever clock the caller measures with, and sizes are
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from arraybridge.offload.history import CardTimes, Entry, Times

__all__ = ["Moves", "Verdict", "choose"]

#: The place changes only where the other one is faster than this share of the present one.
SWITCH = 0.95
#: Calls within which a footprint's first, provisional samples are made good.
CALIBRATION = 5
#: After those, an unmeasured place is tried only where it may take less than this share of the other's time.
LATE = 0.5
#: The CPU's first sample is at most so many times too long; a card's, which compiles, may be any times.
CPU_WARM_UP = 4.0
#: The slower place is tried again now and then, if it is at most so many times slower, and after so many
#: calls at the latest.
RECHECK_LIMIT, RECHECK_LONGEST = 1.8, 1024
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
    recheck: bool = False


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
    if entry.calls >= entry.recheck_at and other <= RECHECK_LIMIT * chosen:
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
