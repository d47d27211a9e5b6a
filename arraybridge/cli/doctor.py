"""``arraybridge doctor``: what is installed, what each framework sees, what will go wrong, and the fix."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import arraybridge
from arraybridge.cli import output
from arraybridge.cli.facts import (
    CUPYS,
    TENSORFLOWS,
    Card,
    Distribution,
    Driver,
    Facts,
    Problem,
    canonical,
)
from arraybridge.cli.faults import find_problems
from arraybridge.cli.processes import end_of, run, workers
from arraybridge.cli.script_faults import read_script
from arraybridge.frameworks import registry

__all__ = ["doctor"]

Json = dict[str, Any]
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_STATES = {
    "works": "[green]works[/green]",
    "missing": "[dim]not installed[/dim]",
    "no device": "[yellow]no device[/yellow]",
    "broken": "[red]broken[/red]",
    "crashed": "[red]crashes[/red]",
    "timed out": "[red]hangs[/red]",
}


# Whoever sees one of these has nothing to look at again.
_SOUND = ("works", "no device")
_MISSING: Json = {"state": "missing", "devices": [], "error": None}


def _nothing(name: str, found: Json) -> None:
    """Hear, and say nothing."""


def doctor(
    script: Annotated[
        Path | None,
        typer.Argument(
            help="A program to read (it is not run) for variables that it sets too late, and for fork.",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable JSON alone.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the commands that mend what was found; runs none of them.")
    ] = False,
    orders: Annotated[
        bool, typer.Option("--orders/--no-orders", help="Try whether the order of imports can crash.")
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a framework may take before it counts as hanging.",
            callback=output.seconds(0.1),
        ),
    ] = 90.0,
) -> None:
    """Find out what is installed, what will go wrong, and how to mend it.

    Frameworks are looked at in processes of their own, so that a broken one is reported and harms nothing.
    The exit code is 1 when something is broken; warnings alone leave it at 0.

    Examples:
    [bold]arraybridge doctor[/bold]

    [bold]arraybridge doctor train.py[/bold]   what that program does too late

    [bold]arraybridge doctor --fix[/bold]   commands to look over and run

    [bold]arraybridge doctor --json | jq .problems[/bold]
    """
    if as_json and fix:
        raise typer.BadParameter("--json holds the fixes already; leave --fix out", param_hint="--fix")
    read = _read(script)
    with output.progress() as bar:
        task = bar.add_task("looking at the frameworks")

        def tell(name: str, found: Json) -> None:
            told = " ".join(filter(None, (name, found.get("version"))))
            bar.console.print(f"{escape(told)}  {_STATES[found['state']]}")
            bar.advance(task)

        facts, trials = gather(timeout, orders, tell if not bar.disable else _nothing)
        if orders and not trials:
            bar.update(task, description="trying orders of imports")
            trials = try_orders(facts, timeout)
    problems = find_problems(facts)
    problems += [order_problem(trial) for trial in trials if trial["crash"]]
    problems += read
    problems.sort(key=lambda problem: ("error", "warning", "note").index(problem.severity))
    if as_json:
        output.print_json(_as_json(facts, problems, trials))
    elif fix:
        _print_fixes(problems)
    else:
        _print(facts, problems, trials)
    raise typer.Exit(1 if any(problem.severity == "error" for problem in problems) else 0)


def _read(script: Path | None) -> list[Problem]:
    if script is None:
        return []
    try:
        return read_script(script)
    except (OSError, SyntaxError, ValueError) as error:
        raise typer.BadParameter(f"{script} can't be read as a Python program: {error}") from None


# -- gathering facts ---------------------------------------------------------------------------------


def gather(
    timeout: float, orders: bool = False, tell: Callable[[str, Json], None] = _nothing
) -> tuple[Facts, list[Json]]:
    """Everything that the checks look at, found in processes with a limit each; ``tell`` hears of each look.

    With ``orders`` one process uses all frameworks in turn and another does in the reverse order, and both
    report what they see. Where neither crashes, nothing is left to try, and what they did is returned. Where
    one does, each framework is looked at in a process of its own; and so is one that does not work.
    """
    names = registry.framework_names()
    there = [name for name in names if registry.is_installed(name)]
    others = [name for name in there if name != "numpy"]
    looks: dict[str, Json] = {}
    trials: list[Json] = []
    lock = threading.Lock()

    def seen(name: str, found: Json) -> None:
        with lock:
            known = looks.setdefault(name, found)
            if found["state"] not in _SOUND:
                looks[name] = found
            elif known is found:
                tell(name, found)
            elif known["state"] in _SOUND:
                # An earlier import may have brought what it needs, so the longer time is nearer to its own.
                known["seconds"] = max(known["seconds"], found["seconds"])

    with workers() as pool:
        driver = pool.submit(ask_driver)
        if orders and len(others) > 1:
            follow = partial(_try_order, timeout=timeout, environ=_MODEST, hear=seen)
            trials = list(pool.map(follow, (others, others[::-1])))
        if any(trial["crash"] for trial in trials):
            looks, trials = {}, []
        again = [name for name in there if looks.get(name, _MISSING)["state"] not in _SOUND]
        for name, found in zip(again, pool.map(lambda name: look_at(name, timeout), again), strict=True):
            looks[name] = found
            tell(name, found)
    facts = Facts(
        environ=dict(os.environ),
        distributions=_distributions(),
        driver=driver.result(),
        inspections={name: looks.get(name, _MISSING) for name in names},
        start_method=multiprocessing.get_context().get_start_method(),
        folder=Path.cwd(),
    )
    return facts, trials


def _distributions() -> dict[str, Distribution]:
    """What is installed, by canonical name; of two of one name, the one that is imported."""
    found: dict[str, Distribution] = {}
    for one in metadata.distributions():
        # Half-deleted packages leave folders without a name or a version.
        name, version = _field(one, "Name"), _field(one, "Version")
        if name and version:
            plain = canonical(name)
            found.setdefault(plain, Distribution(plain, version, tuple(one.requires or ())))
    return found


def _field(one: metadata.Distribution, name: str) -> str | None:
    # Its type knows no get(), and asking for a field that is missing is deprecated.
    return one.metadata[name] if name in one.metadata else None  # noqa: SIM401


def ask_driver() -> Driver:
    """What nvidia-smi tells of the driver and the cards."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Driver()
    fields = "index,name,uuid,memory.total,memory.free,driver_version"
    try:
        listing = run([command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], 20)
        summary = run([command], 20)
    except subprocess.TimeoutExpired:
        return Driver(error="nvidia-smi took more than 20 seconds")
    except OSError as error:
        return Driver(error=str(error))
    if listing.returncode:
        told = (listing.stdout + listing.stderr).strip()
        return Driver(error=" ".join(told.split()) or f"nvidia-smi ended with code {listing.returncode}")
    cards, version = [], None
    for row in csv.reader(listing.stdout.splitlines(), skipinitialspace=True):
        if len(row) == 6 and row[0].isdigit():
            index, name, uuid, total, free, version = row
            cards.append(Card(int(index), name, uuid, _number(total), _number(free)))
    # Newer drivers write "CUDA UMD Version".
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", summary.stdout)
    return Driver(version, cuda.group(1) if cuda else None, tuple(cards))


def _number(words: str) -> int | None:
    return int(words) if words.isdigit() else None  # "[N/A]" of cards that share the host's memory


# The inspected process shares the card with whatever else runs on it.
_MODEST = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


def look_at(name: str, timeout: float) -> Json:
    """What `arraybridge.cli.inspect` tells of a framework, and a ``"state"``."""
    told: dict[str, Json] = {}
    trial = _try_order([name], timeout, _MODEST, told.__setitem__)
    found = told.get(name, dict(_MISSING))
    if trial["crash"] is None:
        return found
    if trial["crash"].startswith("hangs"):
        return found | {"state": "timed out", "error": f"no answer within {timeout:g} seconds"}
    ended = "" if trial["at"] else ", as its process ended"
    return found | {"state": "crashed", "error": trial["crash"] + ended}


# -- orders of imports -------------------------------------------------------------------------------


def try_orders(facts: Facts, timeout: float) -> list[Json]:
    """Import and use the frameworks one after the other, in processes of their own.

    One order and its reverse put each framework both before and after every other. Where one of them ends
    its process, the pairs that could be to blame are tried alone.
    """
    names = [
        name
        for name, seen in facts.inspections.items()
        if seen.get("version") and seen["state"] in ("works", "no device", "broken") and name != "numpy"
    ]
    if len(names) < 2:
        return []

    def trial(order: list[str]) -> Json:
        return _try_order(order, timeout, _MODEST)

    found: list[Json] = []
    with workers() as pool:
        waiting = [names, names[::-1]]
        while waiting:
            wholes, waiting = list(pool.map(trial, waiting)), []
            for whole in wholes:
                failed = whole["at"]
                if failed is None:
                    found.append(whole)
                    continue
                earlier = whole["order"][: whole["order"].index(failed)]
                pairs = list(pool.map(trial, [[name, failed] for name in earlier]))
                found += [pair for pair in pairs if pair["crash"]] or [whole]
                # Those after the one that crashed have not had their turn.
                rest = [name for name in whole["order"] if name != failed]
                if len(rest) > 1:
                    waiting.append(rest)
    return found


def _try_order(
    order: list[str],
    timeout: float,
    environ: dict[str, str],
    hear: Callable[[str, Json], None] = _nothing,
) -> Json:
    """Use frameworks one after the other in one process; ``hear`` hears what is seen of each.

    ``timeout`` is that of each step.
    """
    result: Json = {"order": list(order), "crash": None, "at": None}
    under_way: list[str] = []

    def read(line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "start":
            under_way[:] = [rest]
        elif word == "found":
            found = json.loads(rest)
            state = {"done": "works", "device": "no device"}.get(found["stage"], "broken")
            hear(under_way[0], found | {"state": state})
        elif word == "done":
            under_way.clear()

    try:
        done = run([sys.executable, "-m", "arraybridge.cli.inspect", *order], timeout, read, **environ)
    except subprocess.TimeoutExpired:
        result["crash"] = f"hangs for {timeout:g} seconds"
    else:
        if done.returncode or under_way:
            result["crash"] = end_of(done)
    if result["crash"] and under_way:
        result["at"] = under_way[0]
    return result


def order_problem(trial: Json) -> Problem:
    """The problem of an order that ended its process."""
    order = trial["order"] if trial["at"] is None else trial["order"][: trial["order"].index(trial["at"]) + 1]
    *first, last = order
    before = " and ".join(first)
    if trial["at"] is None:
        message = f"Using {' and '.join(order)} together crashes when the process ends: {trial['crash']}."
        fix: tuple[str, ...] = (f"# use {last} and {before} in processes of their own",)
    elif not first:
        message = f"{last} ends the process when it is used: {trial['crash']}."
        fix = (f"python -m arraybridge.cli.inspect {last}",)
    else:
        message = (
            f"After {before} the process is ended when {last} is imported and used: {trial['crash']}."
            f" Import {last} before {before}."
        )
        fix = (f"# import {last} before {before}",)
    if last == "pyclesperanto" and first:
        message += " Or use the OpenCL of the PoCL wheel, which bears any order."
        fix += (
            'pip install "pyopencl[pocl]"',
            'mkdir -p ~/.no-opencl && export OCL_ICD_VENDORS="$HOME/.no-opencl"',
        )
    return Problem("import-order", "error", last, message, fix)


# -- telling -----------------------------------------------------------------------------------------


def _as_json(facts: Facts, problems: list[Problem], trials: list[Json]) -> Json:
    return {
        "ok": not any(problem.severity == "error" for problem in problems),
        "arraybridge": arraybridge.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": dataclasses.asdict(facts.driver),
        "frameworks": {
            name: {**seen, "version": _version(name, facts), "built_for": _built_for(name, facts)}
            for name, seen in facts.inspections.items()
        },
        "import_orders": trials,
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def _version(name: str, facts: Facts) -> str | None:
    """What the framework says of itself; where it does not work, what its package says."""
    told = facts.inspections[name].get("version")
    if told or facts.inspections[name]["state"] == "missing":
        return told
    packages = {"cupy": CUPYS, "tensorflow": TENSORFLOWS}.get(name, (name, f"{name}-prototype"))
    return next((facts.distributions[found].version for found in facts.installed(*packages)), None)


def _built_for(name: str, facts: Facts) -> str:
    """``"CUDA 13.0"``, ``"ROCm 7"``, ``"OpenCL"`` or ``"CPU"``."""
    seen = facts.inspections.get(name, {})
    cuda = facts.built_for(name)
    if cuda:
        return f"CUDA {cuda}"
    if seen.get("rocm"):
        return f"ROCm {seen['rocm']}"
    return "OpenCL" if name == "pyclesperanto" else "CPU"


def _print_fixes(problems: list[Problem]) -> None:
    for problem in problems:
        if problem.fix:
            typer.echo(f"# {problem.severity}: {problem.message}")
            for line in problem.fix:
                typer.echo(line)
    if not any(problem.fix for problem in problems):
        typer.echo("# nothing to mend")


def _print(facts: Facts, problems: list[Problem], trials: list[Json]) -> None:
    console = output.console()
    system = f"{platform.system()} {platform.machine()}"
    console.print(f"arraybridge {arraybridge.__version__}, Python {platform.python_version()}, {system}")
    _print_cards(console, facts.driver)
    rows = []
    for name, seen in facts.inspections.items():
        there = seen["state"] != "missing"
        spent = f"{seen['seconds']:.1f} s" if seen.get("seconds") is not None else ""
        rows.append(
            (
                name,
                escape(_version(name, facts) or ""),
                _STATES[seen["state"]],
                _built_for(name, facts) if there else "",
                escape(_devices(seen["devices"])),
                spent,
            )
        )
    console.print()
    output.show(
        console, ("framework", "version", "state", "built for", "devices", "import"), rows, ("import",)
    )
    tried = [trial for trial in trials if not trial["crash"]]
    if tried and len(tried) == len(trials):
        console.print("\nNo order of imports crashes.", style="dim")
    if not problems:
        console.print("\n[green]Nothing is wrong.[/green]")
        return
    for problem in problems:
        colour = _COLOURS[problem.severity]
        console.print(f"\n[{colour} bold]{problem.severity}[/] {escape(problem.message)}")
        for line in problem.fix:
            # No folding: a command is copied as one line.
            console.print(f"    [bold]{escape(line)}[/bold]", soft_wrap=True)
    counts = [(s, sum(problem.severity == s for problem in problems)) for s in _COLOURS]
    summary = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts if count)
    console.print(f"\n{summary}. [bold]arraybridge doctor --fix[/bold] prints the commands alone.")
    console.print(
        "An error at another place? docs/troubleshooting.md has each message as a heading.", style="dim"
    )


def _print_cards(console: Console, driver: Driver) -> None:
    if driver.version is None:
        console.print("NVIDIA driver: " + ("fails" if driver.error else "none found"))
        return
    console.print(f"NVIDIA driver {driver.version}, which runs CUDA up to {driver.cuda or '?'}")
    for card in driver.cards:
        size = "" if card.total_mib is None else f", {card.total_mib / 1024:.0f} GiB"
        console.print(f"  card {card.index}: {escape(card.name)}{size}")


def _devices(devices: list[Json]) -> str:
    """``"cpu, gpu:0 (NVIDIA H200)"``; several CPU devices as ``"4 × cpu"``."""
    cpus = [device for device in devices if device["device"].startswith("cpu")]
    words = [f"{len(cpus)} × cpu"] if len(cpus) > 1 else [device["device"] for device in cpus]
    for device in devices:
        if device not in cpus:
            name = device["name"]
            words.append(f"{device['device']} ({name})" if name else device["device"])
    return ", ".join(words)
