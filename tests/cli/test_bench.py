"""`arraybridge bench`: what is timed, how runs are compared, and what becomes of a damaged baseline."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import arraybridge
from arraybridge.cli import bench as command
from arraybridge.cli.output import progress
from tests.cli.programs import environment, run_cli
from tests.helpers import require

Json = dict[str, Any]
RUN = ("bench", "--frameworks", "numpy,torch", "--size", "64KiB", "--rounds", "3")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Path]:
    """A run with its files."""
    if importlib.util.find_spec("torch") is None:
        require("torch")
    folder = tmp_path_factory.mktemp("bench")
    more = ["--plot", str(folder / "plot.png")] if importlib.util.find_spec("matplotlib") else []
    done = run_cli(*RUN, "--json", "--out", str(folder / "before.json"), *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_conversions_and_decorators_are_timed(earlier: tuple[Json, Path]) -> None:
    result, folder = earlier
    assert [(row["kind"], row["name"]) for row in result["rows"]] == [
        ("conversion", "numpy → torch"),
        ("conversion", "torch → numpy"),
        ("decorator", "@numpy"),
        ("decorator", "@torch"),
    ]
    for row in result["rows"]:
        assert 0 < row["raw_min_ns"] <= row["raw_ns"] < 1e9
        assert 0 < row["ours_min_ns"] <= row["ours_ns"] < 1e9
        assert row["nbytes"] == 65536
    assert json.loads((folder / "before.json").read_text()) == result


def test_the_plot_is_a_picture(earlier: tuple[Json, Path]) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert min(image.imread(earlier[1] / "plot.png").shape[:2]) > 300


@pytest.mark.parametrize(
    ("factor", "threshold", "code", "told"),
    [(1e4, "5", 0, "No call takes more"), (1e-4, "5", 1, "past the threshold")],
)
def test_a_regression_ends_with_exit_code_1(
    earlier: tuple[Json, Path], tmp_path: Path, factor: float, threshold: str, code: int, told: str
) -> None:
    """A baseline that was much slower, and one that was much faster, than this machine can be."""
    before = json.loads((earlier[1] / "before.json").read_text())
    for row in before["rows"]:
        row["ours_min_ns"] *= factor
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(before))
    arguments = ("bench", "--frameworks", "numpy", "--size", "64KiB", "--rounds", "3")
    done = run_cli(
        *arguments,
        "--compare",
        str(baseline),
        "--threshold",
        threshold,
        env=environment(PYTHONIOENCODING="utf-8"),
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout
    assert "3 calls of the earlier run were not timed now" in done.stdout


def rows(**times: float) -> Json:
    return {
        "rows": [
            {"kind": "conversion", "name": name, "nbytes": 4, "ours_min_ns": time}
            for name, time in times.items()
        ],
        "machine": {"cores": 2},
    }


def test_ratios_are_of_the_quickest_rounds() -> None:
    now, before = rows(same=100, slower=151, edge=150, new=1), rows(same=100, slower=100, edge=100, gone=1)
    compared = command.compare_results(now, before, 1.5)
    assert compared == {
        "threshold": 1.5,
        "regressions": ["conversion slower 4"],
        "new": ["conversion new 4"],
        "gone": ["conversion gone 4"],
        "other_machine": False,
    }
    assert [row.get("ratio") for row in now["rows"]] == [1.0, 1.51, 1.5, None]


ROW = {"kind": "conversion", "name": "a", "nbytes": 4, "ours_min_ns": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged, or no JSON"),
        (b'{"format": "arraybridge-bench-1", "rows": [', "is damaged, or no JSON"),
        (b"\xff\xfe\x00", "is damaged, or no JSON"),
        (b"[]", "holds no results"),
        (b'{"format": "something-else"}', "holds no results"),
        (b'{"format": "arraybridge-bench-1"}', "no complete list of rows"),
        (json.dumps({"format": command.FORMAT, "rows": [{}]}).encode(), "no complete list of rows"),
        (
            json.dumps({"format": command.FORMAT, "rows": [ROW | {"ours_min_ns": 0}]}).encode(),
            "no complete list",
        ),
        (
            json.dumps({"format": command.FORMAT, "rows": [ROW | {"ours_min_ns": "1"}]}).encode(),
            "no complete list",
        ),
        (
            json.dumps({"format": command.FORMAT, "rows": [ROW | {"ours_min_ns": float("nan")}]}).encode(),
            "no complete",
        ),
    ],
)
def test_a_damaged_baseline_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=message):
        command.load_results(file)


def test_a_damaged_baseline_ends_with_exit_code_2_before_anything_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text("{")
    done = run_cli("bench", "--rounds", "1000", "--compare", str(file), timeout=20)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_baseline_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="No such file"):
        command.load_results(tmp_path / "none.json")


@pytest.mark.parametrize("pair", [pair for pair in command.RAW if "cupy" not in pair])
def test_the_call_by_hand_gives_the_same_values(pair: tuple[str, str]) -> None:
    """What is compared does the same: both results are the array, in the target framework."""
    source, target = pair
    for name in pair:
        require(name)
    cases, left_out = command.make_cases([*dict.fromkeys(("numpy", *pair))], 4096)
    assert left_out == {}
    case = next(case for case in cases if case.name == f"{source} → {target}")
    expected = np.arange(1024, dtype=np.float32)
    for result in (case.raw(), case.ours()):
        assert arraybridge.detect_memory_type(result) == target
        np.testing.assert_array_equal(arraybridge.to_numpy(result), expected)


@pytest.mark.parametrize("target", command.RAW_OWN)
def test_what_numpy_allocates_is_timed_too(target: str) -> None:
    require(target)
    cases, _ = command.make_cases(["numpy", target], 4096)
    case = next(case for case in cases if case.name == f"numpy's own → {target}")
    expected = np.arange(1024, dtype=np.float32)
    for result in (case.raw(), case.ours()):
        assert arraybridge.detect_memory_type(result) == target
        np.testing.assert_array_equal(arraybridge.to_numpy(result), expected)


def test_calls_are_timed_in_turn() -> None:
    heard: list[str] = []
    steps: list[int] = []
    samples = command.in_turn(
        [lambda: heard.append("a"), lambda: heard.append("b")], 4, lambda: steps.append(1)
    )
    assert [len(own) for own in samples] == [4, 4]
    assert len(steps) == 4
    assert heard[-1] == "b"
    assert all(sample > 0 for own in samples for sample in own)


def test_one_framework_alone_has_its_decorator() -> None:
    cases, _ = command.make_cases(["numpy"], 16)
    with progress() as bar:
        result = command.measure(cases, 3, bar)
    assert [row["name"] for row in result["rows"]] == ["@numpy"]
