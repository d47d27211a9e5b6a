"""Check that calls from threads, then ten thousand conversions with failures and empty arrays, leak
nothing.

Arguments: the frameworks to convert between.
"""

import gc
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import psutil

import arraybridge

THREADS = 8
frameworks = ("numpy", *sys.argv[1:])
values = np.arange(16384, dtype=np.float32).reshape(2, 64, 128)  # 64 KiB: a leak of 1 in 100 is 6 MiB
layouts: list[Any] = [
    *(values, values[::-1], values[:, ::2], values.T, values[:0], np.broadcast_to(values[0], (2, 64, 128))),
    *(values.astype(dtype) for dtype in (">f4", "f8", "bool")),
    *(np.ma.masked_array(values), np.array(1.0), np.array(["a", "b"]), [1, 2], None),
]
options: list[dict[str, Any]] = [
    *({}, {"copy": True}, {"copy": False}, {"dtype": "float32"}, {"gpu_id": 99}, {"dtype": "nonsense"}),
    *({"gpu_id": -1}, {"device": "nowhere"}),
]
done = failed = 0


def attempt(x: Any, target: str, **option: Any) -> Any:
    """Convert the array, or return it unchanged if that raises."""
    global done, failed
    done += 1
    try:
        return arraybridge.convert_memory(x, target, **option)
    except (arraybridge.MemoryConversionError, ValueError):
        failed += 1
        return x


def rounds(least: int) -> None:
    """Convert at least this many times."""
    global done, failed
    done = failed = 0
    while done < least:
        for layout, source in product(layouts, frameworks):
            array = attempt(layout, source)
            for target, option in product(frameworks, options):
                attempt(array, target, **option)
            # A separate class for each array, as in code that creates classes in a loop.
            arraybridge.convert_memory(values.view(type("Fleeting", (np.ndarray,), {})), "numpy")
        with arraybridge.trace():
            arraybridge.convert_memory(values, "numpy", copy=True)


def first_calls(number: int) -> None:
    """Convert all pairs in threads that start simultaneously, each with a different first framework."""
    barrier.wait()
    own = values + number
    order = frameworks[number % len(frameworks) :] + frameworks[: number % len(frameworks)]
    arrays = [arraybridge.convert_memory(own, source) for source in order]
    for array, target in product(arrays, order):
        assert (arraybridge.to_numpy(arraybridge.convert_memory(array, target)) == own).all()
        assert arraybridge.explain(array, target).nbytes == own.nbytes
    if "jax" in frameworks:  # its global x64 flag stays off
        import jax

        assert arraybridge.to_jax(np.array([2**40 + 1])).dtype == np.int64
        assert jax.numpy.arange(3).dtype == np.int32


def held() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }


barrier = threading.Barrier(THREADS)
for _ in range(4):
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(first_calls, range(THREADS)))
warnings.simplefilter("error")
rounds(6_000)
before = held()
rounds(10_000)
after = held()
grown = {name: after[name] - before[name] for name in before}
assert done // 10 < failed < done, "both failures and successes must occur"
# One leaked array per hundred would take more.
most = {"rss": 8 * 2**20, "files": 0, "threads": 0, "objects": 2_000}
assert all(grown[name] <= most[name] for name in most), grown
