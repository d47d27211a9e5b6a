"""Measure the overhead of memory recovery, the cost of memory statistics, and GPU transfers.

Run it from the root of the checkout:

    python -m benchmarks.memory                      # all sections that this machine supports
    python -m benchmarks.memory --section transfer   # one section; repeatable

Sections: `overhead` (recovery and splitting around a call that succeeds), `reading` (`memory_stats`),
`transfer` (large arrays to a GPU and back; requires an NVIDIA GPU and PyTorch).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import arraybridge  # noqa: E402
from arraybridge.device import Device  # noqa: E402
from benchmarks.timing import Summary, batch_ns, calls_per_batch, machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = ("overhead", "reading", "transfer")
SIZES_MIB = (0.25, 0.5, 1, 4, 16, 64, 256, 1024)

Json = dict[str, Any]
console = Console(width=110)


# --- overhead ------------------------------------------------------------------------------------


def identity(x: Any) -> Any:
    return x


def contenders(x: Any) -> dict[str, Callable[[], object]]:
    recover, split = arraybridge.run_with_oom_recovery, arraybridge.split_and_retry
    return {
        "plain call": lambda: identity(x),
        "run_with_oom_recovery": lambda: recover(identity, x),
        "split_and_retry": lambda: split(identity, x),
    }


def overhead(rounds: int) -> Json:
    """Return the nanoseconds over the plain call of a function that returns its argument."""
    arrays: dict[str, Any] = {"numpy": np.ones(16, np.float32)}
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name) is not None:
            arrays[name] = arraybridge.convert_memory(arrays["numpy"], name)
    found: Json = {}
    for framework, x in arrays.items():
        calls = contenders(x)
        counts = {name: calls_per_batch(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name].append(batch_ns(call, counts[name]))
        plain = samples["plain call"]
        for name in list(calls)[1:]:
            over = [a - b for a, b in zip(samples[name], plain, strict=True)]
            found[f"{name}, {framework}"] = Summary.of(over).as_dict()
    return found


def overhead_targets(found: Json) -> list[tuple[str, float, float]]:
    return [
        (f"{name}, ns over the plain call", found[name]["median_ns"], most)
        for name, most in (("run_with_oom_recovery, numpy", 1000), ("split_and_retry, numpy", 5000))
    ]


# --- reading -------------------------------------------------------------------------------------


def reading(rounds: int) -> Json:
    """Return the nanoseconds of `memory_stats` with all installed frameworks loaded."""
    loaded = []
    for name in ("torch", "jax", "tensorflow", "cupy", "pyclesperanto"):
        try:
            arraybridge.framework(name)
        except arraybridge.FrameworkNotInstalledError:
            continue
        loaded.append(name)
    call = arraybridge.memory_stats
    count = calls_per_batch(call)
    summary = Summary.of(batch_ns(call, count) for _ in range(rounds)).as_dict()
    return {"frameworks": loaded, **summary}


# --- transfer ------------------------------------------------------------------------------------


def gpu_name() -> str:
    """Return the name of the first NVIDIA GPU; empty if there is none."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def gb_per_second(call: Callable[[], object], nbytes: int, rounds: int) -> float:
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds) / 1e9


def transfer(rounds: int) -> Json:
    """Measure transfers to and from the first GPU in GB/s: arraybridge, native calls and pinned memory.

    ``convert`` is ``convert_memory(gpu_id=0)``. Only ``pinned`` uses pinned host memory.
    """
    arraybridge.coexist()  # JAX must not reserve most of the GPU memory
    import torch

    device = Device("gpu", 0)
    owners = [name for name in ("torch", "cupy") if importlib.util.find_spec(name) is not None]
    found: Json = {"gpu": gpu_name(), "frameworks": owners, "sizes": []}
    for mib in SIZES_MIB:
        count = int(mib * (1 << 20)) // 4
        host = np.arange(count, dtype=np.float32)
        nbytes = host.nbytes
        locked = torch.empty(count, dtype=torch.float32, pin_memory=True)
        locked.numpy()[...] = host
        there = torch.empty(count, dtype=torch.float32, device="cuda").copy_(locked)
        up: dict[str, Callable[[], object]] = {
            "pinned": lambda a=there, b=locked: (a.copy_(b, non_blocking=True), torch.cuda.synchronize()),
            "torch": lambda a=host: (torch.from_numpy(a).to("cuda"), torch.cuda.synchronize()),
        }
        down: dict[str, Callable[[], object]] = {
            "pinned": lambda a=locked, b=there: (a.copy_(b, non_blocking=True), torch.cuda.synchronize()),
            "torch": lambda a=there: a.cpu(),
        }
        for name in owners:
            framework = arraybridge.framework(name)
            on_gpu = framework.from_host(host, device)
            up[f"convert, {name}"] = lambda a=host, n=name: convert(a, n)
            down[f"convert, {name}"] = lambda a=on_gpu: convert(a, "numpy")
        if "cupy" in owners:
            import cupy

            on_cupy = cupy.asarray(host)
            up["cupy"] = lambda a=host: (cupy.asarray(a), cupy.cuda.get_current_stream().synchronize())
            down["cupy"] = lambda a=on_cupy: a.get()
        if importlib.util.find_spec("jax") is not None:
            import jax

            gpus = [d for d in jax.devices() if d.platform == "gpu"]
            if gpus:
                on_jax = jax.device_put(host, gpus[0]).block_until_ready()
                up["jax"] = lambda a=host, g=gpus[0]: jax.device_put(a, g).block_until_ready()
                # JAX caches the result of np.asarray(x) with the array, so each copy needs a new array.
                down["jax"] = lambda a=on_jax: np.asarray(a + 0)
        row: Json = {"mib": mib}
        for direction, calls in (("to the GPU", up), ("to the host", down)):
            row[direction] = {
                name: round(gb_per_second(call, nbytes, rounds), 2) for name, call in calls.items()
            }
        found["sizes"].append(row)
    return found


def convert(x: Any, target: str) -> Any:
    return arraybridge.convert_memory(x, target, gpu_id=0)


def transfer_targets(found: Json) -> list[tuple[str, float, float]]:
    """Return each claim with its measurement and its lower limit."""
    targets = []
    for row in found["sizes"]:
        for direction in ("to the GPU", "to the host"):
            rates = row[direction]
            best = max(rate for name, rate in rates.items() if name in ("torch", "cupy", "jax"))
            for name in found["frameworks"]:
                what = f"{row['mib']} MiB {direction}, {name}"
                converted = rates[f"convert, {name}"]
                # The target is the speed of the native call, less the variation of equal calls.
                targets.append(
                    (f"{what}: gpu_id=0, relative to the fastest native call", converted / best, 0.9)
                )
    return targets


# --- report --------------------------------------------------------------------------------------


def show(report: Json) -> None:
    if "overhead" in report:
        table = Table(title="Difference from the plain call of a function that returns its argument")
        for column in ("", "median, ns", "minimum, ns"):
            table.add_column(column, justify="left" if not column else "right")
        for name, row in report["overhead"].items():
            table.add_row(name, f"{row['median_ns']:.0f}", f"{row['min_ns']:.0f}")
        console.print(table)
        for what, measured, most in overhead_targets(report["overhead"]):
            console.print(
                f"{'met' if measured < most else 'MISSED':>6}  {what}: {measured:.0f} (under {most:.0f})"
            )
    if "reading" in report:
        median = report["reading"]["median_ns"] / 1e3
        frameworks = ", ".join(report["reading"]["frameworks"])
        verdict = "met" if median < 1000 else "MISSED"
        console.print(f"{verdict:>6}  memory_stats() with {frameworks}: {median:.0f} µs (under 1000)")
    if "transfer" in report:
        for row in report["transfer"]["sizes"]:
            for direction in ("to the GPU", "to the host"):
                rates = ", ".join(f"{name} {rate}" for name, rate in row[direction].items())
                console.print(f"{row['mib']:>7} MiB {direction}, GB/s: {rates}")
        for what, measured, least in transfer_targets(report["transfer"]):
            console.print(
                f"{'met' if measured >= least else 'MISSED':>6}  {what}: {measured:.2f} (at least {least})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure memory recovery, statistics and transfers.")
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="run only this section; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=25, help="rounds (at least 15 to publish)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of memory.json")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    chosen = arguments.section or list(SECTIONS)
    measured: Json = {}
    if "overhead" in chosen:
        measured["overhead"] = overhead(arguments.rounds)
    if "reading" in chosen:
        measured["reading"] = reading(arguments.rounds)
    if "transfer" in chosen:
        if gpu_name():
            measured["transfer"] = transfer(min(arguments.rounds, 15))
        else:
            console.print("transfer: skipped, because PyTorch finds no NVIDIA GPU")
    show(measured)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "memory.json"
    # Sections that were not measured are unchanged. Each section names its machine.
    report = json.loads(path.read_text()) if path.exists() else {}
    about = {
        "machine": machine(),
        "versions": versions("numpy", "torch", "jax", "tensorflow-cpu", "cupy-cuda13x"),
    }
    report.update({name: {**about, "results": result} for name, result in measured.items()})
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
