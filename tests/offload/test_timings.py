"""Two times for each footprint: how close the choice comes to an oracle, and when it changes."""

from __future__ import annotations

import math
import random

import pytest

from arraybridge.offload.timings import CARD, CPU, Timings


def regret(rng: random.Random, ratio: float, drift: float, noise: float, calls: int = 600) -> float:
    """What choosing costs over always taking the faster place, after the first calls, as a share.

    ``ratio``: how long the card takes at first, for each second of the CPU; both wander with each call.
    """
    timings = Timings()
    cpu, card, spent, best = 1.0, ratio, 0.0, 0.0
    for number in range(calls):
        cpu, card = (seconds * math.exp(rng.gauss(0, drift)) for seconds in (cpu, card))
        took = {place: s * math.exp(rng.gauss(0, noise)) for place, s in ((CPU, cpu), (CARD, card))}
        if number == 0:
            timings.add(CPU, took[CPU])
        elif not timings.proven:  # the trial, on the card as it compiles
            timings.add(CPU, took[CPU])
            timings.add(CARD, took[CARD] + 5)
            timings.proven = True
        else:
            place, _ = timings.choose()
            timings.add(place, took[place])
            if number >= 5:
                spent += took[place]
                best += min(cpu, card)
    return spent / best - 1


@pytest.mark.parametrize(("drift", "noise"), [(0, 0), (0, 0.1), (0.003, 0.1), (0.01, 0.1), (0.02, 0.15)])
def test_regret_against_an_oracle_is_at_most_five_percent(drift: float, noise: float) -> None:
    rng = random.Random(1)
    functions = [regret(rng, 10 ** rng.uniform(-1.5, 1.5), drift, noise) for _ in range(60)]
    assert sum(functions) / len(functions) <= 0.05
    assert max(functions) <= 0.15


def run(timings: Timings, cpu: float, card: float, calls: int) -> list[str]:
    """Where these calls run."""
    places = []
    for _ in range(calls):
        place, _ = timings.choose()
        timings.add(place, cpu if place == CPU else card)
        places.append(place)
    return places


def tried(cpu: float, card: float) -> Timings:
    timings = Timings()
    timings.add(CPU, cpu)
    timings.add(CARD, card)
    return timings


def test_a_first_run_which_compiles_does_not_count() -> None:
    timings = tried(1.0, 50.0)
    assert run(timings, 1.0, 0.1, 5) == [CARD] * 5


def test_a_change_of_speed_is_noticed() -> None:
    timings = tried(1.0, 0.1)
    assert run(timings, 1.0, 0.1, 20)[-1] == CARD
    assert run(timings, 1.0, 5.0, 20)[-1] == CPU  # somebody else uses the card
    assert CARD in run(timings, 1.0, 0.1, 400)[-50:]  # and has gone


def test_the_slower_place_costs_a_fiftieth_to_look_at() -> None:
    timings = tried(1.0, 3.0)
    places = run(timings, 1.0, 3.0, 1000)[2:]
    assert 0 < places.count(CARD) <= 0.02 * len(places)
