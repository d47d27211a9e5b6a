"""Import frameworks in several orders, each in a separate process, to find the orders that crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from arraybridge.cli.probe import COMPANIONS
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel
from arraybridge.interface.installation import can_find
from arraybridge.memory import gpu_sharing

Json = dict[str, Any]
WORKING = ("works", "no device")
ENDED = ("crashed", "timed out")


def working_probes(trials: Sequence[Json]) -> dict[str, Json]:
    """Return the findings on each framework that works in one of the trials.

    If a framework works in several, the findings from its slowest import are returned. The time of that
    import is the most accurate: in the other trials, an earlier framework may have imported shared packages.
    """
    working: dict[str, Json] = {}
    for trial in trials:
        for name, probe in trial["probes"].items():
            previous = working.get(name, {}).get("seconds", 0)
            if probe.get("state") in WORKING and probe.get("seconds", 0) >= previous:
                working[name] = probe
    return working


def narrow_down(trials: Sequence[Json], probes: Mapping[str, Json], seconds: float) -> list[Json]:
    """Replace each trial with trials of the framework pairs that crash; keep a trial without such a pair."""
    narrowed: list[Json] = []
    for trial in trials:
        at = trial["at"]
        order = trial["order"]
        # If a framework also crashes in a separate process, its crash does not depend on the order.
        suspects = () if not at or probes[at]["state"] in ENDED else order[: order.index(at)]
        pairs = run_trials([(name, at) for name in suspects], seconds)
        narrowed += [pair for pair in pairs if pair["crash"]] or [trial]
    return narrowed


def try_companions(installed: Sequence[str], seconds: float) -> list[Json]:
    """Import each installed companion after each framework, and return the trials that crash.

    A companion that also crashes in a separate process is not reported: its crash does not depend on the
    order.
    """
    crashes: list[Json] = []
    for companion in filter(can_find, COMPANIONS):
        every, separate = run_trials([(*installed, companion), (companion,)], seconds)
        if every["at"] == companion and not separate["crash"]:
            pairs = run_trials([(name, companion) for name in installed], seconds)
            crashes += [pair for pair in pairs if pair["crash"]] or [every]
    return crashes


def run_trials(orders: Sequence[tuple[str, ...]], seconds: float) -> list[Json]:
    """Probe frameworks in several orders in parallel, each order in a separate process."""
    command = [sys.executable, "-m", "arraybridge.cli.probe", str(seconds)]
    # Limit the GPU memory of these processes, because other programs may use the same GPU.
    environment = os.environ | gpu_sharing.coexistence() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    processes = [
        subprocess.Popen(
            [*command, *order],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
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
        A dictionary with ``"order"``; ``"probes"``: the findings by framework; ``"crash"``: how the process
        crashed, or ``""``; ``"at"``: the framework that was being probed when it crashed, or ``""`` for a
        crash on exit.
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


def try_plain_import() -> str:
    """Run ``import pyclesperanto`` without arraybridge; return ``"works"`` or ``"fails"``.

    Without an OpenCL driver, the import only warns, and the module lacks its functions.
    """
    environ = {k: v for k, v in os.environ.items() if k != "OCL_ICD_FILENAMES" or not use_pocl_wheel()}
    command = [sys.executable, "-c", "import pyclesperanto; pyclesperanto.push"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, check=False)
    return "fails" if done.returncode else "works"
