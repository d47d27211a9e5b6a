"""tools/gpu_check.sh without a GPU: its verdicts, its report, and processes that hang or lack a module."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_python, tool

gpu_run = tool("gpu_check_run")


@pytest.fixture
def report(tmp_path: Path) -> Any:
    return gpu_run.Report(tmp_path, 60)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("passed", "")),
        ('<skipped message="no matrix library&#10;and more" />', ("not run", "no matrix library")),
        (
            '<skipped message="not applicable: requires two GPUs" />',
            ("not applicable", "not applicable: requires two GPUs"),
        ),
        ('<failure message="wrong">first&#10;last</failure>', ("failed", "wrong\nfirst\nlast")),
        ('<skipped message="x" /><error message="at the end" />', ("failed", "at the end")),
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
def test_verdicts(report: Any, ran: int, failed: list[str], not_run: int, word: str, code: int) -> None:
    report.ran, report.not_run = ran, not_run
    for name in failed:
        report.fail(name, "a message")
    words, found = report.verdict()
    assert words.startswith(word)
    assert (len(words) < 200, found) == (True, code)


def test_failures_are_stored_and_printed_again_at_the_end(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.fail("a test", "the message", "the last lines")
    report.note("a line of the summary")
    capsys.readouterr()
    assert report.finish() == 1
    printed = capsys.readouterr().out
    for text in (printed, (tmp_path / "failures.txt").read_text()):
        assert text.index("a test") < text.index("the message") < text.index("the last lines")
    assert "a line of the summary" in (tmp_path / "summary.txt").read_text()


def test_a_process_that_hangs_is_ended_and_shows_where(tmp_path: Path) -> None:
    code = "import time\ndef wait_for_the_driver(): time.sleep(600)\nprint('begun')\nwait_for_the_driver()"
    done = gpu_run.run([sys.executable, "-u", "-c", code], 2, tmp_path / "log.txt")
    assert done.code is None
    assert "begun" in done.output
    assert "in wait_for_the_driver" in done.tail
    assert done.ending.startswith("no result within")


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        (
            "cupy: import\nModuleNotFoundError: No module named 'fastrlock'",
            1,
            (
                "step 'cupy: import', exit status 1: ModuleNotFoundError: No module named 'fastrlock'"
                " (install the module fastrlock)"
            ),
        ),
        ("jax: import\njax: list GPUs\n", -11, "step 'jax: list GPUs', ended by SIGSEGV"),
        ("torch: import\ntorch: transfer to the GPU\n", None, "step 'torch: transfer to the GPU', no result"),
    ],
)
def test_smoke_tests_name_the_step_that_failed(output: str, code: int | None, expected: str) -> None:
    assert expected in gpu_run.explain_smoke(gpu_run.Finished(code, output, 60))


def test_files_run_in_the_order_of_their_value() -> None:
    names = [file.stem for file in gpu_run.gpu_files("1/1")]
    assert names[:3] == ["test_conversion", "test_tensorflow", "test_ordering"]
    assert "test_emulator" not in names
    halves = [gpu_run.gpu_files("1/2"), gpu_run.gpu_files("2/2")]
    assert sorted(file.stem for half in halves for file in half) == sorted(names)
    for name in gpu_run.FILES_BY_VALUE:
        assert (gpu_run.ROOT / "tests" / f"{name}.py").is_file()


def test_small_packages_cover_the_requirements() -> None:
    text = (gpu_run.ROOT / "pyproject.toml").read_text()
    required = text.split("\ndependencies = [")[1].split("]")[0]
    packages = set(gpu_run.SMALL_PACKAGES.values())
    names = [line.strip(' ",').partition(">")[0] for line in required.splitlines() if line.strip()]
    assert set(names) <= packages
    assert set(gpu_run.ESSENTIAL) <= set(gpu_run.SMALL_PACKAGES)


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
