"""benchmark and compare: what is counted, and what is waited for."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import benchmark, compare
from tests.helpers import require


def test_a_sleep_takes_its_time() -> None:
    timing = benchmark(time.sleep, 0.005, runs=9)
    assert timing.runs == 9
    assert 0.005 <= timing.minimum <= timing.median < 0.05
    assert 0 <= timing.spread < 0.05
    assert "median" in str(timing)


def test_warm_up_is_not_counted() -> None:
    calls = []

    def first_is_slow() -> None:
        calls.append(1)
        if len(calls) <= 2:
            time.sleep(0.05)

    timing = benchmark(first_is_slow, runs=5)
    assert len(calls) == 7
    assert timing.median < 0.02


def test_the_number_of_runs_follows_the_clock() -> None:
    assert benchmark(lambda: None, seconds=0.05).runs > 5
    assert benchmark(time.sleep, 0.01, seconds=0.001).runs == 5


def test_jax_is_waited_for() -> None:
    jax = require("jax")

    def wait(x: Any) -> Any:
        time.sleep(0.02)
        return x

    @jax.jit
    def slow(x: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = arraybridge.to_jax(np.zeros(4, np.float32))
    assert benchmark(slow, x, runs=3).minimum >= 0.02


@pytest.mark.parametrize("returns", ["array", "nothing", "object", "number", "object in a dict"])
def test_whatever_a_function_returns_its_computation_is_waited_for(returns: str) -> None:
    jax = require("jax")
    x = jax.numpy.ones((300, 300))

    @jax.jit
    def long(x: Any) -> Any:
        return jax.lax.fori_loop(0, 100, lambda _, y: y @ x / 300, x)

    long(x).block_until_ready()
    made: list[Any] = []

    class Model:
        """An object of which arraybridge knows nothing, and that holds an array."""

        def __init__(self, state: Any) -> None:
            self.state = state

    def work() -> Any:
        made.append(long(x))
        assert not made[-1].is_ready()  # else this test shows nothing
        assert all(before.is_ready() for before in made[:-1])
        model = Model(made[-1])
        results = {"array": made[-1], "nothing": None, "object": model, "number": 3}
        return results.get(returns, {"model": model})

    timing = benchmark(work, warmup=0, runs=1)
    assert made[-1].is_ready()
    assert timing.minimum > benchmark(lambda: None, warmup=0, runs=1).minimum
    benchmark(work, warmup=0, runs=8)  # it is waited for each time


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_every_framework(name: str) -> None:
    require(name)
    x = arraybridge.convert_memory(np.ones((8, 8), np.float32), name)
    assert benchmark(lambda a: a, x, runs=3).median > 0


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((3,), {}, TypeError),
        ((abs, 1), {"runs": 0}, ValueError),
        ((abs, 1), {"seconds": 0}, ValueError),
        ((abs, 1), {"warmup": -1}, ValueError),
    ],
)
def test_bad_input(arguments: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        benchmark(*arguments, **options)


def test_errors_come_out() -> None:
    with pytest.raises(ZeroDivisionError):
        benchmark(lambda: 1 / 0)


def test_compare() -> None:
    result = compare(np.sort, np.arange(1000)[::-1].copy(), runs=5)
    assert result.cpu.runs == 5
    if arraybridge.gpu_available():
        assert result.speedup is not None
    else:
        assert result.gpu is None
        assert result.speedup is None
        assert "there is no GPU here" in str(result)
    assert "<table>" in result._repr_html_()


def test_compare_says_who_is_faster() -> None:
    fast, slow = arraybridge.Timing(1.0, 1.0, 0.0, 5), arraybridge.Timing(4.0, 4.0, 0.0, 5)
    assert arraybridge.Comparison(slow, fast, "n").speedup == 4
    assert "the GPU is 4 times as fast" in str(arraybridge.Comparison(slow, fast, "n"))
    assert "the CPU is 4 times as fast" in str(arraybridge.Comparison(fast, slow, "n"))


def test_compare_of_a_decorated_function() -> None:
    require("jax")

    @arraybridge.jax
    def double(x: Any) -> Any:
        return x * 2

    assert compare(double, np.zeros(3, np.float32), runs=3).cpu.runs == 3
