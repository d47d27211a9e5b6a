"""Check this checkout on a machine with a GPU, and report what failed; see tools/gpu_check.sh.

Every step is a separate process with a time limit. A process that cannot be ended, because it waits for the
driver, is abandoned. Results are written after each step.
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("cupy", "torch", "jax", "tensorflow")
PARTS = ("smoke", "questions", "tests", "ratios")
EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))

#: Modules that arraybridge and its tests import, and the packages that provide them.
SMALL_PACKAGES = {
    "numpy": "numpy",
    "optree": "optree",
    "array_api_compat": "array-api-compat",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "ml_dtypes": "ml_dtypes",
    "scipy": "scipy",
    "xarray": "xarray",
    "cloudpickle": "cloudpickle",
    "dask": "dask[array]",
    "distributed": "distributed",
}
#: Without these, nothing can run.
ESSENTIAL = ("numpy", "optree", "array_api_compat", "psutil", "pynvml", "pytest", "pytest_timeout")
#: A skip for one of these reasons is not applicable, instead of missing.
NOT_APPLICABLE = ("not applicable", "dask_cuda can't be imported")

#: Seconds of each step. Whatever is left goes to the tests.
LIMITS = {
    "install": 90,
    "frameworks": 330,
    "record": 60,
    "smoke": 60,
    "together": 90,
    "questions": 120,
    "ratios": 115,
}
TEST_FILE_LIMIT = 100
#: Test files in the order of their value. All others follow.
FILES_BY_VALUE = (
    *(
        "gpu/test_conversion",
        "gpu/test_tensorflow",
        "gpu/test_ordering",
        "gpu/test_late_reads",
        "gpu/test_memory",
    ),
    *(
        "gpu/test_current_device",
        "gpu/test_prefetch",
        "gpu/test_offload",
        "gpu/test_decorators",
        "test_conformance",
    ),
    *("gpu/test_devices", "gpu/test_processes", "gpu/test_sleeping_driver", "gpu/test_sparse"),
)
#: Processes for the questions, each of which goes on after the question that hung or crashed the last one.
MOST_HANGS = 4
#: Lines of the output of a failed process that are stored and printed again.
TAIL = 25


class Finished(NamedTuple):
    """A process that has ended or was abandoned. ``code`` is None if it exceeded its limit."""

    code: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The last lines, or those around a crash, whose stack begins with the innermost call."""
        lines = self.output.rstrip().splitlines()
        crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        return "\n".join(lines[-TAIL:] if crash is None else lines[max(0, crash - 5) : crash + TAIL])

    @property
    def ending(self) -> str:
        """The way in which the process ended, as text."""
        if self.code is None:
            return f"no result within {self.seconds:.0f} s"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"


class Failure(NamedTuple):
    """A failure: what failed, the message, and the last lines of the output."""

    what: str
    message: str
    details: str = ""


class Report:
    """The results so far, in a folder.

    Attributes:
        lines: The lines of the summary.
        ran: The number of steps and tests that ran and passed.
        not_run: The number of those that did not run, although they apply to this machine.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.until = time.monotonic() + seconds
        self.lines: list[str] = []
        self.failures: list[Failure] = []
        self.ran = 0
        self.not_run = 0

    def left(self, at_most: float, reserve: float = 0) -> float:
        """Return the seconds for a step, of which it gets at most some, and leaves a reserve for others."""
        return min(at_most, self.until - time.monotonic() - reserve)

    def note(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def fail(self, what: str, message: str, details: str = "") -> None:
        """Record a failure, write all failures, and print this one."""
        self.failures.append(Failure(what, message, details))
        (self.folder / "failures.txt").write_text("\n\n".join(map(_text_of, self.failures)) + "\n")
        print(f"FAILED {what}: {message}", flush=True)

    def verdict(self) -> tuple[str, int]:
        """Return the verdict as text and as an exit status."""
        if self.failures:
            named = "; ".join(failure.what for failure in self.failures)
            return f"FAILED: {named if len(named) < 160 else named[:157] + '...'}", 1
        if self.not_run or not self.ran:
            return f"INCOMPLETE: nothing failed, but {self.not_run} were NOT RUN", 3
        return "PASSED: everything ran", 0

    def finish(self) -> int:
        """Print the failures again, then the summary, and return the exit status."""
        verdict, code = self.verdict()
        summary = "\n".join([*self.lines, f"results: {self.folder}", verdict])
        (self.folder / "summary.txt").write_text(summary + "\n")
        for failure in self.failures:
            print(f"\n{_text_of(failure)}")
        print(f"\n== summary\n{summary}", flush=True)
        return code


def _text_of(failure: Failure) -> str:
    return f"== {failure.what}\n{failure.message}\n{failure.details}".rstrip()


# -- processes -----------------------------------------------------------------------------------------


def run(command: list[str], seconds: float, log: Path, env: dict[str, str] | None = None) -> Finished:
    """Run a command with its output in a file; end it and its children after some seconds."""
    print("$", *command, flush=True)
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env or environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    code = None
    try:
        code = process.wait(max(1, seconds))
    except subprocess.TimeoutExpired:
        _end(process)
    return Finished(code, log.read_text(errors="replace"), time.monotonic() - started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children. First, Python prints where each thread is (PYTHONFAULTHANDLER)."""
    for how in (signal.SIGABRT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
    if process.poll() is None:
        print(f"process {process.pid} waits for the driver and cannot be ended", flush=True)


def environment() -> dict[str, str]:
    """Return the environment of all processes: the frameworks share the GPU, and Python prints its stack."""
    return {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONFAULTHANDLER": "1",
    }


# -- packages ------------------------------------------------------------------------------------------


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


def missing_modules(report: Report) -> list[str]:
    """Return the small packages' modules that a new process does not find."""
    code = f"import importlib.util as u; print([n for n in {[*SMALL_PACKAGES]} if u.find_spec(n) is None])"
    done = run([sys.executable, "-c", code], 30, report.folder / "modules.txt")
    found: list[str] = json.loads(done.output.replace("'", '"')) if done.code == 0 else []
    return found


def install(report: Report) -> bool:
    """Install missing small packages, and return whether the essential ones are there."""
    missing = missing_modules(report)
    if missing:
        command = [sys.executable, "-m", "pip", "install", *(SMALL_PACKAGES[name] for name in missing)]
        done = run(command, LIMITS["install"], report.folder / "install.txt")
        if done.code != 0:
            report.fail("installing small packages", f"{' '.join(command)}: {done.ending}", done.tail)
        missing = missing_modules(report)
    essential = [name for name in missing if name in ESSENTIAL]
    if missing:
        packages = " ".join(SMALL_PACKAGES[name] for name in missing)
        report.fail("missing packages", f"Install them: python -m pip install {packages}")
    return not essential


def install_frameworks(report: Report) -> None:
    """Install the frameworks whose CUDA libraries agree."""
    command = [sys.executable, "-m", "pip", "install", "-r", "tools/gpu_requirements.txt"]
    done = run(command, report.left(LIMITS["frameworks"]), report.folder / "install-frameworks.txt")
    if done.code != 0:
        report.fail("installing the frameworks", f"{' '.join(command)}: {done.ending}", done.tail)


# -- environment and smoke tests -----------------------------------------------------------------------


def record(report: Report) -> None:
    """Record the environment, and what nvidia-smi prints if it is installed."""
    path = report.folder / "environment.json"
    done = run(
        [sys.executable, "tools/gpu_environment.py", str(path)], LIMITS["record"], path.with_suffix(".txt")
    )
    if done.code != 0:
        report.fail("recording the environment", done.ending, done.tail)
    try:
        listing = run(["nvidia-smi", "-q"], 20, report.folder / "nvidia-smi.txt")
    except OSError:
        report.note("nvidia-smi: not installed")
        return
    if listing.code is None:
        report.fail("nvidia-smi", listing.ending, "The driver does not respond.")


def describe_gpu(report: Report) -> str:
    """Return the name of the first GPU and note its state; "unknown" if NVML does not list it."""
    path = report.folder / "environment.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    gpus = found.get("gpus", [])
    if not isinstance(found.get("driver"), str) or not gpus:
        report.fail("NVML", f"it lists no GPU: {found.get('driver', 'no record')}")
        return "unknown"
    name = str(gpus[0]["name"])
    emulated = " (EMULATED: these are not results of a GPU)" if EMULATED else ""
    report.note(f"GPU: {len(gpus)} x {name}{emulated}, driver {found['driver']}, CUDA {found.get('cuda')}")
    mode, slices = gpus[0].get("compute mode"), gpus[0].get("MIG (current, pending)")
    report.note(f"compute mode {mode}, MIG {slices}, peer access {found.get('peer access') or 'none'}")
    return name


def smoke(report: Report) -> list[str]:
    """Run one array, one kernel and one transfer per framework, and all frameworks in one process.

    Returns:
        The frameworks that work on the GPU.
    """
    found: dict[str, str] = {}
    broken = []
    for name in FRAMEWORKS:
        done = run(
            [sys.executable, "tools/gpu_smoke.py", name],
            report.left(LIMITS["smoke"]),
            report.folder / f"smoke-{name}.txt",
        )
        if done.code == 0:
            found[name] = json.loads(done.output.rstrip().splitlines()[-1])[name]["version"]
            report.ran += 1
        elif f"No module named {name!r}" in done.output:
            report.note(f"{name}: not installed")
            report.not_run += 1
        else:
            report.fail(name, explain_smoke(done), done.tail)
            broken.append(name)
    block(report, broken)
    report.note(f"frameworks: {', '.join(f'{name} {version}' for name, version in found.items()) or 'none'}")
    if len(found) > 1:
        log = report.folder / "smoke-together.txt"
        command = [sys.executable, "tools/gpu_smoke.py", *found]
        done = run(command, report.left(LIMITS["together"]), log)
        if done.code == 0:
            report.ran += 1
        else:
            report.fail("all frameworks in one process", explain_smoke(done), done.tail)
    return list(found)


def block(report: Report, names: list[str]) -> None:
    """Make imports of frameworks that crash or hang raise `ImportError`, so that all other tests can run."""
    folder = report.folder / "blocked"
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        text = f"raise ImportError({f'{name} failed its smoke test'!r})\n"
        (folder / name / "__init__.py").write_text(text)
    if names:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


def explain_smoke(done: Finished) -> str:
    """Return the failed step of a smoke test, and the cause."""
    steps = re.findall(r"^(\w+: [a-zA-Z, ]+)$", done.output, re.MULTILINE)
    absent = re.search(r"No module named '([\w.]+)'", done.output)
    cause = (done.output.rstrip().splitlines() or [""])[-1][:200] if done.code not in (None, 0) else ""
    advice = f" (install the module {absent[1]})" if absent else ""
    return f"failed at step '{steps[-1] if steps else 'start'}', {done.ending}: {cause}{advice}"


# -- questions, tests and ratios -----------------------------------------------------------------------


def questions(report: Report) -> None:
    """Run tools/gpu_questions.py, and add its answers to the report."""
    answers = report.folder / "questions.json"
    answers.unlink(missing_ok=True)
    until = time.monotonic() + report.left(LIMITS["questions"])
    done = Finished(None, "", 0)
    for i in range(MOST_HANGS):
        log = report.folder / f"questions-{i}.txt"
        seconds = min(LIMITS["questions"] / 2, until - time.monotonic())
        done = run([sys.executable, "tools/gpu_questions.py", str(answers)], seconds, log)
        if (done.code is not None and done.code >= 0) or until - time.monotonic() < 5:
            break
        report.fail(f"questions, process {i}", done.ending, done.tail)  # the next process goes on
    found = json.loads(answers.read_text()) if answers.exists() else {}
    if not found:
        report.fail("questions", f"{done.ending}, without an answer", done.tail)
    kinds = Counter[str]()
    for question, answer in found.items():
        kind = answer.split(" ", 1)[0].strip(",:")
        kinds[kind if kind in ("no", "raised", "not") else "answered"] += 1
        if kind in ("no", "raised"):
            report.fail(question, *answer.partition("\n")[::2])
    report.ran += kinds["answered"]
    labels = {"answered": "answered", "no": "NO", "raised": "raised", "not": "not applicable"}
    report.note("questions: " + ", ".join(f"{kinds[kind]} {label}" for kind, label in labels.items()))


def gpu_files(part: str) -> list[Path]:
    """Return the files with GPU tests in the order of their value; for ``"1/2"``, every other one."""
    number, _, parts = part.partition("/")
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    # tests/emulated_gpu tests the emulation itself.
    files = [f for f in files if f.parent.name != "emulated_gpu"]
    order = {name: i for i, name in enumerate(FILES_BY_VALUE)}
    files.sort(key=lambda f: order.get(str(f.relative_to(ROOT / "tests").with_suffix("")), len(order)))
    return files[int(number) - 1 :: int(parts)]


def result_of(case: ET.Element) -> tuple[str, str]:
    """Return the outcome of a test, and the message if it failed or was not run."""
    for element in (*case.iter("failure"), *case.iter("error")):
        lines = (element.text or "").rstrip().splitlines()
        return "failed", "\n".join([element.get("message") or "", *lines[-TAIL:]])
    skipped = case.find("skipped")
    if skipped is None:
        return "passed", ""
    why = (skipped.get("message") or "").splitlines()[0][:90]
    return "not applicable" if why.startswith(NOT_APPLICABLE) else "not run", why


def tests(report: Report, found: list[str], part: str, reserve: float) -> None:
    """Run the test files, each in a separate process, because CUDA errors are permanent."""
    env = environment() | {"ARRAYBRIDGE_REQUIRE": ",".join(["numpy", "gpu", *found])}
    counts = Counter[str]()
    outcomes: dict[str, str] = {}
    files = gpu_files(part)
    for file in files:
        seconds = report.left(TEST_FILE_LIMIT, reserve)
        if seconds < 5:
            counts["files without time"] += 1
            continue
        of_file = test_file(report, file, seconds, env)
        outcomes.update(of_file)
        counts.update(outcome.partition(":")[0] for outcome in of_file.values())
        (report.folder / "tests.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    report.ran += counts["passed"]
    report.not_run += counts["not run"] + counts["files without time"]
    report.note(
        f"tests: {counts['passed']} passed, {counts['failed']} FAILED, {counts['not run']} NOT RUN,"
        f" {counts['not applicable']} not applicable;"
        f" {counts['files without time']} of {len(files)} files had no time left"
    )
    skips = Counter(outcome for outcome in outcomes.values() if outcome.startswith("not run"))
    report.lines += [f"  {why}, {count} times" for why, count in skips.most_common(5)]


def test_file(report: Report, file: Path, seconds: float, env: dict[str, str]) -> dict[str, str]:
    """Run one file, report its failures, and return outcomes by test, such as ``"not run: reason"``."""
    name = str(file.relative_to(ROOT))
    xml = report.folder / f"{file.parent.name}-{file.stem}.xml"
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-v", "-p", "no:cacheprovider"]
    # A hanging test ends with its stack before the file reaches its limit.
    full = [*pytest, "--timeout", str(max(3, int(seconds) - 10)), f"--junitxml={xml}", name]
    done = run(full, seconds, xml.with_suffix(".txt"), env)
    # 5: no test was collected, because the file skips if a package is missing.
    if done.code not in (0, 1, 5) or not xml.exists():
        report.fail(name, done.ending, done.tail)
        return {}
    outcomes = {}
    for case in ET.parse(xml).iter("testcase"):  # noqa: S314 - pytest has just written it
        kind, why = result_of(case)
        outcomes[f"{name}::{case.get('name')}"] = f"{kind}: {why}" if why else kind
        if kind == "failed":
            report.fail(f"{file.stem}::{case.get('name')}", *why.partition("\n")[::2])
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    text = ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "no tests"
    print(f"{name}: {text}, {done.seconds:.0f} s", flush=True)
    return outcomes


def ratios(report: Report) -> None:
    """Run tools/gpu_ratios.py, and add its results to the report."""
    path = report.folder / "ratios.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "tools/gpu_ratios.py", str(path)]
    done = run(command, report.left(LIMITS["ratios"]), path.with_suffix(".txt"))
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, result in found.items():
        if isinstance(result, dict):
            report.note(f"  {name}: {result['ratio']}")
    if done.code != 0:
        report.fail("ratios", done.ending, done.tail)
    else:
        report.ran += 1


# -- the whole check -----------------------------------------------------------------------------------


def part_of(text: str) -> str:
    """Return a part such as ``"2/3"`` if it is valid."""
    found = re.fullmatch(r"([1-9])/([1-9])", text)
    if found is None or found[1] > found[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part. Pass, for example, 1/2.")
    return text


def steps_of(text: str) -> list[str]:
    """Return the chosen parts if they exist."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(PARTS)}.")
    return chosen


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__)
    parser.add_argument("--only", type=steps_of, default=[*PARTS], help=f"some of {','.join(PARTS)}")
    parser.add_argument("--part", type=part_of, default="1/1", help="part of the tests, such as 1/2 or 2/2")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit of the whole run; defaults to 9.5")
    parser.add_argument("--frameworks", action="store_true", help="install tools/gpu_requirements.txt first")
    parser.add_argument("--site", type=Path, help="folder of wheels for packages that this Python lacks")
    parser.add_argument("--out", type=Path, help="folder of the results")
    return parser.parse_args()


def main() -> int:
    """Run the check, and return the exit status."""
    chosen = parse()
    if EMULATED and chosen.out is None:
        sys.exit("This GPU is emulated, so its results are not those of a GPU. Pass --out with a folder.")
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as site:
        folder: Path = chosen.out or ROOT / "benchmarks" / "results" / "gpu-check"
        folder.mkdir(parents=True, exist_ok=True)
        on_path(chosen.site, Path(site))
        report = Report(folder.resolve(), chosen.minutes * 60 - 10)
        if install(report):
            check(report, chosen)
        return report.finish()


def check(report: Report, chosen: argparse.Namespace) -> None:
    """Run the chosen parts."""
    if chosen.frameworks:
        install_frameworks(report)
    record(report)
    gpu = describe_gpu(report)
    found = smoke(report)
    if gpu == "unknown" and not found:
        report.fail("GPU", "neither NVML nor a framework finds a GPU, so nothing else can run")
        return
    if "questions" in chosen.only:
        questions(report)
    if "tests" in chosen.only:
        tests(report, found, chosen.part, LIMITS["ratios"] + 5 if "ratios" in chosen.only else 5)
    if "ratios" in chosen.only:
        ratios(report)


if __name__ == "__main__":
    sys.exit(main())
