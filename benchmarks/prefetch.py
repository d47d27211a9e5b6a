"""What `prefetch` makes of a loop that reads and uses: against the longer of the two alone.

Run it from the root of the checkout:

    python -m benchmarks.prefetch

Sections: `overlap` (reading sleeps, using sleeps, each for so many milliseconds), `overhead` (neither takes
time: what an item costs), `arrays` (a batch of 4 MiB is made by NumPy and multiplied by torch). Writes
`results/prefetch.json`. A loop without `prefetch` stands beside each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from arraybridge import convert_memory, prefetch  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
ITEMS = 100
#: Milliseconds that reading and using an item take.
TIMES = ((10, 10), (10, 2), (2, 10), (20, 10))

Json = dict[str, Any]


def reading(seconds: float, item: Any, count: int = ITEMS) -> Iterator[Any]:
    for _ in range(count):
        time.sleep(seconds)
        yield item


def timed(items: Iterator[Any], use: Callable[[Any], object]) -> float:
    start = time.perf_counter()
    for item in items:
        use(item)
    return time.perf_counter() - start


def overlap(repeats: int) -> list[Json]:
    """Seconds against the longer of reading alone and using alone, as this machine takes them."""
    rows = []
    item = np.zeros(1000, np.float32)

    def nothing(_: Any) -> None: ...

    for read, used in TIMES:

        def use(_: Any, pause: float = used / 1e3) -> None:
            time.sleep(pause)

        samples: dict[str, list[float]] = {"prefetch": [], "plain": [], "reading": [], "using": []}
        for _ in range(repeats):  # in turn, so that a busy machine is busy for all
            samples["prefetch"].append(timed(prefetch(reading(read / 1e3, item), "numpy"), use))
            samples["plain"].append(timed(reading(read / 1e3, item), use))
            samples["reading"].append(timed(reading(read / 1e3, item), nothing))
            samples["using"].append(timed(iter([item] * ITEMS), use))
        least = {f"{name}_s": min(found) for name, found in samples.items()}
        ratio = least["prefetch_s"] / max(least["reading_s"], least["using_s"])
        rows.append({"read_ms": read, "use_ms": used, "items": ITEMS, **least, "ratio": ratio})
        print(f"read {read} ms, use {used} ms: {ratio:.3f} x the longer", flush=True)
    return rows


def overhead(repeats: int) -> Json:
    """Microseconds an item of a loop in which nothing takes time."""
    item, count = np.zeros(10, np.float32), 5000

    def nothing(_: Any) -> None: ...

    ahead = [timed(prefetch(reading(0, item, count), "numpy"), nothing) / count * 1e6 for _ in range(repeats)]
    print(f"an item costs {statistics.median(ahead):.0f} µs", flush=True)
    return {"items": count, "item_us": statistics.median(ahead)}


def arrays(repeats: int) -> Json:
    """Batches made by NumPy, which releases Python's lock, and used by torch."""
    rng = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        for _ in range(ITEMS):
            yield {"x": rng.random((1024, 1024), dtype=np.float32)}

    def use(batch: Any) -> None:
        x = convert_memory(batch["x"], "torch")  # the very tensor, where prefetch has converted it
        (x @ x).sum()

    ahead = [timed(prefetch(batches(), "torch"), use) for _ in range(repeats)]
    plain = [timed(batches(), use) for _ in range(repeats)]
    result = {"items": ITEMS, "prefetch_s": statistics.median(ahead), "plain_s": statistics.median(plain)}
    print(f"arrays: {result['prefetch_s']:.2f} s, without prefetch {result['plain_s']:.2f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found = {
        "machine": machine(),
        "versions": versions("numpy", "torch"),
        "overlap": overlap(options.repeats),
        "overhead": overhead(options.repeats),
        "arrays": arrays(options.repeats),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "prefetch.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
