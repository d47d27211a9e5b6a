"""What all commands share: help, mistakes, JSON, colours, pipes, narrow terminals, Ctrl-C."""

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
from arraybridge.cli import output
from tests.cli.programs import Site, call_cli, environment, run_cli

UNIX = pytest.mark.skipif(sys.platform == "win32", reason="needs the pipes, signals and terminals of Unix")
COMMANDS = ("demo", "doctor", "matrix", "bench", "monitor", "trace")
PROGRAM = [sys.executable, "-m", "arraybridge"]
# Calls that take little time and print something.
QUICK = {
    "matrix": ("matrix", "--frameworks", "numpy", "--size", "1KiB"),
    "bench": ("bench", "--frameworks", "numpy", "--size", "1KiB", "--rounds", "3"),
    "monitor": ("monitor", "--once"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    done = call_cli(command, "-h", COLUMNS="100")
    assert done.exit_code == 0
    assert "Example" in done.stdout
    assert f"arraybridge {command}" in done.stdout
    assert "--json" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_module_is_the_program() -> None:
    assert run_cli("--version").stdout == f"arraybridge {arraybridge.__version__}\n"
    assert all(command in call_cli("--help").stdout for command in COMMANDS)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_its_packages_one_sentence_says_what_to_install(tmp_path: Path, name: str) -> None:
    """A module of that name that fails as a missing one does stands before the real one."""
    words = f"raise ModuleNotFoundError({f'No module named {name}'!r}, name={name!r})\n"
    (tmp_path / f"{name}.py").write_text(words, encoding="utf-8")
    done = run_cli("--help", env=environment(tmp_path))
    assert done.returncode == 1
    assert f"the command line needs {name}; run pip install typer rich" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matirx"], "No such command 'matirx'"),
        (["matrix", "--dtyp", "float32"], "--dtyp"),
        (["matrix", "--frameworks", "torhc"], "did you mean 'torch'"),
        (["matrix", "--frameworks", ","], "names no framework"),
        (["matrix", "--size", "big"], "is no size"),
        (["matrix", "--dtype", "float31"], "write it like float32"),
        (["matrix", "--dtype", "object"], "no dtype of numbers"),
        (["matrix", "--html", "/no/such/folder/page.html"], "No such file or directory"),
        (["matrix", "--html", "/"], "Is a directory"),
        (["matrix", "--png", "picture.txt"], "must end in .png, .svg, .pdf"),
        (["bench", "--rounds", "0"], "--rounds"),
        (["monitor", "--interval", "0"], "--interval"),
        (["monitor", "--csv", "memory.txt"], "must end in .csv, .jsonl"),
        (["demo", "--image", "/no/such/picture.png"], "does not exist"),
        (["doctor", "train.py"], "unexpected extra argument"),
        (["trace"], "SCRIPT"),
        (["trace", "nowhere.py"], "there is no file nowhere.py"),
        (["trace", "--save", "run.png", __file__], "must end in .json"),
    ],
)
def test_a_mistake_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = call_cli(*arguments)
    assert done.exit_code == 2, done.stderr
    assert message in " ".join(done.stderr.translate(str.maketrans("│╭╮╰╯─", "      ")).split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no sh")
@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-", ">&-"])
def test_a_stream_that_is_closed(closed: str, tmp_path: Path) -> None:
    command = f'exec "$0" -m arraybridge matrix --frameworks numpy --json {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, env=environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr
    assert (b'"numpy"' in done.stdout) is (closed != ">&-")


@pytest.mark.parametrize("command", QUICK)
def test_a_pipe_gets_no_escape_codes_and_40_columns_are_enough_and_json_comes_alone(command: str) -> None:
    done = call_cli(*QUICK[command], COLUMNS="40", TERM="xterm-256color")
    assert done.exit_code == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40
    machine_readable = call_cli(*QUICK[command], "--json")
    assert isinstance(json.loads(machine_readable.stdout), dict)
    assert machine_readable.stderr == ""


@UNIX
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_no_color(no_color: str, coloured: bool) -> None:
    import pty

    leader, follower = pty.openpty()
    env = environment(NO_COLOR=no_color, TERM="xterm-256color", COLUMNS="80", PYTHONIOENCODING="utf-8")
    command = [*PROGRAM, *QUICK["matrix"]]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux tells that the other side has closed
            while part := os.read(leader, 4096):
                shown += part
    os.close(leader)
    assert process.returncode == 0
    assert (re.search(rb"\x1b\[(1;)?3\d", shown) is not None) is coloured  # bold is no colour


@UNIX
def test_a_broken_pipe_ends_it_cleanly() -> None:
    command = [*PROGRAM, "monitor", "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        words = process.stderr.read()
        assert process.wait(60) == 1
    assert "Traceback" not in words
    assert "Exception" not in words


@UNIX
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("monitor", signal.SIGINT, 0),  # the ordinary way to leave it
        ("doctor", signal.SIGINT, 130),  # while a framework hangs
        ("doctor", signal.SIGTERM, 143),
    ],
)
def test_ctrl_c_ends_it_cleanly(command: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
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
            assert process.stdout.readline()  # past the imports, and into the work
        while command == "doctor" and not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == code
    assert "Traceback" not in errors.read_text()


SIZES = {"1": 1, "4MiB": 4 << 20, "64 KiB": 65536, "1.5k": 1536, "2MB": 2_000_000, "1g": 1 << 30, "10B": 10}


def test_sizes() -> None:
    assert {words: output.size_in_bytes(words) for words in SIZES} == SIZES


@pytest.mark.parametrize("words", ["", "MiB", "4 apples", "0", "-1", "nan", "inf", "0.1B", "1e999", "4Bi"])
def test_what_is_no_size(words: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no size"):
        output.size_in_bytes(words)
