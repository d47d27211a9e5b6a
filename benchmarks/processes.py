"""Compare shared memory with other ways to send an array to a process and back.

Run it from the root of the checkout:

    python -m benchmarks.processes [--rounds 7]

A worker receives an item and returns it. The contenders are `device_map(processes=True)`, the same with a
`shared` array, pickle through a pipe, joblib (which memory-maps files for arrays above 1 MB),
`torch.multiprocessing`, and ``x.copy()`` as a reference. All take turns. Writes `results/processes.json`,
and `results/processes.png` if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from arraybridge import device_map, shared  # noqa: E402
from benchmarks.timing import batch_ns, machine, pyplot, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIZES = [4 << 10 << 2 * i for i in range(9)]  # 4 KiB to 256 MiB
WARM_UP = 8  # items until all segments have been used once
READ_AHEAD = 4  # largest number of items that device_map computes in advance

Json = dict[str, Any]
Trip = Callable[[], object]


def same(x: Any) -> Any:
    """Return the argument; workers call this function."""
    return x


@contextmanager
def by_device_map(x: np.ndarray) -> Iterator[Trip]:
    """Yield a call that copies an ordinary array into shared segments, which are reused."""
    results = device_map(same, repeat(x), ["cpu"], processes=True)
    yield lambda: next(results)
    results.close()  # type: ignore[attr-defined]  # a generator


@contextmanager
def by_shared(x: np.ndarray) -> Iterator[Trip]:
    """Yield a call that passes an array in shared memory."""
    with by_device_map(shared(x)) as trip:
        yield trip


@contextmanager
def by_pickle(x: np.ndarray) -> Iterator[Trip]:
    """Yield a call that sends the pickled array through a pipe of multiprocessing."""
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=echo, args=(child,), daemon=True)
    process.start()

    def trip() -> Any:
        connection.send(x)
        return connection.recv()

    yield trip
    process.terminate()
    process.join()


def echo(end: Any) -> None:
    """Send back each object."""
    while True:
        end.send(same(end.recv()))


@contextmanager
def by_joblib(x: np.ndarray) -> Iterator[Trip]:
    """Yield a call that passes the array to a worker of joblib."""
    import joblib

    with joblib.Parallel(n_jobs=2) as parallel:
        yield lambda: parallel([joblib.delayed(same)(x)])


@contextmanager
def by_torch(x: np.ndarray) -> Iterator[Trip]:
    """Yield a call that passes a new tensor, as a data loader does, through torch.multiprocessing queues."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=echo_queue, args=(there, back), daemon=True)
    process.start()

    def trip() -> Any:
        there.put(torch.from_numpy(x).clone())
        return back.get()

    yield trip
    process.terminate()
    process.join()


def echo_queue(there: Any, back: Any) -> None:
    """Send back a copy of each tensor."""
    while True:
        back.put(same(there.get()).clone())


CONTENDERS = {
    "device_map": by_device_map,
    "shared": by_shared,
    "pickle": by_pickle,
    "joblib": by_joblib,
    "torch": by_torch,
}


LABELS = {
    "copy": "x.copy()",
    "shared": "device_map, shared array",
    "device_map": "device_map(processes=True)",
    "torch": "torch.multiprocessing",
    "joblib": "joblib",
    "pickle": "pickle through a pipe",
}


def measured(x: np.ndarray, rounds: int) -> Json:
    """Return the fastest and the median round of each contender, in microseconds."""
    count = 8 if x.nbytes < 16 << 20 else 3
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        trips: dict[str, Trip] = {"copy": x.copy}
        for name, contender in CONTENDERS.items():
            with suppress(ImportError):
                trips[name] = stack.enter_context(contender(x))
        for trip in trips.values():
            batch_ns(trip, WARM_UP)
        for _ in range(rounds):
            for name, trip in trips.items():
                if name in ("device_map", "shared"):
                    batch_ns(trip, READ_AHEAD)  # computed during the turns of the other contenders
                samples.setdefault(name, []).append(batch_ns(trip, 8 if name == "shared" else count) / 1e3)
    return {
        name: {"min_us": round(min(times), 1), "median_us": round(statistics.median(times), 1)}
        for name, times in samples.items()
    }


def plot(rows: list[Json], path: Path) -> None:
    """Draw the median round of each contender by size."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    sizes = [row["bytes"] / 1024 for row in rows]
    for name, label in LABELS.items():
        if all(name in row for row in rows):
            axes.loglog(sizes, [row[name]["median_us"] / 1e3 for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=4)
    axes.set_xticks(sizes, [f"{int(n)} KiB" if n < 1024 else f"{int(n / 1024)} MiB" for n in sizes])
    axes.set(ylabel="milliseconds", title="Time to send an array to a process and back")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per contender and size")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest array")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    rows: list[Json] = []
    for size in (size for size in SIZES if size <= options.largest):
        x = np.random.default_rng(0).random(size // 4, dtype=np.float32)
        rows.append({"bytes": size, **measured(x, options.rounds)})
        print(json.dumps(rows[-1]), flush=True)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    about = {"machine": machine(), "versions": versions("numpy", "torch", "joblib"), "load": load}
    result = {**about, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "processes.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with suppress(ImportError):
        plot(rows, options.out / "processes.png")


if __name__ == "__main__":
    main()
