"""tools/card.sh, as far as no card is needed: what it calls a pass, and what it refuses."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parent.parent / "tools"

if not TOOLS.is_dir():
    pytest.skip("the tools are not beside these tests", allow_module_level=True)


def module() -> Any:
    spec = importlib.util.spec_from_file_location("card_run", TOOLS / "card_run.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


card_run = module()

PASSED = '<testcase name="a" />'
SKIPPED = '<testcase name="b"><skipped message="needs two cards&#10;and more" /></testcase>'
FAILED = '<testcase name="c"><failure message="wrong" /></testcase>'
BROKEN = '<testcase name="d"><skipped message="x" /><error message="at the end" /></testcase>'


def test_a_skip_is_no_pass() -> None:
    found = [card_run.result_of(ET.fromstring(case)) for case in (PASSED, SKIPPED, FAILED, BROKEN)]  # noqa: S314
    assert found == [("passed", ""), ("not run", "needs two cards"), ("failed", ""), ("failed", "")]


@pytest.mark.parametrize(
    ("ran", "failed", "not_run", "word", "code"),
    [
        (10, [], 0, "PASSED", 0),
        (10, [], 1, "INCOMPLETE", 3),
        (0, [], 0, "INCOMPLETE", 3),
        (10, ["test_memory.py::test_it"], 0, "FAILED: test_memory.py::test_it", 1),
        (10, ["a" * 100, "b" * 100], 5, "FAILED: a", 1),
    ],
)
def test_the_verdict(ran: int, failed: list[str], not_run: int, word: str, code: int) -> None:
    out = card_run.Outcome()
    out.ran, out.failed, out.not_run = ran, failed, not_run
    words, found = out.verdict()
    assert words.startswith(word)
    assert len(words) < 200
    assert found == code


@pytest.mark.parametrize(("listing", "emulated"), [("", ""), ("GPU 0: Planted Card (UUID: GPU-1)", "lazy")])
def test_without_a_card_nothing_has_passed(tmp_path: Path, listing: str, emulated: str) -> None:
    """No card, or one that is emulated and whose results would land among those of real ones."""
    if os.name != "posix":
        pytest.skip("a script of the shell")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{listing}'\nexit {0 if listing else 9}\n")
    smi.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, "ARRAYBRIDGE_EMULATED_CARD": emulated}
    done = subprocess.run(
        [str(TOOLS / "card.sh"), "--here", "tests"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    assert done.returncode == 1
    told = "pass --out, away from benchmarks/results" if emulated else "nothing has passed"
    assert told in done.stderr


def test_the_script_says_how_it_is_called() -> None:
    done = subprocess.run(
        ["bash", str(TOOLS / "card.sh"), "everything"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "tools/card.sh WHEELS tests" in done.stdout
    assert "a skip is no pass" in done.stdout


def test_every_benchmark_is_there(tmp_path: Path) -> None:
    for one in card_run.benchmarks_into(tmp_path):
        assert set(one.needs_one_of) <= set(card_run.FRAMEWORKS)
        assert importlib.util.find_spec(one.command[1]) is not None
    assert sum(one.seconds for one in card_run.benchmarks_into(tmp_path)) <= card_run.LIMIT


DEPS = ("torch>=2.11", "jax[cuda13]", "numba-cuda[cu13]")


def test_both_ways_to_a_real_card_install_what_its_tests_need() -> None:
    """`tox -e gpu`, and the wheels that tools/card.sh takes along where there is no network."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(TOOLS.parent / "tox.ini", encoding="utf-8")
    online = tox["testenv:gpu"]
    extras = {word.strip() for word in online["extras"].split(",")}
    script = (TOOLS / "card.sh").read_text(encoding="utf-8")
    (fetched,) = re.findall(r"pip download --dest WHEELS (.*)", script)
    # nvidia-ml-py is the extra nvml; pytest-timeout is one of the extra test.
    assert {"test", "nvml"} <= extras
    assert {"test", "nvml"} <= set(re.findall(r"\w+", fetched.partition(".[")[2].partition("]")[0]))
    # torch first: pip else takes the newest libraries for the others, and looks for a torch that suits them.
    for package in DEPS:
        assert package in online["deps"]
        assert f'"{package}"' in fetched
    assert fetched.startswith(f'"{DEPS[0]}" ')
    assert online["deps"].index(DEPS[0]) < online["deps"].index(DEPS[1])
    assert "cupy-cuda13x" in extras
    assert '"cupy-cuda13x[ctk]"' in fetched
    pyproject = tomllib.loads((TOOLS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    known = pyproject["project"]["optional-dependencies"]
    assert any(one.startswith("pytest-timeout") for one in known["test"])
    assert any(one.startswith("nvidia-ml-py") for one in known["nvml"])
    assert "--no-index" in script
