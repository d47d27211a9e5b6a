"""``arraybridge doctor``: what is installed, what each framework sees, what will go wrong, and the fix.

`FAULTS` is the table of what is looked for. The facts that it looks at are gathered in processes apart
(`arraybridge.cli.probe`), so that a broken framework is reported and harms nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

import arraybridge
from arraybridge import hardware
from arraybridge.cli import output
from arraybridge.cli.probe import COMPANIONS
from arraybridge.formatting import format_bytes
from arraybridge.frameworks import registry
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel
from arraybridge.frameworks.registry import can_find, install_command

Json = dict[str, Any]
_SEVERITIES = {"error": "red", "warning": "yellow", "note": "cyan"}
_STATES = {
    "works": "[green]works[/green]",
    "missing": "[dim]not installed[/dim]",
    "no device": "[yellow]no device[/yellow]",
    "broken": "[red]broken[/red]",
    "crashed": "[red]crashes[/red]",
    "timed out": "[red]hangs[/red]",
}
#: How PoCL says that it cannot compile for this CPU.
_UNKNOWN_CPU = "unknown target CPU"
_CUPYS = {f"cupy-cuda{major}x": major for major in (11, 12, 13, 14)}
#: Every distribution that brings CuPy: its source, and a wheel for each CUDA.
_DISTRIBUTIONS_OF_CUPY = ("cupy", *_CUPYS)


class Findings(NamedTuple):
    """Everything that the table of faults looks at.

    Attributes:
        driver, gpus: the NVIDIA driver and what it sees.
        looks: by framework what was seen of it, and its ``"state"``, one of `_STATES`.
        trials: what came of the orders of imports that were tried, see `_trial`.
        versions: of arraybridge and of what brings CuPy, where it is installed.
        environ: the variables of this process.
        folder: the working directory, which is searched for modules first.
    """

    driver: hardware.Driver = hardware.Driver()
    gpus: Sequence[hardware.Gpu] = ()
    looks: Mapping[str, Json] = {}
    trials: Sequence[Json] = ()
    versions: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    folder: Path = Path()

    def cuda(self, framework: str) -> int | None:
        """The major version of the CUDA that a framework was built for; None for other builds."""
        match = re.match(r"CUDA (\d+)", self.looks.get(framework, {}).get("built_for") or "")
        return None if match is None else int(match.group(1))

    def cuda_of_driver(self) -> int | None:
        """The major version of the newest CUDA that the driver runs; None without a driver."""
        return None if self.driver.cuda is None else self.driver.cuda[0]

    def cupys(self) -> list[str]:
        """The installed distributions that bring CuPy."""
        return [name for name in self.versions if name in _DISTRIBUTIONS_OF_CUPY]

    def fitting_cupy(self) -> str:
        """The CuPy wheel for the driver."""
        return f"cupy-cuda{min(max(self.cuda_of_driver() or 13, 12), 13)}x"


# -- the faults --------------------------------------------------------------------------------------


def _problem(name: str, severity: str, framework: str, message: str, *fix: str) -> Json:
    """A fault that was found.

    ``severity``: ``"error"``, something does not work; ``"warning"``, it will fail or waste later; or
    ``"note"``. ``fix``: shell commands; a line that begins with ``#`` is to be done by hand.
    """
    return {"id": name, "severity": severity, "framework": framework, "message": message, "fix": list(fix)}


def no_driver(facts: Findings) -> Iterator[Json]:
    builds = ", ".join(name for name in facts.looks if facts.cuda(name))
    reason = facts.driver.reason
    if reason and (builds or facts.driver.is_silent):
        message = f"{reason}: what was built for CUDA ({builds or 'nothing here'}) can use no card."
        advice = "# with a card: install its driver, or reboot after an update of it"
        yield _problem("no-driver", "note", "", message, "nvidia-smi", advice)


_BUILT_FOR_CUDA = ("torch", "jax", "tensorflow")


def driver_too_old(facts: Findings) -> Iterator[Json]:
    runs = facts.cuda_of_driver()
    for name in _BUILT_FOR_CUDA:
        built = facts.cuda(name)
        if runs and built and built > runs:
            yield _problem(
                "driver-too-old",
                "error",
                name,
                f"{name} was built for CUDA {built}, and the driver {facts.driver.version} runs CUDA {runs}"
                " at most: it won't use the card.",
                f"# update the NVIDIA driver to one that runs CUDA {built}",
                f"# or install a build of {name} for CUDA {runs}",
            )


def cupy_for_another_cuda(facts: Findings) -> Iterator[Json]:
    runs = facts.cuda_of_driver()
    for name in facts.cupys():
        built = _CUPYS.get(name, runs)
        if runs and built and built != runs:
            fix = (f"pip uninstall -y {name}", f"pip install {facts.fitting_cupy()}")
            if built < runs:
                severity = "warning"
                why = f"it needs libraries of CUDA {built} beside those of the others"
            else:
                severity = "error"
                why = "every allocation will fail"
            message = f"{name} is for CUDA {built}, and the driver runs CUDA {runs}: {why}."
            yield _problem("cupy-cuda-major", severity, "cupy", message, *fix)


def two_cupys(facts: Findings) -> Iterator[Json]:
    names = facts.cupys()
    if len(names) > 1:
        message = (
            f"{' and '.join(names)} are installed at once: they bring the same files, so that what is"
            " imported is a mixture. Removing one breaks the other; remove all and install one."
        )
        fix = (f"pip uninstall -y {' '.join(names)}", f"pip install {facts.fitting_cupy()}")
        yield _problem("two-cupys", "error", "cupy", message, *fix)


def cpu_build(facts: Findings) -> Iterator[Json]:
    for name, *fix in (
        ("torch", "pip uninstall -y torch", "pip install --no-cache-dir torch"),
        ("jax", f'pip install "jax[cuda{max(facts.cuda_of_driver() or 13, 12)}]"'),
        ("tensorflow", "pip uninstall -y tensorflow-cpu", 'pip install "tensorflow[and-cuda]"'),
    ):
        look = facts.looks.get(name, {})
        if facts.gpus and look.get("built_for") == "CPU":
            gpu = facts.gpus[0].name
            message = f"{name} {look['version']} is a build for the CPU: it can't use the {gpu} that is here."
            yield _problem("cpu-build", "warning", name, message, *fix)


def no_opencl(facts: Findings) -> Iterator[Json]:
    look = facts.looks.get("pyclesperanto", {})
    if look.get("state") == "no device":
        message = (
            "pyclesperanto finds no OpenCL device. A card's driver brings one, and PoCL is one for the CPU."
        )
        yield _problem("no-opencl", "error", "pyclesperanto", message, 'pip install "pyopencl[pocl]"')
    elif look.get("plain_import") == "fails":
        message = (
            "A program that imports pyclesperanto before arraybridge finds no OpenCL device: no driver is"
            " configured, and only arraybridge shows it the PoCL that is installed."
        )
        fix = (f"export OCL_ICD_FILENAMES={shlex.quote(use_pocl_wheel())}", "# or import arraybridge first")
        yield _problem("no-opencl", "warning", "pyclesperanto", message, *fix)


def old_pocl(facts: Findings) -> Iterator[Json]:
    if _UNKNOWN_CPU in (facts.looks.get("pyclesperanto", {}).get("error") or ""):
        message = (
            "pyclesperanto's arrays come and go, and none of its functions runs: the compiler of the PoCL"
            " that is installed is older than this CPU, and does not know it."
        )
        fix = (
            "sudo apt install pocl-opencl-icd",
            "# or another PoCL of your system, and import pyclesperanto before tensorflow",
        )
        yield _problem("old-pocl", "error", "pyclesperanto", message, *fix)


def preallocation(facts: Findings) -> Iterator[Json]:
    for name, share, variable, modest in (
        ("jax", "three quarters of a card's memory", "XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("tensorflow", "nearly all memory of every card", "TF_FORCE_GPU_ALLOW_GROWTH", "true"),
    ):
        if facts.gpus and facts.cuda(name) and facts.environ.get(variable, "").lower() != modest:
            message = (
                f"{name} takes {share} at its first use. (In a program, call arraybridge.coexist() first.)"
            )
            yield _problem("takes-card", "warning", name, message, f"export {variable}={modest}")


#: Framework → what also helps if its import crashes after those of others.
_OTHER_ORDER_FIXES = {
    "pyclesperanto": (
        '# or use the PoCL of pip install "pyopencl[pocl]", with OCL_ICD_VENDORS an empty folder',
    )
}


def import_order(facts: Findings) -> Iterator[Json]:
    for trial in facts.trials:
        order = trial["order"]
        crash = trial["crash"]
        at = trial["at"]
        last = at or order[-1]
        before = " and ".join(order[: order.index(last)])
        if not crash or not before or facts.looks.get(last, {}).get("state") in _ENDED:
            continue
        when = "is imported and used" if at else "was used and the program ends"
        message = f"After {before} the process is ended when {last} {when}: {crash}."
        fix = [f"# import {last} before {before}" if at else f"# use {last} and {before} in two processes"]
        if last in COMPANIONS:
            message += (
                " PyTorch imports it late: in torch.compile, optimizers, torch.func, checkpoints and"
                " profilers."
            )
        fix += _OTHER_ORDER_FIXES.get(last, ())
        yield _problem("import-order", "error", last, message, *fix)


def namesake(facts: Findings) -> Iterator[Json]:
    version = facts.versions.get("arraybridge")
    own = arraybridge.__version__
    if version not in (None, own):
        folder = Path(arraybridge.__file__).resolve().parent
        message = (
            f"arraybridge {version} is installed, and arraybridge {own} is imported, from {folder}: another"
            " package of the same name is in the way, or an old copy."
        )
        fix = ("pip uninstall -y arraybridge", "# then install this one again")
        yield _problem("namesake", "error", "", message, *fix)


#: Frameworks for which a missing device is a fault with its own description, above.
_DEVICE_FAULTS = {"pyclesperanto": no_opencl}
#: Framework → the distribution to reinstall, if it depends on the machine.
_FITTING = {"cupy": Findings.fitting_cupy}


def _reinstall(name: str, facts: Findings) -> str:
    if name in _FITTING:
        return f"pip install --force-reinstall {_FITTING[name](facts)}"
    return install_command(registry.metadata_of(name), "--force-reinstall")


def broken(facts: Findings) -> Iterator[Json]:
    verbs = {"crashed": "ends the process", "timed out": "hangs", "broken": "does not work"}
    if facts.gpus:
        verbs["no device"] = "finds no device"
    for name, look in facts.looks.items():
        verb = verbs.get(look["state"])
        lacks_device = look["state"] == "no device"
        if verb is None or (lacks_device and name in _DEVICE_FAULTS):
            continue
        if _UNKNOWN_CPU in (look.get("error") or ""):
            continue
        fix = _reinstall(name, facts)
        if lacks_device and "CUDA_VISIBLE_DEVICES" in facts.environ:
            fix = "unset CUDA_VISIBLE_DEVICES"
        shadow = facts.folder / f"{name}.py"
        if shadow.exists():
            verb += f" ({shadow} is imported in its place)"
            fix = f"mv {shlex.quote(str(shadow))} {shlex.quote(str(facts.folder / f'my_{name}.py'))}"
        yield _problem("broken", "error", name, f"{name} {verb}: {look.get('error')}", fix)


#: What is looked for: each looks at the facts, and says and advises what there is to be said.
FAULTS: tuple[Callable[[Findings], Iterator[Json]], ...] = (
    no_driver,
    driver_too_old,
    cupy_for_another_cuda,
    two_cupys,
    cpu_build,
    no_opencl,
    old_pocl,
    preallocation,
    import_order,
    namesake,
    broken,
)


def problems_of(facts: Findings) -> list[Json]:
    """All faults, the worst first."""
    problems = [problem for fault in FAULTS for problem in fault(facts)]
    return sorted(problems, key=_rank)


def _rank(problem: Json) -> int:
    return list(_SEVERITIES).index(problem["severity"])


# -- gathering the facts -----------------------------------------------------------------------------

# The inspected processes share the card with whatever else runs on it.
_MODEST = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_SOUND = ("works", "no device")
_ENDED = ("crashed", "timed out")


def gather(seconds: float) -> Findings:
    """Look at everything.

    One process uses all frameworks in turn, and another in the reverse order: so each comes both before and
    after every other. What is not sound in either is looked at alone; and where an order ends its process,
    the pairs that could be to blame are tried.
    """
    names = registry.framework_names()
    installed = tuple(name for name in names if registry.is_installed(name))
    trials = _in_parallel([installed, installed[::-1]], seconds)
    looks = _sound_looks(trials)
    doubtful = [(name,) for name in installed if name not in looks]
    for trial in _in_parallel(doubtful, seconds):
        looks |= trial["looks"]
    narrowed = _narrowed(trials, looks, seconds)
    narrowed += _with_companions(installed, seconds)
    if looks.get("pyclesperanto", {}).get("state") in _SOUND:
        looks["pyclesperanto"]["plain_import"] = _plain_import()
    versions = _versions()
    for name, look in looks.items():  # one that does not import says nothing itself
        look["version"] = look.get("version") or registry.version_of(name) or None
    every = {name: looks.get(name, {"state": "missing", "devices": []}) for name in names}
    return Findings(hardware.driver(), hardware.gpus(), every, narrowed, versions, os.environ, Path.cwd())


def _sound_looks(trials: Sequence[Json]) -> dict[str, Json]:
    """Return what was seen of each framework that works in one of the trials, from the slower import.

    The longer time is nearer to its own: an earlier import may have brought what it needs.
    """
    sound: dict[str, Json] = {}
    for trial in trials:
        for name, look in trial["looks"].items():
            before = sound.get(name, {}).get("seconds", 0)
            if look.get("state") in _SOUND and look.get("seconds", 0) >= before:
                sound[name] = look
    return sound


def _narrowed(trials: Sequence[Json], looks: Mapping[str, Json], seconds: float) -> list[Json]:
    """Return the pairs of frameworks that crash, or the trials in which no pair is to blame."""
    narrowed: list[Json] = []
    for trial in trials:
        at = trial["at"]
        order = trial["order"]
        # What fails alone is to blame itself.
        suspects = () if not at or looks[at]["state"] in _ENDED else order[: order.index(at)]
        pairs = _in_parallel([(name, at) for name in suspects], seconds)
        narrowed += [pair for pair in pairs if pair["crash"]] or [trial]
    return narrowed


def _with_companions(installed: Sequence[str], seconds: float) -> list[Json]:
    """Try to import each installed companion after each framework; return the trials that crash.

    A companion that crashes alone is not reported: no order of imports is to blame.
    """
    crashes: list[Json] = []
    for companion in filter(can_find, COMPANIONS):
        (every, alone) = _in_parallel([(*installed, companion), (companion,)], seconds)
        if every["at"] == companion and not alone["crash"]:
            pairs = _in_parallel([(name, companion) for name in installed], seconds)
            crashes += [pair for pair in pairs if pair["crash"]] or [every]
    return crashes


def _in_parallel(orders: Sequence[tuple[str, ...]], seconds: float) -> list[Json]:
    """Try several orders at once, each in a process of its own; all end with this function."""
    command = [sys.executable, "-m", "arraybridge.cli.probe", str(seconds)]
    processes = [
        subprocess.Popen(
            [*command, *order],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | _MODEST,
        )
        for order in orders
    ]
    try:
        return [
            _trial(order, process.communicate(), process.returncode, seconds)
            for order, process in zip(orders, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()


def _trial(order: tuple[str, ...], texts: tuple[str, str], code: int, seconds: float) -> Json:
    """What became of a process that used frameworks in that order, by what it wrote on stdout and on stderr.

    ``looks``: by framework what was seen of it. ``crash``: how the process ended before its time, in words,
    and ``at``: the framework that it was at; ``""`` where it did not, or at none, as when the process ended.
    """
    looks: dict[str, Json] = {}
    at = crash = ""
    for line in texts[0].splitlines():
        look = json.loads(line)
        name = look.pop("name")
        at = "" if look.pop("done", False) else name
        looks.setdefault(name, {"devices": []}).update(look)
    if code or at or len(looks) < len(order):
        hangs = "Timeout (" in texts[1]  # as faulthandler says
        crash = f"no answer within {seconds:g} seconds" if hangs else _ending(code, texts[1])
        if at:
            looks[at] |= {"state": "timed out" if hangs else "crashed", "error": crash}
    return {"order": order, "looks": looks, "crash": crash, "at": at}


def _ending(code: int, stderr: str) -> str:
    """How a process ended, in words, with the last line that it wrote."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    last = stderr.strip().rpartition("\n")[2].strip()
    return f"{how} ({last[:300]})" if last else how


def _plain_import() -> str:
    """What becomes of exactly ``import pyclesperanto``: without a driver, it imports half, and only warns."""
    environ = {k: v for k, v in os.environ.items() if k != "OCL_ICD_FILENAMES" or not use_pocl_wheel()}
    command = [sys.executable, "-c", "import pyclesperanto; pyclesperanto.push"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, check=False)
    return "fails" if done.returncode else "works"


def _versions() -> dict[str, str]:
    """The versions of the installed distributions that the faults look at."""
    versions = {}
    for name in ("arraybridge", *_DISTRIBUTIONS_OF_CUPY):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


# -- the command -------------------------------------------------------------------------------------


def doctor(
    as_json: output.AsJson = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a framework hangs.", min=0.1)] = 90.0,
) -> None:
    """Find out what is installed, what will go wrong, and how to mend it.

    Frameworks are used in processes of their own, in two opposite orders, so that a broken one harms nothing.
    The exit code is 1 when something is broken; warnings alone leave it at 0.

    Examples:
    [bold]arraybridge doctor[/bold]

    [bold]arraybridge doctor --json | jq .problems[/bold]
    """
    with output.progress() as bar:
        bar.add_task("looking at the frameworks", total=None)
        facts = gather(timeout)
    problems = problems_of(facts)
    if as_json:
        output.print_json(_as_json(facts, problems))
    else:
        _print(facts, problems)
    raise typer.Exit(1 if any(problem["severity"] == "error" for problem in problems) else 0)


def _as_json(facts: Findings, problems: list[Json]) -> Json:
    return {
        "ok": not any(problem["severity"] == "error" for problem in problems),
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": asdict(facts.driver) | {"cards": [asdict(gpu) for gpu in facts.gpus]},
        "frameworks": facts.looks,
        "import_orders": [{"order": one["order"], "crash": one["crash"] or None} for one in facts.trials],
        "problems": problems,
    }


def _print(facts: Findings, problems: list[Json]) -> None:
    console = output.console()
    system = f"{platform.system()} {platform.machine()}"
    console.print(f"arraybridge {arraybridge.__version__}, Python {platform.python_version()}, {system}")
    _print_driver(console, facts)
    rows = [_framework_row(name, look) for name, look in facts.looks.items()]
    console.print()
    columns = ("framework", "version", "state", "built for", "devices", "import")
    output.show(console, columns, rows, ("import",))
    if not any(trial["crash"] for trial in facts.trials):
        console.print("\nNo order of imports crashes.", style="dim")
    if problems:
        _print_problems(console, problems)
    else:
        console.print("\n[green]Nothing is wrong.[/green]")


def _print_driver(console: Console, facts: Findings) -> None:
    driver = facts.driver
    cuda = ".".join(map(str, driver.cuda or "?"))
    runs = f" {driver.version}, which runs CUDA up to {cuda}" if driver.version else f": {driver.reason}"
    console.print(f"NVIDIA driver{runs}")
    for gpu in facts.gpus:
        console.print(f"  card {gpu.index}: {escape(gpu.name)}, {format_bytes(gpu.total)}")


def _framework_row(name: str, look: Json) -> tuple[str, ...]:
    seconds = "" if look.get("seconds") is None else f"{look['seconds']:.1f} s"
    version = escape(look.get("version") or "")
    devices = escape(_devices(look["devices"]))
    return name, version, _STATES[look["state"]], look.get("built_for") or "", devices, seconds


def _print_problems(console: Console, problems: list[Json]) -> None:
    for problem in problems:
        color = _SEVERITIES[problem["severity"]]
        console.print(f"\n[{color} bold]{problem['severity']}[/] {escape(problem['message'])}")
        for line in problem["fix"]:
            # No folding: a command is copied as one line.
            console.print(f"    [bold]{escape(line)}[/bold]", soft_wrap=True)
    counts = Counter(problem["severity"] for problem in problems)
    words = (f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items())
    console.print(f"\n{', '.join(words)}.")


def _devices(devices: list[Json]) -> str:
    """``"4 × cpu, gpu (NVIDIA H200)"``."""
    kinds = Counter((one["device"].partition(":")[0], one["name"]) for one in devices)
    return ", ".join(
        (f"{count} × " if count > 1 else "") + (f"{kind} ({name})" if name else kind)
        for (kind, name), count in kinds.items()
    )
