"""tools/gpu_check.sh without a GPU: its verdicts and its errors."""

from __future__ import annotations

import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

from tests.helpers import run_python, tool

gpu_run = tool("gpu_check_run")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("passed", "")),
        ('<skipped message="needs two cards&#10;and more" />', ("not run", "needs two cards")),
        ('<failure message="wrong" />', ("failed", "")),
        ('<skipped message="x" /><error message="at the end" />', ("failed", "")),
    ],
)
def test_skips_do_not_count_as_passes(words: str, expected: tuple[str, str]) -> None:
    case = ET.fromstring(f'<testcase name="a">{words}</testcase>')  # noqa: S314
    assert gpu_run.result_of(case) == expected


@pytest.mark.parametrize(
    ("ran", "failed", "not_run", "word", "code"),
    [
        (10, [], 0, "PASSED", 0),
        (10, [], 1, "INCOMPLETE", 3),
        (0, [], 0, "INCOMPLETE", 3),
        (10, ["a" * 100, "b" * 100], 5, "FAILED: a", 1),
    ],
)
def test_verdicts(ran: int, failed: list[str], not_run: int, word: str, code: int) -> None:
    out = gpu_run.Outcome()
    out.ran, out.failed, out.not_run = ran, failed, not_run
    words, found = out.verdict()
    assert words.startswith(word)
    assert (len(words) < 200, found) == (True, code)


def test_packages_are_sent_as_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that processes can import packages from the folder, and that the previous path remains."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought_along-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along.py", "value = 3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "before"))
    gpu_run.on_path(wheels, tmp_path / "site")
    done = run_python("-c", "import brought_along, sys; print(brought_along.value, *sys.path)")
    assert done.stdout.split()[0] == "3", done.stderr
    assert str(tmp_path / "before") in done.stdout
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu_run.on_path(tmp_path / "none", tmp_path / "site")
