"""The cost model of call signatures: how close its choice is to an oracle, and when it changes."""

from __future__ import annotations

from arraybridge.offload.timing_history import CPU, GPU, Timings


def run(timings: Timings, cpu: float, gpu: float, calls: int) -> list[str]:
    """Return the devices on which these calls run."""
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


def test_first_run_is_ignored_because_it_may_compile() -> None:
    timings = tried(1.0, 50.0)
    assert run(timings, 1.0, 0.1, 5) == [GPU] * 5


def test_changes_of_speed_are_detected() -> None:
    timings = tried(1.0, 0.1)
    assert run(timings, 1.0, 0.1, 20)[-1] == GPU
    assert run(timings, 1.0, 5.0, 20)[-1] == CPU  # another program uses the GPU
    assert GPU in run(timings, 1.0, 0.1, 400)[-50:]  # and has ended


def test_probing_the_slower_device_costs_at_most_two_percent() -> None:
    timings = tried(1.0, 3.0)
    places = run(timings, 1.0, 3.0, 1000)[2:]
    assert 0 < places.count(GPU) <= 0.02 * len(places)
