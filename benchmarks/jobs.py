"""Compare whole jobs with programs written by hand: their time, and their peak of host memory.

    python -m benchmarks.jobs                     # writes benchmarks/results/jobs.json
    python -m benchmarks.jobs --job loader        # one job; repeatable
    python -m benchmarks.jobs --quick --out /tmp  # small inputs and one round

A program by hand does the same with the public calls of the libraries, as somebody who knows them would write
it: it shares memory, and has threads and queues where they help. It omits the checks of this library. Each
job and side runs in a separate process. The two take turns, and the fastest run of each counts, because other
work on the machine only adds to the time. The first run is discarded. CPU time is that of all threads, and of
worker processes. The operations of each framework use one thread.

"added" is the peak of resident memory during the runs, less the resident memory before the first run. It does
not include worker processes. Only Linux reports it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a script rather than as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.timing import machine, versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
DISTRIBUTIONS = ("arraybridge", "numpy", "torch", "jax", "pandas", "xarray", "scipy")
#: Seconds that a run takes at least. A shorter job is repeated.
LEAST_SECONDS = 0.05
QUEUE_SIZE = 2
WORKERS = 2

Json = dict[str, Any]
#: A job by this library and the same by hand. Each returns an array or a number to compare.
Sides = tuple[Callable[[], Any], Callable[[], Any]]


# --- threads by hand --------------------------------------------------------------------------------


def ahead(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items that a thread reads in advance."""
    slots: queue.Queue[Any] = queue.Queue(QUEUE_SIZE)
    end = object()

    def read() -> None:
        for item in items:
            slots.put(item)
        slots.put(end)

    threading.Thread(target=read, daemon=True).start()
    while (item := slots.get()) is not end:
        yield item


def chain(stages: Iterable[Callable[[Any], Any]], items: Iterable[Any]) -> Iterator[Any]:
    """Yield items that passed through several stages, each of which has a thread."""
    for stage in stages:
        items = ahead(map(stage, items))
    return iter(items)


# --- the jobs ---------------------------------------------------------------------------------------


def three_frameworks(quick: bool) -> Sides:
    """Smooth an xarray.DataArray in PyTorch, normalize it in JAX, and return it to NumPy."""
    import jax
    import torch
    import xarray

    import arraybridge as ab

    size = 32 if quick else 512
    values = np.random.default_rng(0).random((16, size, size), np.float32)
    labeled = xarray.DataArray(values, dims=("plane", "y", "x"))

    def smooth(x: Any) -> Any:
        return torch.nn.functional.avg_pool2d(x, 3, 1, 1)

    normalize = jax.jit(lambda x: (x - x.mean()) / x.std())
    smooth_any, normalize_any = ab.torch(smooth), ab.jax(normalize)

    def ours() -> Any:
        return ab.to_numpy(normalize_any(smooth_any(labeled)))

    def by_hand() -> Any:
        smoothed = smooth(torch.from_numpy(labeled.data))
        return np.asarray(normalize(jax.dlpack.from_dlpack(smoothed)))

    return ours, by_hand


def loss_of_jax(quick: bool) -> Sides:
    """Return the gradients of a PyTorch CNN with a loss in JAX."""
    import jax
    import jax.numpy as jnp
    import torch

    import arraybridge as ab

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4)),
        *(torch.nn.Flatten(), torch.nn.Linear(512, 10)),
    )
    images = torch.rand(4 if quick else 64, 1, 28, 28)
    labels = torch.randint(0, 10, (len(images),), dtype=torch.int32)

    @jax.jit
    def loss(logits: Any, labels: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -chosen.mean()

    loss_any = ab.jax(grad="flow")(loss)
    value_and_gradient = jax.jit(jax.value_and_grad(loss))

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, labels: Any) -> Any:
            arrays = map(jax.dlpack.from_dlpack, (logits.detach(), labels))
            value, ctx.gradient = value_and_gradient(*arrays)
            return torch.from_dlpack(value)

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            return torch.from_dlpack(ctx.gradient) * cotangent, None

    def gradients(of: Callable[..., Any]) -> Any:
        model.zero_grad()
        of(model(images), labels).backward()
        return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])

    return partial(gradients, loss_any), partial(gradients, Loss.apply)


def loader(quick: bool) -> Sides:
    """Read batches from files in advance, and use them in PyTorch."""
    import torch

    import arraybridge as ab

    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    files = [folder / f"{i}.npy" for i in range(2 if quick else 24)]
    for file in files:
        np.save(file, rng.integers(0, 255, (16, 3, 96, 96), np.uint8))
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 16, 3).requires_grad_(requires_grad=False)

    def read(file: Path) -> Any:
        return np.load(file).astype(np.float32) / 255

    def use(batches: Iterable[Any]) -> float:
        return sum(float(layer(x).mean()) for x in batches)

    def ours() -> Any:
        return use(ab.prefetch(map(read, files), "torch"))

    def by_hand() -> Any:
        return use(ahead(torch.from_numpy(read(file)) for file in files))

    return ours, by_hand


def sharpen(image: np.ndarray) -> np.ndarray:
    """Return a filtered image; workers call this function."""
    frequencies = np.fft.rfft2(image)
    frequencies[:4, :4] *= 0.5
    return np.fft.irfft2(frequencies)


def sums(images: Iterable[np.ndarray]) -> list[float]:
    return [float(image.sum()) for image in images]


def images_of(quick: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    size = 64 if quick else 512
    return [rng.random((size, size)) for _ in range(4 if quick else 32)]


def threads(quick: bool) -> Sides:
    """Filter images in two threads."""
    import arraybridge as ab

    images = images_of(quick)

    def by_hand() -> Any:
        with ThreadPoolExecutor(WORKERS) as pool:
            return sums(pool.map(sharpen, images))

    return lambda: sums(ab.device_map(sharpen, images, ["cpu"], per_device=WORKERS)), by_hand


def processes(quick: bool) -> Sides:
    """Filter images in two processes, including their start."""
    import arraybridge as ab

    images = images_of(quick)

    def ours() -> Any:
        return sums(ab.device_map(sharpen, images, ["cpu"], per_device=WORKERS, processes=True))

    def by_hand() -> Any:
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
            return sums(pool.map(sharpen, images))

    return ours, by_hand


def stages(quick: bool) -> Sides:
    """Pass batches through three stages, in NumPy, PyTorch and JAX."""
    import jax
    import torch

    import arraybridge as ab

    rng = np.random.default_rng(0)
    size = 16 if quick else 256
    batches = [rng.random((8, size, size), np.float32) for _ in range(3 if quick else 24)]
    reduce = jax.jit(lambda x: (x * x).mean((1, 2)))

    def prepare(x: Any) -> Any:
        return np.clip(x * 2 - 1, -0.9, 0.9)

    def pool(x: Any) -> Any:
        return torch.nn.functional.avg_pool2d(x, 5, 1, 2)

    pipeline = ab.Pipeline(prepare, ab.torch(pool), ab.jax(reduce), queue_size=QUEUE_SIZE)
    by_hand_stages = (
        prepare,
        lambda x: pool(torch.from_numpy(x)),
        lambda x: reduce(jax.dlpack.from_dlpack(x)),
    )
    return (
        lambda: np.stack(list(map(np.asarray, pipeline.map(batches)))),
        lambda: np.stack(list(map(np.asarray, chain(by_hand_stages, batches)))),
    )


def table(rows: int, quick: bool) -> Sides:
    """Standardize a pandas table in PyTorch, and return a table."""
    import pandas
    import torch

    import arraybridge as ab

    rows = min(rows, 100) if quick else rows
    frame = pandas.DataFrame(np.random.default_rng(0).random((rows, 4)), columns=list("abcd"))

    def standardize(x: Any) -> Any:
        return (x - x.mean(0)) / x.std(0)

    standardize_any = ab.torch(output_type="input")(standardize)

    def by_hand() -> Any:
        result = standardize(torch.tensor(frame.to_numpy())).numpy()
        return pandas.DataFrame(result, index=frame.index, columns=frame.columns)

    return lambda: standardize_any(frame), by_hand


def sparse_sums(quick: bool) -> Sides:
    """Multiply a BCOO array of JAX with a vector in SciPy."""
    import scipy.sparse
    from jax.experimental import sparse

    import arraybridge as ab

    size, count = (100, 200) if quick else (200_000, 1_000_000)
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, size, (count, 2), np.int32)
    coo = sparse.BCOO((ab.to_jax(rng.random(count, np.float32)), ab.to_jax(pairs)), shape=(size, size))
    vector = rng.random(size, np.float32)

    def by_hand() -> Any:
        coordinates = tuple(np.asarray(coo.indices).T)
        return scipy.sparse.coo_array((np.asarray(coo.data), coordinates), shape=coo.shape) @ vector

    return lambda: ab.to_numpy(coo) @ vector, by_hand


def recovery(quick: bool) -> Sides:
    """Double 4,096 rows of which 1,000 fit."""
    import arraybridge as ab
    from benchmarks.recovery import COLUMNS, by_hand, with_memory_for

    fn = with_memory_for(1000)
    batch = np.ones((4096, 8 if quick else COLUMNS), np.float32)
    return lambda: ab.split_and_retry(fn, batch), lambda: by_hand(fn, batch)


#: Name → its title and the function that returns both sides.
JOBS: dict[str, tuple[str, Callable[[bool], Sides]]] = {
    "frameworks": ("xarray → PyTorch → JAX → NumPy", three_frameworks),
    "loss": ("CNN of PyTorch, loss of JAX, with gradients", loss_of_jax),
    "loader": ("batches from files with `prefetch`", loader),
    "threads": ("`device_map` with two threads", threads),
    "processes": ("`device_map` with two processes", processes),
    "stages": ("`Pipeline` of three stages", stages),
    "large-table": ("pandas → PyTorch → pandas, 1,000,000 rows", partial(table, 1_000_000)),
    "small-table": ("pandas → PyTorch → pandas, 1,000 rows", partial(table, 1000)),
    "sparse": ("JAX BCOO → SciPy, 1,000,000 entries, and a product", sparse_sums),
    "recovery": ("split recovery of 4,096 rows of which 1,000 fit", recovery),
}


# --- measurement ------------------------------------------------------------------------------------


def memory_of(key: str) -> float:
    """Return an entry of ``/proc/self/status`` in MiB: ``"VmRSS"``, or ``"VmHWM"`` for the peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{key}:")[2].split()[0]) / 1024


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it has started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def run(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the seconds and the seconds of CPU time per call of a batch."""
    start, start_cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count, (cpu_seconds() - start_cpu) / count


def worker(connection: Connection, job: str, side: int, quick: bool) -> None:
    """Run one side of a job on each request, and send its times and the peak of its memory."""
    warnings.simplefilter("ignore")
    call = JOBS[job][1](quick)[side]
    is_linux = sys.platform == "linux"
    before = memory_of("VmRSS") if is_linux else 0.0
    connection.send(np.asarray(call()))
    count = 1 if quick else max(1, round(LEAST_SECONDS / run(call, 1)[0]))
    if is_linux:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    while connection.recv():
        times = run(call, count)
        connection.send((*times, max(0.0, memory_of("VmHWM") - before) if is_linux else None))


def measure(job: str, rounds: int, quick: bool) -> Json:
    """Run both sides of a job in turn, and compare them."""
    context = multiprocessing.get_context("spawn")
    pipes, running = [], []
    for side in (0, 1):
        pipe, child = context.Pipe()
        process = context.Process(target=worker, args=(child, job, side, quick))
        process.start()
        child.close()  # so that a read here ends if the process crashes
        pipes.append(pipe)
        running.append(process)
    try:
        first, second = (pipe.recv() for pipe in pipes)
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)
        samples: tuple[list[Any], list[Any]] = ([], [])
        for turn in range(rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                pipes[side].send(True)
                samples[side].append(pipes[side].recv())
    finally:
        for pipe, process in zip(pipes, running, strict=True):
            pipe.send(False)
            process.join(30)
    ours, by_hand = map(summarize, samples)
    ratios = {
        "ratio": round(ours["min_ms"] / by_hand["min_ms"], 2),
        "cpu_ratio": round(ours["cpu_min_ms"] / by_hand["cpu_min_ms"], 2),
    }
    return {"ours": ours, "by_hand": by_hand, **ratios}


def summarize(runs: list[Any]) -> Json:
    """Return the shortest times of the runs of one side, and the peak of its memory."""
    seconds, cpu, added = zip(*runs, strict=True)
    return {
        "min_ms": round(min(seconds) * 1e3, 3),
        "cpu_min_ms": round(min(cpu) * 1e3, 3),
        "added_mib": added[-1] and round(added[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare whole jobs with programs written by hand.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (at least 15 to publish)")
    parser.add_argument("--job", action="append", choices=JOBS, help="run only this job; repeatable")
    parser.add_argument("--quick", action="store_true", help="small inputs and one round")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of jobs.json")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    # One thread for the operations of each framework: others would wait for a free core while they are timed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    path = arguments.out / "jobs.json"
    found = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    for job in arguments.job or JOBS:
        title, _ = JOBS[job]
        row = found[title] = measure(job, rounds, arguments.quick)
        ours, by_hand = row["ours"], row["by_hand"]
        memory = f"{ours['added_mib']} MiB, by hand {by_hand['added_mib']}"
        times = f"{ours['min_ms']:9.2f} ms, by hand {by_hand['min_ms']:9.2f}"
        ratios = f"{row['ratio']:5.2f} times, CPU {row['cpu_ratio']:5.2f} times"
        print(f"{title:52} {times}: {ratios}; {memory}", flush=True)
    about = {"machine": machine(), "versions": versions(*DISTRIBUTIONS)}
    report = about | {"rounds": rounds, "load": round(os.getloadavg()[0], 1), "results": found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
