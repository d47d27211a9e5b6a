"""Time contenders fairly, allocate aligned memory, and describe the machine.

Contenders are measured in turn, one batch of each per round, so that other work on the machine affects
all of them equally.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

BATCH_NS = 3_000_000  # long enough for the clock, short enough to miss most interruptions


@dataclass(frozen=True)
class Summary:
    """Minimum and median of one contender's batches, in nanoseconds per call."""

    minimum: float
    median: float
    samples: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Summary:
        values = list(samples)
        return cls(min(values), statistics.median(values), len(values))

    def as_dict(self) -> dict[str, float]:
        """Return the entries of the JSON file, in nanoseconds rounded to 0.1."""
        return {"min_ns": round(self.minimum, 1), "median_ns": round(self.median, 1), "rounds": self.samples}


def batch_ns(call: Callable[[], object], count: int) -> float:
    """Return the nanoseconds per call in a batch of `count` calls, with the garbage collector disabled.

    Each result is dropped before the next call, as in most programs.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        return (time.perf_counter_ns() - start) / count
    finally:
        if collecting:
            gc.enable()


def calls_per_batch(call: Callable[[], object], target_ns: int = BATCH_NS) -> int:
    """Warm up a call, and return the number of calls that fill a batch of `target_ns` nanoseconds."""
    for _ in range(3):
        call()
    return max(1, int(target_ns / batch_ns(call, 5)))


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time single calls in turn, and return the nanoseconds of each contender per round.

    Use it for calls that take milliseconds. One warm-up round is discarded. Each round starts with the next
    contender, so that none always follows the same one.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        call()
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(batch_ns(calls[name], 1))
    return samples


def aligned(shape: tuple[int, ...], dtype: str = "float32", alignment: int = 64) -> np.ndarray[Any, Any]:
    """Return a C-contiguous array of 0, 1, 2, ... whose address is a multiple of `alignment` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + alignment, np.uint8)
    offset = -raw.ctypes.data % alignment
    array = raw[offset : offset + size].view(dtype).reshape(shape)
    array[...] = np.arange(array.size, dtype=dtype).reshape(shape)
    return array


def machine() -> dict[str, object]:
    """Return the CPU, number of cores, operating system and Python version."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def target_us(claim: str, limit: float, measured: float) -> dict[str, object]:
    """Return the entry of the JSON file for a time in microseconds that should not exceed a limit."""
    return {
        "claim": claim,
        "target": f"<= {limit:.0f}",
        "unit": "µs",
        "measured": measured,
        "met": measured <= limit,
    }


def write_report(
    path: Path, distributions: Iterable[str], rounds: int, results: object, targets: list[dict[str, object]]
) -> None:
    """Write the results of a benchmark to a JSON file, with the machine and the versions."""
    report = {
        "machine": machine(),
        "versions": versions(*distributions),
        "rounds": rounds,
        "results": results,
        "targets": targets,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def pyplot() -> Any:
    """Return matplotlib.pyplot, without windows and with the style of the documentation."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from arraybridge import (
        plots,
    )

    plt.rcParams.update(plots.PLOT_SETTINGS)
    return plt
