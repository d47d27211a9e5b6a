"""Compare recovery from out-of-memory errors with a program written by hand.

    python -m benchmarks.recovery [--rounds 25] [--out FOLDER]

A function doubles the rows of a batch, and raises `MemoryError` above a number of rows. The program by hand
does the same as `split_and_retry`: it collects garbage once, tries the whole batch again, halves the size of
the parts until one fits, and writes the results into one array. All frameworks of the machine are imported,
because they determine how long a collection takes. ``without collections`` is the same comparison with a
`gc.collect` that does nothing, which shows the rest of the time. The contenders take turns. Writes
``results/recovery.json``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import arraybridge as ab  # noqa: E402
from benchmarks.timing import Summary, in_turn, machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: Rows of the batch and rows that fit. Each row has 1024 float32 elements.
CASES = ((4096, 1000), (4096, 16), (256, 100))
COLUMNS = 1024
#: The maximum time of recovery, relative to the program by hand.
TARGET = 1.2

Json = dict[str, Any]
Function = Callable[[np.ndarray], np.ndarray]


def with_memory_for(rows: int) -> Function:
    """Return a function that doubles a batch and runs out of memory above a number of rows."""

    def double(x: np.ndarray) -> np.ndarray:
        if len(x) > rows:
            raise MemoryError
        return x * 2

    return double


def by_hand(fn: Function, batch: np.ndarray) -> np.ndarray:
    """Return ``fn(batch)``, computed in parts of a size that fits."""
    for is_last in (False, True):
        try:
            return fn(batch)
        except MemoryError:
            if not is_last:
                gc.collect()
    size = len(batch) // 2
    result = np.empty_like(batch)
    done = 0
    while done < len(batch):
        stop = min(done + size, len(batch))
        try:
            result[done:stop] = fn(batch[done:stop])
        except MemoryError:
            if size == 1:
                raise
            size //= 2
        else:
            done = stop
    return result


def measure(rows: int, fits: int, rounds: int) -> Json:
    """Return the times of both contenders for one batch, with and without collections, and their ratios."""
    fn = with_memory_for(fits)
    batch = np.ones((rows, COLUMNS), np.float32)
    contenders = {"ours": lambda: ab.split_and_retry(fn, batch), "by hand": lambda: by_hand(fn, batch)}
    row: Json = {"rows": rows, "fits": fits}
    with patch.object(gc, "collect", return_value=0):
        row["without collections"] = summarize(in_turn(contenders, rounds))
    row |= summarize(in_turn({**contenders, "collection": gc.collect}, rounds))
    return row


def summarize(samples: dict[str, list[float]]) -> Json:
    times = {name: Summary.of(values) for name, values in samples.items()}
    ratio = times["ours"].minimum / times["by hand"].minimum
    return {"ratio": round(ratio, 3), "times": {name: one.as_dict() for name, one in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare recovery with a program written by hand.")
    parser.add_argument("--rounds", type=int, default=25, help="rounds (at least 15 to publish)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of recovery.json")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("torch", "jax", "tensorflow"):
        if importlib.util.find_spec(name) is not None:
            ab.framework(name)
    rows = [measure(*case, arguments.rounds) for case in CASES]
    table = Table(
        "rows", "fit", "ours, ms", "by hand, ms", "ratio", "collection, ms", "rest of ours, ms", "by hand, ms"
    )
    targets: list[Json] = []
    for row in rows:
        rest = row["without collections"]["times"]
        times = [row["times"]["ours"], row["times"]["by hand"], row["times"]["collection"]]
        ours, hand, collection, ours_rest, hand_rest = (
            f"{one['min_ns'] / 1e6:.2f}" for one in (*times, rest["ours"], rest["by hand"])
        )
        cells = (str(row["rows"]), str(row["fits"]), ours, hand, f"{row['ratio']:.2f}", collection)
        table.add_row(*cells, ours_rest, hand_rest)
        claim = f"split recovery of {row['rows']} rows of which {row['fits']} fit, against a program by hand"
        met = row["ratio"] <= TARGET
        targets.append(
            {"claim": claim, "target": f"<= {TARGET}", "measured": row["ratio"], "unit": "x", "met": met}
        )
    Console(width=110).print(table)
    about = {"machine": machine(), "versions": versions("numpy", "torch", "jax", "tensorflow-cpu")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"split": about | {"rows": rows, "targets": targets}}
    (arguments.out / "recovery.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
