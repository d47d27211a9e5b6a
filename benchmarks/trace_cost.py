"""Measure the cost of a trace after it was closed, and the cost per event while it is open.

    python -m benchmarks.trace_cost             # writes benchmarks/results/trace_cost.json
    python -m benchmarks.trace_cost --processes 3 --rounds 15 --out /tmp

The calls are those of `benchmarks.call_overhead`. A separate process times each call in short batches, opens
and closes a trace around it, and times it again. Each process yields the ratio of the fastest batch after the
trace to the fastest batch before it; the result is the median over the processes. All times are CPU times of
the thread, which other work on the machine disturbs less than elapsed times.

A traced call also looks up or makes a decision. The cost of an event is therefore the difference from the
same call in a trace without recording.
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
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.conversion import DISTRIBUTIONS  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: Maximum allowed ratio of a call after a trace to the same call before it.
MAX_RATIO = 1.05
#: Maximum allowed cost of an event in microseconds.
MAX_EVENT_US = 10.0
BATCH_NS = 500_000

Json = dict[str, Any]


def batch(call: Callable[[], object], count: int) -> float:
    """Return the CPU time per call, in nanoseconds."""
    gc.disable()
    try:
        start = time.thread_time_ns()
        for _ in range(count):
            call()
        return (time.thread_time_ns() - start) / count
    finally:
        gc.enable()


class Times(NamedTuple):
    """CPU times of one call, in nanoseconds."""

    #: Before any trace was opened.
    before: float
    #: After a trace was closed.
    after: float
    #: While a trace is open.
    recorded: float
    #: While a trace is open, without recording.
    unrecorded: float
    #: Number of events that one call records.
    events: int


@contextmanager
def traced_without_recording() -> Iterator[None]:
    """Open a trace in which calls take the same path and record nothing."""
    import arraybridge
    from arraybridge.conversion import convert
    from arraybridge.conversion.request import Decision
    from arraybridge.tracing import trace_log

    def convert_only(decision: Decision, active_logs: object) -> Any:
        return decision()

    with (
        patch.object(convert, "convert_and_record", convert_only),
        patch.object(trace_log, "span", lambda *_, **__: None),
        arraybridge.trace() as log,
    ):
        yield
    if log.events:
        raise RuntimeError(f"{len(log.events)} events were recorded. Patch the function that records them.")


def worker(connection: Connection, rounds: int) -> None:
    """Time every call before, after and during a trace, and send the times."""
    import arraybridge
    from benchmarks.call_overhead import conversions, decorated

    cases = {**conversions(arraybridge), **decorated(arraybridge)}
    calls = {name: case.ours for name, case in cases.items()}
    counts = {}
    for name, call in calls.items():
        for _ in range(50):
            call()
        counts[name] = max(1, int(BATCH_NS / batch(call, 50)))

    def fastest_batches() -> dict[str, float]:
        found = dict.fromkeys(calls, float("inf"))
        for _ in range(rounds):
            for name, call in calls.items():
                found[name] = min(found[name], batch(call, counts[name]))
        return found

    before = fastest_batches()
    events: dict[str, int] = {}
    recorded = dict.fromkeys(calls, float("inf"))
    unrecorded = dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        with arraybridge.trace() as log:
            call()
        events[name] = len(log.events)
        for _ in range(rounds):
            with arraybridge.trace(limit=1000):
                recorded[name] = min(recorded[name], batch(call, 100))
            with traced_without_recording():
                unrecorded[name] = min(unrecorded[name], batch(call, 100))
    after = fastest_batches()
    connection.send({n: Times(before[n], after[n], recorded[n], unrecorded[n], events[n]) for n in calls})


def measure(rounds: int) -> dict[str, Times]:
    """Return the times of each call, measured in a separate process."""
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=worker, args=(child, rounds), daemon=True)
    process.start()
    child.close()
    found: dict[str, Times] = connection.recv()
    process.join(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of traces after closing and while open.")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=25, help="rounds before and after the trace")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results are written")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    runs = [measure(arguments.rounds) for _ in range(arguments.processes)]
    results: Json = {}
    for name in runs[0]:
        times = [run[name] for run in runs]
        ratio = statistics.median(one.after / one.before for one in times)
        cost = statistics.median((one.recorded - one.unrecorded) / one.events for one in times)
        row = {
            "never_ns": round(min(one.before for one in times), 1),
            "traced_once_ns": round(min(one.after for one in times), 1),
            "ratio": round(ratio, 3),
            "open_ns": round(min(one.recorded for one in times), 1),
            "unrecorded_ns": round(min(one.unrecorded for one in times), 1),
            "events": times[0].events,
            "per_event_us": round(cost / 1e3, 2),
        }
        results[name] = row
        recorded_us = row["open_ns"] / 1e3
        unrecorded_us = row["unrecorded_ns"] / 1e3
        print(
            f"{name:40} {ratio:.3f}  open {recorded_us:5.1f} µs, without recording {unrecorded_us:5.1f} µs,"
            f" {row['events']} events: {row['per_event_us']:4.1f} µs per event"
        )
    ratios = [row["ratio"] for row in results.values()]
    costs = [row["per_event_us"] for row in results.values()]
    targets = [
        {
            "claim": "closed trace: any call after it, compared with before",
            "target": f"<= {MAX_RATIO}",
            "measured": max(ratios),
            "median": round(statistics.median(ratios), 3),
            "met": max(ratios) <= MAX_RATIO,
        },
        {
            "claim": "open trace: each event of any call",
            "target": f"<= {MAX_EVENT_US:.0f}",
            "unit": "µs",
            "measured": max(costs),
            "median": round(statistics.median(costs), 2),
            "met": max(costs) <= MAX_EVENT_US,
        },
    ]
    about = {"machine": machine(), "versions": versions("arraybridge", *DISTRIBUTIONS)}
    report = about | {"processes": arguments.processes, "rounds": arguments.rounds, "results": results}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"trace_cost": report | {"targets": targets}}, indent=1)
    (arguments.out / "trace_cost.json").write_text(text + "\n")
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
