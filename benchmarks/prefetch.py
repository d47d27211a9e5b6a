"""Compare loops over `prefetch` with their lower bound, the longer of reading and using the items.

Run it from the root of the checkout:

    python -m benchmarks.prefetch

Sections: `overlap` (reading and using sleep for some milliseconds), `overhead` (the cost per item if neither
takes time), `arrays` (NumPy creates batches of 4 MiB and PyTorch multiplies them), and on request `gpu`
(batches are used on the first GPU). Writes `results/prefetch.json`. Each section also measures the loop
without `prefetch`. Contenders take turns, and the fastest round of each counts, to reduce the effect of other
work on the machine. `load` is the load average.
"""

from __future__ import annotations

import argparse
import json
import os
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

import arraybridge  # noqa: E402
from arraybridge import convert_memory, prefetch  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = ("overlap", "overhead", "arrays", "gpu")
#: Maximum allowed ratio for the loop in which reading and using take 10 ms each.
TARGET = 1.1
ITEMS, GPU_ITEMS = 100, 40
#: Milliseconds of reading and of using an item.
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
    """Return the seconds of each loop, and the ratio to the longer of reading and using."""
    rows = []
    item = np.zeros(1000, np.float32)

    def nothing(_: Any) -> None: ...

    for read, used in TIMES:

        def use(_: Any, pause: float = used / 1e3) -> None:
            time.sleep(pause)

        samples: dict[str, list[float]] = {"prefetch": [], "plain": [], "reading": [], "using": []}
        for _ in range(repeats):  # in turn, so that other work affects all contenders
            samples["prefetch"].append(timed(prefetch(reading(read / 1e3, item), "numpy"), use))
            samples["plain"].append(timed(reading(read / 1e3, item), use))
            samples["reading"].append(timed(reading(read / 1e3, item), nothing))
            samples["using"].append(timed(iter([item] * ITEMS), use))
        least = {f"{name}_s": min(found) for name, found in samples.items()}
        ratio = least["prefetch_s"] / max(least["reading_s"], least["using_s"])
        rows.append({"read_ms": read, "use_ms": used, "items": ITEMS, **least, "ratio": ratio})
        print(f"read {read} ms, use {used} ms: {ratio:.3f} times the longer", flush=True)
    return rows


def overhead(repeats: int) -> Json:
    """Return the microseconds per item of a loop in which nothing takes time."""
    item, count = np.zeros(10, np.float32), 5000

    def nothing(_: Any) -> None: ...

    ahead = [timed(prefetch(reading(0, item, count), "numpy"), nothing) / count * 1e6 for _ in range(repeats)]
    print(f"{statistics.median(ahead):.0f} µs per item", flush=True)
    return {"items": count, "item_us": statistics.median(ahead)}


def arrays(repeats: int) -> Json:
    """Time batches that NumPy creates, which releases the GIL, and PyTorch uses."""
    rng = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        for _ in range(ITEMS):
            yield {"x": rng.random((1024, 1024), dtype=np.float32)}

    def use(batch: Any) -> None:
        x = convert_memory(batch["x"], "torch")  # the same tensor if prefetch has converted it
        (x @ x).sum()

    samples: dict[str, list[float]] = {"prefetch_s": [], "plain_s": []}
    for _ in range(repeats):
        samples["prefetch_s"].append(timed(prefetch(batches(), "torch"), use))
        samples["plain_s"].append(timed(batches(), use))
    result = {"items": ITEMS, **{name: min(found) for name, found in samples.items()}}
    print(f"arrays: {result['prefetch_s']:.2f} s, without prefetch {result['plain_s']:.2f} s", flush=True)
    return result


def gpu(repeats: int, mib: float) -> Json:
    """Time batches that take 10 ms to read, and about 10 ms of kernels to use on the first GPU."""
    names = [name for name in ("torch", "cupy") if any(d.kind == "gpu" for d in devices(name))]
    if not names:
        print("gpu: skipped, because neither PyTorch nor CuPy finds a GPU", flush=True)
        return {}
    owner = arraybridge.framework(names[0])
    host = np.random.default_rng(0).random(int(mib * (1 << 20)) // 4, dtype=np.float32)
    there = convert_memory(host, owner.name, 0)
    steps = 1

    def use(x: Any) -> None:
        x = convert_memory(x, owner.name, 0)  # the same array if prefetch has converted it
        for _ in range(steps):
            x = x * 0.5 + 1
        owner.interchange.block_until_ready(x)

    use(there)
    while timed(iter([there] * 3), use) < 0.03:
        steps *= 2

    def nothing(_: Any) -> None: ...

    def batches() -> Iterator[Any]:
        return (x.copy() for x in reading(0.01, host, GPU_ITEMS))

    samples: dict[str, list[float]] = {"prefetch_s": [], "plain_s": [], "reading_s": [], "using_s": []}
    for _ in range(repeats):
        samples["prefetch_s"].append(timed(prefetch(batches(), owner.name, 0), use))
        samples["plain_s"].append(timed(batches(), use))
        samples["reading_s"].append(timed(batches(), nothing))
        samples["using_s"].append(timed(iter([there] * GPU_ITEMS), use))
    least = {name: min(found) for name, found in samples.items()}
    ratio = least["prefetch_s"] / max(least["reading_s"], least["using_s"])
    print(f"gpu, {owner.name}: {ratio:.3f} times the longer", flush=True)
    return {
        "framework": owner.name,
        "mib": mib,
        "items": GPU_ITEMS,
        "kernels": 2 * steps,
        **least,
        "ratio": ratio,
    }


def devices(name: str) -> tuple[arraybridge.Device, ...]:
    try:
        return arraybridge.devices(name)
    except arraybridge.FrameworkNotInstalledError:
        return ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="run only this section; repeatable"
    )
    parser.add_argument("--mib", type=float, default=16, help="size of a batch of `gpu`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of prefetch.json")
    options = parser.parse_args()
    chosen = options.section or [name for name in SECTIONS if name != "gpu"]
    sections: dict[str, Callable[[int], Any]] = {
        "overlap": overlap,
        "overhead": overhead,
        "arrays": arrays,
        "gpu": lambda repeats: gpu(repeats, options.mib),
    }
    path = options.out / "prefetch.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    report |= {"machine": machine(), "versions": versions("numpy", "torch", "cupy-cuda13x")}
    report["load"] = round(os.getloadavg()[0], 1)
    report |= {name: sections[name](options.repeats) for name in chosen}
    if "overlap" in chosen:
        ratio = report["overlap"][0]["ratio"]
        claim = f"10 ms of reading and 10 ms of using: at most {TARGET} × the longer of the two"
        report["targets"] = {claim: {"measured": round(ratio, 3), "met": ratio <= TARGET}}
        print(f"{claim}: {ratio:.3f}, {'met' if ratio <= TARGET else 'MISSED'}")
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
