"""Pickle shared arrays in workers without sending them; run by test_shared_memory.py with a start method."""

from __future__ import annotations

import gc
import hashlib
import io
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import arraybridge
from arraybridge import shared
from arraybridge.memory import shared_memory as module


def hashed(count: int) -> tuple[int, int]:
    """Return how many segments are left, and how many the worker would wait for at its end."""
    for i in range(count):
        x = shared(np.full(1000, i))
        hashlib.sha256(pickle.dumps(x[1:])).hexdigest()
        pickle._Pickler(io.BytesIO(), 5).dump([x, x.reshape(2, -1)])  # type: ignore[attr-defined]
        x.__reduce_ex__(4)
        del x
    gc.collect()
    kept = [*module._segments.values()]
    return len(kept), sum(one.in_use.value for one in kept)


def cached_and_returned(value: float) -> np.ndarray:
    """Return an array that was pickled for a cache before."""
    x = shared(np.full(3, value))
    pickle.dumps(x)
    return x


def main(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        print("Pool", *pool.apply(hashed, (20,)))
    with ProcessPoolExecutor(1, context) as executor:
        print("executor", *executor.submit(hashed, 20).result())
    (counts,) = arraybridge.device_map(hashed, [20], ["cpu"], processes=True)
    print("device_map", *counts)
    with context.Pool(1, maxtasksperchild=1) as pool:
        print("returned", pool.apply(cached_and_returned, (2.0,)).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
