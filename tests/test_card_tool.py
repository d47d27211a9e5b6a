"""tools/card.sh, as far as no card is needed: what it calls a pass, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

from tests.helpers import run_python, tool

card_run = tool("card_run")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("passed", "")),
        ('<skipped message="needs two cards&#10;and more" />', ("not run", "needs two cards")),
        ('<failure message="wrong" />', ("failed", "")),
        ('<skipped message="x" /><error message="at the end" />', ("failed", "")),
    ],
)
def test_a_skip_is_no_pass(words: str, expected: tuple[str, str]) -> None:
    case = ET.fromstring(f'<testcase name="a">{words}</testcase>')  # noqa: S314
    assert card_run.result_of(case) == expected


@pytest.mark.parametrize(
    ("ran", "failed", "not_run", "word", "code"),
    [
        (10, [], 0, "PASSED", 0),
        (10, [], 1, "INCOMPLETE", 3),
        (0, [], 0, "INCOMPLETE", 3),
        (10, ["a" * 100, "b" * 100], 5, "FAILED: a", 1),
    ],
)
def test_the_verdict(ran: int, failed: list[str], not_run: int, word: str, code: int) -> None:
    out = card_run.Outcome()
    out.ran, out.failed, out.not_run = ran, failed, not_run
    words, found = out.verdict()
    assert words.startswith(word)
    assert (len(words) < 200, found) == (True, code)


@pytest.mark.skipif(os.name != "posix", reason="a script of the shell")
@pytest.mark.parametrize(
    ("listing", "emulated", "words"),
    [
        ("", "", "nothing has passed"),
        # Its results would land among those of real ones.
        ("GPU 0: Planted (UUID: GPU-1)", "lazy", "pass --out, away from benchmarks/results"),
    ],
)
def test_without_a_card_nothing_has_passed(tmp_path: Path, listing: str, emulated: str, words: str) -> None:
    """With a stand-in for nvidia-smi that lists these cards."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{listing}'\nexit {0 if listing else 9}\n")
    smi.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, "ARRAYBRIDGE_EMULATED_CARD": emulated}
    command = [Path(card_run.__file__).parent / "card.sh", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 1
    assert words in " ".join((done.stdout + done.stderr).split())


def test_a_file_that_needs_what_is_missing_was_not_run_and_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_of_dask.py"
    file.write_text("import pytest\npytest.importorskip('no_such_package')\n")
    monkeypatch.setattr(card_run, "ROOT", tmp_path)
    monkeypatch.setattr(card_run, "gpu_files", lambda _: [file])
    out = card_run.Outcome()
    card_run.tests(tmp_path, [], "2/2", time.monotonic() + 500, out)
    assert (out.failed, out.not_run, out.verdict()[1]) == ([], 1, 3)


def test_packages_come_along_in_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the folder is importable in every process that is started; the path of before stays."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought_along-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along.py", "value = 3")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "before"))
    card_run.on_path(wheels, tmp_path / "site")
    done = run_python("-c", "import brought_along, sys; print(brought_along.value, *sys.path)")
    assert done.stdout.split()[0] == "3", done.stderr
    assert str(tmp_path / "before") in done.stdout
    with pytest.raises(SystemExit, match="has no wheels"):
        card_run.on_path(tmp_path / "none", tmp_path / "site")
