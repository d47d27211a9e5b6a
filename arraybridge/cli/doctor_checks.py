"""The checks of ``arraybridge doctor``: problems of an installation, and how to fix each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import arraybridge
from arraybridge import hardware
from arraybridge.cli.import_trials import ENDED
from arraybridge.cli.probe import COMPANIONS
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel
from arraybridge.interface import registry
from arraybridge.interface.installation import install_command
from arraybridge.memory import gpu_sharing

if TYPE_CHECKING:
    from arraybridge.cli.import_trials import Json


SEVERITIES = {"error": "red", "warning": "yellow", "note": "cyan"}
STATES = {
    "works": "[green]works[/green]",
    "missing": "[dim]not installed[/dim]",
    "no device": "[yellow]no device[/yellow]",
    "broken": "[red]broken[/red]",
    "crashed": "[red]crashes[/red]",
    "timed out": "[red]hangs[/red]",
}
#: The PoCL error message for a CPU that its compiler does not support (pocl/pocl#1049).
_UNKNOWN_CPU = "unknown target CPU"
#: The CuPy wheels and the CUDA major version of each.
_CUPY_WHEELS = {f"cupy-cuda{major}x": major for major in (11, 12, 13, 14)}
#: All distributions that contain CuPy: the source distribution and the wheels.
CUPY_DISTRIBUTIONS = ("cupy", *_CUPY_WHEELS)


class Findings(NamedTuple):
    """The input of all checks.

    Attributes:
        driver: The NVIDIA driver.
        gpus: The GPUs that are visible to CUDA.
        probes: The findings of `arraybridge.cli.probe` by framework. The value of each
            finding's ``"state"`` is a key of `STATES`.
        trials: The result of each import order; see `arraybridge.cli.import_trials`.
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

    def cuda_of_build(self, framework: str) -> int | None:
        """Return the CUDA major version that a framework was built for, or None for other builds."""
        match = re.match(r"CUDA (\d+)", self.probes.get(framework, {}).get("built_for") or "")
        return None if match is None else int(match.group(1))

    def driver_cuda(self) -> int | None:
        """Return the newest CUDA major version that the driver supports, or None if there is no driver."""
        return None if self.driver.cuda is None else self.driver.cuda[0]

    def cupy_distributions(self) -> list[str]:
        """Return the installed distributions that contain CuPy."""
        return [name for name in self.versions if name in CUPY_DISTRIBUTIONS]

    def matching_cupy(self) -> str:
        """Return the name of the CuPy wheel for the driver."""
        return f"cupy-cuda{min(max(self.driver_cuda() or 13, 12), 13)}x"


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
    builds = ", ".join(name for name in findings.probes if findings.cuda_of_build(name))
    if not driver.reason or not (builds or driver.is_silent):
        return
    reason = driver.reason[0].upper() + driver.reason[1:].rstrip(".")
    effect = f"CUDA builds cannot use a GPU ({builds})." if builds else "No framework can use a GPU."
    fix = ["# if this machine has an NVIDIA GPU, install its driver, and check it with nvidia-smi"]
    if driver.is_silent:
        fix = ["nvidia-smi", "# if the driver was updated, reboot"]
    yield _problem("no-driver", "note", "", f"{reason}. {effect}", *fix)


def check_driver_version(findings: Findings) -> Iterator[Json]:
    """Report frameworks that were built for a newer CUDA version than the driver supports."""
    supported = findings.driver_cuda()
    for name in ("torch", "jax", "tensorflow"):
        built = findings.cuda_of_build(name)
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
    for name, share, variable in (
        ("jax", "three quarters of the memory of a GPU", "XLA_PYTHON_CLIENT_PREALLOCATE"),
        ("tensorflow", "nearly all memory of every GPU", "TF_FORCE_GPU_ALLOW_GROWTH"),
    ):
        modest = gpu_sharing.coexistence()[variable]
        is_disabled = findings.environ.get(variable, "").lower() == modest
        if findings.gpus and findings.cuda_of_build(name) and not is_disabled:
            message = f"{name} allocates {share} on first use."
            fix = (f"export {variable}={modest}", "# or call arraybridge.coexist() first in your program")
            yield _problem("preallocation", "warning", name, message, *fix)


def check_import_orders(findings: Findings) -> Iterator[Json]:
    """Report import orders that crash the process."""
    for trial in findings.trials:
        order = trial["order"]
        crash = trial["crash"]
        at = trial["at"]
        last = at or order[-1]
        before = " and ".join(order[: order.index(last)])
        if not crash or not before or findings.probes.get(last, {}).get("state") in ENDED:
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
        if last == "pyclesperanto":  # tensorflow/tensorflow#119254
            fix.append(
                '# or use the PoCL of pip install "pyopencl[pocl]", with OCL_ICD_VENDORS set to an empty'
                " folder"
            )
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


def check_states(findings: Findings) -> Iterator[Json]:
    """Report frameworks that crash, hang or fail, or that find no device on a machine with a GPU."""
    effects = {"crashed": "crashes the process", "timed out": "hangs", "broken": "does not work"}
    if findings.gpus:
        effects["no device"] = "finds no device"
    for name, probe in findings.probes.items():
        effect = effects.get(probe["state"])
        lacks_device = probe["state"] == "no device"
        is_reported = lacks_device and name == "pyclesperanto"  # by `check_opencl`
        if effect is None or is_reported or _UNKNOWN_CPU in (probe.get("error") or ""):
            continue
        if lacks_device and "CUDA_VISIBLE_DEVICES" in findings.environ:
            fix = "unset CUDA_VISIBLE_DEVICES"
        elif name == "cupy":  # the wheel depends on the driver
            fix = f"pip install --force-reinstall {findings.matching_cupy()}"
        else:
            fix = install_command(registry.metadata_of(name), "--force-reinstall")
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
    ranks = list(SEVERITIES)
    return sorted(problems, key=lambda problem: ranks.index(problem["severity"]))
