"""Conversions from many threads at once, and what ten thousand of them leave behind."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from tests.helpers import run_python

MANY_CONVERSIONS = Path(__file__).parent / "conversion" / "scripts" / "many_conversions.py"
THREADS = 8


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


def test_first_calls_from_threads_and_ten_thousand_conversions_leave_nothing_behind() -> None:
    """Imports, plans and registry meet in the first calls of a process."""
    # No warning is an error there: what one package tells Python to ignore while it is imported is forgotten
    # when another one, in another thread, leaves its `warnings.catch_warnings`.
    done = run_python(str(MANY_CONVERSIONS), *installed(), env={"PYTHONWARNINGS": ""})
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
