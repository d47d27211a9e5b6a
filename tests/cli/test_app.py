"""What all commands share: help, mistakes, JSON, colours, pipes, narrow terminals, Ctrl-C, completion."""

from __future__ import annotations

import json
import os
import re
import shutil
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

COMMANDS = ("demo", "doctor", "matrix", "bench", "monitor", "trace")
# Calls that take little time and print something.
QUICK = {
    "matrix": ("matrix", "--frameworks", "numpy", "--size", "1KiB"),
    "bench": ("bench", "--frameworks", "numpy", "--size", "1KiB", "--rounds", "3"),
    "monitor": ("monitor", "--once"),
}


def words(text: str) -> str:
    """The words of an error or a help text, without the frame around them."""
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    done = call_cli(command, "-h", COLUMNS="100")
    assert done.exit_code == 0
    assert "Example" in done.stdout
    assert f"arraybridge {command}" in done.stdout
    assert "--json" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_command_shows_the_help() -> None:
    done = run_cli()
    assert all(command in done.stdout + done.stderr for command in COMMANDS)
    assert "Traceback" not in done.stderr


def test_module_and_script_are_one_program() -> None:
    script = shutil.which("arraybridge", path=os.path.dirname(sys.executable))  # noqa: PTH120
    module = run_cli("--help")
    assert "Usage: arraybridge " in module.stdout
    assert run_cli("--version").stdout == f"arraybridge {arraybridge.__version__}\n"
    if script is None:
        pytest.skip("arraybridge runs from the checkout, not installed")
    done = subprocess.run(
        [script, "--help"], capture_output=True, text=True, encoding="utf-8", check=False, env=environment()
    )
    assert done.stdout == module.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matirx"], "No such command 'matirx'"),
        (["matrix", "--dtyp", "float32"], "--dtyp"),
        (["matrix", "--frameworks", "torhc"], "did you mean 'torch'"),
        (["matrix", "--frameworks", ","], "names no framework"),
        (["matrix", "--size", "big"], "is no size"),
        (["matrix", "--size", "0"], "must be positive"),
        (["matrix", "--size", "infMiB"], "is no size"),
        (["matrix", "--dtype", "float31"], "write it like float32"),
        (["matrix", "--dtype", "object"], "no dtype of numbers"),
        (["matrix", "--html", "/no/such/folder/page.html"], "there is no folder"),
        (["matrix", "--html", "/"], "it is a folder"),
        (["matrix", "--png", "picture.txt"], "must end in .png, .svg, .pdf"),
        (["bench", "--rounds", "0"], "--rounds"),
        (["trace", "--save", "/no/such/x.json", __file__], "there is no folder"),
        (["monitor", "--interval", "0"], "--interval"),
        (["monitor", "--csv", "/no/such/folder/x.csv"], "there is no folder"),
        (["demo", "--image", "/no/such/picture.png"], "does not exist"),
    ],
)
def test_a_mistake_is_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    done = call_cli(*arguments)
    assert done.exit_code == 2, done.stderr
    assert message in words(done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["matirx"], ["matrix", "--size", "big"]])
def test_a_mistake_shows_no_traceback(arguments: list[str]) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Error" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", QUICK)
def test_json_is_all_that_is_printed(command: str) -> None:
    done = run_cli(*QUICK[command], "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""


@pytest.mark.parametrize("command", QUICK)
def test_a_pipe_gets_no_escape_codes_and_40_columns_are_enough(command: str) -> None:
    done = run_cli(
        *QUICK[command], env=environment(COLUMNS="40", PYTHONIOENCODING="utf-8", TERM="xterm-256color")
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_an_encoding_without_the_signs_is_no_crash() -> None:
    done = run_cli(*QUICK["bench"], env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0, done.stderr
    assert "@numpy" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a matter of Unix")
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_no_color(no_color: str, coloured: bool) -> None:
    import pty

    leader, follower = pty.openpty()
    env = environment(NO_COLOR=no_color, TERM="xterm-256color", COLUMNS="80", PYTHONIOENCODING="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "arraybridge", "monitor", "--once"], stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # how Linux tells that the other side has closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait(60) == 0
    assert b"free of" in shown
    assert (re.search(rb"\x1b\[(1;)?3\d", shown) is not None) is coloured  # bold is no colour


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break with a signal on Unix alone")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_broken_pipe_ends_it_cleanly(more: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "arraybridge", "monitor", "--interval", "0.1", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONIOENCODING="utf-8"),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    assert process.wait(60) == 1
    process.stderr.close()
    assert "Traceback" not in told
    assert "Exception" not in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a matter of Linux")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_behind_stdout_is_told(more: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "arraybridge", *QUICK["monitor"], *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(PYTHONIOENCODING="utf-8"),
        )
    assert done.returncode == 1
    assert done.stderr == "arraybridge: [Errno 28] No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are a matter of Unix")
@pytest.mark.parametrize(
    ("arguments", "number", "code"),
    [
        (("monitor", "--interval", "0.1"), signal.SIGINT, 0),  # the ordinary way to leave it
        (("doctor", "--timeout", "90"), signal.SIGINT, 130),  # while a framework hangs
        (("doctor", "--timeout", "90"), signal.SIGTERM, 143),
    ],
)
def test_ctrl_c_ends_it_cleanly(
    arguments: tuple[str, ...], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.package("jax", "jax_that_hangs.py")
    begun, errors = tmp_path / "begun", tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "arraybridge", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(site.folder, PYTHONIOENCODING="utf-8", FAKE_BEGUN=str(begun)),
            cwd=site.work,
        )
        assert process.stdout is not None
        # Past the imports, and into the work.
        if arguments[0] == "monitor":
            assert process.stdout.readline()
        while arguments[0] == "doctor" and not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(20) == code
        process.stdout.close()
    assert "Traceback" not in errors.read_text()


@pytest.mark.parametrize(
    ("shell", "told"), [("bash", "complete -o default -F"), ("zsh", "#compdef arraybridge")]
)
def test_shells_complete_it(shell: str, told: str) -> None:
    done = run_cli(env=environment(_ARRAYBRIDGE_COMPLETE=f"source_{shell}"))
    assert done.returncode == 0
    assert told in done.stdout
    asked = environment(
        _ARRAYBRIDGE_COMPLETE="complete_bash",
        COMP_WORDS="arraybridge m",
        COMP_CWORD="1",
        PYTHONIOENCODING="utf-8",
    )
    assert run_cli(env=asked).stdout.split() == ["matrix", "monitor"]


# -- the parts alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1", 1),
        ("4MiB", 4 << 20),
        ("64 KiB", 65536),
        ("1.5k", 1536),
        ("2MB", 2_000_000),
        ("1g", 1 << 30),
        ("10B", 10),
    ],
)
def test_sizes(given: str, expected: int) -> None:
    assert output.size_in_bytes(given) == expected


@pytest.mark.parametrize("given", ["", "MiB", "4 apples", "-1", "nan", "0.1B", "1e999", "4Bi"])
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no size"):
        output.size_in_bytes(given)


def test_a_folder_without_permission_is_no_place_to_write(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(typer.BadParameter, match="permission is denied"):
        output.writable(tmp_path / "x", "--out")


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.print_json({"x": float("nan")})


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_its_packages_one_sentence_says_what_to_install(tmp_path: Path, name: str) -> None:
    """A module of that name that fails as a missing one does stands before the real one."""
    words = f"raise ModuleNotFoundError({f'No module named {name}'!r}, name={name!r})\n"
    (tmp_path / f"{name}.py").write_text(words, encoding="utf-8")
    done = run_cli("--help", env=environment(tmp_path))
    assert done.returncode == 1
    assert f"the command line needs {name}; run pip install typer rich" in done.stderr
    assert len(done.stderr.splitlines()) == 1
