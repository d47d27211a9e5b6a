"""Test what all commands share: help, error messages, JSON, colors, pipes, narrow terminals and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import arraybridge
from arraybridge.cli import option_parsing
from tests.cli.programs import Site, call_cli, environment, join_boxed_lines, run_cli

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="requires pipes, signals and terminals of Unix")
COMMANDS = ("demo", "doctor", "matrix", "bench", "monitor", "trace")
PROGRAM = [sys.executable, "-m", "arraybridge"]
# Fast calls that print something.
QUICK = {
    "matrix": ("matrix", "--frameworks", "numpy", "--size", "1KiB"),
    "bench": ("bench", "--frameworks", "numpy", "--size", "1KiB", "--rounds", "3"),
    "monitor": ("monitor", "--once"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_contains_examples(command: str) -> None:
    done = call_cli(command, "-h", COLUMNS="100")
    assert done.exit_code == 0
    assert "Example" in done.stdout
    assert f"arraybridge {command}" in done.stdout
    assert "--json" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_package_runs_as_a_module() -> None:
    assert run_cli("--version").stdout == f"arraybridge {arraybridge.__version__}\n"
    assert all(command in call_cli("--help").stdout for command in COMMANDS)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_packages_are_reported_in_one_line(tmp_path: Path, name: str) -> None:
    """Put a module that fails like a missing one in front of the real one."""
    words = f"raise ModuleNotFoundError({f'No module named {name}'!r}, name={name!r})\n"
    (tmp_path / f"{name}.py").write_text(words, encoding="utf-8")
    done = run_cli("--help", env=environment(tmp_path))
    assert done.returncode == 1
    assert (
        f"the command line requires {name}, which is not installed. Run pip install typer rich" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matirx"], "No such command 'matirx'"),
        (["matrix", "--dtyp", "float32"], "--dtyp"),
        (["matrix", "--frameworks", "torhc"], "did you mean 'torch'"),
        (["matrix", "--frameworks", ","], "The list is empty. Use names such as torch,jax."),
        (
            ["matrix", "--size", "big"],
            "for --size: 'big' is not a size. Use a number of bytes, such as 4MiB.",
        ),
        (["bench", "--size", "0"], "for --size: '0' is not a size of at least one byte."),
        (["matrix", "--dtype", "float31"], "Use a name such as float32"),
        (["matrix", "--dtype", "object"], "object is not a numeric dtype"),
        (["matrix", "--html", "/no/such/folder/page.html"], "No such file or directory"),
        (["matrix", "--html", "/"], "Is a directory"),
        (["matrix", "--png", "plot.txt"], "must end in .png, .svg or .pdf."),
        (["bench", "--rounds", "0"], "--rounds"),
        (["monitor", "--interval", "0"], "--interval"),
        (["monitor", "--csv", "memory.txt"], "must end in .csv or .jsonl."),
        (["doctor", "train.py"], "unexpected extra argument"),
        (["trace"], "SCRIPT"),
        (["trace", "nowhere.py"], "File nowhere.py does not exist."),
        (["trace", "--save", "run.png", __file__], "must end in .json."),
    ],
)
def test_usage_errors_print_a_message_and_exit_with_code_2(arguments: list[str], message: str) -> None:
    done = call_cli(*arguments)
    assert done.exit_code == 2, done.stderr
    assert message in join_boxed_lines(done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="requires sh")
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-", ">&-"])
def test_commands_run_with_closed_streams(closed: str, tmp_path: Path) -> None:
    command = f'exec "$0" -m arraybridge matrix --frameworks numpy --json {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, env=environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    assert (b'"numpy"' in done.stdout) is (closed != ">&-")


@pytest.mark.parametrize("command", QUICK)
def test_pipes_get_plain_text_within_40_columns_and_pure_json(command: str) -> None:
    done = call_cli(*QUICK[command], COLUMNS="40", TERM="xterm-256color")
    assert done.exit_code == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40
    machine_readable = call_cli(*QUICK[command], "--json")
    assert isinstance(json.loads(machine_readable.stdout), dict)
    assert machine_readable.stderr == ""


@UNIX
@pytest.mark.parametrize(("no_color", "is_colored"), [("", True), ("1", False)])
def test_terminals_get_colors_unless_no_color_is_set(no_color: str, is_colored: bool) -> None:
    import pty

    leader, follower = pty.openpty()
    env = environment(NO_COLOR=no_color, TERM="xterm-256color", COLUMNS="80", PYTHONIOENCODING="utf-8")
    command = [*PROGRAM, *QUICK["matrix"]]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # Linux raises it when the other side has closed
            while part := os.read(leader, 4096):
                shown += part
    os.close(leader)
    assert process.returncode == 0
    assert (re.search(rb"\x1b\[(1;)?3\d", shown) is not None) is is_colored  # bold is not a color


@UNIX
def test_a_broken_pipe_exits_cleanly() -> None:
    command = [*PROGRAM, "monitor", "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 1
    assert "Traceback" not in errors
    assert "Exception" not in errors


@UNIX
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("monitor", signal.SIGINT, 0),  # the usual way to exit
        ("doctor", signal.SIGINT, 130),  # while a framework hangs
        ("doctor", signal.SIGTERM, 143),
    ],
)
def test_ctrl_c_and_kill_exit_cleanly(
    command: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.package("jax", "jax_that_hangs.py")
    begun, errors = tmp_path / "begun", tmp_path / "stderr"
    env = environment(site.folder, PYTHONIOENCODING="utf-8", FAKE_BEGUN=str(begun))
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [*PROGRAM, command], stdout=subprocess.PIPE, stderr=stderr, env=env, cwd=site.work
        ) as process,
    ):
        assert process.stdout is not None
        if command == "monitor":
            assert process.stdout.readline()  # wait until the imports are done
        while command == "doctor" and not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == code
    assert "Traceback" not in errors.read_text()


SIZES = {"1": 1, "4MiB": 4 << 20, "64 KiB": 65536, "1.5k": 1536, "2MB": 2_000_000, "1g": 1 << 30, "10B": 10}


def test_sizes_are_parsed() -> None:
    assert {text: option_parsing.parse_size(text) for text in SIZES} == SIZES


@pytest.mark.parametrize("text", ["", "MiB", "4 apples", "0", "-1", "nan", "inf", "0.1B", "1e999", "4Bi"])
def test_invalid_sizes_raise(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        option_parsing.parse_size(text)
