"""Compare pipelines and maps over devices with their lower bounds.

Run it from the root of the checkout:

    python -m benchmarks.pipeline

Sections: `stages` (n sleep stages over m items, against m + n - 1 steps), `overhead` (empty stages),
`map` (four virtual JAX devices, against four times the speed of one). Writes
`results/pipeline.json` and `results/pipeline.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import numpy as np  # noqa: E402

import arraybridge  # noqa: E402
from arraybridge import Pipeline, device_map  # noqa: E402
from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STEP = 0.02  # seconds that a sleep stage takes
STAGES = ((1, 20), (2, 20), (3, 20), (4, 40), (8, 40))
QUEUE_SIZE = 2

Json = dict[str, Any]


def step(x: Any) -> Any:
    """Sleep for a known time, which releases the GIL, and return the argument."""
    time.sleep(STEP)
    return x


def nothing(x: Any) -> Any:
    """Return the argument."""
    return x


def seconds(call: Callable[[], object]) -> float:
    """Return the elapsed time of one call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def stages(rounds: int) -> list[Json]:
    """Return the time of n stages over m items, as a multiple of the m + n - 1 steps that they need."""
    rows = []
    for n, m in STAGES:
        pipeline = Pipeline(*[step] * n, queue_size=QUEUE_SIZE)
        list(pipeline.map(range(2)))

        def run(pipeline: Pipeline = pipeline, m: int = m) -> list[Any]:
            return list(pipeline.map(range(m)))

        # A sleep takes longer than requested, so the step is the measured time.
        one = statistics.median(seconds(lambda: step(0)) for _ in range(20))
        samples = sorted(seconds(run) / (one * (m + n - 1)) for _ in range(rounds))
        rows.append(
            {
                "stages": n,
                "items": m,
                "min_ratio": round(samples[0], 4),
                "median_ratio": round(statistics.median(samples), 4),
                "most_in_flight": pipeline.report().most_in_flight,
                "allowed_in_flight": n * (QUEUE_SIZE + 1),
                "in_turn_ratio": round(n * m / (m + n - 1), 2),
            }
        )
    return rows


def overhead(rounds: int) -> list[Json]:
    """Return the microseconds per stage and item of empty stages."""
    rows = []
    for n in (1, 2, 4, 8):
        pipeline, m = Pipeline(*[nothing] * n), 2000
        list(pipeline.map(range(10)))

        def run(pipeline: Pipeline = pipeline, m: int = m) -> list[Any]:
            return list(pipeline.map(range(m)))

        samples = sorted(seconds(run) / (n * m) for _ in range(rounds))
        rows.append(
            {
                "stages": n,
                "min_us": round(samples[0] * 1e6, 1),
                "median_us": round(statistics.median(samples) * 1e6, 1),
            }
        )
    return rows


@arraybridge.jax
def wait_on_device(x: Any) -> Any:
    """Sleep, which releases the GIL, and return the argument on its device."""
    time.sleep(STEP)
    return x


def over_devices(rounds: int) -> Json:
    """Return the speed of `device_map` over four virtual devices, as a fraction of four times one device."""
    devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    items = [np.full(16, i, np.float32) for i in range(80)]
    list(device_map(wait_on_device, items[:8], devices))
    one = statistics.median(seconds(lambda: wait_on_device(items[0])) for _ in range(20))
    perfect = one * len(items) / len(devices)
    fractions = sorted(
        perfect / seconds(lambda: list(device_map(wait_on_device, items, devices))) for _ in range(rounds)
    )
    return {
        "devices": len(devices),
        "items": len(items),
        "max_fraction": round(fractions[-1], 4),
        "median_fraction": round(statistics.median(fractions), 4),
    }


def draw(file: Path) -> None:
    """Draw the Gantt chart of a pipeline whose middle stage is the slowest."""

    def load(x: Any) -> Any:
        time.sleep(STEP / 2)
        return x

    def model(x: Any) -> Any:
        time.sleep(STEP)
        return x

    def save(x: Any) -> Any:
        time.sleep(STEP / 4)
        return x

    pipeline = Pipeline(load, model, save)
    list(pipeline.map(range(12)))
    pipeline.report().plot(file)
    print(pipeline.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each case (7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    found: Json = {
        "machine": machine(),
        "versions": versions("numpy", "jax"),
        "step_seconds": STEP,
        "stages": stages(options.rounds),
        "overhead": overhead(options.rounds),
        "map": over_devices(options.rounds),
    }
    worst = max(row["median_ratio"] for row in found["stages"])
    costly = max(row["median_us"] for row in found["overhead"])
    found["targets"] = {
        "stages: at most 1.05 times the steps needed": {"measured": worst, "met": worst <= 1.05},
        "in flight: at most stages * (queue_size + 1)": {
            "measured": max(row["most_in_flight"] / row["allowed_in_flight"] for row in found["stages"]),
            "met": all(row["most_in_flight"] <= row["allowed_in_flight"] for row in found["stages"]),
        },
        "overhead: under 100 us per stage and item": {"measured": costly, "met": costly < 100},
        "map: at least 0.95 times the ideal speed": {
            "measured": found["map"]["median_fraction"],
            "met": found["map"]["median_fraction"] >= 0.95,
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pipeline.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for row in (*found["stages"], *found["overhead"], found["map"]):
        print(row)
    for target, result in found["targets"].items():
        print(f"{'met   ' if result['met'] else 'MISSED'}  {target}: {result['measured']}")
    draw(options.out / "pipeline.png")


if __name__ == "__main__":
    main()
