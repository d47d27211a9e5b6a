"""Conversions from many threads at once, and what ten thousand of them leave behind."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from arraybridge import CopyRequiredError, convert_memory, explain
from tests import matrix_data as data
from tests.helpers import require, run_python

MANY_CONVERSIONS = Path(__file__).parent / "conversion" / "scripts" / "many_conversions.py"
THREADS = 8
ROUNDS = 12


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What ``work(number)`` returns in threads that begin together."""
    barrier = Barrier(THREADS)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def installed() -> list[str]:
    names = ("torch", "jax", "tensorflow", "pyclesperanto")
    return [name for name in names if importlib.util.find_spec(name) is not None]


def test_all_pairs_from_eight_threads() -> None:
    frameworks = {name: require(name) for name in data.FRAMEWORKS}

    def work(number: int) -> None:
        generator = np.random.default_rng(number)
        for _ in range(ROUNDS):
            # A shape of its own for each thread, and values that no other has.
            values = generator.integers(0, 2**30, (number + 2, 5)).astype(np.float32)
            for source in data.FRAMEWORKS:
                array = convert_memory(values, source, copy=True)
                for target in data.FRAMEWORKS:
                    result = convert_memory(array, target)
                    assert data.bits(result) == values.tobytes(), f"{source} → {target}"
                    assert explain(array, target).nbytes == values.nbytes
            with pytest.raises(CopyRequiredError):
                convert_memory(values[::-1], "torch", copy=False)
            assert convert_memory(np.array([2**40 + 1]), "jax").dtype == np.int64
            assert frameworks["jax"].numpy.arange(3).dtype == np.int32

    in_threads(work)


FIRST_CALLS = """
import sys, numpy as np, arraybridge
from tests.test_threads import in_threads

frameworks = ("numpy", *sys.argv[1:])

def work(number):
    values = np.arange(number, number + 12, dtype=np.float32).reshape(3, 4)
    order = frameworks[number % len(frameworks) :] + frameworks[: number % len(frameworks)]
    arrays = [arraybridge.convert_memory(values, source) for source in order]
    results = [arraybridge.convert_memory(array, target) for array in arrays for target in order]
    return [bool((arraybridge.to_numpy(result) == values).all()) for result in results]

assert in_threads(work) == [[True] * len(frameworks) ** 2] * 8
"""


def test_the_first_calls_of_a_process_come_from_threads() -> None:
    """Imports, plans and registry meet there."""
    # No warning is an error here: what one package tells Python to ignore while it is imported is forgotten
    # when another one, in another thread, leaves its `warnings.catch_warnings`.
    done = run_python("-c", FIRST_CALLS, *installed(), env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr


def test_ten_thousand_conversions_leave_nothing_behind() -> None:
    pytest.importorskip("psutil")
    done = run_python(str(MANY_CONVERSIONS), *installed())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["done"] >= 10_000
    assert report["done"] // 10 < report["failed"] < report["done"], "failures and successes both"
    grown = report["grown"]
    assert grown["rss"] < 8 * 2**20, report  # one array of a hundred that stays would be more
    assert grown["files"] <= 0, report
    assert grown["threads"] <= 0, report
    assert grown["objects"] < 2_000, report
    assert report["types"] <= 512, report
