"""``arraybridge doctor``: report what is installed, what will fail, and how to fix it.

`CHECKS` lists the checks. Their findings come from separate processes (`arraybridge.cli.probe`), so that a
broken framework is reported without affecting this process.
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
from arraybridge.frameworks.installation import can_find, install_command
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel

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
#: The PoCL error message for a CPU that its compiler does not support.
_UNKNOWN_CPU = "unknown target CPU"
#: The CuPy wheels and the CUDA major version of each.
_CUPY_WHEELS = {f"cupy-cuda{major}x": major for major in (11, 12, 13, 14)}
#: All distributions that contain CuPy: the source distribution and the wheels.
_CUPY_DISTRIBUTIONS = ("cupy", *_CUPY_WHEELS)


class Findings(NamedTuple):
    """The input of all checks.

    Attributes:
        driver: The NVIDIA driver.
        gpus: The GPUs that are visible to CUDA.
        probes: The findings of `arraybridge.cli.probe` by framework. ``"state"`` is a key of `_STATES`.
        trials: The result of each import order; see `_read_trial`.
        versions: The installed versions of arraybridge and of distributions that contain CuPy.
        environ: The environment variables.
        folder: The working directory, which Python searches first for modules.
    """

    driver: hardware.Driver = hardware.Driver()
    gpus: Sequence[hardware.Gpu] = ()
    probes: Mapping[str, Json] = {}
    trials: Sequence[Json] = ()
    versions: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    folder: Path = Path()

    def built_cuda(self, framework: str) -> int | None:
        """Return the CUDA major version that a framework was built for, or None for other builds."""
        match = re.match(r"CUDA (\d+)", self.probes.get(framework, {}).get("built_for") or "")
        return None if match is None else int(match.group(1))

    def driver_cuda(self) -> int | None:
        """Return the newest CUDA major version that the driver supports, or None if there is no driver."""
        return None if self.driver.cuda is None else self.driver.cuda[0]

    def cupy_distributions(self) -> list[str]:
        """Return the installed distributions that contain CuPy."""
        return [name for name in self.versions if name in _CUPY_DISTRIBUTIONS]

    def matching_cupy(self) -> str:
        """Return the name of the CuPy wheel for the driver."""
        return f"cupy-cuda{min(max(self.driver_cuda() or 13, 12), 13)}x"


# -- checks ------------------------------------------------------------------------------------------


def _problem(check: str, severity: str, framework: str, message: str, *fix: str) -> Json:
    """Return the report of a problem.

    Args:
        check: The identifier of the check.
        severity: ``"error"`` if something does not work, ``"warning"`` if it will fail or waste resources
            later, else ``"note"``.
        framework: The affected framework, or ``""``.
        message: The problem and its cause.
        fix: Shell commands, and comments that start with ``#`` for manual steps.
    """
    return {"id": check, "severity": severity, "framework": framework, "message": message, "fix": list(fix)}


def check_driver(findings: Findings) -> Iterator[Json]:
    """Report a missing driver if a CUDA build is installed, and a driver that does not respond."""
    driver = findings.driver
    builds = ", ".join(name for name in findings.probes if findings.built_cuda(name))
    if not driver.reason or not (builds or driver.is_silent):
        return
    reason = driver.reason[0].upper() + driver.reason[1:].rstrip(".")
    effect = f"CUDA builds cannot use a GPU ({builds})." if builds else "No framework can use a GPU."
    fix = ["# if this machine has an NVIDIA GPU, install its driver, and check it with nvidia-smi"]
    if driver.is_silent:
        fix = ["nvidia-smi", "# if the driver was updated, reboot"]
    yield _problem("no-driver", "note", "", f"{reason}. {effect}", *fix)


_BUILT_FOR_CUDA = ("torch", "jax", "tensorflow")


def check_driver_version(findings: Findings) -> Iterator[Json]:
    """Report frameworks that were built for a newer CUDA version than the driver supports."""
    supported = findings.driver_cuda()
    for name in _BUILT_FOR_CUDA:
        built = findings.built_cuda(name)
        if supported and built and built > supported:
            yield _problem(
                "driver-too-old",
                "error",
                name,
                f"{name} cannot use the GPU: it was built for CUDA {built}, but driver"
                f" {findings.driver.version} supports only CUDA {supported} and older.",
                f"# update the NVIDIA driver to one that supports CUDA {built}",
                f"# or install a build of {name} for CUDA {supported}",
            )


def check_cupy_cuda(findings: Findings) -> Iterator[Json]:
    """Report a CuPy wheel for a CUDA major version that differs from the driver's."""
    supported = findings.driver_cuda()
    for name in findings.cupy_distributions():
        built = _CUPY_WHEELS.get(name, supported)
        if supported and built and built != supported:
            if built < supported:
                severity = "warning"
                effect = f"CuPy requires CUDA {built} libraries in addition to those of the other frameworks"
            else:
                severity = "error"
                effect = "CuPy cannot allocate GPU memory"
            message = f"{effect}: {name} is for CUDA {built}, but the driver supports CUDA {supported}."
            fix = (f"pip uninstall -y {name}", f"pip install {findings.matching_cupy()}")
            yield _problem("cupy-cuda-major", severity, "cupy", message, *fix)


def check_cupy_duplicates(findings: Findings) -> Iterator[Json]:
    """Report several distributions that contain CuPy."""
    names = findings.cupy_distributions()
    if len(names) > 1:
        message = (
            f"{' and '.join(names)} are installed together and overwrite each other's files, so CuPy is a"
            " mixture of them. Uninstalling one breaks the other. Uninstall all and install one."
        )
        fix = (f"pip uninstall -y {' '.join(names)}", f"pip install {findings.matching_cupy()}")
        yield _problem("two-cupys", "error", "cupy", message, *fix)


def check_cpu_builds(findings: Findings) -> Iterator[Json]:
    """Report CPU builds of frameworks on a machine with a GPU."""
    for name, *fix in (
        ("torch", "pip uninstall -y torch", "pip install --no-cache-dir torch"),
        ("jax", f'pip install "jax[cuda{max(findings.driver_cuda() or 13, 12)}]"'),
        ("tensorflow", "pip uninstall -y tensorflow-cpu", 'pip install "tensorflow[and-cuda]"'),
    ):
        probe = findings.probes.get(name, {})
        if findings.gpus and probe.get("built_for") == "CPU":
            gpu = findings.gpus[0].name
            message = f"{name} cannot use the {gpu}: version {probe['version']} is a CPU build."
            yield _problem("cpu-build", "warning", name, message, *fix)


def check_opencl(findings: Findings) -> Iterator[Json]:
    """Report that pyclesperanto finds no OpenCL device, or finds one only after arraybridge is imported."""
    probe = findings.probes.get("pyclesperanto", {})
    if probe.get("state") == "no device":
        message = (
            "pyclesperanto finds no OpenCL device: no OpenCL driver is installed. GPU drivers include one,"
            " and PoCL is one for the CPU."
        )
        yield _problem("no-opencl", "error", "pyclesperanto", message, 'pip install "pyopencl[pocl]"')
    elif probe.get("plain_import") == "fails":
        message = (
            "Programs that import pyclesperanto before arraybridge find no OpenCL device: no OpenCL driver is"
            " configured, and only arraybridge finds the installed PoCL package."
        )
        fix = (f"export OCL_ICD_FILENAMES={shlex.quote(use_pocl_wheel())}", "# or import arraybridge first")
        yield _problem("no-opencl", "warning", "pyclesperanto", message, *fix)


def check_pocl(findings: Findings) -> Iterator[Json]:
    """Report a PoCL installation whose compiler does not support this CPU."""
    if _UNKNOWN_CPU in (findings.probes.get("pyclesperanto", {}).get("error") or ""):
        message = (
            "The functions of pyclesperanto fail, although arrays can be converted: the compiler of the"
            " installed PoCL is older than this CPU and does not support it."
        )
        fix = (
            "sudo apt install pocl-opencl-icd",
            "# or install another PoCL package of your system, and import pyclesperanto before tensorflow",
        )
        yield _problem("old-pocl", "error", "pyclesperanto", message, *fix)


def check_preallocation(findings: Findings) -> Iterator[Json]:
    """Report frameworks that will allocate most of the GPU memory on first use."""
    for name, share, variable, modest in (
        ("jax", "three quarters of the memory of a GPU", "XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("tensorflow", "nearly all memory of every GPU", "TF_FORCE_GPU_ALLOW_GROWTH", "true"),
    ):
        is_disabled = findings.environ.get(variable, "").lower() == modest
        if findings.gpus and findings.built_cuda(name) and not is_disabled:
            message = f"{name} allocates {share} on first use."
            fix = (f"export {variable}={modest}", "# or call arraybridge.coexist() first in your program")
            yield _problem("preallocation", "warning", name, message, *fix)


#: Framework → another fix if its import crashes after other frameworks have been imported.
_OTHER_ORDER_FIXES = {
    "pyclesperanto": (
        '# or use the PoCL of pip install "pyopencl[pocl]", with OCL_ICD_VENDORS set to an empty folder',
    )
}


def check_import_orders(findings: Findings) -> Iterator[Json]:
    """Report import orders that crash the process."""
    for trial in findings.trials:
        order = trial["order"]
        crash = trial["crash"]
        at = trial["at"]
        last = at or order[-1]
        before = " and ".join(order[: order.index(last)])
        if not crash or not before or findings.probes.get(last, {}).get("state") in _ENDED:
            continue
        if at:
            message = f"Importing and using {last} after {before} crashes the process: {crash}."
            fix = [f"# import {last} before {before}"]
        else:
            message = f"Using {last} after {before} crashes the process when it exits: {crash}."
            fix = [f"# use {last} and {before} in two processes"]
        if last in COMPANIONS:
            message += (
                " PyTorch imports it late: in torch.compile, optimizers, torch.func, checkpoints and"
                " profilers."
            )
        fix += _OTHER_ORDER_FIXES.get(last, ())
        yield _problem("import-order", "error", last, message, *fix)


def check_namesake(findings: Findings) -> Iterator[Json]:
    """Report an installed package that is also named arraybridge, or an old copy of this one."""
    installed = findings.versions.get("arraybridge")
    imported = arraybridge.__version__
    if installed not in (None, imported):
        folder = Path(arraybridge.__file__).resolve().parent
        message = (
            f"arraybridge {installed} is installed, but arraybridge {imported} is imported from {folder}. The"
            " installed package is another one of the same name, or an old copy."
        )
        fix = ("pip uninstall -y arraybridge", "# then install arraybridge again")
        yield _problem("namesake", "error", "", message, *fix)


#: Frameworks with a dedicated check for a missing device.
_DEVICE_CHECKS = {"pyclesperanto": check_opencl}
#: Framework → the distribution to reinstall, if it depends on the machine.
_MATCHING_DISTRIBUTIONS = {"cupy": Findings.matching_cupy}


def _reinstall_command(name: str, findings: Findings) -> str:
    if name in _MATCHING_DISTRIBUTIONS:
        return f"pip install --force-reinstall {_MATCHING_DISTRIBUTIONS[name](findings)}"
    return install_command(registry.metadata_of(name), "--force-reinstall")


def check_states(findings: Findings) -> Iterator[Json]:
    """Report frameworks that crash, hang or fail, or that find no device on a machine with a GPU."""
    effects = {"crashed": "crashes the process", "timed out": "hangs", "broken": "does not work"}
    if findings.gpus:
        effects["no device"] = "finds no device"
    for name, probe in findings.probes.items():
        effect = effects.get(probe["state"])
        lacks_device = probe["state"] == "no device"
        if effect is None or (lacks_device and name in _DEVICE_CHECKS):
            continue
        if _UNKNOWN_CPU in (probe.get("error") or ""):
            continue
        fix = _reinstall_command(name, findings)
        if lacks_device and "CUDA_VISIBLE_DEVICES" in findings.environ:
            fix = "unset CUDA_VISIBLE_DEVICES"
        shadow = findings.folder / f"{name}.py"
        if shadow.exists():
            effect += f" (Python imports {shadow} instead)"
            fix = f"mv {shlex.quote(str(shadow))} {shlex.quote(str(findings.folder / f'my_{name}.py'))}"
        yield _problem("broken", "error", name, f"{name} {effect}: {probe.get('error')}", fix)


#: All checks. Each one yields the problems that it finds.
CHECKS: tuple[Callable[[Findings], Iterator[Json]], ...] = (
    check_driver,
    check_driver_version,
    check_cupy_cuda,
    check_cupy_duplicates,
    check_cpu_builds,
    check_opencl,
    check_pocl,
    check_preallocation,
    check_import_orders,
    check_namesake,
    check_states,
)


def find_problems(findings: Findings) -> list[Json]:
    """Run all checks and return the problems, the most severe first."""
    problems = [problem for check in CHECKS for problem in check(findings)]
    return sorted(problems, key=_severity_rank)


def _severity_rank(problem: Json) -> int:
    return list(_SEVERITIES).index(problem["severity"])


# -- gathering findings ------------------------------------------------------------------------------

# The probing processes share the GPU with other programs.
_LOW_MEMORY = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
_WORKING = ("works", "no device")
_ENDED = ("crashed", "timed out")


def gather(seconds: float) -> Findings:
    """Gather the findings of all checks.

    One process probes all frameworks in turn, and a second one in reverse order, so that each framework comes
    before and after every other one. Frameworks that fail in both are probed separately. If a process
    crashes, the pairs that may have caused it are probed.

    Args:
        seconds: The time after which a framework counts as hanging.
    """
    names = registry.framework_names()
    installed = tuple(name for name in names if registry.is_installed(name))
    trials = _run_trials([installed, installed[::-1]], seconds)
    probes = _working_probes(trials)
    for trial in _run_trials([(name,) for name in installed if name not in probes], seconds):
        probes |= trial["probes"]
    trials = _narrow_down(trials, probes, seconds)
    trials += _try_companions(installed, seconds)
    if probes.get("pyclesperanto", {}).get("state") in _WORKING:
        probes["pyclesperanto"]["plain_import"] = _try_plain_import()
    for name, probe in probes.items():  # a framework that cannot be imported reports no version
        probe["version"] = probe.get("version") or registry.version_of(name) or None
    return Findings(
        driver=hardware.driver(),
        gpus=hardware.gpus(),
        probes={name: probes.get(name, {"state": "missing", "devices": []}) for name in names},
        trials=trials,
        versions=_installed_versions(),
        environ=os.environ,
        folder=Path.cwd(),
    )


def _working_probes(trials: Sequence[Json]) -> dict[str, Json]:
    """Return the findings of each framework that works in one of the trials, from the slower import.

    The slower import measures the framework better: in the other one, an earlier framework may have imported
    shared packages.
    """
    working: dict[str, Json] = {}
    for trial in trials:
        for name, probe in trial["probes"].items():
            previous = working.get(name, {}).get("seconds", 0)
            if probe.get("state") in _WORKING and probe.get("seconds", 0) >= previous:
                working[name] = probe
    return working


def _narrow_down(trials: Sequence[Json], probes: Mapping[str, Json], seconds: float) -> list[Json]:
    """Return the trials of the pairs of frameworks that crash, or the original trials if no pair does."""
    narrowed: list[Json] = []
    for trial in trials:
        at = trial["at"]
        order = trial["order"]
        # If a framework also crashes in a separate process, its crash does not depend on the order.
        suspects = () if not at or probes[at]["state"] in _ENDED else order[: order.index(at)]
        pairs = _run_trials([(name, at) for name in suspects], seconds)
        narrowed += [pair for pair in pairs if pair["crash"]] or [trial]
    return narrowed


def _try_companions(installed: Sequence[str], seconds: float) -> list[Json]:
    """Import each installed companion after each framework, and return the trials that crash.

    A companion that also crashes in a separate process is not reported: its crash does not depend on the
    order.
    """
    crashes: list[Json] = []
    for companion in filter(can_find, COMPANIONS):
        every, separate = _run_trials([(*installed, companion), (companion,)], seconds)
        if every["at"] == companion and not separate["crash"]:
            pairs = _run_trials([(name, companion) for name in installed], seconds)
            crashes += [pair for pair in pairs if pair["crash"]] or [every]
    return crashes


def _run_trials(orders: Sequence[tuple[str, ...]], seconds: float) -> list[Json]:
    """Probe frameworks in several orders in parallel, each order in a separate process."""
    command = [sys.executable, "-m", "arraybridge.cli.probe", str(seconds)]
    processes = [
        subprocess.Popen(
            [*command, *order],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | _LOW_MEMORY,
        )
        for order in orders
    ]
    try:
        return [
            _read_trial(order, process.communicate(), process.returncode, seconds)
            for order, process in zip(orders, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()


def _read_trial(order: tuple[str, ...], texts: tuple[str, str], code: int, seconds: float) -> Json:
    """Parse the output of a process that probed frameworks in a given order.

    Args:
        order: The names of the frameworks.
        texts: The output of the process on stdout and stderr.
        code: The exit code of the process.
        seconds: The time limit per framework.

    Returns:
        ``"order"``; ``"probes"``: the findings by framework; ``"crash"``: how the process crashed, or ``""``;
        ``"at"``: the framework that was being probed when it crashed; ``""`` for a crash on exit.
    """
    probes: dict[str, Json] = {}
    at = ""
    crash = ""
    for line in texts[0].splitlines():
        probe = json.loads(line)
        name = probe.pop("name")
        at = "" if probe.pop("done", False) else name
        probes.setdefault(name, {"devices": []}).update(probe)
    if code or at or len(probes) < len(order):
        hangs = "Timeout (" in texts[1]  # written by faulthandler
        crash = f"no response within {seconds:g} seconds" if hangs else _describe_exit(code, texts[1])
        if at:
            probes[at] |= {"state": "timed out" if hangs else "crashed", "error": crash}
    return {"order": order, "probes": probes, "crash": crash, "at": at}


def _describe_exit(code: int, stderr: str) -> str:
    """Describe the exit code or the signal of a process, with the last line that it wrote to stderr."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    last = stderr.strip().rpartition("\n")[2].strip()
    return f"{how} ({last[:300]})" if last else how


def _try_plain_import() -> str:
    """Run ``import pyclesperanto`` without arraybridge; return ``"works"`` or ``"fails"``.

    Without an OpenCL driver, the import only warns, and the module lacks its functions.
    """
    environ = {k: v for k, v in os.environ.items() if k != "OCL_ICD_FILENAMES" or not use_pocl_wheel()}
    command = [sys.executable, "-c", "import pyclesperanto; pyclesperanto.push"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, check=False)
    return "fails" if done.returncode else "works"


def _installed_versions() -> dict[str, str]:
    """Return the versions of arraybridge and of the distributions that contain CuPy, if installed."""
    versions = {}
    for name in ("arraybridge", *_CUPY_DISTRIBUTIONS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


# -- the command -------------------------------------------------------------------------------------


def doctor(
    as_json: output.AsJson = False,
    timeout: Annotated[
        float,
        typer.Option(help="Time limit per framework.", min=0.1, metavar="SECONDS"),
    ] = 90.0,
) -> None:
    """Report what is installed, what will fail, and how to fix it.

    Frameworks are tested in separate processes and in two opposite orders, so that a broken one does no harm.
    The exit code is 1 if there is an error; warnings do not change it.

    Examples:
    [bold]arraybridge doctor[/bold]

    [bold]arraybridge doctor --json | jq .problems[/bold]
    """
    with output.progress_bar(has_total=False) as bar:
        bar.add_task("Testing the frameworks", total=None)
        findings = gather(timeout)
    problems = find_problems(findings)
    if as_json:
        output.print_json(_as_json(findings, problems))
    else:
        print_report(findings, problems)
    raise typer.Exit(1 if _has_error(problems) else 0)


def _has_error(problems: list[Json]) -> bool:
    return any(problem["severity"] == "error" for problem in problems)


def _as_json(findings: Findings, problems: list[Json]) -> Json:
    return {
        "ok": not _has_error(problems),
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": asdict(findings.driver) | {"gpus": [asdict(gpu) for gpu in findings.gpus]},
        "frameworks": findings.probes,
        "import_orders": [
            {"order": trial["order"], "crash": trial["crash"] or None} for trial in findings.trials
        ],
        "problems": problems,
    }


def print_report(findings: Findings, problems: list[Json]) -> None:
    """Print the driver, the GPUs, the table of frameworks, and the problems with their fixes."""
    console = output.console()
    system = f"{platform.system()} {platform.machine()}"
    console.print(f"arraybridge {arraybridge.__version__}, Python {platform.python_version()}, {system}")
    _print_driver(console, findings)
    console.print()
    columns = ("framework", "version", "state", "built for", "devices", "import")
    rows = [_framework_row(name, probe) for name, probe in findings.probes.items()]
    console.print(output.table_or_list(console, columns, rows, right=("import",), wrap="devices"))
    if not any(trial["crash"] for trial in findings.trials):
        console.print("\nNo import order causes a crash.", style="dim")
    if problems:
        _print_problems(console, problems)
    else:
        console.print("\n[green]No problems found.[/green]")


def _print_driver(console: Console, findings: Findings) -> None:
    driver = findings.driver
    if driver.version:
        supported = f", supports CUDA {'.'.join(map(str, driver.cuda))} and older" if driver.cuda else ""
        console.print(f"NVIDIA driver {driver.version}{supported}")
    else:
        console.print(escape(driver.reason[:1].upper() + driver.reason[1:]))
    for gpu in findings.gpus:
        memory = "" if gpu.total is None else f", {format_bytes(gpu.total)}"
        console.print(f"  gpu:{gpu.index}  {escape(gpu.name)}{memory}")


def _framework_row(name: str, probe: Json) -> tuple[str, ...]:
    seconds = "" if probe.get("seconds") is None else f"{probe['seconds']:.1f} s"
    version = escape(probe.get("version") or "")
    devices = escape(_list_devices(probe["devices"]))
    return name, version, _STATES[probe["state"]], probe.get("built_for") or "", devices, seconds


def _print_problems(console: Console, problems: list[Json]) -> None:
    for problem in problems:
        color = _SEVERITIES[problem["severity"]]
        console.print(f"\n[{color} bold]{problem['severity']}:[/] {escape(problem['message'])}")
        for line in problem["fix"]:
            # Do not wrap commands, so that they can be copied as one line.
            console.print(f"    [bold]{escape(line)}[/bold]", soft_wrap=True)
    counts = Counter(problem["severity"] for problem in problems)
    parts = (f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items())
    console.print(f"\n{', '.join(parts)}.")


def _list_devices(devices: list[Json]) -> str:
    """Return the devices as text, such as ``"4 × cpu, gpu (NVIDIA H200)"``."""
    counts = Counter((device["device"].partition(":")[0], device["name"]) for device in devices)
    texts = []
    for (kind, name), count in counts.items():
        prefix = f"{count} × " if count > 1 else ""
        texts.append(f"{prefix}{kind} ({name})" if name else f"{prefix}{kind}")
    return ", ".join(texts)
