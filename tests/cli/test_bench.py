"""Test `arraybridge bench`: the pairs of calls."""

from __future__ import annotations

import json

import numpy as np
import pytest

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
