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
    fail_at = (rng.randrange(stages), rng.randrange(1, 14)) if rng.random() < 0.3 else None
    input_fails_at = rng.randrange(14) if rng.random() < 0.15 else None
    drop_at = rng.randrange(14) if rng.random() < 0.3 else None
    pause = rng.choice([0.0, 0.0, 0.0, 0.0002])

    def stage(s: int) -> Any:
        def work(x: int) -> int:
            if pause and rng.random() < 0.3:
                time.sleep(pause)
            if fail_at is not None and fail_at == (s, x // 100):
                raise PlannedError(f"{s} {x // 100}")
            return x + 1

        return work

    def items() -> Iterator[int]:
        for i in range(n):
            if i == input_fails_at:
                raise PlannedError("input")
            yield (i + 1) * 100

    kind = rng.choice(["pipeline", "map", "unordered"])
    if kind == "pipeline":
        results = Pipeline(*map(stage, range(stages)), queue_size=rng.randrange(1, 4)).map(items())
    else:
        stages = 1
        if fail_at is not None:
            fail_at = (0, fail_at[1])
        results = device_map(stage(0), items(), "cpu", per_device=rng.randrange(1, 5), ordered=kind == "map")
    expected = [(i + 1) * 100 + stages for i in range(n)]
    must_fail = (fail_at is not None and fail_at[1] <= n) or (
        input_fails_at is not None and input_fails_at < n
    )
    got: list[int] = []
    named = True
    try:
        for i, result in enumerate(results):
            if i == drop_at:
                break
            got.append(result)
        else:
            assert not must_fail
            assert (sorted(got) if kind == "unordered" else got) == expected
    except PlannedError as error:
        assert must_fail
        named = bool(error.__notes__)
    assert named  # what failed, and where
    if kind != "unordered":
        assert got == expected[: len(got)]
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
