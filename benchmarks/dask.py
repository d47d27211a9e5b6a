"""Measure the cost per block of arraybridge.dask, and how it scales with workers, memory and graphs.

Run it from the root of the checkout:

    python -m benchmarks.dask                       # all sections, about eight minutes
    python -m benchmarks.dask --section throughput  # one section; repeatable

Sections: `overhead` (tiny blocks on the synchronous scheduler), `throughput` (1, 2 and 4 worker processes),
`memory` (memory of workers over 10,000 blocks), `compile` (number of jax.jit traces), `graph` (cost by
number of blocks). Writes `results/dask.json` and `results/dask.png`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# If this file runs as a script, its folder is first in sys.path, and `import dask` would import this file.
sys.path[:] = [
    str(ROOT),
    *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "benchmarks")),
]

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from dask.base import collections_to_expr  # noqa: E402
from distributed import Client  # noqa: E402
from distributed.protocol import serialize, to_serialize  # noqa: E402
from distributed.utils import nbytes  # noqa: E402

import arraybridge  # noqa: E402
from arraybridge import convert_memory  # noqa: E402
from arraybridge.dask import cluster, map_blocks  # noqa: E402
from benchmarks.timing import in_turn, machine, pyplot, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = ("overhead", "throughput", "memory", "compile", "graph")
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
WORKERS = (1, 2, 4)
BLOCKS = 1000
# Workers that share a few cores must not start one thread per core.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Json = dict[str, Any]


def quartiles(samples: list[float], digits: int = 3) -> Json:
    """Return the median and quartiles. The quartiles of fewer than four samples are the extremes."""
    if len(samples) > 3:
        low, _, high = statistics.quantiles(samples, n=4)
    else:
        low, high = min(samples), max(samples)
    middle = statistics.median(samples)
    found = {"median": middle, "quartiles": [low, high], "rounds": len(samples)}
    return {
        key: [round(v, digits) for v in value] if isinstance(value, list) else round(value, digits)
        for key, value in found.items()
    }


def local_cluster(n: int, **options: Any) -> Any:
    """Start worker processes with one thread each, in Dask and in the numerical libraries."""
    return cluster(n, threads_per_worker=1, dashboard_address=":0", env=ONE_THREAD, **options)


# --- overhead ------------------------------------------------------------------------------------


def add_one(x: Any) -> Any:
    """Add one, a minimal amount of work for any framework."""
    return x + 1


def own_calls(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the native calls that convert from NumPy and back."""
    if name == "torch":
        import torch

        return torch.from_numpy, torch.Tensor.numpy
    if name == "jax":
        import jax.numpy as jnp

        return jnp.asarray, np.asarray
    if name == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor, lambda x: x.numpy()
    return np.asarray, np.asarray


def overhead(rounds: int) -> list[Json]:
    """Return the microseconds per block of six ways to call a function on 1000 blocks of 8 × 8 elements.

    numpy        the function in a loop, over NumPy arrays
    plain        the function in a loop, over arrays of the framework
    dask         dask.array.map_blocks of the function in NumPy, with meta
    converted    dask.array.map_blocks of the function with convert_memory() by hand around it, with meta
    by_hand      the same with the framework's own calls, which may copy
    map_blocks   arraybridge.dask.map_blocks of the decorated function

    The difference between `map_blocks` and `plain` is exactly the sum of three parts:

    scheduling   dask - numpy: the cost of Dask's map_blocks over the loop
    conversion   (converted - dask) - (plain - numpy): two conversions by hand, inside a task
    added        map_blocks - converted: the cost of arraybridge.dask
    """
    values = np.arange(BLOCKS * 8 * 8, dtype=np.float32).reshape(BLOCKS * 8, 8)
    array = da.from_array(values, chunks=(8, 8), name="values")
    blocks = [values[i : i + 8] for i in range(0, BLOCKS * 8, 8)]
    expected = values + 1
    meta = np.empty((0, 0), np.float32)
    rows = []
    with dask.config.set(scheduler="synchronous"):
        for name in FRAMEWORKS:
            if importlib.util.find_spec(name) is None:
                continue
            own = [convert_memory(block, name, copy=True) for block in blocks]
            decorated = arraybridge.framework(name).decorator(add_one)

            def plain(own: list[Any] = own) -> list[Any]:
                return [add_one(x) for x in own]

            def converted(x: Any, name: str = name) -> Any:
                return convert_memory(add_one(convert_memory(x, name)), "numpy")

            into, out = own_calls(name)

            def by_hand(x: Any, into: Any = into, out: Any = out) -> Any:
                return out(add_one(into(x)))

            calls: dict[str, Callable[[], Any]] = {
                "numpy": lambda: [add_one(x) for x in blocks],
                "plain": plain,
                "dask": lambda: da.map_blocks(add_one, array, meta=meta).compute(),
                "converted": lambda f=converted: da.map_blocks(f, array, meta=meta).compute(),
                "by_hand": lambda f=by_hand: da.map_blocks(f, array, meta=meta).compute(),
                "map_blocks": lambda f=decorated: map_blocks(f, array).compute(),
            }
            np.testing.assert_array_equal(calls["map_blocks"](), expected)
            np.testing.assert_array_equal(calls["converted"](), expected)
            np.testing.assert_array_equal(calls["by_hand"](), expected)
            us = {
                call: [ns / BLOCKS / 1e3 for ns in samples]
                for call, samples in in_turn(calls, rounds).items()
            }
            each = zip(*(us[c] for c in ("numpy", "plain", "dask", "converted", "map_blocks")), strict=True)
            parts: dict[str, list[float]] = {p: [] for p in ("whole", "conversion", "scheduling", "added")}
            for loop, plain_loop, in_dask, with_both, ours in each:
                parts["whole"].append(ours - plain_loop)
                parts["scheduling"].append(in_dask - loop)
                parts["conversion"].append((with_both - in_dask) - (plain_loop - loop))
                parts["added"].append(ours - with_both)
            rows.append(
                {
                    "framework": name,
                    "us_per_block": {call: quartiles(samples, 2) for call, samples in us.items()},
                    "over_by_hand": quartiles(
                        [a / b for a, b in zip(us["map_blocks"], us["by_hand"], strict=True)], 3
                    ),
                    "over_plain_us": {part: quartiles(samples, 2) for part, samples in parts.items()},
                }
            )
    return rows


# --- throughput ----------------------------------------------------------------------------------


@arraybridge.torch
def gaussian(x: Any) -> Any:
    """Apply a Gaussian filter of sigma 6 to both axes, with reflected edges."""
    import torch

    torch.set_num_threads(1)
    t = torch.arange(-18, 19, dtype=x.dtype)
    kernel = torch.exp(-(t**2) / 72)
    kernel /= kernel.sum()
    padded = torch.nn.functional.pad(x[None, None], (18, 18, 18, 18), mode="reflect")
    rows = torch.nn.functional.conv2d(padded, kernel[None, None, :, None])
    return torch.nn.functional.conv2d(rows, kernel[None, None, None, :])[0, 0]


@arraybridge.torch
def median(x: Any) -> Any:
    """Apply a 3 × 3 median filter, with reflected edges."""
    import torch

    torch.set_num_threads(1)
    padded = torch.nn.functional.pad(x[None, None], (1, 1, 1, 1), mode="reflect")[0, 0]
    return padded.unfold(0, 3, 1).unfold(1, 3, 1).reshape(*x.shape, 9).median(-1).values


FILTERS = {"gaussian": gaussian, "median": median}


def images(blocks: int, side: int = 256, seed: int = 0) -> Any:
    """Return random float32 images, each created by the worker that uses it."""
    columns = 10
    shape = (blocks // columns * side, columns * side)
    return da.random.default_rng(seed).random(shape, dtype="float32", chunks=(side, side))


def filter_ms(fn: Callable[..., Any]) -> float:
    """Return how long a filter takes on one block without Dask, in milliseconds."""
    x = np.random.default_rng(0).random((256, 256), dtype=np.float32)
    fn(x)
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        fn(x)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


def throughput(rounds: int, blocks: int = BLOCKS) -> Json:
    """Return the seconds on 1, 2 and 4 workers, which take turns, and the speed-up over one worker."""
    found: Json = {"blocks": blocks, "block": "256 x 256 float32, created on the worker", "filters": {}}
    clusters, clients = {}, {}
    try:
        for n in WORKERS:
            clusters[n] = local_cluster(n)
            clients[n] = Client(clusters[n], set_as_default=False)
            clients[n].wait_for_workers(n)
        for name, fn in FILTERS.items():

            def seconds(n: int, count: int, seed: int, fn: Callable[..., Any] = fn) -> float:
                total = map_blocks(fn, images(count, seed=seed)).sum()
                start = time.perf_counter()
                mean = clients[n].compute(total).result() / (count * 256 * 256)
                passed = time.perf_counter() - start
                assert abs(mean - 0.5) < 0.01, mean
                return passed

            taken: dict[int, list[float]] = {n: [] for n in WORKERS}
            for n in WORKERS:
                seconds(n, 100, 10_000)  # every worker imports PyTorch
            for turn in range(rounds):
                for n in WORKERS[turn % 3 :] + WORKERS[: turn % 3]:
                    taken[n].append(seconds(n, blocks, turn))
            found["filters"][name] = {
                "ms_per_block_without_dask": round(clients[1].submit(filter_ms, fn).result(), 2),
                "workers": {
                    str(n): {
                        "seconds": quartiles(taken[n]),
                        "blocks_per_second": round(blocks / statistics.median(taken[n]), 1),
                        "speed_up": quartiles([a / b for a, b in zip(taken[1], taken[n], strict=True)]),
                    }
                    for n in WORKERS
                },
            }
    finally:
        for client in clients.values():
            client.close()
        for made in clusters.values():
            made.close()
    return found


# --- memory --------------------------------------------------------------------------------------


def memory(blocks: int = 10_000) -> Json:
    """Return the memory of the workers over many blocks, also with Dask alone, whose workers record tasks."""

    def by_dask(array: Any) -> Any:
        return da.map_blocks(add_one, array, meta=array._meta) - 1

    only_dask = watched(by_dask, blocks)
    return {**watched(lambda array: map_blocks(gaussian, array), blocks), "only_dask": only_dask["workers"]}


def watched(mapped: Callable[[Any], Any], blocks: int) -> Json:
    """Return the resident memory of each warm worker during work on blocks of 128 × 128."""
    with local_cluster(2) as made, Client(made) as client:
        client.wait_for_workers(2)
        # Read by process id, so that sampling does not use the workers.
        processes = {str(pid): psutil.Process(pid) for pid in client.run(os.getpid).values()}
        client.compute(mapped(images(1000, 128, seed=1)).sum()).result()
        here = psutil.Process()
        rss: dict[str, list[int]] = {name: [] for name in (*processes, "client")}
        start, times = time.perf_counter(), []
        future = client.compute(mapped(images(blocks, 128)).sum())
        while not future.done():
            times.append(round(time.perf_counter() - start, 2))
            for name, process in processes.items():
                rss[name].append(process.memory_info().rss)
            rss["client"].append(here.memory_info().rss)
            time.sleep(0.1)
        assert abs(future.result() / (blocks * 128 * 128) - 0.5) < 0.01
    quarter = len(times) // 4
    rows = {}
    for name, samples in rss.items():
        first, last = (statistics.fmean(part) for part in (samples[:quarter], samples[-quarter:]))
        rows[name] = {
            "first_quarter_mib": round(first / 2**20, 1),
            "last_quarter_mib": round(last / 2**20, 1),
            "ratio": round(last / first, 4),
            "grown_mib": round((last - first) / 2**20, 1),
            "max_mib": round(max(samples) / 2**20, 1),
        }
    step = max(1, len(times) // 200)
    return {
        "blocks": blocks,
        "seconds": round(times[-1], 1),
        "workers": [rows[name] for name in processes],
        "client_and_scheduler": rows["client"],
        "curve": {
            "seconds": times[::step],
            "workers_mib": [[round(b / 2**20, 1) for b in rss[name][::step]] for name in processes],
            "client_and_scheduler_mib": [round(b / 2**20, 1) for b in rss["client"][::step]],
        },
    }


# --- compile -------------------------------------------------------------------------------------


def compile_once(blocks: int = 200) -> Json:
    """Count how often two workers trace a jax.jit function that is sent as code."""
    import jax

    with tempfile.TemporaryDirectory() as folder, local_cluster(2) as made, Client(made) as client:
        client.wait_for_workers(2)

        def traced(file: str) -> Any:
            def halve(x: Any) -> Any:
                with Path(file).open("a") as out:  # runs only during tracing
                    out.write(f"{os.getpid()}\n")
                return x / 2

            return jax.jit(halve)

        def lines(file: str) -> list[str]:
            return Path(file).read_text().split()

        array = images(blocks, 16)
        ours, theirs = str(Path(folder) / "ours"), str(Path(folder) / "theirs")
        client.compute(map_blocks(arraybridge.jax(traced(ours)), array).sum()).result()
        client.compute(map_blocks(arraybridge.jax(traced(ours)), array[16:]).sum()).result()  # another graph
        jitted = traced(theirs)
        by_dask = da.map_blocks(lambda x: np.asarray(jitted(x)), array, meta=array._meta)
        client.compute(by_dask.sum()).result()
        per_worker = Counter(lines(ours))
        return {
            "blocks": blocks,
            "graphs": 2,
            "workers": len(per_worker),
            "traces_per_worker": sorted(per_worker.values()),
            "traces_with_dask_map_blocks": len(lines(theirs)),
        }


# --- graph ---------------------------------------------------------------------------------------


def graph(rounds: int) -> list[Json]:
    """Measure the client's cost for graphs of 1,000 to 100,000 blocks, and run the smaller graphs."""
    rows = []
    decorated = arraybridge.numpy(add_one)
    for blocks in (1000, 10_000, 100_000):
        array = da.zeros((blocks * 16,), chunks=16, dtype="float32")
        seconds: dict[str, list[float]] = {"build": [], "pickle": [], "tasks": []}
        sent = tasks = 0
        for _ in range(rounds if blocks < 100_000 else min(rounds, 3)):
            start = time.perf_counter()
            total = map_blocks(decorated, array).sum()
            built = time.perf_counter()
            expression = collections_to_expr((total,)).optimize()
            _, frames = serialize(to_serialize(expression), on_error="raise")
            pickled = time.perf_counter()
            tasks = len(expression.__dask_graph__())  # the scheduler does this in its process
            seconds["build"].append(built - start)
            seconds["pickle"].append(pickled - built)
            seconds["tasks"].append(time.perf_counter() - pickled)
            sent = sum(map(nbytes, frames))
        rows.append(
            {
                "blocks": blocks,
                "seconds_to_build": quartiles(seconds["build"], 5),
                "seconds_to_optimize_and_pickle": quartiles(seconds["pickle"], 5),
                "bytes_sent": sent,
                "tasks": tasks,
                "seconds_to_make_tasks": quartiles(seconds["tasks"], 4),
            }
        )
    with local_cluster(2) as made, Client(made) as client:
        client.wait_for_workers(2)
        client.compute(map_blocks(decorated, da.zeros(160, chunks=16, dtype="float32")).sum()).result()
        for row in rows[:2]:
            array = da.zeros((row["blocks"] * 16,), chunks=16, dtype="float32")
            before = psutil.Process().memory_info().rss
            start = time.perf_counter()
            future = client.compute(map_blocks(decorated, array).sum())
            submitted = time.perf_counter()
            most = before
            while not future.done():
                most = max(most, psutil.Process().memory_info().rss)
                time.sleep(0.02)
            assert future.result() == array.size
            row["seconds_to_submit"] = round(submitted - start, 4)
            row["seconds_to_run_on_2_workers"] = round(time.perf_counter() - start, 2)
            row["scheduler_bytes_per_task"] = round((most - before) / row["tasks"])
            del future
    return rows


# --- report --------------------------------------------------------------------------------------


def targets(report: Json) -> list[tuple[str, float, float, bool]]:
    """Return each claim with its measurement, its limit and whether it is met."""
    found = []
    for row in report.get("overhead", {}).get("results", ()):
        us = row["over_plain_us"]["added"]["median"]
        what = f"{row['framework']}: added to Dask and the conversion, us per block (under 100)"
        found.append((what, us, 100.0, us < 100))
        if row["framework"] in ("jax", "tensorflow"):
            ratio = row["over_by_hand"]["median"]
            what = f"{row['framework']}: over Dask's map_blocks with conversions by hand (at most 1.3)"
            found.append((what, ratio, 1.3, ratio <= 1.3))
    if "memory" in report:
        worst = max(row["ratio"] for row in report["memory"]["results"]["workers"])
        found.append(("memory: last quarter over first (at most 1.05)", worst, 1.05, worst <= 1.05))
    if "compile" in report:
        most = max(report["compile"]["results"]["traces_per_worker"])
        found.append(("compile: traces per worker (1)", most, 1, most == 1))
    if "throughput" in report:
        cores = report["throughput"]["machine"]["cores"]
        for name, row in report["throughput"]["results"]["filters"].items():
            for n, measured in row["workers"].items():
                most = min(int(n), cores)
                if most > 1:
                    share = round(measured["speed_up"]["median"] / most, 3)
                    what = (
                        f"throughput: {name}, {n} workers, fraction of {most} times on {cores} cores (0.75)"
                    )
                    found.append((what, share, 0.75, share >= 0.75))
    return found


def draw(report: Json, path: Path) -> None:
    """Draw the parts of the overhead, the speed-up by workers and the memory over time, if measured."""
    plt = pyplot()

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 13), layout="constrained")
    colors = {"scheduling": "#e08a2e", "conversion": "#9aa5b1", "added": "#1f77b4"}
    if "overhead" in report:
        rows = report["overhead"]["results"]
        names = [row["framework"] for row in rows]
        base = np.zeros(len(rows))
        labels = {
            "conversion": "conversion by hand",
            "scheduling": "dask.array.map_blocks",
            "added": "added by arraybridge.dask",
        }
        for part, color in colors.items():
            us = np.array([row["over_plain_us"][part]["median"] for row in rows])
            top.bar(names, us, bottom=base, color=color, label=labels[part])
            base += np.maximum(us, 0)
        top.axhline(100, color="0.5", linewidth=1, linestyle=":", label="100 µs")
        top.set_ylabel("µs per block over the plain function")
        top.set_title(f"Overhead, {BLOCKS} blocks of 8 × 8, one thread", fontsize=11)
        top.set_ylim(top=1.45 * max(100, base.max()))
        top.legend(frameon=False, fontsize=9)
    if "throughput" in report:
        cores = report["throughput"]["machine"]["cores"]
        middle.plot(WORKERS, [min(n, cores) for n in WORKERS], ":", color="0.5", label=f"{cores} cores allow")
        for (name, row), color in zip(
            report["throughput"]["results"]["filters"].items(), ("#1f77b4", "#e08a2e"), strict=True
        ):
            ups = [row["workers"][str(n)]["speed_up"] for n in WORKERS]
            ends = [
                [up["median"] - up["quartiles"][0] for up in ups],
                [up["quartiles"][1] - up["median"] for up in ups],
            ]
            label = f"{name}, {row['ms_per_block_without_dask']:.0f} ms per block"
            middle.errorbar(
                WORKERS,
                [up["median"] for up in ups],
                np.maximum(ends, 0),
                fmt="o-",
                color=color,
                label=label,
            )
        middle.set_xticks(WORKERS)
        middle.set_ylim(0, cores + 0.7)
        middle.set_xlabel("worker processes, one thread each")
        middle.set_ylabel("speed-up over one worker")
        blocks = report["throughput"]["results"]["blocks"]
        middle.set_title(f"{blocks} blocks of 256 × 256 on a machine of {cores} cores", fontsize=11)
        middle.legend(frameon=False, fontsize=9, loc="lower right")
    if "memory" in report:
        result = report["memory"]["results"]
        curve = result["curve"]
        for i, (samples, color) in enumerate(zip(curve["workers_mib"], ("#1f77b4", "#e08a2e"), strict=True)):
            bottom.plot(curve["seconds"], samples, color=color, label=f"worker {i + 1}")
        bottom.plot(
            curve["seconds"], curve["client_and_scheduler_mib"], color="#9aa5b1", label="client and scheduler"
        )
        bottom.set_ylim(0, 1.15 * max(*curve["client_and_scheduler_mib"], *map(max, curve["workers_mib"])))
        bottom.set_xlabel("seconds")
        bottom.set_ylabel("resident memory, MiB")
        bottom.set_title(f"Memory over {result['blocks']} blocks", fontsize=11)
        bottom.legend(frameon=False, fontsize=9, loc="lower right")
    for panel in (top, middle, bottom):
        panel.grid(alpha=0.35)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def show(name: str, result: Any) -> None:
    """Print the results of one section, one per line."""
    print(f"-- {name}")
    match name:
        case "overhead":
            for row in result:
                parts = ", ".join(
                    f"{p} {v['median']:.0f} [{v['quartiles'][0]:.0f} {v['quartiles'][1]:.0f}]"
                    for p, v in row["over_plain_us"].items()
                )
                print(f"{row['framework']:>11}  us per block: {parts}")
        case "throughput":
            for filtered, row in result["filters"].items():
                for n, measured in row["workers"].items():
                    up = measured["speed_up"]
                    rate, (low, high) = measured["blocks_per_second"], up["quartiles"]
                    print(f"{filtered:>11}  {n} workers: {rate} per second, {up['median']} x [{low} {high}]")
        case "memory":
            for row in (*result["workers"], result["client_and_scheduler"]):
                print(row)
            print("only Dask:", *(f"{row['grown_mib']} MiB grown" for row in result["only_dask"]))
        case "compile":
            print(result)
        case _:
            for row in result:
                print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="run only this section; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison (7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("distributed").setLevel(logging.ERROR)
    chosen = options.section or list(SECTIONS)
    run: dict[str, Callable[[], Any]] = {
        "overhead": lambda: overhead(max(options.rounds, 5)),
        "throughput": lambda: throughput(options.rounds),
        "memory": memory,
        "compile": compile_once,
        "graph": lambda: graph(options.rounds),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "dask.json"
    # Sections that were not measured are unchanged. Each section names its machine.
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = {
        "machine": machine(),
        "versions": versions("numpy", "dask", "distributed", "torch", "jax", "tensorflow-cpu"),
    }
    for name in SECTIONS:
        if name in chosen:
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            result = run[name]()
            report[name] = {**about, "load_before": load, "results": result}
            path.write_text(
                json.dumps(report, indent=1) + "\n", encoding="utf-8"
            )  # after each section, in case a later one fails
            show(name, result)
    report["targets"] = {
        what: {"measured": measured, "limit": limit, "met": met}
        for what, measured, limit, met in targets(report)
    }
    for what, target in report["targets"].items():
        print(f"{'met   ' if target['met'] else 'MISSED'}  {what}: {target['measured']}")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, options.out / "dask.png")


if __name__ == "__main__":
    main()
