"""Measure what traces cost while they are closed, and per event while they are open.

    python -m benchmarks.trace_cost             # writes benchmarks/results/trace_cost.json
    python -m benchmarks.trace_cost --processes 3 --rounds 15 --out /tmp

The calls are those of `benchmarks.call_overhead`. A separate process times each call in short batches, opens and
closes a trace around it, and times it again. The ratio of the fastest batch after the trace to the fastest batch
before it is taken per process, and the result is the median over the processes. All times are CPU times of the
thread, which other work on the machine disturbs less than elapsed times.

A traced call takes the slow path, without plans. The cost of an event is therefore the difference to the same call
on the slow path without recording.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.conversion import DISTRIBUTIONS  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: The most that a case may take after a trace, over what it took before.
MOST = 1.05
#: The most microseconds of an event.
MOST_US = 10.0
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


@contextmanager
def unrecorded() -> Iterator[None]:
    """Calls go the way that they go for an open trace, and nothing is told to it."""
    import arraybridge
    from arraybridge.conversion.decision import Decision
    from arraybridge.tracing import trace_log

    def untold(decision: Decision, active_logs: object) -> Any:
        return decision()

    with (
        patch.object(trace_log, "recorded", untold),
        patch.object(trace_log, "span", lambda *_, **__: None),
        arraybridge.trace() as log,
    ):
        yield
    assert not log.events


def worker(connection: Connection, rounds: int) -> None:
    """Time every case before and after a trace."""
    import arraybridge
    from benchmarks.call_overhead import conversions, decorated

    cases = {name: case.ours for name, case in {**conversions(arraybridge), **decorated(arraybridge)}.items()}
    counts = {}
    for name, call in cases.items():
        for _ in range(50):
            call()
        counts[name] = max(1, int(BATCH_NS / batch(call, 50)))

    def quickest() -> dict[str, float]:
        found = dict.fromkeys(cases, float("inf"))
        for _ in range(rounds):
            for name, call in cases.items():
                found[name] = min(found[name], batch(call, counts[name]))
        return found

    never = quickest()
    events: dict[str, int] = {}
    opened, careful = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, float("inf"))
    for name, call in cases.items():
        with arraybridge.trace() as log:
            call()
        events[name] = len(log.events)
        for _ in range(rounds):
            with arraybridge.trace(limit=1000):
                opened[name] = min(opened[name], batch(call, 100))
            with unrecorded():
                careful[name] = min(careful[name], batch(call, 100))
    once = quickest()
    connection.send({n: (never[n], once[n], opened[n], careful[n], events[n]) for n in cases})


def measure(rounds: int) -> dict[str, tuple[float, float, float, float, int]]:
    """The figures of one process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker, args=(there, rounds), daemon=True)
    process.start()
    there.close()
    found: dict[str, tuple[float, float, float, float, int]] = here.recv()
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
        price = statistics.median((run[name][2] - run[name][3]) / run[name][4] for run in runs)
        results[name] = {
            "never_ns": round(min(run[name][0] for run in runs), 1),
            "traced_once_ns": round(min(run[name][1] for run in runs), 1),
            "ratio": round(ratio, 3),
            "open_ns": round(min(run[name][2] for run in runs), 1),
            "careful_ns": round(min(run[name][3] for run in runs), 1),
            "events": runs[0][name][4],
            "per_event_us": round(price / 1e3, 2),
        }
        row = results[name]
        took, careful = row["open_ns"] / 1e3, row["careful_ns"] / 1e3
        print(
            f"{name:40} {ratio:.3f}  open {took:5.1f} µs, without its {row['events']} events {careful:5.1f}:"
            f" {row['per_event_us']:4.1f} µs an event"
        )
    ratios = [row["ratio"] for row in results.values()]
    prices = [row["per_event_us"] for row in results.values()]
    targets = [
        {
            "claim": "closed: every form of call, traced once before over never traced",
            "target": f"<= {MOST}",
            "measured": max(ratios),
            "median": round(statistics.median(ratios), 3),
            "met": max(ratios) <= MOST,
        },
        {
            "claim": "open: each event, in every form of call",
            "target": f"<= {MOST_US:.0f}",
            "unit": "µs",
            "measured": max(prices),
            "median": round(statistics.median(prices), 2),
            "met": max(prices) <= MOST_US,
        },
    ]
    about = {"machine": machine(), "versions": versions("arraybridge", *DISTRIBUTIONS)}
    report = about | {"processes": arguments.processes, "rounds": arguments.rounds, "results": results}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"price": report | {"targets": targets}}, indent=1)
    (arguments.out / "trace_cost.json").write_text(text + "\n")
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
