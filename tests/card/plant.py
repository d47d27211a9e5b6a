"""Plants mistakes, one at a time, and tells whether the tests notice.

``python tests/card/plant.py [FOLDER] [--only N ...]``; FOLDER is where build.py has put the card. Each
mistake (mistakes.py) is an edit of a copy of the package, as a wait that is left out or one for the wrong
queue, and the tests that it concerns run against the copy, on the emulated card or on the host. It is red
where a test fails, as it has to be, and green where none notices. What needs a framework that is not here, or
the card without a FOLDER, is not tried, and says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.card.mistakes import MISTAKES, Mistake  # noqa: E402
from tests.card.run import environment  # noqa: E402


def planted(mistake: Mistake, package: Path) -> str:
    """The text of the file with the mistake in it.

    Raises:
        LookupError: the text to replace is not there exactly once.
    """
    text = (package / mistake.file).read_text(encoding="utf-8")
    if text.count(mistake.old) != 1:
        raise LookupError(f"{mistake.file} has {text.count(mistake.old)} times, and not once:\n{mistake.old}")
    return text.replace(mistake.old, mistake.new)


def missing(mistake: Mistake, folder: Path | None) -> str:
    """What is not here that would show the mistake; "" where all is."""
    if mistake.card and folder is None:
        return "an emulated card"
    needed = Requirement(mistake.needs) if mistake.needs else None
    if needed is None:
        return ""
    names = (needed.name, f"{needed.name}-cpu")  # TensorFlow has two
    found = next((d.version for d in distributions() if canonicalize_name(d.name) in names), None)
    return "" if found is not None and needed.specifier.contains(found) else mistake.needs


def noticed_by(mistake: Mistake | None, folder: Path | None, tests: tuple[str, ...]) -> str:
    """The first test that fails on a copy with the mistake; "" where all pass. No folder: on the host."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("arraybridge", "tests", "tools"):
            shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conftest.py", "pyproject.toml", "tox.ini"):
            shutil.copy(ROOT / name, scratch)
        if mistake is not None:
            package = Path(scratch) / "arraybridge"
            (package / mistake.file).write_text(planted(mistake, package), encoding="utf-8")
        found = dict(os.environ) if folder is None else environment(folder, "lazy")
        env = {**found, "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        try:
            done = subprocess.run(
                [*command, *tests],
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
    return failed[0].split(" ", 2)[1] if failed else "" if done.returncode == 0 else "the process, which died"


def main() -> int:
    """Plant them all; the return code is the number of mistakes that nothing notices."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="mistakes by their numbers")
    chosen = parser.parse_args()
    numbered = [m for m in enumerate(MISTAKES, 1) if not chosen.only or m[0] in chosen.only]
    for _, mistake in numbered:
        planted(mistake, ROOT / "arraybridge")
    tried = [m for m in numbered if not missing(m[1], chosen.folder)]
    for folder in (chosen.folder, None):
        there = [m for _, m in tried if m.card is (folder is not None)]
        tests = tuple(dict.fromkeys(test for mistake in there for test in mistake.tests))
        by = noticed_by(None, folder, tests) if tests else ""
        if by:
            sys.exit(f"without any mistake, {by} fails")
    missed = 0
    for number, mistake in numbered:
        lacks = missing(mistake, chosen.folder)
        if lacks:
            print(f"{number:3} -     {mistake.what}: not tried, needs {lacks}", flush=True)
            continue
        by = noticed_by(mistake, chosen.folder if mistake.card else None, mistake.tests)
        missed += not by
        print(
            f"{number:3} {'red  ' if by else 'GREEN'} {mistake.what}: {by or 'no test notices'}", flush=True
        )
    print(f"{len(tried) - missed} of {len(tried)} mistakes turn the tests red")
    return missed


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")
    sys.exit(main())
