"""Two times for each footprint: how close the choice comes to an oracle, and when it changes."""

from __future__ import annotations

from arraybridge.offload.cost_model import CPU, GPU, Timings


def run(timings: Timings, cpu: float, gpu: float, calls: int) -> list[str]:
    """Where these calls run."""
    places = []
    for _ in range(calls):
        place, _ = timings.choose()
        timings.add(place, cpu if place == CPU else gpu)
        places.append(place)
    return places


def tried(cpu: float, gpu: float) -> Timings:
    timings = Timings()
    timings.add(CPU, cpu)
    timings.add(GPU, gpu)
    return timings


def test_a_first_run_which_compiles_does_not_count() -> None:
    timings = tried(1.0, 50.0)
    assert run(timings, 1.0, 0.1, 5) == [GPU] * 5


def test_a_change_of_speed_is_noticed() -> None:
    timings = tried(1.0, 0.1)
    assert run(timings, 1.0, 0.1, 20)[-1] == GPU
    assert run(timings, 1.0, 5.0, 20)[-1] == CPU  # somebody else uses the card
    assert GPU in run(timings, 1.0, 0.1, 400)[-50:]  # and has gone


def test_the_slower_place_costs_a_fiftieth_to_look_at() -> None:
    timings = tried(1.0, 3.0)
    places = run(timings, 1.0, 3.0, 1000)[2:]
    assert 0 < places.count(GPU) <= 0.02 * len(places)
