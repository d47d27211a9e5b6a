"""What an array costs on its way to another process and back: by shared memory, and by what else there is.

Run it from the root of the checkout:

    python -m benchmarks.processes [--seconds 2]

An item goes to one worker, whose function returns it: with `device_map(processes=True)`, with an array that
is `shared` already, with pickle through a pipe, with joblib (which maps files above 1 MB) and with
`torch.multiprocessing`. Each time stands beside that of ``x.copy()``. Writes `results/processes.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from arraybridge import device_map, shared  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIZES = [4 << 10 << 2 * i for i in range(9)]  # 4 KiB to 256 MiB
WARM_UP = 8  # items until all segments have been used once

Json = dict[str, Any]
Trip = Callable[[], object]


def same(x: Any) -> Any:
    """The function of the workers."""
    return x


@contextmanager
def by_device_map(x: np.ndarray) -> Iterator[Trip]:
    """An array of this process's own, copied into segments that are used again."""
    results = device_map(same, repeat(x), ["cpu"], processes=True)
    yield lambda: next(results)
    results.close()  # type: ignore[attr-defined]  # a generator


@contextmanager
def by_shared(x: np.ndarray) -> Iterator[Trip]:
    """An array that is shared already."""
    with by_device_map(shared(x)) as trip:
        yield trip


@contextmanager
def by_pickle(x: np.ndarray) -> Iterator[Trip]:
    """A pipe of multiprocessing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs,), daemon=True)
    process.start()

    def trip() -> Any:
        ours.send(x)
        return ours.recv()

    yield trip
    process.terminate()
    process.join()


def echo(end: Any) -> None:
    """Send back what comes."""
    while True:
        end.send(same(end.recv()))


@contextmanager
def by_joblib(x: np.ndarray) -> Iterator[Trip]:
    """The workers of joblib."""
    import joblib

    with joblib.Parallel(n_jobs=2) as parallel:
        yield lambda: parallel([joblib.delayed(same)(x)])


@contextmanager
def by_torch(x: np.ndarray) -> Iterator[Trip]:
    """Queues of torch.multiprocessing, with a new tensor each time, as a loader makes it."""
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
    """Send back a new tensor for each that comes."""
    while True:
        back.put(same(there.get()).clone())


WAYS = {
    "device_map": by_device_map,
    "shared": by_shared,
    "pickle": by_pickle,
    "joblib": by_joblib,
    "torch": by_torch,
}


def median(trip: Trip, seconds: float) -> float:
    """Seconds a call takes, after the first ones."""
    samples = []
    for _ in range(WARM_UP):
        trip()
    until = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        result = trip()
        samples.append(time.perf_counter() - start)
        del result
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and size")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest array")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    seconds = options.seconds
    rows: list[Json] = []
    for size in (size for size in SIZES if size <= options.largest):
        x = np.random.default_rng(0).random(size // 4, dtype=np.float32)
        row: Json = {"bytes": size, "copy_us": round(median(x.copy, seconds) * 1e6, 1)}
        for name, way in WAYS.items():
            try:
                with way(x) as trip:
                    row[f"{name}_us"] = round(median(trip, seconds) * 1e6, 1)
            except ImportError:
                row[f"{name}_us"] = None
        rows.append(row)
        print(json.dumps(row), flush=True)
    found = {"machine": machine(), "versions": versions("numpy", "torch", "joblib"), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "processes.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
