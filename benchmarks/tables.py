"""Compare conversions of tables to NumPy with the calls of pyarrow and polars that do the same.

Run it from the root of the checkout:

    python -m benchmarks.tables

Each call returns a NumPy array with the values of the whole table. The contenders take turns, and the
fastest round of each counts, in CPU time, because other work on the machine delays these long calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import polars as pl  # noqa: E402
import pyarrow as pa  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import arraybridge  # noqa: E402
from benchmarks.timing import calls_per_batch, machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ROWS, COLUMNS, WIDTH, CHUNKS = 500_000, 8, 64, 10
#: Maximum allowed ratio to the table library's own call if the table is copied.
COPIED_RATIO = 1.2
#: Maximum allowed time in microseconds if the table is shared.
SHARED_US = 100

Json = dict[str, Any]
Timed = Callable[[], object]
console = Console(width=110)


def cpu_ns(call: Timed, count: int) -> float:
    """Return the CPU time per call of all threads, in nanoseconds."""
    start = time.process_time_ns()
    for _ in range(count):
        call()
    return (time.process_time_ns() - start) / count


def stacked(x: Any) -> Any:
    """Return the values of an Arrow table with a plain NumPy call."""
    return np.column_stack([column.to_numpy() for column in x.columns])


def cases() -> dict[str, tuple[Any, Timed, bool]]:
    """Return each table by name, with the library's own call and whether the conversion shares memory."""
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.random(ROWS) for i in range(COLUMNS)}
    table = pa.table(columns)
    part = ROWS // CHUNKS
    chunked = pa.concat_tables([table.slice(start, part) for start in range(0, ROWS, part)])
    vectors = rng.random((ROWS // 8, WIDTH), np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), WIDTH)
    several = pa.chunked_array([lists, lists])
    booleans = pa.chunked_array([rng.random(8 * ROWS) < 0.5])
    frame = pl.DataFrame(columns)
    frames = pl.concat([frame.slice(start, part) for start in range(0, ROWS, part)], rechunk=False)
    arrays = pl.Series("v", vectors)
    one = table.select(["c0"])
    return {
        "Arrow table, one column": (one, lambda: stacked(one), True),
        "Arrow table, 8 columns": (table, lambda: stacked(table), False),
        "Arrow table, 8 columns, 10 chunks": (chunked, lambda: stacked(chunked), False),
        "Arrow table, 8 columns, to_pandas": (table, lambda: table.to_pandas().to_numpy(), False),
        "Arrow column, 10 chunks": (chunked["c0"], chunked["c0"].to_numpy, False),
        "Arrow column of booleans": (booleans, booleans.to_numpy, False),
        "Arrow fixed-size lists": (
            lists,
            lambda: lists.flatten().to_numpy().reshape(-1, WIDTH),
            True,
        ),
        "Arrow fixed-size lists, 2 chunks": (
            several,
            lambda: several.combine_chunks().flatten().to_numpy().reshape(-1, WIDTH),
            False,
        ),
        "polars frame, 8 columns": (frame, frame.to_numpy, False),
        "polars frame, 8 columns, 10 chunks": (frames, frames.to_numpy, False),
        "polars arrays": (arrays, arrays.to_numpy, True),
    }


def measure(rounds: int) -> Json:
    results, targets = {}, []
    for name, (x, own, shares) in cases().items():

        def ours(x: Any = x) -> Any:
            return arraybridge.to_numpy(x)

        assert np.array_equal(ours(), own())  # type: ignore[call-overload]
        assert arraybridge.explain(x, "numpy").shares_memory == shares, name
        calls: dict[str, Timed] = {"own": own, "ours": ours}
        counts = {who: calls_per_batch(call) for who, call in calls.items()}
        taken: dict[str, list[float]] = {who: [] for who in calls}
        for turn in range(rounds):
            for who in list(calls)[:: 1 if turn % 2 else -1]:
                taken[who].append(cpu_ns(calls[who], counts[who]))
        best = {who: min(values) for who, values in taken.items()}
        ratio = round(best["ours"] / best["own"], 2)
        results[name] = {
            "own_ns": round(best["own"], 1),
            "ours_ns": round(best["ours"], 1),
            "ratio": ratio,
            "shares_memory": shares,
        }
        if shares:
            measured = round(best["ours"] / 1e3, 1)
            target = {"target": f"<= {SHARED_US}", "measured": measured, "unit": "µs"}
            targets.append({"claim": f"{name}, shared", **target, "met": measured <= SHARED_US})
        else:
            target = {"target": f"<= {COPIED_RATIO}", "measured": ratio, "unit": "x"}
            claim = f"{name}, compared with the library's own call"
            targets.append({"claim": claim, **target, "met": ratio <= COPIED_RATIO})
    return {"results": results, "targets": targets}


def show(tables: Json) -> None:
    table = Table(title="Tables to NumPy")
    for column in ("", "own call, µs", "ours, µs", "ratio", "memory"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in tables["results"].items():
        memory = "shared" if row["shares_memory"] else "copied"
        times = (f"{row['own_ns'] / 1e3:,.1f}", f"{row['ours_ns'] / 1e3:,.1f}", f"{row['ratio']:.2f}")
        table.add_row(name, *times, memory)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare conversions of tables with native calls.")
    parser.add_argument("--rounds", type=int, default=50, help="rounds (at least 25 to publish)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    tables = measure(arguments.rounds)
    show(tables)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": machine(),
        "versions": versions("arraybridge", "numpy", "pyarrow", "polars", "pandas"),
    }
    (arguments.out / "tables.json").write_text(json.dumps(about | {"tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
