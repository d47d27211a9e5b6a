"""Compare conversions of carriers (tables, labeled arrays, images, buffers) with calls of their libraries.

    python -m benchmarks.carriers             # writes benchmarks/results/carriers.json
    python -m benchmarks.carriers --rounds 15 --out /tmp
    python -m benchmarks.carriers --without peer

Each object is small, so that the time of a call counts. "By hand" is the code that users write with the
public calls of the libraries. It makes the copies that the library makes, such as that of read-only memory
for PyTorch, and omits its checks. Both contenders run in turn, one batch each per round. The fastest batch of
each counts, because other work on the machine only adds to the time. The peer, arraybridge 0.5.2, converts
none of these objects; the results have its answers.
"""

from __future__ import annotations

import argparse
import array
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks import peer  # noqa: E402
from benchmarks.timing import Summary, batch_ns, calls_per_batch, target_us, write_report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: Maximum time over the call by hand in microseconds: for one array, for a table, and to restore a result.
ARRAY_US, TABLE_US, RESTORE_US = 5.0, 8.0, 15.0
DISTRIBUTIONS = ("arraybridge", "numpy", "torch", "pandas", "polars", "pyarrow", "xarray", "pillow")


class Conversion(NamedTuple):
    """A conversion, the same by hand, and how much longer it may take in microseconds."""

    x: Any
    target: str
    by_hand: Callable[[], object]
    most_us: float


class Row(NamedTuple):
    """Two calls, and how much longer the first one may take in microseconds."""

    ours: Callable[[], object]
    by_hand: Callable[[], object]
    most_us: float


def arrays_and_buffers() -> dict[str, Conversion]:
    """Return the conversions of objects with one array."""
    import pandas
    import torch
    import xarray
    from PIL import Image

    values = np.random.default_rng(0).random((100, 4))
    labeled = xarray.DataArray(values, dims=("row", "column"), coords={"row": np.arange(100)})
    series = pandas.Series(values[:, 0].copy(), name="a")
    image = Image.fromarray((values * 255).astype(np.uint8))
    view = memoryview(values)
    numbers = array.array("d", range(100))
    return {
        "DataArray → PyTorch": Conversion(labeled, "torch", lambda: torch.from_numpy(labeled.data), ARRAY_US),
        "pandas Series → PyTorch": Conversion(
            series, "torch", lambda: torch.tensor(series.to_numpy()), ARRAY_US
        ),
        "pandas Index → NumPy": Conversion(series.index, "numpy", series.index.to_numpy, ARRAY_US),
        "Pillow image → NumPy": Conversion(image, "numpy", lambda: np.array(image), ARRAY_US),
        "memoryview → PyTorch": Conversion(
            view, "torch", lambda: torch.from_numpy(np.asarray(view)), ARRAY_US
        ),
        "array.array → NumPy": Conversion(numbers, "numpy", lambda: np.asarray(numbers), ARRAY_US),
    }


def tables() -> dict[str, Conversion]:
    """Return the conversions of tables and columns."""
    import pandas
    import polars
    import pyarrow
    import torch

    values = np.random.default_rng(0).random((100, 4))
    columns = {name: values[:, i].copy() for i, name in enumerate("abcd")}
    frame = pandas.DataFrame(values)
    apart = pandas.DataFrame({"a": columns["a"]})
    for name in "bcd":
        apart[name] = columns[name]
    table = pyarrow.table(columns)
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), 4)
    polar = polars.DataFrame(columns)
    column = table["a"]
    series = polar["a"]

    def stack() -> Any:
        return np.column_stack([one.to_numpy() for one in table.columns])

    return {
        "pandas DataFrame → NumPy": Conversion(frame, "numpy", frame.to_numpy, TABLE_US),
        "pandas DataFrame → PyTorch": Conversion(
            frame, "torch", lambda: torch.tensor(frame.to_numpy()), TABLE_US
        ),
        "pandas DataFrame, separate columns → NumPy": Conversion(apart, "numpy", apart.to_numpy, TABLE_US),
        "polars DataFrame → NumPy": Conversion(polar, "numpy", polar.to_numpy, TABLE_US),
        "polars DataFrame → PyTorch": Conversion(
            polar, "torch", lambda: torch.from_numpy(polar.to_numpy()), TABLE_US
        ),
        "polars Series → NumPy": Conversion(series, "numpy", series.to_numpy, ARRAY_US),
        "Arrow table → NumPy": Conversion(table, "numpy", stack, TABLE_US),
        "Arrow column → NumPy": Conversion(column, "numpy", column.to_numpy, ARRAY_US),
        "Arrow fixed-size lists → NumPy": Conversion(
            lists, "numpy", lambda: lists.flatten().to_numpy().reshape(-1, 4), TABLE_US
        ),
    }


def questions() -> dict[str, tuple[Any, str, str]]:
    """Return the conversions for the peer, which needs a source; all objects hold NumPy arrays."""
    conversions = {**arrays_and_buffers(), **tables()}
    return {name: (one.x, "numpy", one.target) for name, one in conversions.items()}


def ours_of(conversion: Conversion) -> Callable[[], object]:
    """Return the call of this library."""
    import arraybridge

    convert = getattr(arraybridge, f"to_{conversion.target}")
    x = conversion.x
    return lambda: convert(x)


def restored() -> dict[str, Row]:
    """Return the calls of decorated functions whose results are restored."""
    import pandas
    import torch
    import xarray

    import arraybridge as ab

    values = np.random.default_rng(0).random((100, 4))
    labeled = xarray.DataArray(values, dims=("row", "column"), coords={"row": np.arange(100)})
    frame = pandas.DataFrame(values)

    @ab.torch(output_type="input")
    def double(x: Any) -> Any:
        return x * 2

    def double_labeled() -> Any:
        return labeled.copy(deep=False, data=(torch.from_numpy(labeled.data) * 2).numpy())

    def double_frame() -> Any:
        doubled = (torch.tensor(frame.to_numpy()) * 2).numpy()
        return pandas.DataFrame(doubled, index=frame.index, columns=frame.columns)

    return {
        "DataArray, restored": Row(lambda: double(labeled), double_labeled, RESTORE_US),
        "pandas DataFrame, restored": Row(lambda: double(frame), double_frame, RESTORE_US),
    }


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Time both contenders in turn, and compare them."""
    calls = row.ours, row.by_hand
    counts = [calls_per_batch(call) for call in calls]
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for i in (0, 1) if turn % 2 else (1, 0):
            samples[i].append(batch_ns(calls[i], counts[i]))
    ours, by_hand = map(Summary.of, samples)
    over = round((ours.minimum - by_hand.minimum) / 1e3, 2)
    return {
        "ours": ours.as_dict(),
        "by_hand": by_hand.as_dict(),
        "ratio": round(ours.minimum / by_hand.minimum, 2),
        "over_by_hand_us": over,
        "most_us": row.most_us,
        "met": over <= row.most_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure conversions of carriers and the same by hand.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    peer.add_options(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    results: dict[str, dict[str, Any]] = {}
    answers = peer.answers_for("benchmarks.carriers", arguments)
    conversions = {**arrays_and_buffers(), **tables()}
    rows = {name: Row(ours_of(one), one.by_hand, one.most_us) for name, one in conversions.items()}
    for name, row in {**rows, **restored()}.items():
        found = results[name] = measure(row, arguments.rounds)
        if name in answers:
            found["peer"] = answers[name]
        ours, by_hand = found["ours"]["min_ns"] / 1e3, found["by_hand"]["min_ns"] / 1e3
        print(f"{name:45} {ours:8.2f} µs, by hand {by_hand:8.2f}: {found['ratio']:6.2f} times")
    targets = [
        target_us(f"{name}, over the call by hand", found["most_us"], found["over_by_hand_us"])
        for name, found in results.items()
    ]
    write_report(arguments.out / "carriers.json", DISTRIBUTIONS, arguments.rounds, results, targets)


if __name__ == "__main__":
    main()
