"""Conversions from many threads at the same time, and a leak check of ten thousand conversions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.helpers import run_python

MANY_CONVERSIONS = Path(__file__).parent / "conversion" / "scripts" / "many_conversions.py"


def test_threads_and_ten_thousand_conversions_leak_nothing() -> None:
    """Check that imports, plans and the registry are safe in the first concurrent calls of a process."""
    names = ("torch", "jax", "tensorflow", "pyclesperanto")
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    # Warnings are not errors there: a package's filters, set during its import, are lost if another package
    # leaves `warnings.catch_warnings` in another thread.
    done = run_python(str(MANY_CONVERSIONS), *installed, env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
