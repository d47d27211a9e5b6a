"""Compare the package with the raw calls on the first GPU: ``python tools/gpu_ratios.py OUT.json``.

Each result is a ratio: the time through arraybridge divided by the time of the raw calls, so that 1.0 is the
goal. Contenders take turns, and the fastest round of each counts. The file is written after each result, with
the name of the GPU. Frameworks that are not installed are left out.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import arraybridge as ab
from arraybridge import hardware

EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))
SMALL, LARGE = 1 << 10, (1 << 16 if EMULATED else 1 << 24)
ROUNDS = 3 if EMULATED else 7
#: Seconds for each pair of contenders.
SECONDS = 0.2 if EMULATED else 1.5


def best_times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the fastest time of each contender in seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for call in contenders.values():
        call()
    end = time.perf_counter() + SECONDS
    rounds = 0
    while rounds < ROUNDS or (time.perf_counter() < end and rounds < 1000):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def synchronize() -> None:
    """Wait for all GPUs in every loaded framework."""
    for name in ("cupy", "torch", "jax"):
        if name in sys.modules:
            ab.framework(name).memory.synchronize()


def has(*names: str) -> bool:
    """Return whether all of these frameworks can be imported."""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        return False
    return True


class Ratios:
    """The results so far, which are printed and written one by one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        names = [gpu.name for gpu in hardware.gpus()]
        self.results: dict[str, Any] = {"gpu": names[0] if names else "unknown", "emulated": EMULATED}

    def add(self, name: str, value: Any, **details: Any) -> None:
        self.results[name] = {"ratio": value, **details}
        text = ", ".join(f"{key} {item}" for key, item in details.items())
        print(f"{name}: {value} ({text})", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.results, indent=1) + "\n")

    def compare(self, name: str, ours: Callable[[], object], raw: Callable[[], object]) -> None:
        best = best_times({"ours": ours, "raw": raw})
        micro = {key: round(seconds * 1e6, 1) for key, seconds in best.items()}
        self.add(name, round(best["ours"] / best["raw"], 2), **{f"{key} µs": t for key, t in micro.items()})


def front_door(ratios: Ratios) -> None:
    """Compare conversions between GPU arrays, and to and from the host."""
    for count, size in ((SMALL, "4 KiB"), (LARGE, "large")):
        host = np.arange(count, dtype=np.float32)
        for name in ("cupy", "torch"):
            if has(name):
                there = ab.convert_memory(host, name, 0)
                send = partial(ab.convert_memory, host, name, 0)
                ratios.compare(f"NumPy to {name} on the GPU, {size}", send, partial(send_raw, host, name))
                fetch = partial(ab.to_numpy, there)
                ratios.compare(f"{name} on the GPU to NumPy, {size}", fetch, partial(fetch_raw, there))
    for source, target in (("cupy", "torch"), ("torch", "cupy"), ("torch", "jax"), ("jax", "torch")):
        if not has(source, target) or (EMULATED and "jax" in (source, target)):
            continue
        x = ab.convert_memory(np.arange(SMALL, dtype=np.float32), source, 0)
        module = importlib.import_module("jax.dlpack" if target == "jax" else target)
        synchronize()
        ours = partial(ab.convert_memory, x, target)
        ratios.compare(f"{source} to {target} on the GPU", ours, partial(module.from_dlpack, x))


def send_raw(host: np.ndarray, name: str) -> None:
    """Transfer an array to the GPU by a framework's own call, and wait for the transfer."""
    if name == "cupy":
        import cupy

        cupy.asarray(host)
        cupy.cuda.Stream.null.synchronize()
    else:
        import torch

        torch.from_numpy(host).cuda()
        torch.cuda.synchronize()


def fetch_raw(x: Any) -> Any:
    """Transfer an array to the host by its framework's own call."""
    return x.get() if hasattr(x, "get") else x.cpu().numpy()


def pinned_transfers(ratios: Ratios) -> None:
    """Compare transfers from pinned memory with PyTorch's own pinned tensors, and with pageable memory."""
    if not has("torch"):
        return
    import torch

    host = torch.ones(LARGE)
    ours, raw = ab.pinned(host), host.pin_memory()
    there = torch.empty(LARGE, device="cuda")

    def send(x: Any) -> None:
        there.copy_(x, non_blocking=True)
        torch.cuda.synchronize()

    ratios.compare("pinned(x) to the GPU, against pin_memory()", partial(send, ours), partial(send, raw))
    ratios.compare("pinned(x) to the GPU, against pageable memory", partial(send, ours), partial(send, host))


class Loop:
    """A loop that reads batches, sends them to the GPU and uses them there, in several orders."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch = np.ones(LARGE // 4, np.float32)
        self.there = ab.convert_memory(self.batch, name, 0)
        self.count = 10 if EMULATED else 30

    def read(self) -> Iterator[np.ndarray]:
        for _ in range(self.count):
            time.sleep(0.005)
            yield self.batch

    def use(self, x: Any) -> None:
        for _ in range(0 if EMULATED and self.name == "torch" else 20):
            x = x + 1
        synchronize()

    def overlap(self) -> None:
        for x in ab.prefetch(self.read(), self.name, 0):
            self.use(x)

    def take_turns(self) -> None:
        for x in self.read():
            self.use(ab.convert_memory(x, self.name, 0))

    def only_read(self) -> None:
        for x in self.read():
            ab.convert_memory(x, self.name, 0)

    def only_use(self) -> None:
        for _ in range(self.count):
            self.use(self.there)


def prefetch_overlap(ratios: Ratios) -> None:
    """Compare a loop over `prefetch` with its lower bound, the longer of reading and using."""
    name = "cupy" if has("cupy") else "torch"
    if not has(name):
        return
    loop = Loop(name)
    bound = max(shortest(loop.only_read), shortest(loop.only_use))
    in_turn = round(shortest(loop.take_turns) / bound, 2)
    ratios.add(
        "prefetch, against its lower bound", round(shortest(loop.overlap) / bound, 2), **{"in turn": in_turn}
    )


def shortest(work: Callable[[], object]) -> float:
    """Return the fastest of three runs in seconds."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def scale(x: Any) -> Any:
    """Compute elementwise for as long as several transfers."""
    for _ in range(20):
        x = x * 1.0001 + 0.5
    return x


def scale_on_gpu(x: np.ndarray, name: str) -> np.ndarray:
    """Compute on the GPU, with both transfers."""
    return ab.to_numpy(scale(ab.convert_memory(x, name, 0)))


def break_even(ratios: Ratios) -> None:
    """Compare `@gpu` with the faster of CPU and GPU at sizes around the break-even point."""
    name = next(
        (name for name in ("cupy", "torch") if has(name) and not (EMULATED and name == "torch")), None
    )
    if name is None:
        return
    for exponent in (12, 14) if EMULATED else (12, 14, 16, 18, 20, 22, 24):
        x = np.ones(1 << exponent, np.float32)
        fn = ab.gpu(backend=name)(scale)
        for _ in range(6):
            fn(x)

        contenders = {"ours": partial(fn, x), "cpu": partial(scale, x), "gpu": partial(scale_on_gpu, x, name)}
        best = best_times(contenders)
        faster = min(best["cpu"], best["gpu"])
        details = {
            "on the GPU": fn.explain(x).on_gpu,
            "GPU is faster": best["gpu"] < best["cpu"],
            "cpu µs": round(best["cpu"] * 1e6),
            "gpu µs": round(best["gpu"] * 1e6),
        }
        ratios.add(f"@gpu, {1 << exponent} elements", round(best["ours"] / faster, 2), **details)


SECTIONS = (front_door, pinned_transfers, prefetch_overlap, break_even)


def main() -> int:
    """Run all sections, and return the number of those that failed."""
    ratios = Ratios(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    failed = 0
    for section in SECTIONS:
        try:
            section(ratios)
        except Exception as error:  # noqa: BLE001  # the next section runs nevertheless
            failed += 1
            print(f"{section.__name__} raised {type(error).__name__}: {error}", flush=True)
            ratios.add(section.__name__, None, error=f"{type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
