"""Run the GPU questions and tests, or the GPU benchmarks, and write a summary.

tools/gpu_check.sh runs this. The exit status is 0 if everything ran and passed, 1 if something failed, and 3
if nothing failed but something did not run. A skip does not count as a pass.
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
#: Seconds per run, with half a minute left to write the results.
LIMIT = 9 * 60 - 30
QUESTIONS_LIMIT = 150
EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))

#: Prints the version of a framework and whether it finds a GPU. A framework may crash this process.
PROBE = """
import importlib, sys, arraybridge
version = importlib.import_module(sys.argv[1]).__version__
print(version, any(device.kind == "gpu" for device in arraybridge.devices(sys.argv[1])))
"""


class Benchmark(NamedTuple):
    """A benchmark of a GPU: arguments to Python, required frameworks and time limit in seconds.

    ``prints`` is the file for its standard output.
    """

    name: str
    command: tuple[str, ...]
    needs_one_of: tuple[str, ...]
    seconds: float
    prints: Path | None = None


def benchmarks_into(folder: Path) -> list[Benchmark]:
    """Return all benchmarks of a GPU, which write their results into a folder."""
    # On an emulated GPU, CuPy has no cuBLAS and cuFFT, and times are meaningless.
    few = ("--functions", "elementwise,reduction,filter", "--rounds", "3") if EMULATED else ()
    sizes = "1e3,1e4" if EMULATED else "1e3,1e4,1e5,1e6,1e7,1e8"
    cli, any_of = ("-m", "arraybridge"), ("cupy", "torch", "jax")
    transfer = ("-m", "benchmarks.memory", "--section", "transfer", "--section", "reading")
    ahead = (
        "-m",
        "benchmarks.prefetch",
        "--section",
        "gpu",
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
    """The lines of the summary, and the counts that decide the verdict."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ran = 0
        self.failed: list[str] = []
        self.not_run = 0

    def verdict(self) -> tuple[str, int]:
        """Return the verdict as text and as an exit status."""
        if self.failed:
            named = "; ".join(self.failed)
            return f"FAILED: {named if len(named) < 160 else named[:157] + '...'}", 1
        if self.not_run or not self.ran:
            return f"INCOMPLETE: nothing failed, but {self.not_run} were NOT RUN", 3
        return "PASSED: everything ran", 0


def run(command: list[str], seconds: float, env: dict[str, str], prints: Path | None = None) -> int | None:
    """Run a command, and return its exit status; None if it timed out, in which case its children are killed.

    ``prints`` is the file for its standard output.
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
    """Put the checkout and the contents of the wheels first on the path of all new processes."""
    paths = [str(ROOT)]
    if wheels is not None:
        files = sorted(wheels.glob("*.whl"))
        if not files:
            sys.exit(f"{wheels} has no wheels. Download them as described in tools/gpu_check.sh.")
        for file in files:
            print("Unpack", file.name, flush=True)
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(folder)
        paths.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


# -- environment -----------------------------------------------------------------------------------


def gpu_name() -> str:
    """Return the name of the first GPU that nvidia-smi lists, or exit if there is none."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("nvidia-smi lists no NVIDIA GPU. Nothing was run, and nothing has passed.")
    found = re.match(r"GPU 0: (.+?) \(UUID", listing)
    return found[1] if found else "unknown"


def frameworks() -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions of the frameworks that find the GPU, and the reasons why the others do not."""
    found, missing = {}, {}
    for name in FRAMEWORKS:
        command = [sys.executable, "-c", PROBE, name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, env=environment()
            )
        except subprocess.TimeoutExpired:
            missing[name] = "did not start within a minute"
            continue
        output = done.stdout.split()
        if done.returncode == 0 and output[-1:] == ["True"]:
            found[name] = output[-2]
        elif done.returncode == 0:
            missing[name] = f"{output[-2]} finds no GPU"
        else:
            last = (done.stderr.strip().splitlines() or ["crashed"])[-1]
            missing[name] = "not installed" if "No module named" in last else last[:60]
    return found, missing


# -- the two parts -----------------------------------------------------------------------------------


def questions(folder: Path, until: float, env: dict[str, str], out: Outcome) -> None:
    """Run tools/gpu_questions.py, and add its answers to the outcome."""
    answers = folder / "questions.json"
    answers.unlink(missing_ok=True)
    seconds = min(QUESTIONS_LIMIT, until - time.monotonic())
    run([sys.executable, "tools/gpu_questions.py", str(answers)], seconds, env)
    if not answers.exists():
        out.failed.append("no question was answered within the time limit")
        out.lines.append("questions: NONE answered within the time limit")
        return
    kinds = Counter[str]()
    for question, answer in json.loads(answers.read_text()).items():
        kind = answer.split(" ", 1)[0].strip(",:")
        kinds[kind if kind in ("no", "raised", "not") else "answered"] += 1
        if kind in ("no", "raised"):
            out.failed.append(f"{question} {answer}")
    out.ran += kinds["answered"]
    out.not_run += kinds["not"]
    labels = {"answered": "answered", "no": "NO", "raised": "raised", "not": "NOT ASKED"}
    out.lines.append("questions: " + ", ".join(f"{kinds[kind]} {label}" for kind, label in labels.items()))


def gpu_files(part: str) -> list[Path]:
    """Return the files with GPU tests; for ``"1/2"``, every other one."""
    number, _, parts = part.partition("/")
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    # tests/emulated_gpu tests the emulation itself.
    if not EMULATED:
        files = [f for f in files if f.parent.name != "emulated_gpu"]
    return files[int(number) - 1 :: int(parts)]


def tests(folder: Path, found: list[str], part: str, until: float, out: Outcome) -> None:
    """Run the questions and the tests, each file in a separate process, because CUDA errors are permanent."""
    env = environment() | {"ARRAYBRIDGE_REQUIRE": ",".join(["numpy", "gpu", *found])}
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
            # 5: no test was collected, because the file skips if a package is missing.
            if code not in (0, 1, 5) or not report.exists():
                lost.append(f"{name} ({'timed out' if code is None else f'exit status {code}'})")
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
            text = ", ".join(f"{n} {kind}" for kind, n in of_file.items()) or "no tests"
            print(f"{name}: {text}, {time.monotonic() - started:.0f} s", flush=True)
        # Write the outcomes after each file, in case the run is interrupted.
        (folder / f"tests-{part.replace('/', 'of')}.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    out.ran += counts["passed"]
    out.not_run += counts["not run"]
    out.failed += lost
    out.lines.append(
        f"tests: {counts['passed']} passed, {counts['failed']} FAILED, {counts['not run']} NOT RUN, and"
        f" {len(lost)} of {len(files)} files did not finish"
    )
    out.lines += [f"  not run, {count} times: {why}" for why, count in skips.most_common(3)]


def result_of(case: ET.Element) -> tuple[str, str]:
    """Return the outcome of a test, and the reason if it was not run."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is None:
        return "passed", ""
    return "not run", (skipped.get("message") or "").splitlines()[0][:90]


def benchmarks(folder: Path, found: list[str], until: float, out: Outcome) -> None:
    """Run all benchmarks of a GPU."""
    for one in benchmarks_into(folder):
        if not set(one.needs_one_of) & set(found):
            out.lines.append(f"{one.name}: NOT RUN, because {' or '.join(one.needs_one_of)} is missing")
            out.not_run += 1
            continue
        started = time.monotonic()
        seconds = min(one.seconds, until - started)
        code = run([sys.executable, *one.command], seconds, environment(), one.prints)
        how = "timed out" if code is None else "done" if code == 0 else f"FAILED with {code}"
        out.lines.append(f"{one.name}: {how}, {time.monotonic() - started:.0f} s")
        if code == 0:
            out.ran += 1
        else:
            out.failed.append(f"{one.name}: {how}")


def part_of(text: str) -> str:
    """Return a part such as ``"2/3"`` if it is valid."""
    found = re.fullmatch(r"([1-9])/([1-9])", text)
    if found is None or found[1] > found[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part. Pass, for example, 1/2.")
    return text


def main() -> int:
    """Run the tests or the benchmarks, and return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__)
    parser.add_argument("what", choices=("tests", "benchmarks"))
    parser.add_argument("--part", type=part_of, default="1/1", help="part of the tests, such as 1/2 or 2/2")
    parser.add_argument("--site", type=Path, help="folder of wheels for packages that this Python lacks")
    parser.add_argument(
        "--out", type=Path, help="folder of the results instead of benchmarks/results/gpu-NAME"
    )
    chosen = parser.parse_args()
    until = time.monotonic() + LIMIT
    gpu = gpu_name()
    if EMULATED and chosen.out is None:
        sys.exit(
            "This GPU is emulated, so its results are not those of a GPU. Pass --out with another folder."
        )
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = (chosen.out or ROOT / "benchmarks" / "results" / f"gpu-{name}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as site:
        on_path(chosen.site, Path(site))
        return everything(chosen.what, chosen.part, gpu, folder, until)


def everything(what: str, part: str, gpu: str, folder: Path, until: float) -> int:
    """Run the tests or benchmarks, write the summary, and return the exit status."""
    found, missing = frameworks()
    out = Outcome()
    if what == "tests":
        tests(folder, list(found), part, until, out)
    else:
        benchmarks(folder, list(found), until, out)
    verdict, code = out.verdict()
    versions = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    lacking = "; ".join(f"{name} ({why})" for name, why in missing.items())
    summary = [
        f"GPU: {gpu}" + (" (EMULATED: these are not results of a GPU)" if EMULATED else ""),
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
