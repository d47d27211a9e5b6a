"""`benchmark` and `compare`: measured calls and synchronization."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import benchmark, compare
from arraybridge.benchmarking import timing as margin
from tests.helpers import require


def test_warm_up_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that only the function advances: its first two calls, for warm-up, are not counted."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(margin, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def first_is_slow() -> None:
        calls[0] += 1
        now[0] += 5 if calls[0] <= 2 else 0.25

    timing = benchmark(first_is_slow, runs=5)
    assert (calls[0], timing) == (7, arraybridge.Timing(0.25, 0.25, 0.0, 5))
    assert "median" in str(timing)
    assert benchmark(first_is_slow, seconds=2).runs == 8
    assert benchmark(first_is_slow, seconds=0.1).runs == 5


@pytest.mark.parametrize("returns", [True, False])
def test_jax_computations_are_synchronized(returns: bool) -> None:
    jax = require("jax")
    x = jax.numpy.ones((300, 300))

    @jax.jit
    def long(x: Any) -> Any:
        return jax.lax.fori_loop(0, 40, lambda _, y: y @ x / 300, x)

    made = [long(x).block_until_ready()]

    def work() -> Any:
        assert made[-1].is_ready()
        made.append(long(x))
        return {"deep": [made[-1]]} if returns else 3

    benchmark(work, warmup=0, runs=8)
    assert made[-1].is_ready()


@pytest.mark.parametrize("fn", [np.sort, arraybridge.numpy(np.sort)], ids=["plain", "decorated"])
def test_compare(fn: Any) -> None:
    result = compare(fn, np.arange(1000)[::-1].copy(), runs=5)
    assert result.cpu.runs == 5
    if arraybridge.gpu_available():
        assert result.speedup is not None
    else:
        assert result.gpu is None
        assert result.speedup is None
        assert "no GPU is available" in str(result)
    assert "<table>" in result._repr_html_()


def timed(cpu: float, gpu: float | None) -> arraybridge.Comparison:
    def timing(seconds: float) -> arraybridge.Timing:
        return arraybridge.Timing(seconds, seconds, 0.0, 3)

    return arraybridge.Comparison(timing(cpu), None if gpu is None else timing(gpu), "by hand")


def test_compare_reports_the_faster_device() -> None:
    assert timed(4, 1).speedup == 4
    assert "the GPU is 4 times as fast" in str(timed(4, 1))
    assert "the CPU is 4 times as fast" in str(timed(1, 4))


@pytest.mark.parametrize(
    ("measure", "arguments", "options", "error"),
    [
        (benchmark, (3,), {}, TypeError),
        (benchmark, (abs, 1), {"runs": 0}, ValueError),
        (benchmark, (lambda: 1 / 0,), {}, ZeroDivisionError),
        (compare, (3,), {}, TypeError),
    ],
)
def test_bad_input(measure: Any, arguments: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        measure(*arguments, **options)


def test_seconds_that_are_not_a_number_raise() -> None:
    with pytest.raises(TypeError, match=r"^seconds='1' must be a number greater than 0\.$"):
        benchmark(np.sum, np.ones(2), seconds="1")  # type: ignore[arg-type]
