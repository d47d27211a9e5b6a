"""What a trace costs whoever does not open one: each door never traced, and traced once before.

    python benchmarks/trace_price.py             # writes benchmarks/results/trace_price.json
    python benchmarks/trace_price.py --processes 3 --rounds 15 --out /tmp

The doors are those of doors.py: forms of `convert_memory` and of decorated functions. In a process of its
own, each is timed in short batches, then used with a trace open, which is closed again, then timed anew. What
counts is the quickest batch of the second half over the quickest of the first, and of several processes the
median of that. Times are of the thread's own processor time, which other work on the machine disturbs less.
Beside them stands what a call takes while a trace is open, and how many events it records.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.conversion import DISTRIBUTIONS  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: The most that a door may take after a trace, over what it took before.
MOST = 1.05
BATCH_NS = 500_000

Json = dict[str, Any]


def batch(call: Callable[[], object], count: int) -> float:
    """Nanoseconds of processor time a call."""
    gc.disable()
    try:
        start = time.thread_time_ns()
        for _ in range(count):
            call()
        return (time.thread_time_ns() - start) / count
    finally:
        gc.enable()


def worker(connection: Connection, rounds: int) -> None:
    """Time every door before and after a trace."""
    import arraybridge
    from benchmarks.doors import conversions, decorated

    doors = {name: door.ours for name, door in {**conversions(arraybridge), **decorated(arraybridge)}.items()}
    counts = {}
    for name, call in doors.items():
        for _ in range(50):
            call()
        counts[name] = max(1, int(BATCH_NS / batch(call, 50)))

    def quickest() -> dict[str, float]:
        found = dict.fromkeys(doors, float("inf"))
        for _ in range(rounds):
            for name, call in doors.items():
                found[name] = min(found[name], batch(call, counts[name]))
        return found

    never = quickest()
    opened, events = {}, {}
    for name, call in doors.items():
        with arraybridge.trace() as log:
            call()
        events[name] = len(log.events)
        with arraybridge.trace(limit=1000):
            opened[name] = min(batch(call, 200) for _ in range(5))
    once = quickest()
    connection.send({n: (never[n], once[n], opened[n], events[n]) for n in doors})


def measure(rounds: int) -> dict[str, tuple[float, float, float, int]]:
    """The figures of one process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker, args=(there, rounds), daemon=True)
    process.start()
    there.close()
    found: dict[str, tuple[float, float, float, int]] = here.recv()
    process.join(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a trace costs when it is closed, and when it is open.")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=25, help="rounds before, and after")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    runs = [measure(arguments.rounds) for _ in range(arguments.processes)]
    results: Json = {}
    for name in runs[0]:
        ratio = statistics.median(run[name][1] / run[name][0] for run in runs)
        count = runs[0][name][3]
        results[name] = {
            "never_ns": round(min(run[name][0] for run in runs), 1),
            "traced_once_ns": round(min(run[name][1] for run in runs), 1),
            "ratio": round(ratio, 3),
            "open_ns": round(min(run[name][2] for run in runs), 1),
            "events": count,
        }
        print(f"{name:40} {ratio:.3f}  open {results[name]['open_ns'] / 1e3:.1f} µs, {count} events")
    ratios = [row["ratio"] for row in results.values()]
    target = {
        "claim": "closed: every door, traced once over never",
        "target": f"<= {MOST}",
        "measured": max(ratios),
        "median": round(statistics.median(ratios), 3),
        "met": max(ratios) <= MOST,
    }
    about = {"machine": machine(), "versions": versions("arraybridge", *DISTRIBUTIONS)}
    report = about | {"processes": arguments.processes, "rounds": arguments.rounds, "results": results}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report | {"targets": [target]}, indent=1)
    (arguments.out / "trace_price.json").write_text(text + "\n")
    print(target)


if __name__ == "__main__":
    main()
