"""The numbers of the cost model, each at its edge."""

from __future__ import annotations

import pytest

from arraybridge.offload.choice import Moves, choose
from arraybridge.offload.history import Entry, Family, Times

CARD = "fakecard gpu:0"
NOTHING = Moves(0.0, 0.0, False)


def entry(nbytes: int = 1000, family: Family | None = None) -> Entry:
    made = Entry((("float32",), ((nbytes // 4,),), ()), family or Family(), nbytes)
    made.family.entries.append(made)
    return made


def measured(cpu: float, card: float, *, calls: int = 20, runs: int = 3) -> Entry:
    made = entry()
    made.calls = calls
    for _ in range(runs):
        made.cpu.add(cpu)
        made.card(CARD).add(card)
    return made


def on_card(made: Entry, moves: Moves = NOTHING, launch: float = 1e-6) -> bool:
    return choose(made, made.card(CARD), CARD, moves, launch).on_card


@pytest.mark.parametrize(("card", "moved"), [(0.96, False), (0.94, True)])
def test_the_card_takes_over_at_five_percent(card: float, moved: bool) -> None:
    made = measured(1.0, card)
    made.card(CARD).on_card = False
    assert on_card(made) is moved


@pytest.mark.parametrize(("cpu", "moved"), [(0.96, False), (0.94, True)])
def test_the_cpu_takes_over_at_five_percent(cpu: float, moved: bool) -> None:
    made = measured(cpu, 1.0)
    made.card(CARD).on_card = True
    assert on_card(made) is not moved


@pytest.mark.parametrize(("cpu", "again"), [(3.9, True), (4.1, False)])
def test_a_first_run_on_the_cpu_may_be_four_times_too_long(cpu: float, again: bool) -> None:
    """Then it is run there again before the card is preferred."""
    made = measured(cpu, 1.0, calls=2, runs=1)
    made.card(CARD).add(1.0)
    assert on_card(made) is not again


@pytest.mark.parametrize(("ratio", "judged"), [(3.9, True), (4.1, False), (1 / 3.9, True), (1 / 4.1, False)])
def test_a_footprint_within_four_times_the_size_tells_of_another(ratio: float, judged: bool) -> None:
    known = measured(1.0, 0.01)
    new = entry(round(known.nbytes * ratio), known.family)
    assert on_card(new) is judged  # where nothing is known, the CPU comes first


def test_an_estimate_is_the_median_of_the_last_seven() -> None:
    times = Times()
    times.add(100.0)  # does not count
    for seconds in (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
        times.add(seconds)
    assert times.seconds == 1.0  # four of seven
    times.add(2.0)
    assert times.seconds == 2.0  # the first of them is forgotten
    for seconds in (3.0, 3.0, 3.0):
        times.add(seconds)
    assert times.seconds == 2.0
    times.add(3.0)
    assert times.seconds == 3.0


@pytest.mark.parametrize(("seconds", "outliers"), [(2.9, 0), (3.1, 1), (1 / 2.9, 0), (1 / 3.1, 1)])
def test_an_outlier_is_three_times_off(seconds: float, outliers: int) -> None:
    times = Times()
    for sample in (1.0, 1.0, 1.0, seconds):
        times.add(sample)
    assert times.outliers == outliers


@pytest.mark.parametrize(("calls", "tried"), [(4, True), (5, False)])
def test_first_samples_are_made_good_within_five_calls(calls: int, tried: bool) -> None:
    made = measured(1.0, 2.0, calls=calls, runs=1)
    assert on_card(made) is tried


@pytest.mark.parametrize(("moving", "tried"), [(0.49, True), (0.51, False)])
def test_a_late_try_must_promise_half_the_time(moving: float, tried: bool) -> None:
    made = entry()
    made.calls = 20
    for _ in range(3):
        made.cpu.add(1.0)
    assert on_card(made, Moves(0.0, moving, False)) is tried


@pytest.mark.parametrize(
    ("calls", "card", "again"), [(31, 1.1, False), (32, 1.1, True), (32, 1.79, True), (32, 1.81, False)]
)
def test_the_slower_place_is_looked_at_again(calls: int, card: float, again: bool) -> None:
    made = measured(1.0, card, calls=calls)
    made.card(CARD).on_card = False
    assert on_card(made) is again
