"""What tools/gpu_check.sh runs: the questions and the tests, or the benchmarks, and a summary.

The exit code is 0 where all was run and nothing failed, 1 where something failed, and 3 where something was
not run: a skip is no pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("cupy", "torch", "jax", "tensorflow")
#: Seconds for one run, with half a minute to write down what came out.
LIMIT = 9 * 60 - 30
QUESTIONS_LIMIT = 150
EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))

#: Whether a framework sees the card; in a process of its own, since some end it.
SEES = """
import importlib, sys, arraybridge
version = importlib.import_module(sys.argv[1]).__version__
print(version, any(device.kind == "gpu" for device in arraybridge.devices(sys.argv[1])))
"""


class Benchmark(NamedTuple):
    """One that measures a card: its arguments to Python, what it needs, and its seconds at most.

    ``prints``: the file that what it prints goes to.
    """

    name: str
    command: tuple[str, ...]
    needs_one_of: tuple[str, ...]
    seconds: float
    prints: Path | None = None


def benchmarks_into(folder: Path) -> list[Benchmark]:
    """Every benchmark with a card section; what it finds goes into the folder."""
    # Emulated, CuPy has no cuBLAS and no cuFFT, and no time means anything.
    few = ("--functions", "elementwise,reduction,filter", "--rounds", "3") if EMULATED else ()
    sizes = "1e3,1e4" if EMULATED else "1e3,1e4,1e5,1e6,1e7,1e8"
    cli, any_of = ("-m", "arraybridge"), ("cupy", "torch", "jax")
    transfer = ("-m", "benchmarks.memory", "--section", "transfer", "--section", "reading")
    ahead = (
        "-m",
        "benchmarks.prefetch",
        "--section",
        "card",
        *(("--repeats", "2", "--mib", "0.1") if EMULATED else ()),
    )
    return [
        Benchmark("transfers", (*transfer, "--out", str(folder)), ("torch",), 210),
        Benchmark("prefetch", (*ahead, "--out", str(folder)), ("torch", "cupy"), 60),
        Benchmark(
            "sizes",
            (*cli, "bench", "--sizes", sizes, *few, "--json"),
            any_of,
            120,
            folder / "sizes.json",
        ),
        Benchmark(
            "matrix",
            (*cli, "matrix", "--size", "1MiB", "--html", str(folder / "matrix.html")),
            any_of,
            90,
        ),
    ]


class Outcome:
    """What is told at the end: lines of the summary, and the three things that decide the verdict."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ran = 0
        self.failed: list[str] = []
        self.not_run = 0

    def verdict(self) -> tuple[str, int]:
        """In words, and as an exit code."""
        if self.failed:
            named = "; ".join(self.failed)
            return f"FAILED: {named if len(named) < 160 else named[:157] + '...'}", 1
        if self.not_run or not self.ran:
            return f"INCOMPLETE: nothing failed of what was run, and {self.not_run} were NOT RUN", 3
        return "PASSED: all was run", 0


def run(command: list[str], seconds: float, env: dict[str, str], prints: Path | None = None) -> int | None:
    """The return code of a command; None where its time was up. What it started ends with it.

    ``prints``: the file that what it prints goes to.
    """
    print("$", *command, *(() if prints is None else (">", prints)), flush=True)
    with nullcontext() if prints is None else prints.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, start_new_session=True)
    try:
        return process.wait(max(1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def on_path(wheels: Path | None, folder: Path) -> None:
    """Put the checkout, and what the wheels hold, first on the path of every process from here on."""
    paths = [str(ROOT)]
    if wheels is not None:
        files = sorted(wheels.glob("*.whl"))
        if not files:
            sys.exit(f"{wheels} has no wheels; fill it as tools/gpu_check.sh says")
        for file in files:
            print("unpacks", file.name, flush=True)
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(folder)
        paths.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


# -- what is there -----------------------------------------------------------------------------------


def gpu_name() -> str:
    """The first card as nvidia-smi lists it; ends the program where there is none."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("nvidia-smi lists no NVIDIA card here: there is nothing to run, and nothing has passed.")
    found = re.match(r"GPU 0: (.+?) \(UUID", listing)
    return found[1] if found else "unknown"


def frameworks() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of the frameworks that see the card; and why the others do not."""
    there, missing = {}, {}
    for name in FRAMEWORKS:
        command = [sys.executable, "-c", SEES, name]
        try:
            asked = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, env=environment()
            )
        except subprocess.TimeoutExpired:
            missing[name] = "does not come up in a minute"
            continue
        words = asked.stdout.split()
        if asked.returncode == 0 and words[-1:] == ["True"]:
            there[name] = words[-2]
        elif asked.returncode == 0:
            missing[name] = f"{words[-2]} sees no card"
        else:
            last = (asked.stderr.strip().splitlines() or ["ends its process"])[-1]
            missing[name] = "not installed" if "No module named" in last else last[:60]
    return there, missing


# -- the two parts -----------------------------------------------------------------------------------


def questions(folder: Path, until: float, env: dict[str, str], out: Outcome) -> None:
    """The first questions, see card_questions.py."""
    answers = folder / "questions.json"
    answers.unlink(missing_ok=True)
    seconds = min(QUESTIONS_LIMIT, until - time.monotonic())
    run([sys.executable, "tools/gpu_questions.py", str(answers)], seconds, env)
    if not answers.exists():
        out.failed.append("no question was answered in time")
        out.lines.append("questions: NONE was answered in time")
        return
    kinds = Counter[str]()
    for words, answer in json.loads(answers.read_text()).items():
        kind = answer.split(" ", 1)[0].strip(",:")
        kinds[kind if kind in ("no", "raised", "not") else "answered"] += 1
        if kind in ("no", "raised"):
            out.failed.append(f"{words} {answer}")
    out.ran += kinds["answered"]
    out.not_run += kinds["not"]
    error_text = ("answered", "yes or a fact"), ("no", "NO"), ("raised", "raised"), ("not", "NOT ASKED")
    out.lines.append("questions: " + ", ".join(f"{kinds[kind]} {words}" for kind, words in error_text))


def gpu_files(part: str) -> list[Path]:
    """The files with tests of a real card; of ``"1/2"`` every other one."""
    number, _, parts = part.partition("/")
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    # What asks the emulated card itself has nothing to ask of a real one.
    if not EMULATED:
        files = [f for f in files if f.parent.name != "emulated_gpu"]
    return files[int(number) - 1 :: int(parts)]


def tests(folder: Path, there: list[str], part: str, until: float, out: Outcome) -> None:
    """Ask the questions; run the tests, each file in a process of its own, where its errors of a card end."""
    env = environment() | {"ARRAYBRIDGE_REQUIRE": ",".join(["numpy", "gpu", *there])}
    if part.startswith("1/"):
        questions(folder, until, env, out)
    files = gpu_files(part)
    counts, skips = Counter[str](), Counter[str]()
    lost: list[str] = []
    outcomes: dict[str, str] = {}
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-p", "no:cacheprovider"]
    for file in files:
        name = str(file.relative_to(ROOT))
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "tests.xml"
            started = time.monotonic()
            full = [*pytest, "--timeout", "120", f"--junitxml={report}", name]
            code = run(full, until - started, env) if until - started > 5 else None
            # 5: no test was collected, since the whole file skips for want of a package.
            if code not in (0, 1, 5) or not report.exists():
                lost.append(f"{name} ({'its time was up' if code is None else f'ended with {code}'})")
                print(f"{name}: LOST", flush=True)
                continue
            of_file = Counter[str]()
            for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
                kind, why = result_of(case)
                outcomes[f"{name}::{case.get('name')}"] = f"{kind}: {why}" if why else kind
                of_file[kind] += 1
                if kind == "not run":
                    skips[why] += 1
                elif kind == "failed":
                    out.failed.append(f"{file.name}::{case.get('name')}")
            counts.update(of_file)
            words = ", ".join(f"{n} {kind}" for kind, n in of_file.items()) or "nothing to run"
            print(f"{name}: {words}, {time.monotonic() - started:.0f} s", flush=True)
        # After each file, so that a run which is cut short has told what it did.
        (folder / f"tests-{part.replace('/', 'of')}.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    out.ran += counts["passed"]
    out.not_run += counts["not run"]
    out.failed += lost
    out.lines.append(
        f"tests: {counts['passed']} passed, {counts['failed']} FAILED, {counts['not run']} NOT RUN, and"
        f" {len(lost)} of {len(files)} files came to no end"
    )
    out.lines += [f"  not run, {count} times: {why}" for why, count in skips.most_common(3)]


def result_of(case: ET.Element) -> tuple[str, str]:
    """One test's outcome, and for one that was not run the reason."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is None:
        return "passed", ""
    return "not run", (skipped.get("message") or "").splitlines()[0][:90]


def benchmarks(folder: Path, there: list[str], until: float, out: Outcome) -> None:
    """Run every benchmark of a card."""
    for one in benchmarks_into(folder):
        if not set(one.needs_one_of) & set(there):
            out.lines.append(f"{one.name}: NOT RUN, since {' or '.join(one.needs_one_of)} is missing")
            out.not_run += 1
            continue
        started = time.monotonic()
        seconds = min(one.seconds, until - started)
        code = run([sys.executable, *one.command], seconds, environment(), one.prints)
        how = "its time was up" if code is None else "done" if code == 0 else f"FAILED with {code}"
        out.lines.append(f"{one.name}: {how}, {time.monotonic() - started:.0f} s")
        if code == 0:
            out.ran += 1
        else:
            out.failed.append(f"{one.name}: {how}")


def part_of(words: str) -> str:
    """``"2/3"``, checked."""
    found = re.fullmatch(r"([1-9])/([1-9])", words)
    if found is None or found[1] > found[2]:
        raise argparse.ArgumentTypeError(f"{words!r} is no part, as 1/2 is")
    return words


def main() -> int:
    """One of the two runs."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__)
    parser.add_argument("what", choices=("tests", "benchmarks"))
    parser.add_argument("--part", type=part_of, default="1/1", help="of the tests: 1/2, 2/2")
    parser.add_argument("--site", type=Path, help="a folder of wheels that this Python lacks")
    parser.add_argument("--out", type=Path, help="in place of benchmarks/results/card-NAME")
    chosen = parser.parse_args()
    until = time.monotonic() + LIMIT
    gpu = gpu_name()
    if EMULATED and chosen.out is None:
        sys.exit(
            "This card is emulated. Its results are no card's: pass --out, away from benchmarks/results."
        )
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = (chosen.out or ROOT / "benchmarks" / "results" / f"card-{words}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="card-site-") as site:
        on_path(chosen.site, Path(site))
        return everything(chosen.what, chosen.part, gpu, folder, until)


def everything(what: str, part: str, gpu: str, folder: Path, until: float) -> int:
    """Run it and sum it up; the exit code."""
    there, missing = frameworks()
    out = Outcome()
    if what == "tests":
        tests(folder, list(there), part, until, out)
    else:
        benchmarks(folder, list(there), until, out)
    verdict, code = out.verdict()
    versions = ", ".join(f"{name} {version}" for name, version in there.items()) or "none"
    lacking = "; ".join(f"{name} ({why})" for name, why in missing.items())
    summary = [
        f"card: {gpu}" + (" - EMULATED, a rehearsal: nothing here is a figure of a card" * EMULATED),
        f"frameworks: {versions}" + (f"; MISSING: {lacking}" if missing else ""),
        *out.lines,
        f"results: {folder}",
        verdict,
    ]
    text = "\n".join(summary)
    (folder / f"summary-{what}-{part.replace('/', 'of')}.txt").write_text(text + "\n")
    print(f"\n{text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
