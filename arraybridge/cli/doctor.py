"""``arraybridge doctor``: report what is installed, what will fail, and how to fix it.

`doctor_checks.CHECKS` lists the checks. Their findings come from separate processes
(`arraybridge.cli.probe`), so that a broken framework is reported without affecting this process.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

import arraybridge
from arraybridge import hardware
from arraybridge.cli import output
from arraybridge.cli.doctor_checks import CUPY_DISTRIBUTIONS, SEVERITIES, STATES, Findings, find_problems
from arraybridge.cli.import_trials import (
    WORKING,
    narrow_down,
    run_trials,
    try_companions,
    try_plain_import,
    working_probes,
)
from arraybridge.formatting import format_bytes
from arraybridge.interface import registry

if TYPE_CHECKING:
    from arraybridge.cli.import_trials import Json


# -- gathering findings ------------------------------------------------------------------------------


def gather(seconds: float) -> Findings:
    """Gather the findings of all checks.

    One process probes all frameworks in turn, and a second one in reverse order, so that each framework comes
    before and after every other one. Frameworks that fail in both are probed separately. If a process
    crashes, the pairs of frameworks that may have caused the crash are probed.

    Args:
        seconds: The time after which a framework counts as hanging.
    """
    names = registry.framework_names()
    installed = tuple(name for name in names if registry.is_installed(name))
    trials = run_trials([installed, installed[::-1]], seconds)
    probes = working_probes(trials)
    for trial in run_trials([(name,) for name in installed if name not in probes], seconds):
        probes |= trial["probes"]
    trials = narrow_down(trials, probes, seconds)
    trials += try_companions(installed, seconds)
    if probes.get("pyclesperanto", {}).get("state") in WORKING:
        probes["pyclesperanto"]["plain_import"] = try_plain_import()
    for name, probe in probes.items():  # a framework that cannot be imported reports no version
        probe["version"] = probe.get("version") or registry.version_of(name) or None
    return Findings(
        driver=hardware.driver(),
        gpus=hardware.gpus(),
        probes={name: probes.get(name, {"state": "missing", "devices": []}) for name in names},
        trials=trials,
        versions=_versions(),
        environ=os.environ,
        folder=Path.cwd(),
    )


def _versions() -> dict[str, str]:
    """Return the versions of arraybridge and of the distributions that contain CuPy, if installed."""
    versions = {}
    for name in ("arraybridge", *CUPY_DISTRIBUTIONS):
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
    return name, version, STATES[probe["state"]], probe.get("built_for") or "", devices, seconds


def _print_problems(console: Console, problems: list[Json]) -> None:
    for problem in problems:
        color = SEVERITIES[problem["severity"]]
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
