"""Compare the help and the tables of the commands with stored texts, in terminals of 80 and 120 columns.

To store the current texts after a deliberate change, run the tests with ``UPDATE_SNAPSHOTS=1``.
"""

from __future__ import annotations

import itertools
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import arraybridge
from arraybridge.cli import bench, demo, doctor, doctor_checks, matrix_report
from arraybridge.hardware import Driver, Gpu
from tests.cli.programs import UNSET, call_cli, environment, run_cli

Json = dict[str, Any]
SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)
COMMANDS = ("", "demo", "doctor", "matrix", "bench", "monitor", "trace")
#: The layout of the help depends on these versions. The stored texts were made with them.
HELP_VERSIONS = {"typer": "0.29", "rich": "15"}


def check_snapshot(name: str, width: int, text: str) -> None:
    """Compare text with the stored text, and check that no line is wider than the terminal."""
    lines = [line.rstrip() for line in text.splitlines()]
    # Commands of fixes are never wrapped, so that they can be copied.
    assert all(len(line) <= width for line in lines if not line.startswith("    ")), text
    text = "\n".join(lines) + "\n"
    file = SNAPSHOTS / f"{name}-{width}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_texts(command: str, width: int) -> None:
    done = call_cli(*filter(None, (command, "--help")), COLUMNS=str(width))
    assert done.exit_code == 0
    assert "bool" not in done.stdout.lower()
    assert max(map(len, done.stdout.splitlines())) <= width
    if all(f"{version(name)}.".startswith(f"{recorded}.") for name, recorded in HELP_VERSIONS.items()):
        check_snapshot(f"help-{command or 'arraybridge'}", width, done.stdout)


def bench_result() -> Json:
    """Make a result with all pairs of frameworks, and times from 0.1 µs to 0.4 s."""
    rows = []
    raw = 1e-7
    for (source, target), native in bench.RAW.items():
        rows.append({"name": f"{source} → {target}", "raw_call": native.text, "raw": raw, "ours": 2e-6})
        raw *= 2
    names = ("numpy", "torch", "jax", "tensorflow", "cupy", "pyclesperanto")
    rows += [{"name": f"@{name}", "raw_call": "f", "raw": 1e-7, "ours": 1.1e-6} for name in names]
    for row in rows:
        row["difference"] = row["ours"] - row["raw"]
    skipped = {"mlx": "mlx is not installed. Run pip install mlx."}
    return {"nbytes": 4 << 20, "rounds": 15, "rows": rows, "left_out": skipped}


@pytest.mark.parametrize("width", WIDTHS)
def test_bench_table(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    bench.print_result(bench_result())
    check_snapshot("bench", width, capsys.readouterr().out)


def matrix_result() -> Json:
    """Make a result with five frameworks, in which pyclesperanto rejects arrays of the last one."""
    places = ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"]
    cells = []
    for source in (*places, matrix_report.UNALIGNED):
        for target in places:
            cell: Json = {"source": source, "target": target, "exact": True, "error": None}
            if source == target:
                cell |= {"kind": "same", "method": "same", "seconds": 3e-7, "bytes_per_second": None}
            elif "pyclesperanto" not in (source, target):
                cell |= {"kind": "shared", "method": "dlpack", "seconds": 1.21e-5, "bytes_per_second": None}
            elif source == matrix_report.UNALIGNED:
                error = "pyclesperanto does not support this dtype."
                cell |= {"kind": "refused", "exact": None, "error": error}
                cell |= {"method": None, "seconds": None, "bytes_per_second": None}
            else:
                cell |= {"kind": "copied", "method": "device", "seconds": 2.5e-3, "bytes_per_second": 1.7e9}
            cells.append(cell)
    return {
        "dtype": "float32",
        "shape": [1024, 1024],
        "nbytes": 4 << 20,
        "places": places,
        "cells": cells[:25],
        "numpy_own": cells[25:],
        "missing": {"cupy": "cupy is not installed."},
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_matrix_table(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    matrix_report.print_result(matrix_result())
    check_snapshot("matrix", width, capsys.readouterr().out)


def doctor_findings() -> doctor_checks.Findings:
    """Make findings with a problem of each severity, and a device name that wraps in 80 columns."""

    def probe(version: str, built_for: str, *devices: tuple[str, str], **changes: Any) -> Json:
        found = [{"device": device, "name": name} for device, name in devices]
        return {
            "state": "works",
            "version": version,
            "built_for": built_for,
            "seconds": 1.7,
            "devices": found,
            "error": None,
            **changes,
        }

    crash = "SIGSEGV (Segmentation fault)"
    return doctor_checks.Findings(
        driver=Driver("550.54.15", (12, 4)),
        gpus=(Gpu(0, "NVIDIA RTX A5000", "GPU-1", "0000:3b:00.0", 24 << 30),),
        probes={
            "numpy": probe("2.4.6", "CPU", ("cpu", "")),
            "cupy": {"state": "crashed", "version": "14.2.0", "devices": [], "error": crash},
            "torch": probe("2.13.0+cpu", "CPU", ("cpu", "")),
            "jax": probe("0.10.2", "CUDA 12", ("gpu:0", "NVIDIA RTX A5000"), ("cpu:0", ""), ("cpu:1", "")),
            "tensorflow": {"state": "missing", "devices": []},
            "pyclesperanto": probe(
                "0.25.1", "OpenCL", ("opencl:0", "NVIDIA RTX A5000"), ("opencl:1", "PoCL")
            ),
        },
        versions={"cupy-cuda13x": "14.2.0", "arraybridge": arraybridge.__version__},
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor_report(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    findings = doctor_findings()
    doctor.print_report(findings, doctor_checks.find_problems(findings))
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert first.startswith(f"arraybridge {arraybridge.__version__}, Python 3.")
    check_snapshot("doctor", width, rest)


def demo_report() -> Json:
    """Make a report with all frameworks and a failed conversion."""
    names = ("numpy", "torch", "jax", "tensorflow", "pyclesperanto", "numpy")
    steps = []
    for source, target in itertools.pairwise(names):
        copies = int("pyclesperanto" in (source, target))
        steps.append(
            {
                "source": source,
                "target": target,
                "device": "opencl:0" if target == "pyclesperanto" else "cpu",
                "method": "device" if copies else "dlpack",
                "shares_memory": not copies,
                "copies": copies,
                "nbytes": 116352,
                "seconds": 36.8e-6,
                "exact": target != "jax",
            }
        )
    return {
        "image": "coins.png from scikit-image",
        "shape": [303, 384],
        "dtype": "uint8",
        "nbytes": 116352,
        "steps": steps,
        "missing": {"cupy": "cupy is not installed."},
        "gpu": False,
        "decorated": {"framework": "torch", "exact": True},
        "out_of_memory": {"framework": "torch", "attempts": [303, 303, 101, 101, 101], "exact": True},
        "pipeline": {"stages": ["torch", "jax"], "microbatches": 4, "exact": True},
        "exact": False,
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_demo_report(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    demo.print_report(demo_report())
    check_snapshot("demo", width, capsys.readouterr().out)


TRACED = """\
import numpy as np
import arraybridge as ab
from arraybridge.testing import inject_oom

for _ in range(3):
    ab.convert_memory(np.ones((100, 10)).T, "numpy", copy=True)

@ab.numpy(oom_recovery="split")
def negative(x):
    return -x

with inject_oom("numpy", above_rows=5):
    negative(np.ones((12, 2)))
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_trace_table(width: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRACED, encoding="utf-8")
    env = environment(COLUMNS=str(width), PYTHONIOENCODING="utf-8")
    done = run_cli("trace", "script.py", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\d+\.\d+ (µs|ms|s)\b", "TIME", done.stdout)
    check_snapshot("trace", width, re.sub(r"(?<=\S) {2,}", "  ", text))


# -- the page on the commands ------------------------------------------------------------------------

#: A row of a table: the name of a framework, a conversion or a decorator, and at least two columns.
ROW = re.compile(r"@?(?:numpy|cupy|torch|jax|tensorflow|pyclesperanto|mlx|paddle)\b.*  +\S")


def _without_numbers(line: str) -> str:
    return re.sub(r" +", " ", re.sub(r"[\d.]+ ?(?:µs|ms|GB/s)?", "#", line.strip()))


@pytest.mark.parametrize("command", ["doctor", "matrix", "bench"])
def test_the_page_shows_todays_texts(command: str) -> None:
    """Each line is a row of a table, or equal to a stored line apart from numbers."""
    page = Path(__file__).parents[2] / "docs" / "command-line.md"
    if not page.is_file():
        pytest.skip("there are no docs next to the tests")
    text = page.read_text(encoding="utf-8")
    section = text.partition(f"\n## {command}\n")[2]
    _, _, shown = section.partition("```console\n$ arraybridge ")[2].partition("```")[0].partition("\n")
    stored = (SNAPSHOTS / f"{command}-120.txt").read_text(encoding="utf-8").splitlines()
    stored += [f"arraybridge {arraybridge.__version__}, Python 3.11.7, Linux x86_64"]
    stored += ["All 16 results are equal to the original, bit for bit."]
    known = {_without_numbers(line) for line in stored} | {"…", ""}
    # The names of the columns depend on the frameworks.
    lines = [line for line in shown.splitlines() if line.split() and not ROW.match(line.strip())]
    assert len(lines) > 1
    assert [
        line for line in lines if not re.match(" {8}", line) and _without_numbers(line) not in known
    ] == []
