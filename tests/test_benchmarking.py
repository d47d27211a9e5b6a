"""`benchmark` and `compare`: measured calls and synchronization."""

from __future__ import annotations

import re
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


# -- comparison over sizes ---------------------------------------------------------------------------


def timed(cpu: float, gpu: float | None) -> arraybridge.Comparison:
    def timing(seconds: float) -> arraybridge.Timing:
        return arraybridge.Timing(seconds, seconds, 0.0, 3)

    return arraybridge.Comparison(timing(cpu), None if gpu is None else timing(gpu), "by hand")


def test_compare_reports_the_faster_function_and_the_crossover() -> None:
    assert timed(4, 1).speedup == 4
    assert "the GPU is 4 times as fast" in str(timed(4, 1))
    assert "the CPU is 4 times as fast" in str(timed(1, 4))
    times = {10: (1, 8), 100: (3, 2), 1000: (9, 10), 10_000: (50, 20), 100_000: (400, 40)}
    rows = [("f", size, timed(*both)) for size, both in times.items()]
    rows += [("g", size, timed(1, 2)) for size in times]
    result = arraybridge.SizeComparison(tuple(rows))
    assert result.crossover() == 10_000  # at 100 it was faster by chance
    assert result.crossover("g") is None
    text = str(result)
    assert "f: 10,000 elements; g: never" in text
    assert "100,000" in text
    with pytest.raises(KeyError, match=r"'h' was not measured\. Pass one of 'f', 'g'"):
        result.crossover("h")


@pytest.mark.parametrize(
    ("measure", "arguments", "options", "error"),
    [
        (benchmark, (3,), {}, TypeError),
        (benchmark, (abs, 1), {"runs": 0}, ValueError),
        (benchmark, (lambda: 1 / 0,), {}, ZeroDivisionError),
        (compare, (np.sort, np.ones(3)), {"sizes": [1]}, ValueError),
        (compare, (np.sort,), {"sizes": [0, 3]}, ValueError),
        (compare, ([np.sort, 3],), {"sizes": [3]}, TypeError),
        (compare, ([],), {"sizes": [3]}, ValueError),
        (compare, ({},), {"sizes": [3]}, ValueError),
    ],
)
def test_bad_input(measure: Any, arguments: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        measure(*arguments, **options)


def test_a_factory_of_arguments_that_is_not_a_function_raises() -> None:
    with pytest.raises(
        TypeError,
        match=r"^make='x' must be a function that returns the argument .*, such as make=np\.ones\.$",
    ):
        compare(np.sum, sizes=[10], make="x")  # type: ignore[arg-type]


def test_seconds_that_are_not_a_number_raise() -> None:
    with pytest.raises(TypeError, match=r"^seconds='1' must be a number greater than 0\.$"):
        benchmark(np.sum, np.ones(2), seconds="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (5, "sizes=5 must be a list of ints."),
        ("10", "sizes='10' must be a list of ints."),
        ([10, "x"], "sizes=[10, 'x'] must be a list of ints."),
        ([1e3], "sizes=[1000.0] must be a list of ints."),
        ([True], "sizes=[True] must be a list of ints."),
    ],
)
def test_sizes_that_are_not_ints_raise(sizes: Any, problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        compare(np.sort, sizes=sizes)
    assert str(caught.value) == f"{problem} Pass numbers of elements, such as sizes=[1000, 1_000_000]."


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [([0], "sizes=[0] contains 0."), ([5, -2], "contains -2."), ([], "sizes=[] is empty.")],
)
def test_missing_sizes_and_sizes_below_one_raise(sizes: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        compare(np.sort, sizes=sizes)
    assert "numbers of elements, each at least 1, such as sizes=[1000, 1_000_000]." in str(caught.value)


def test_comparisons_are_selected_by_function_and_size() -> None:
    result = compare({"sort": np.sort, "sum": np.sum}, sizes=[10, 20], runs=1)
    assert result["sum", 20] is result.rows[3][2]
    keys: list[Any] = ["sum", 0, ("sum", 30)]
    for key in keys:
        with pytest.raises(KeyError, match=r"was not measured\. Pass .*: \['sort', 10\], \['sort', 20\], \["):
            result[key]
    with pytest.raises(TypeError, match="not iterable"):
        list(result)  # type: ignore[call-overload]


def test_sizes_may_be_numpy_ints_in_any_order() -> None:
    rows = compare(np.sort, sizes=np.array([20, 10, 20]), runs=1).as_dicts()
    assert [(row["elements"], type(row["elements"])) for row in rows] == [(10, int), (20, int)]
