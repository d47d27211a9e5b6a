"""Type checkers read typing_cases.py: decorated functions take foreign arrays, not unknown options."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.helpers import run_python

CASES = Path(__file__).with_name("typing_cases.py")


def test_mypy_strict(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed; the environment lint has it")
    done = run_python(
        "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(CASES), env={"PYTHONWARNINGS": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; the environment lint has it")
    root = CASES.parents[2]
    config = {
        "include": [str(CASES)],
        "extraPaths": [str(root)],
        "stubPath": str(root / "typings"),
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": False,  # those are mypy's
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(config), encoding="utf-8")
    done = run_python("-m", "pyright", "-p", str(project), env={"PYTHONWARNINGS": ""}, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout, done.stdout
