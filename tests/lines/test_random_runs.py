"""Random pipelines and maps, with failures, some dropped half-way: none hangs, and no thread is left."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from arraybridge import Pipeline, device_map
from tests.lines.conftest import our_threads


class PlannedError(Exception):
    pass


def one_run(rng: random.Random) -> None:
    """One random run, checked against what plain Python makes of the same input."""
    n, stages = rng.randrange(12), rng.randrange(1, 5)
    fail_at = {
        (rng.randrange(stages), rng.randrange(14)) for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 1, 1, 2, 3]))
    }
    input_fails_at = rng.randrange(14) if rng.random() < 0.15 else None
    drop_at = rng.randrange(14) if rng.random() < 0.3 else None
    pause = rng.choice([0.0, 0.0, 0.0, 0.0002])

    def stage(s: int) -> Any:
        def work(x: int) -> int:
            if pause and rng.random() < 0.3:
                time.sleep(pause)
            if (s, x // 100 - 1) in fail_at:
                raise PlannedError(f"item {x // 100 - 1}")
            return x + 1

        return work

    def items() -> Iterator[int]:
        for i in range(n):
            if i == input_fails_at:
                raise PlannedError(f"item {i}")
            yield (i + 1) * 100

    kind = rng.choice(["pipeline", "map", "unordered"])
    if kind == "pipeline":
        results = Pipeline(*map(stage, range(stages)), queue_size=rng.randrange(1, 4)).map(items())
    else:
        stages = 1
        fail_at = {(0, i) for _, i in fail_at}
        results = device_map(stage(0), items(), "cpu", per_device=rng.randrange(1, 5), ordered=kind == "map")
    expected = [(i + 1) * 100 + stages for i in range(n)]
    failing = [i for i in [*(i for _, i in fail_at), input_fails_at] if i is not None and i < n]
    got: list[int] = []
    raised, notes = "", []
    try:
        for i, result in enumerate(results):
            if i == drop_at:
                break
            got.append(result)
    except PlannedError as error:
        raised, notes = str(error), error.__notes__
    assert bool(notes) == bool(raised)  # what failed, and where
    if kind != "unordered":
        # As of Python's own map, whatever the timing: the items before the first that fails, then its error.
        fine = min(failing, default=n)
        is_dropped = drop_at is not None and drop_at < fine
        assert got == expected[: drop_at if is_dropped else fine]
        assert raised == (f"item {fine}" if failing and not is_dropped else "")
    elif not fail_at and drop_at is None:  # what is read before the input fails comes out
        assert sorted(got) == expected[: min(failing, default=n)]
        assert raised == (f"item {failing[0]}" if failing else "")
    assert len(set(got)) == len(got)
    assert set(got) <= set(expected)
    del results


def many(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        one_run(rng)
    until = time.monotonic() + 1
    while our_threads():
        assert time.monotonic() < until, our_threads()
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_random_runs() -> None:
    many(400, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_random_runs(seed: int) -> None:
    many(1000, seed)
