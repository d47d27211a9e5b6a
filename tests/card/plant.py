"""Plants ordering mistakes, one at a time, and tells whether the tests on the emulated card notice.

``python tests/card/plant.py FOLDER [--only N ...]``; FOLDER is where build.py has put the card. Each mistake
is an edit of a copy of the package, a wait that is left out or one for the wrong queue, and the tests that it
concerns run against the copy. It is red where a test fails, as it has to be, and green where none notices.
"""

from __future__ import annotations

import argparse
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

ORDERING = ("tests/gpu/test_ordering.py",)
LOANS = ("tests/memory/test_loans.py",)
LINES = ("tests/lines/test_lanes.py", "tests/lines/test_streams.py")


class Mistake(NamedTuple):
    """What is wrong, the file below the package, the text to replace, by what, and the tests to notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ORDERING


CUPY, LANES, LOAN, RING = (
    "frameworks/cupy.py",
    "lines/lanes.py",
    "frameworks/loans.py",
    "conversion/ring.py",
)
MISTAKES = (
    Mistake(
        "a staging buffer is filled again before its last copy has left",
        RING,
        "                waiting()  # for the copy that used this buffer last\n",
        "                pass\n",
    ),
    Mistake(
        "a staging buffer is emptied before it is filled",
        RING,
        "            wait()\n            part = target",
        "            part = target",
    ),
    Mistake(
        "an array is handed out before its last bytes have left locked memory",
        CUPY,
        "            cupy.cuda.get_current_stream().synchronize()\n            return result\n",
        "            return result\n",
    ),
    Mistake(
        "a copy to another card starts before its source is there",
        CUPY,
        "            stream.wait_event(ready)\n",
        "",
    ),
    Mistake(
        "the source of a copy to another card is used again before it is read",
        CUPY,
        "        reader.wait_event(copied)\n",
        "",
    ),
    Mistake(
        "an array counts as settled before it is computed",
        CUPY,
        "        with _on_card(x.device.id):\n            cupy.cuda.get_current_stream().synchronize()\n",
        "        pass\n",
    ),
    Mistake(
        "a mark is set in the default stream",
        CUPY,
        "            event.record(cupy.cuda.get_current_stream())\n",
        "            event.record(cupy.cuda.Stream.null)\n",
    ),
    Mistake(
        "nobody waits for a mark",
        CUPY,
        "                cupy.cuda.get_current_stream().wait_event(event)\n",
        "                pass\n",
    ),
    Mistake(
        "a queue does not wait for another by its handle",
        CUPY,
        "                stream.wait_event(reached)\n",
        "",
    ),
    Mistake(
        "what another thread's stream made is given back to it before it is copied",
        CUPY,
        "            copy = x.copy()\n            cupy.cuda.get_current_stream().synchronize()\n",
        "            copy = x.copy()\n",
    ),
    Mistake(
        "a function's stream does not wait for its arguments",
        CUPY,
        "        side.wait_event(outer.record())\n",
        "",
    ),
    Mistake(
        "a stream chosen with use() is lost behind a function",
        CUPY,
        "            outer.use()\n",
        "",
    ),
    Mistake(
        "the caller does not wait for a function's stream",
        CUPY,
        "            outer.wait_event(side.record())\n",
        "",
    ),
    Mistake(
        "the caller does not wait for a stream that the function has chosen",
        CUPY,
        "                outer.wait_event(last.record())\n",
        "                pass\n",
    ),
    Mistake(
        "the lender does not wait for the borrower",
        LOAN,
        "                self._lender.wait_for(self._device, self._borrower.handle(self._device))\n",
        "",
        (*ORDERING, *LOANS),
    ),
    Mistake(
        "what was lent on another queue goes back to it unread",
        LOAN,
        "                and self._lender.handle(self._device) == self._lent_on\n",
        "",
    ),
    Mistake(
        "what was lent by a lender without queues is not kept",
        LOAN,
        "                keep(self._borrowed, mark.is_done, mark.synchronize)\n",
        "                pass\n",
        LOANS,
    ),
    Mistake(
        "what is kept goes before it was read",
        LOAN,
        "                if not is_done:  # nor",
        "                if False:  # nor",
        (*LOANS, *LINES),
    ),
    Mistake(
        "nobody waits for what is kept",
        LOAN,
        "            entry[2]()\n",
        "",
        (*LOANS, *LINES),
    ),
    Mistake(
        "memory is freed while others still read what is kept",
        "memory/cleanup.py",
        "    loans.settle()  # what",
        "    # what",
        LOANS,
    ),
    Mistake(
        "a stage does not wait for what made its input",
        LANES,
        "            self.use_stream(mark.streams, mark.device)\n            mark.wait()\n",
        "            self.use_stream(mark.streams, mark.device)\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "a stage says nothing of what it made",
        "lines/line.py",
        "                    made = marks_of(result)\n",
        "                    made: list[Mark] = []\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "the caller does not wait for the last stage",
        LANES,
        "    for mark in marks:\n        mark.wait()\n    marked",
        "    marked",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "results stay on the stream of a thread that makes more of them",
        LANES,
        "        return streams.take_over(x)\n",
        "        return x\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "inputs are not held",
        "lines/line.py",
        "                    lane.hold(item)\n",
        "",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "inputs are held for the framework that owns them, and not for the one that reads",
        LANES,
        "        for reader in (owner, *registry.loaded()):\n",
        "        for reader in (owner,):\n",
        (*ORDERING, *LINES),
    ),
    Mistake(
        "a thread ends before what it holds was read",
        LANES,
        '        """Wait for what is queued, before its inputs go."""\n        self._held.settle()\n',
        '        """Wait for nothing."""\n',
        LINES,
    ),
    Mistake(
        "a buffer of a pool is lent again while it is still written to",
        "memory/pools.py",
        "            owner.settle(array)\n",
        "",
    ),
)


def planted(mistake: Mistake, package: Path) -> str:
    """The text of the file with the mistake in it.

    Raises:
        LookupError: the text to replace is not there exactly once.
    """
    text = (package / mistake.file).read_text(encoding="utf-8")
    if text.count(mistake.old) != 1:
        raise LookupError(f"{mistake.file} has {text.count(mistake.old)} times, and not once:\n{mistake.old}")
    return text.replace(mistake.old, mistake.new)


def noticed_by(mistake: Mistake | None, folder: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails on a copy with the mistake; "" where all pass."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("arraybridge", "tests"):
            shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, scratch)
        if mistake is not None:
            package = Path(scratch) / "arraybridge"
            (package / mistake.file).write_text(planted(mistake, package), encoding="utf-8")
        env = {**environment(folder, "lazy"), "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
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
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="mistakes by their numbers")
    chosen = parser.parse_args()
    numbered = [m for m in enumerate(MISTAKES, 1) if not chosen.only or m[0] in chosen.only]
    for _, mistake in numbered:
        planted(mistake, ROOT / "arraybridge")
    by = noticed_by(None, chosen.folder, tuple(dict.fromkeys(t for _, m in numbered for t in m.tests)))
    if by:
        sys.exit(f"without any mistake, {by} fails")
    missed = 0
    for number, mistake in numbered:
        by = noticed_by(mistake, chosen.folder, mistake.tests)
        missed += not by
        print(
            f"{number:3} {'red  ' if by else 'GREEN'} {mistake.what}: {by or 'no test notices'}", flush=True
        )
    print(f"{len(numbered) - missed} of {len(numbered)} mistakes turn the tests red")
    return missed


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "110")
    sys.exit(main())
