"""Count the Python functions that an operation enters.

    python -m benchmarks.entered_functions [--out FOLDER]

Counts do not depend on the load of the machine, so they show a slower path that timings would not. A count is
the number of ``call`` events of `sys.setprofile`, in all threads, during the operation: in functions of the
package and in everything that these call, such as `contextlib`, PyTorch and the user's function. A generator
counts each time it is resumed, and before Python 3.12 a list comprehension counts as a function.

Each operation is repeated until its caches are filled. Out-of-memory errors are simulated with
`inject_oom("numpy")`, whose functions count too; NumPy and PyTorch are imported. The count of a pipeline is
per item: a hundredth of the difference between runs of 120 and of 20 items. Arrays have 8 × 8 elements.
Writes ``results/entered_functions.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402, F401  # its memory is part of each recovery
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import arraybridge as ab  # noqa: E402
from arraybridge.testing import inject_oom  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: The maximum number of functions entered by each operation.
TARGETS = {
    "out of memory once, split in two": 300,
    "out of memory once, retry": 65,
    "pipeline of two stages, per number": 40,
    "pipeline of two stages, per array": 40,
    "decorated call with a dict of two arrays": 22,
    "decorated call with one array": 13,
    "trace of ten conversions": 360,
}
WARM_UP = 3

Json = dict[str, Any]


def shift(x: Any) -> Any:
    return x + 1


def entered(run: FunctionType) -> Counter[str]:
    """Return how often a call enters each function, by the function's name."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code is not run.__code__:
            counts[f"{Path(code.co_filename).name}:{code.co_name}"] += 1

    threading.setprofile(count)  # for the threads that the call starts
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counts


def operations() -> dict[str, FunctionType]:
    x = np.arange(64.0).reshape(8, 8)
    arrays = {"a": x, "b": x}
    decorated = ab.torch(output_type="input")(shift_all)

    def split() -> None:
        with inject_oom("numpy", count=2):  # the retry fails as well
            ab.split_and_retry(shift, x)

    def retry() -> None:
        with inject_oom("numpy", count=1):
            ab.run_with_oom_recovery(shift, x)

    def trace() -> None:
        with ab.trace():
            for _ in range(10):
                ab.to_torch(x)

    return {
        "out of memory once, split in two": split,
        "out of memory once, retry": retry,
        "decorated call with a dict of two arrays": lambda: decorated(arrays),
        "decorated call with one array": lambda: decorated(x),
        "trace of ten conversions": trace,
    }


def shift_all(given: Any) -> Any:
    return {name: x + 1 for name, x in given.items()} if isinstance(given, dict) else given + 1


def per_item(item: Any) -> float:
    """Return the number of functions that a pipeline of two stages enters for each item."""
    pipeline = ab.Pipeline(shift, shift)

    def run(count: int) -> int:
        return entered(lambda: list(pipeline.map([item] * count))).total()

    run(20)
    # A waiting thread may wake up in vain, so the smallest of several counts is used.
    return min(run(120) for _ in range(3)) / 100 - min(run(20) for _ in range(3)) / 100


def measure() -> dict[str, float]:
    measured: dict[str, float] = {}
    for name, run in operations().items():
        for _ in range(WARM_UP):
            run()
        measured[name] = entered(run).total()
    measured["pipeline of two stages, per number"] = round(per_item(1), 1)
    measured["pipeline of two stages, per array"] = round(per_item(np.ones((8, 8))), 1)
    return {name: measured[name] for name in TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the functions that each operation enters.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of entered_functions.json")
    parser.add_argument("--functions", choices=list(operations()), help="print the functions of an operation")
    arguments = parser.parse_args()
    if arguments.functions:
        run = operations()[arguments.functions]
        for _ in range(WARM_UP):
            run()
        for name, count in entered(run).most_common():
            print(f"{count:5} {name}")
        return
    measured = measure()
    table = Table("operation", "functions entered", "at most", "")
    targets: list[Json] = []
    for name, count in measured.items():
        met = count <= TARGETS[name]
        table.add_row(name, f"{count:g}", str(TARGETS[name]), "" if met else "missed")
        targets.append(
            {
                "claim": name,
                "target": f"<= {TARGETS[name]}",
                "measured": count,
                "unit": "functions",
                "met": met,
            }
        )
    Console(width=110).print(table)
    report = {"machine": machine(), "versions": versions("numpy", "torch"), "targets": targets}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "entered_functions.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
