"""Measure the time of `@gpu` for a decision, and its overhead around an empty function.

    python -m benchmarks.offload [--out FOLDER]

It needs no GPU: the decisions are for a simulated one that is never used. Writes ``results/offload.json``.
Target: less than 20 µs for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from arraybridge.device import Device
from arraybridge.interface.registry import framework
from arraybridge.offload.call_signature import Call
from arraybridge.offload.decision import DeviceChooser
from arraybridge.offload.gpu_decorator import gpu
from arraybridge.offload.gpu_search import BackendGpu, found_gpus
from arraybridge.offload.records import CPU, GPU
from benchmarks.timing import batch_ns, calls_per_batch, machine, versions

TARGET_US = 20.0


def microseconds(call: Callable[[], object], rounds: int = 15) -> float:
    count = calls_per_batch(call)
    return statistics.median(batch_ns(call, count) for _ in range(rounds)) / 1000


def decisions() -> dict[str, float]:
    """Return the microseconds per decision for known and new call signatures, by case."""
    simulated = BackendGpu(framework("numpy"), Device("gpu", 0))
    found_gpus[None, 0] = simulated
    chooser = DeviceChooser(lambda *xs: xs[0])
    measured = {}

    def decide(args: tuple[Any, ...]) -> object:
        call = Call((), args, {}).inspect()
        return chooser.decide(call, chooser.history.record(call))

    one, eight = (np.zeros((512, 512)),), tuple(np.zeros((64, 8 + i)) for i in range(8))
    for name, args in {"one array": one, "eight arrays": eight, "eight in a list": (list(eight),)}.items():
        call = Call((), args, {}).inspect()
        record = chooser.history.record(call)
        record.verified.add(simulated.name)
        for place, seconds in ((CPU, 1e-3), (GPU, 1e-4)):
            for _ in range(7):
                record.add(place, seconds)
        measured[f"{name}, measured before"] = microseconds(lambda args=args: decide(args))  # type: ignore[misc]
    fresh = [np.zeros((4, n)) for n in range(1, 4000)]
    turn = iter(fresh * 1000)
    measured["one array of a new size"] = microseconds(lambda: decide((next(turn),)))
    return measured


def calls() -> dict[str, float]:
    """Return the microseconds that the decorator adds to a call with a small array."""

    def same(x: Any) -> Any:
        return None

    wrapped, x = gpu(same), np.zeros(100)
    return {"a call, small array": microseconds(lambda: wrapped(x)) - microseconds(lambda: same(x))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().out
    measured = {**calls(), **decisions()}  # decisions() registers a simulated GPU
    for name, value in measured.items():
        print(f"{name:<32} {value:6.2f} µs")
    slowest = max(measured.values())
    print(f"target under {TARGET_US:.0f} µs: {'met' if slowest < TARGET_US else 'missed'} ({slowest:.2f} µs)")
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine(),
        "versions": versions("numpy", "arraybridge"),
        "target_us": TARGET_US,
        "microseconds": {name: round(value, 2) for name, value in measured.items()},
    }
    (folder / "offload.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
