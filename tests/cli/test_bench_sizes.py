"""`arraybridge bench --sizes`: which functions and sizes are meant, and what comes out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import arraybridge
from arraybridge.cli import bench_sizes as command
from arraybridge.cli.bench import bench
from tests.cli.programs import run_cli

ONE_FUNCTION = "import numpy as np\n\ndef doubled(x):\n    assert x.dtype == np.float32\n    return x * 2\n"


def test_functions_over_sizes_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(ONE_FUNCTION)
    drawn = ["--plot", str(tmp_path / "sizes.svg")] if importlib.util.find_spec("matplotlib") else []
    done = run_cli(
        *("bench", "--sizes", "4KiB,10", "--functions", "matmul,beside:doubled", "--rounds", "3"),
        *("--json", "--out", str(tmp_path / "sizes.json"), *drawn),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "sizes.json").read_text()) == result
    assert [(row["function"], row["elements"]) for row in result["rows"]] == [
        ("matmul", 10),
        ("matmul", 1024),
        ("beside:doubled", 10),
        ("beside:doubled", 1024),
    ]
    assert all(0 < row["cpu"] < 10 for row in result["rows"])
    assert result["crossover"].keys() == {"matmul", "beside:doubled"}
    if drawn:
        assert (tmp_path / "sizes.svg").stat().st_size > 1000
    if not arraybridge.gpu_available():
        assert result["crossover"] == {"matmul": None, "beside:doubled": None}
        assert all(row["gpu"] is None for row in result["rows"])
        assert "there is no GPU here" in result["note"]


def test_the_whole_set_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    bench(sizes="100", rounds=3)
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if "100 " in line]
    assert names == ["elementwise", "reduction", "matmul", "fft", "filter"]


def test_a_function_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        bench(sizes="100", functions="numpy:matmul", rounds=3)
    assert ended.value.exit_code == 1
    told = capsys.readouterr().err
    assert "numpy:matmul fails at 100 elements: TypeError" in told
    assert "one array of float32" in told


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
    ("words", "told"),
    [
        ("", "names none"),
        ("fast", "is not known"),
        (":sort", "is not known"),
        ("numpy:", "is not known"),
        ("no_such_module:f", "can't be had"),
        ("numpy:no_such_function", "can't be had"),
        ("numpy:pi", "no function"),
    ],
)
def test_what_is_no_function(words: str, told: str) -> None:
    with pytest.raises(typer.BadParameter, match=told):
        command.named_functions(words)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"functions": "fft"}, "goes with --sizes"),
        ({"sizes": "10", "compare": Path("before.json")}, "goes without"),
        ({"sizes": "10", "frameworks": "torch"}, "goes without"),
        ({"sizes": "1e14"}, "is too much"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], told: str) -> None:
    with pytest.raises(typer.BadParameter, match=told):
        bench(**options)
