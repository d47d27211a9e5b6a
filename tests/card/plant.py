"""Plants ordering mistakes, one at a time, and tells whether the tests on the emulated card notice.

``python tests/card/plant.py FOLDER [--only N ...]``; FOLDER is where build.py has put the card. A mistake is
a wait that was left out: each statement that calls one of `WAITS` becomes ``pass`` in a copy of the package,
and the tests of ordering run against the copy. A mistake that no test notices is named.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.card.run import environment  # noqa: E402

#: Calls that order something, wait for something, or keep something for as long as it is read.
WAITS = {
    "wait_event",
    "wait",
    "synchronize",
    "waiting",
    "keep",
    "hold",
    "receive",
    "wait_for",
    "use",
    "settle",
}
FILES = (
    "frameworks/cupy.py",
    "conversion/ring.py",
    "lines/lanes.py",
    "memory/pools.py",
    "frameworks/loans.py",
)
TESTS = (
    "tests/gpu/test_ordering.py",
    "tests/gpu/test_devices.py",
    "tests/memory/test_loans.py",
    "tests/card",
)


class Mistake(NamedTuple):
    """A statement to leave out: its file below the package, its first and last line, and its text."""

    file: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first}: {self.text}"


def mistakes() -> list[Mistake]:
    """Every statement that is nothing but a call of one of `WAITS`, in order."""
    found = []
    for file in FILES:
        source = (ROOT / "arraybridge" / file).read_text()
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            call = node.value.func
            name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
            if name in WAITS and node.end_lineno is not None:
                text = ast.unparse(node)
                found.append(Mistake(file, node.lineno, node.end_lineno, text))
    return sorted(found)


def plant(mistake: Mistake, package: Path) -> None:
    """Leave the statement out of a copy of the package."""
    path = package / mistake.file
    lines = path.read_text().splitlines(keepends=True)
    first = lines[mistake.first - 1]
    indent = first[: len(first) - len(first.lstrip())]
    lines[mistake.first - 1 : mistake.last] = [f"{indent}pass\n"]
    path.write_text("".join(lines))


def is_noticed(mistake: Mistake, folder: Path) -> str:
    """The first test that fails with the mistake; "" where all pass."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("arraybridge", "tests"):
            shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, scratch)
        plant(mistake, Path(scratch) / "arraybridge")
        env = {**environment(folder, "lazy"), "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        try:
            done = subprocess.run(
                [*command, *TESTS],
                cwd=scratch,
                env=env,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "the tests, which hang"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ", 1)[1] if failed else "" if done.returncode == 0 else "the process, which died"


def main() -> int:
    """Plant them all; the return code is the number of mistakes that nothing notices."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="only list the mistakes")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers from the list")
    chosen = parser.parse_args()
    missed = 0
    for number, mistake in enumerate(mistakes(), 1):
        if chosen.only and number not in chosen.only:
            continue
        if chosen.list:
            print(f"{number:3} {mistake}")
            continue
        by = is_noticed(mistake, chosen.folder)
        missed += not by
        print(f"{number:3} {mistake}\n    {'noticed by ' + by if by else 'NOT NOTICED'}", flush=True)
    return missed


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")
    sys.exit(main())
