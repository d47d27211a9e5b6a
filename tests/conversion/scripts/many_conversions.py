"""Calls from threads first, then ten thousand conversions; print what the process holds more after these.

Failures and empties are among them.

Arguments: the frameworks to convert between. Prints JSON.
"""

import gc
import json
import sys
import threading
import warnings
from itertools import product
from typing import Any

import numpy as np
import psutil

import arraybridge
from arraybridge.conversion import plans
from arraybridge.types import Cache
from tests.test_threads import in_threads

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
    """Convert it, or return it as it is."""
    global done, failed
    done += 1
    try:
        return arraybridge.convert_memory(x, target, **option)
    except (arraybridge.MemoryConversionError, ValueError):
        failed += 1
        return x


def rounds(least: int) -> None:
    """Convert at least so many times."""
    global done, failed
    done = failed = 0
    while done < least:
        for layout, source in product(layouts, frameworks):
            array = attempt(layout, source)
            for target, option in product(frameworks, options):
                attempt(array, target, **option)
            # A class of its own for each array, as in code that makes classes in a loop.
            arraybridge.convert_memory(values.view(type("Fleeting", (np.ndarray,), {})), "numpy")
        with arraybridge.trace():
            arraybridge.convert_memory(values, "numpy", copy=True)


def first_calls(number: int) -> None:
    """All pairs, beginning with another framework in each thread."""
    own = values + number
    order = frameworks[number % len(frameworks) :] + frameworks[: number % len(frameworks)]
    arrays = [arraybridge.convert_memory(own, source) for source in order]
    for array, target in product(arrays, order):
        assert (arraybridge.to_numpy(arraybridge.convert_memory(array, target)) == own).all()
        assert arraybridge.explain(array, target).nbytes == own.nbytes
    if "jax" in frameworks:  # whose global flag, x64, stays off
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


for _ in range(4):
    in_threads(first_calls)
warnings.simplefilter("error")
rounds(6_000)
before = held()
rounds(10_000)
after = held()
memos = [one for one in gc.get_objects() if type(one) is Cache]
grown = {name: after[name] - before[name] for name in before}
types = max(len(known) for known in (*memos, *plans.by_form.values()))
print(json.dumps({"done": done, "failed": failed, "types": types, "grown": grown}))
