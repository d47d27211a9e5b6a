"""`@gpu` returns NumPy's results: the first GPU run of a call signature is compared with the CPU's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge.offload.verification import difference
from tests.fake_gpu import FakeGpuArray
from tests.helpers import require
from tests.offload import simulated_gpu
from tests.offload.simulated_gpu import Clock, Machine, offload, paying, running_on


class Pair(NamedTuple):
    low: Any
    high: Any


X = np.random.default_rng(3).normal(size=(40, 50))


def checked(name: str, body: Callable[..., Any], *args: Any, calls: int = 5) -> tuple[list[str], str]:
    """Call ``body`` through @gpu and check each result against NumPy. Return the devices and the warning."""
    require(name)
    seen: list[str] = []
    fn = running_on(name, "cpu", body, seen)
    for x in args:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    expected = body(*args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            result = fn(*args)
            assert type(result) is type(expected)
            for a, b in zip(_leaves(result), _leaves(expected), strict=True):
                assert type(a) is type(b)
                assert np.asarray(a).dtype == np.asarray(b).dtype
                if isinstance(b, np.ndarray | np.generic):
                    largest = np.max(np.abs(b), initial=0, where=np.isfinite(b))
                    assert np.allclose(a, b, 1e-5, 1e-6 * largest, equal_nan=True)
                else:
                    assert a == b
    assert len(caught) <= 1, [str(w.message) for w in caught]
    if caught:
        assert caught[0].filename == simulated_gpu.__file__  # the line of the call
    return seen, str(caught[0].message) if caught else ""


def _leaves(result: Any) -> list[Any]:
    return [y for x in result for y in _leaves(x)] if isinstance(result, tuple) else [result]


# Calls that PyTorch interprets differently from NumPy, and the reported difference.
OTHERWISE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "std": (lambda x: x.std(), "in NumPy"),
    "var of rows": (lambda x: x.var(axis=1), "values differ"),
    "max along an axis": (lambda x: x.max(axis=1), "an array of float64 in NumPy"),
    "nonzero": (lambda x: (x > 0).nonzero(), "a tuple of 2 in NumPy"),
    "size": (lambda x: x.sum() * 0 + (x.size if isinstance(x.size, int) else 0), "2000.0 in NumPy"),
    "shape": (lambda x: (x + 1, x.shape), "in NumPy"),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_calls_with_another_meaning_in_torch_run_in_numpy(what: str) -> None:
    body, words = OTHERWISE[what]
    seen, warning = checked("torch", body, X.copy())
    assert seen.count("torch") <= 2  # the trial run, and a check in float64
    assert "has a different result on the GPU: in torch, it returns" in warning
    assert words in warning


def test_differences_are_found_in_large_float32_images() -> None:
    """N and N-1 differ by sixteen roundings here: float64 exposes another formula, but not rounding."""
    image = np.random.default_rng(0).random((512, 512), dtype=np.float32)
    _, warning = checked("torch", lambda x: x.std(), image)
    assert "has a different result on the GPU" in warning


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_another_summation_order_is_accepted(dtype: str) -> None:
    x = np.random.default_rng(1).normal(size=(300, 400)).astype(dtype)
    for body in (lambda x: x.sum(), lambda x: x @ x.T, lambda x: x.cumsum(0), lambda x: x - x.mean()):
        seen, warning = checked("torch", body, x.copy())
        assert not warning
        assert seen[-1] == "torch"


def test_integers_are_compared_exactly(machine: Machine, clock: Clock) -> None:
    def fn(x: Any) -> Any:
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        return x + 1 if isinstance(x, np.ndarray) else FakeGpuArray(x.values + 1 + (x.values == 7))

    run = offload(fn, machine)
    x = np.arange(10**6) + 2**60
    run(x)
    run(x)
    small = np.arange(10)
    run(small)
    words = r"it returns 9 at \[7\], but 8 in NumPy \(1 of 10 values differ\)"
    with pytest.warns(RuntimeWarning, match=words):
        assert run(small)[7] == 8
    for _ in range(3):
        assert run(small)[7] == 8
        assert run(x)[0] == 2**60 + 1
    assert "Its trial failed: in fakecard, it returns 9" in str(run.explain(x))


def test_each_call_signature_is_verified(machine: Machine, clock: Clock) -> None:
    """A function that is correct for one axis may be wrong for another."""

    def fn(x: Any, axis: int | None) -> Any:
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        if isinstance(x, np.ndarray):
            return x.sum(axis)
        return FakeGpuArray(np.asarray(x.values.sum(axis) + (axis == 1)))

    run, x = offload(fn, machine), np.ones((4, 4))
    for _ in range(4):
        assert run(x, 0).tolist() == [4.0] * 4
    assert run.explain(x, 0).on_gpu
    assert run(x, 1).tolist() == [4.0] * 4  # on the CPU, like each first call
    with pytest.warns(RuntimeWarning, match="has a different result on the GPU"):
        assert run(x, 1).tolist() == [4.0] * 4
    assert run(x, 0).tolist() == [4.0] * 4
    assert not run.explain(x, 0).on_gpu


def test_functions_without_a_result_stay_on_the_cpu(machine: Machine, clock: Clock) -> None:
    """There is no result to compare: the function works in place or prints."""
    seen: list[str] = []
    run = offload(paying(clock, lambda x: x.fill(x[0] + 1), seen), machine)
    x = np.zeros(4)
    for i in range(1, 4):
        assert run(x) is None
        assert x.tolist() == [float(i)] * 4
    assert set(seen) == {"numpy"}


def test_functions_with_a_fixed_device_keep_it(machine: Machine, clock: Clock) -> None:
    require("torch")
    run = offload(arraybridge.torch(output_type="input")(lambda x: x * 2), machine)
    for _ in range(5):
        assert run(np.ones(3)).tolist() == [2.0] * 3
    assert "another decorator sets its device: torch" in str(run.explain(np.ones(3))).lower()


# -- comparison of results ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "found", "words"),
    [
        (np.float64(1), np.float32(1), "it returns float32, but float64 in NumPy"),
        (np.ones(3), np.ones((3, 1)), "it returns shape (3, 1), but (3,) in NumPy"),
        ((np.ones(2), 3), (np.ones(2), 4), "at [1], it returns 4, but 3 in NumPy"),
        ({"a": 1.0}, {"b": 1.0}, "a dict of 'b', but a dict of 'a' in NumPy"),
        ([np.ones(2)], (np.ones(2),), "a tuple of 1, but a list of 1 in NumPy"),
        (np.ones(2), None, "a NoneType, but an array of float64 in NumPy"),
        (1.0, 1, "an int, but a float in NumPy"),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0]), "it returns 2.0 at [1], but nan in NumPy"),
        (np.array([np.inf]), np.array([-np.inf]), "it returns -inf at [0], but inf in NumPy"),
        (np.array([True]), np.array([False]), "it returns False at [0], but True in NumPy"),
        (np.ones(1).view(np.recarray), np.ones(1), "an array of float64"),
        (np.float16(1.0), np.float16(1.1), "1.1, but 1.0 in NumPy"),
    ],
)
def test_texts_of_differences(expected: Any, found: Any, words: str) -> None:
    assert words in difference(expected, found, [np.ones(10)])
