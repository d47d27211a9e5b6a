"""`arraybridge bench`: what is timed, beside what, and over which sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import arraybridge
from arraybridge.cli import bench as command
from tests.cli.programs import call_cli
from tests.helpers import require


def test_conversions_and_decorators_are_timed() -> None:
    require("torch")
    run = ("bench", "--frameworks", "numpy,torch", "--size", "64KiB", "--rounds", "3")
    done = call_cli(*run, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["name"] for row in result["rows"]] == ["numpy → torch", "torch → numpy", "@numpy", "@torch"]
    for row in result["rows"]:
        assert 0 < row["raw"] < 1
        assert 0 < row["ours"] < 1
        assert row["difference"] == row["ours"] - row["raw"], "of the two times that stand beside it"
    assert result["nbytes"] == 65536


@pytest.mark.parametrize("pair", [pair for pair in command.RAW if "cupy" not in pair])
def test_the_call_by_hand_gives_the_same_values(pair: tuple[str, str]) -> None:
    """What is compared does the same: both results are the array, in the target framework."""
    source, target = pair
    for name in pair:
        require(name)
    cases, left_out = command.make_cases([*dict.fromkeys(("numpy", *pair))], 4096)
    assert left_out == {}
    (calls,) = [case[2:] for case in cases if case[0] == f"{source} → {target}"]
    for result in (call() for call in calls):
        assert arraybridge.detect_memory_type(result) == target
        np.testing.assert_array_equal(arraybridge.to_numpy(result), np.arange(1024, dtype=np.float32))


def test_functions_over_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text(
        "def doubled(x):\n    assert x.dtype == 'float32'\n    return x * 2\n"
    )
    functions = ("--functions", "matmul,beside:doubled")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = call_cli("bench", "--sizes", "4KiB,10", *functions, "--rounds", "3", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["function"], row["elements"]) for row in result["rows"]] == [
        ("matmul", 10),
        ("matmul", 1024),
        ("beside:doubled", 10),
        ("beside:doubled", 1024),
    ]
    assert all(0 < row["cpu"] < 10 for row in result["rows"])
    assert result["crossover"].keys() == {"matmul", "beside:doubled"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [("1000", [1000]), ("1e6, 10,10", [10, 1_000_000]), ("64KiB,1_000", [1000, 16384]), ("8B", [2])],
)
def test_sizes(words: str, expected: list[int]) -> None:
    assert command.elements(words) == expected


@pytest.mark.parametrize("words", ["", ",", "0", "-5", "nan", "inf", "1e20", "2B", "many", "4QiB"])
def test_what_is_no_size(words: str) -> None:
    with pytest.raises(typer.BadParameter):
        command.elements(words)


def test_functions_by_name() -> None:
    assert list(command.named_functions(None)) == ["elementwise", "reduction", "matmul", "fft", "filter"]
    assert command.named_functions("numpy:sort, fft")["numpy:sort"] is np.sort


@pytest.mark.parametrize(
    "words", ["fast", "numpy:", "no_such_module:f", "numpy:no_such_function", "numpy:pi"]
)
def test_what_is_no_function(words: str) -> None:
    with pytest.raises(typer.BadParameter):
        command.named_functions(words)
