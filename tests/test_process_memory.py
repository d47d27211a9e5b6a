"""Ten thousand conversions leave the process no larger."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers import run_python

SCRIPT = Path(__file__).parent / "conversion" / "scripts" / "many_conversions.py"


def test_ten_thousand_conversions_leave_nothing_behind() -> None:
    pytest.importorskip("psutil")
    there = [
        name
        for name in ("torch", "jax", "tensorflow", "pyclesperanto")
        if importlib.util.find_spec(name) is not None
    ]
    done = run_python(str(SCRIPT), *there, timeout=240)
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
