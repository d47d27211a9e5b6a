"""Conversions from many threads at once, and what ten thousand of them leave behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.helpers import run_python

MANY_CONVERSIONS = Path(__file__).parent / "conversion" / "scripts" / "many_conversions.py"


def test_first_calls_from_threads_and_ten_thousand_conversions_leave_nothing_behind() -> None:
    """Imports, plans and registry meet in the first calls of a process."""
    names = ("torch", "jax", "tensorflow", "pyclesperanto")
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    # No warning is an error there: what one package tells Python to ignore while it is imported is forgotten
    # when another one, in another thread, leaves its `warnings.catch_warnings`.
    done = run_python(str(MANY_CONVERSIONS), *installed, env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
