"""Test `arraybridge trace`: scripts run unchanged, and their copies are listed."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import environment, join_boxed_lines, run_cli

COPY = """\
import sys
import numpy as np
import arraybridge
print("arguments", sys.argv[1:])
arraybridge.convert_memory(np.ones((100, 10)).T, "numpy", copy=True)
"""


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def python(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python without arraybridge, for comparison."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment(), check=False, timeout=120
    )


def test_trace_runs_a_script_and_lists_its_copies(tmp_path: Path) -> None:
    file = script(tmp_path, COPY)
    done = run_cli("trace", str(file), "--top", "7", "-x", "--json")
    assert done.returncode == 0, done.stderr
    assert "arguments ['--top', '7', '-x', '--json']" in done.stdout, "the script must receive its arguments"
    assert "script.py:5" in done.stdout
    assert "7.8 KiB" in done.stdout
    assert "because copy=True was passed" in done.stdout
    assert "→ omit copy=True" in done.stdout
    assert "1 line, 7.8 KiB copied" in done.stdout.splitlines()[-1]


def test_trace_writes_json_and_html_files(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    moved = script(tmp_path, f"import os\nos.chdir({str(folder)!r})\n" + COPY)
    options = ("--json", "--save", "run.json", "--html", "report.html")
    done = run_cli("trace", *options, moved.name, "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "arguments ['a']" in done.stderr, "stdout must contain only JSON"
    answer = json.loads(done.stdout)
    assert answer["program"] == "script.py a"
    assert [(spot["nbytes"], spot["count"]) for spot in answer["hotspots"]] == [(8000, 1)]
    events = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["traceEvents"]
    assert any(e["ph"] == "X" and e["args"].get("nbytes") == 8000 for e in events)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "omit copy=True" in page
    assert "<table" in page
    assert not re.search(r"src\s*=|href=\"(?!data:)|@import|url\(", page), "the page loads another file"


PRINT_ENVIRONMENT = """\
import sys, json
import __main__
print(json.dumps([
    sys.argv[1:], sys.path[0], __name__, __file__, __main__.__file__, __spec__ is None or __spec__.name,
    sys.modules["__main__"].__dict__ is globals(), __doc__,
]))
"""


@pytest.mark.parametrize("program", [("inside/script.py",), ("{tmp}/script.py",), ("-m", "package")])
def test_a_script_sees_the_same_environment_as_under_python(tmp_path: Path, program: tuple[str, ...]) -> None:
    for folder in ("inside", "package"):
        (tmp_path / folder).mkdir()
    script(tmp_path / "package", "", "__init__.py")
    for name in ("script.py", "inside/script.py", "package/__main__.py"):
        script(tmp_path, '"""Doc."""\n' + PRINT_ENVIRONMENT, name)
    arguments = [word.replace("{tmp}", str(tmp_path)) for word in program] + ["--save", "b"]
    plain = python(*arguments, cwd=tmp_path)
    traced = run_cli("trace", *arguments, cwd=tmp_path)
    assert plain.returncode == traced.returncode == 0, plain.stderr + traced.stderr
    assert traced.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3)", 3), ("def f():\n    1 / 0\nf()", 1), ("x = (", 1)]
)
def test_a_script_exits_as_under_python_with_its_table(tmp_path: Path, ending: str, code: int) -> None:
    file = script(tmp_path, COPY + ending)
    plain, traced = python(file), run_cli("trace", str(file))
    assert traced.returncode == plain.returncode == code
    assert traced.stderr == plain.stderr, "the traceback must not contain lines of arraybridge"
    assert ending == "x = (" or "script.py:5" in traced.stdout


MISSING_PROGRAMS = {
    ("-m", "no_package"): "Cannot run the module no_package: No module named no_package.",
    ("-m", "no_package.train"): "Cannot run the module no_package.train: No module named 'no_package'.",
    ("-m", "package.train"): "Cannot run the module package.train: No module named package.train.",
    (
        "-m",
        "package",
    ): "Cannot run the module package: No module named package.__main__; 'package' is a package",
    ("-m", ".package"): "Cannot run the module .package: Relative module names not supported.",
    ("package",): "Cannot run package: can't find '__main__' module in ",
}


@pytest.mark.parametrize("program", MISSING_PROGRAMS)
def test_a_missing_program_is_a_usage_error(tmp_path: Path, program: tuple[str, ...]) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", "", "__init__.py")
    done = run_cli("trace", "--json", "--save", "run.json", *program, "--option", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    message = join_boxed_lines(done.stderr)
    assert f"for SCRIPT: {MISSING_PROGRAMS[program]}" in message
    assert message.endswith("Pass the path of a script, or -m and a module that python -m can run.")
    assert not (tmp_path / "run.json").exists(), "checking that the file can be written leaves no file"


@pytest.mark.skipif(sys.platform == "win32", reason="requires sockets in the file system")
def test_an_unreadable_script_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(file))
        done = run_cli("trace", "script.py", cwd=tmp_path)
    assert done.returncode == python(file).returncode == 2
    assert "for SCRIPT: Cannot run script.py: " in join_boxed_lines(done.stderr)


@pytest.mark.parametrize(
    "text",
    [
        "import no_package",
        "raise ImportError('no')",
        "import runpy\nrunpy.run_module('no_package')",
        "open('none')",
    ],
)
@pytest.mark.parametrize("program", [("script.py",), ("-m", "script"), ("-m", "package.main")])
def test_import_errors_of_the_program_have_their_traceback(
    tmp_path: Path, text: str, program: tuple[str, ...]
) -> None:
    """Compare the last frame with that of plain Python, also for errors in the parent package of a module."""
    script(tmp_path, text)
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", text, "__init__.py")
    script(tmp_path / "package", "", "main.py")
    plain, traced = python(*program, cwd=tmp_path), run_cli("trace", *program, cwd=tmp_path)
    assert traced.returncode == plain.returncode == 1
    last_frame = plain.stderr.rpartition("  File ")[2]
    assert traced.stderr.endswith(last_frame)
    assert traced.stderr.startswith("Traceback")
    assert str(tmp_path) in traced.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="requires signals of Unix")
def test_the_copies_are_listed_after_ctrl_c(tmp_path: Path) -> None:
    file = script(tmp_path, COPY + "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "arraybridge", "trace", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        table, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "script.py:5" in table
    assert errors.startswith("Traceback")
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "arraybridge" not in errors


def test_copies_in_threads_and_other_libraries_are_listed(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    script(site, "import arraybridge\ndef inside(x): arraybridge.to_numpy(x, copy=True)\n", "somelib.py")
    file = script(
        tmp_path,
        f"import sys, threading\nsys.path.append({str(site)!r})\nimport numpy as np, arraybridge, somelib\n"
        "thread = threading.Thread(target=lambda: arraybridge.to_numpy(np.ones(10), copy=True))\n"
        "thread.start()\nthread.join()\nsomelib.inside(np.ones(1000))\n",
    )
    spots = json.loads(run_cli("trace", "--json", str(file)).stdout)["hotspots"]
    assert [(s["line"], s["nbytes"]) for s in spots] == [(7, 8000), (4, 80)]
    assert [s["libraries"] for s in spots] == [["somelib"], [""]]
    spots = json.loads(run_cli("trace", "--json", "--without-libraries", str(file)).stdout)["hotspots"]
    assert [s["line"] for s in spots] == [4]


def test_spawned_processes_can_send_classes_of_the_script(tmp_path: Path) -> None:
    file = script(
        tmp_path,
        "import multiprocessing\n"
        "class Square:\n"
        "    def __init__(self, x): self.value = x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([one.value for one in pool.map(Square, [2, 3])])\n",
    )
    # Start-up files and libraries may import multiprocessing before the script runs.
    script(tmp_path, "import multiprocessing\n", "sitecustomize.py")
    done = run_cli("trace", str(file), timeout=60, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "[4, 9]" in done.stdout
    assert done.stdout.count("no conversions") == 1
