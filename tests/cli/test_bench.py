"""Test `arraybridge bench`: the pairs of calls, and the options for sizes and functions."""

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


def test_bench_times_conversions_and_decorators() -> None:
    require("torch")
    run = ("bench", "--frameworks", "numpy,torch", "--size", "64KiB", "--rounds", "3")
    done = call_cli(*run, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["name"] for row in result["rows"]] == ["numpy → torch", "torch → numpy", "@numpy", "@torch"]
    for row in result["rows"]:
        assert 0 < row["raw"] < 1
        assert 0 < row["ours"] < 1
        assert row["difference"] == row["ours"] - row["raw"]
    assert result["nbytes"] == 65536


@pytest.mark.parametrize("pair", [pair for pair in command.RAW if "cupy" not in pair])
def test_the_native_call_returns_the_same_values(pair: tuple[str, str]) -> None:
    """Both calls must return the same array in the target framework, to be comparable."""
    source, target = pair
    for name in pair:
        require(name)
    cases, left_out = command.make_cases([*dict.fromkeys(("numpy", *pair))], 4096)
    assert left_out == {}
    (calls,) = [case[2:] for case in cases if case[0] == f"{source} → {target}"]
    for result in (call() for call in calls):
        assert arraybridge.detect_memory_type(result) == target
        np.testing.assert_array_equal(arraybridge.to_numpy(result), np.arange(1024, dtype=np.float32))


def test_bench_compares_functions_over_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_module.py").write_text(
        "def doubled(x):\n    assert x.dtype == 'float32'\n    return x * 2\n"
    )
    functions = ("--functions", "matmul,local_module:doubled")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = call_cli("bench", "--sizes", "4KiB,10", *functions, "--rounds", "3", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["function"], row["elements"]) for row in result["rows"]] == [
        ("matmul", 10),
        ("matmul", 1024),
        ("local_module:doubled", 10),
        ("local_module:doubled", 1024),
    ]
    assert all(0 < row["cpu"] < 10 for row in result["rows"])
    assert result["crossover"].keys() == {"matmul", "local_module:doubled"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", [1000]), ("1e6, 10,10", [10, 1_000_000]), ("64KiB,1_000", [1000, 16384]), ("8B", [2])],
)
def test_element_counts_are_parsed(text: str, expected: list[int]) -> None:
    assert command.parse_element_counts(text) == expected


@pytest.mark.parametrize("text", ["", ",", "0", "-5", "nan", "inf", "1e20", "2B", "many", "4QiB"])
def test_invalid_element_counts_raise(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        command.parse_element_counts(text)


def test_functions_are_found_by_name() -> None:
    assert list(command.parse_functions(None)) == ["elementwise", "reduction", "matmul", "fft", "filter"]
    assert command.parse_functions("numpy:sort, fft")["numpy:sort"] is np.sort


@pytest.mark.parametrize("name", ["fast", "numpy:", "no_such_module:f", "numpy:no_such_function", "numpy:pi"])
def test_invalid_functions_raise(name: str) -> None:
    with pytest.raises(typer.BadParameter):
        command.parse_functions(name)
