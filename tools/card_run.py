"""What tools/card.sh runs: the questions and the tests, or the benchmarks, and a summary of ten lines."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("cupy", "torch", "jax")
#: Seconds for one run, with half a minute to write down what came out.
LIMIT = 9 * 60 - 30
#: Benchmarks that measure a card, and the frameworks that each needs.
BENCHMARKS = ((("benchmarks.memory", "--section", "transfer", "--section", "reading"), ("torch", "cupy")),)


def card_name() -> str:
    """The first card as nvidia-smi lists it; ends the program where there is none."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("nvidia-smi lists no NVIDIA card here: there is nothing to run, and nothing has passed.")
    found = re.match(r"GPU 0: (.+?) \(UUID", listing)
    return found[1] if found else "unknown"


def run(command: list[str], seconds: float, env: dict[str, str]) -> int | None:
    """The return code of a command; None where its time was up."""
    print("$", *command, flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, env=env, timeout=max(1, seconds), check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2"}


def tests(folder: Path, there: list[str], until: float) -> list[str]:
    """Ask the questions, run the tests; lines of the summary."""
    env = environment() | {"ARRAYBRIDGE_REQUIRE": ",".join(["numpy", "gpu", *there])}
    answers, report = folder / "questions.json", folder / "tests.xml"
    for old in (answers, report):
        old.unlink(missing_ok=True)
    run([sys.executable, "tools/card_questions.py", str(answers)], min(180, until - time.monotonic()), env)
    lines = ["questions: none was answered in time"]
    if answers.exists():
        kinds = Counter(a.split(" ", 1)[0].strip(",:") for a in json.loads(answers.read_text()).values())
        not_asked, raised = kinds.pop("not", 0), kinds.pop("raised", 0)
        no = kinds.pop("no", 0)
        lines = [
            f"questions: {sum(kinds.values())} yes or a fact, {no} NO, {raised} raised, {not_asked} NOT ASKED"
        ]
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-p", "no:cacheprovider"]
    code = run([*pytest, "--timeout", "120", f"--junitxml={report}"], until - time.monotonic(), env)
    if code is None or not report.exists():
        return [*lines, "tests: their time was up before the last; NOT PROVEN"]
    counts, skips = Counter[str](), Counter[str]()
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        counts["skipped" if skipped is not None else "failed" if failed else "passed"] += 1
        if skipped is not None:
            skips[(skipped.get("message") or "").splitlines()[0][:80]] += 1
    lines.append(f"tests: {counts['passed']} passed, {counts['failed']} FAILED, {counts['skipped']} NOT RUN")
    lines += [f"  not run, {count} times: {why}" for why, count in skips.most_common(3)]
    return lines


def benchmarks(folder: Path, there: list[str], until: float) -> list[str]:
    """Run every benchmark of a card; lines of the summary."""
    lines = []
    for command, needed in BENCHMARKS:
        missing = [name for name in needed if name not in there]
        if missing:
            lines.append(f"{command[0]}: NOT RUN, since {' and '.join(missing)} is missing")
            continue
        full = [sys.executable, "-m", *command, "--out", str(folder)]
        code = run(full, until - time.monotonic(), environment())
        how = "its time was up" if code is None else "done" if code == 0 else f"FAILED with {code}"
        lines.append(f"{command[0]}: {how}")
    return lines


def main() -> None:
    """One of the two runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("tests", "benchmarks"))
    parser.add_argument("--out", type=Path, help="in place of benchmarks/results/card-NAME")
    chosen = parser.parse_args()
    until = time.monotonic() + LIMIT
    card = card_name()
    emulated = os.environ.get("ARRAYBRIDGE_EMULATED_CARD")
    if emulated and chosen.out is None:
        sys.exit(
            "This card is emulated. Its results are no card's: pass --out, away from benchmarks/results."
        )
    words = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    folder = (chosen.out or ROOT / "benchmarks" / "results" / f"card-{words}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    missing = [name for name in FRAMEWORKS if name not in there]
    summary = [
        f"card: {card}"
        + (" - EMULATED, a rehearsal: nothing here is a figure of a card" if emulated else ""),
        f"frameworks: {', '.join(there) or 'none'}" + (f"; MISSING: {', '.join(missing)}" if missing else ""),
        *{"tests": tests, "benchmarks": benchmarks}[chosen.part](folder, there, until),
        f"results: {folder}",
    ]
    text = "\n".join(summary[:10])
    (folder / f"summary-{chosen.part}.txt").write_text(text + "\n")
    print(f"\n{text}")
    if any(word in text for word in ("FAILED with", "NOT PROVEN")) or re.search(r"[1-9]\d* FAILED", text):
        sys.exit(1)


if __name__ == "__main__":
    main()
