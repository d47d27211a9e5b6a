"""Run each test file in a separate process, in random order.

python tools/test_files_apart.py                       runs all test files
python tools/test_files_apart.py --seed 7 tests/gpu    runs some of them, in the order of seed 7

A test that passes only because an earlier file has imported a framework or cached a plan fails here.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5  # the exit code of pytest


def run_file(path: Path) -> tuple[Path, str]:
    """Run one test file, and return it with the output if it fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = done.returncode in (0, NO_TESTS_COLLECTED)
    return path, "" if passed else done.stdout + done.stderr


def main() -> int:
    """Run the files that the command line names, and return the number of those that fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests"], help="test files and folders")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=2, help="the number of files that run at once")
    options = parser.parse_args()
    files = sorted({file for path in options.paths for file in _test_files(ROOT / path)})
    random.Random(options.seed).shuffle(files)  # noqa: S311  # not for cryptography
    print(f"{len(files)} test files in the order of --seed {options.seed}", flush=True)
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for path, output in pool.map(run_file, files):
            print(
                f"{'failed' if output else 'passed'} {path.relative_to(ROOT)}\n{output}", end="", flush=True
            )
            failed += bool(output)
    return failed


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


if __name__ == "__main__":
    sys.exit(main())
