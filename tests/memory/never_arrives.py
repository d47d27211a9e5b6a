"""Pickle shared arrays in workers without sending them; run by test_shared_memory.py with a start method."""

from __future__ import annotations

import gc
import hashlib
import io
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler

import numpy as np

import arraybridge
from arraybridge import shared
from arraybridge.memory import segments, shared_memory


def hashed(count: int) -> tuple[int, int]:
    """Return how many segments are left, and how many the worker would wait for at its end."""
    for i in range(count):
        x = shared(np.full(1000, i))
        hashlib.sha256(pickle.dumps(x[1:])).hexdigest()
        pickle._Pickler(io.BytesIO(), 5).dump([x, x.reshape(2, -1)])  # type: ignore[attr-defined]
        x.__reduce_ex__(4)
        del x
    gc.collect()
    kept = [*segments._segments.values()]
    return len(kept), sum(one.in_use.value for one in kept)


def limit(most_bytes: int, most: int) -> None:
    """Set the limits of the memory that this worker keeps."""
    shared_memory._MOST_SENT_BYTES = most_bytes
    shared_memory._MOST_SENT = most


def measured(count: int, elements: int) -> tuple[int, int]:
    """Return the number and bytes of the segments that are kept for pickles that are not sent."""
    for i in range(count):
        ForkingPickler.dumps(shared(np.full(elements, i)))
    gc.collect()
    kept = [*segments._segments.values()]
    return len(kept), sum(one.size for one in kept)


def several(count: int) -> list[np.ndarray]:
    """Return arrays, most of which are more than the memory that is kept."""
    return [shared(np.full(10_000, float(i))) for i in range(count)]


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
    with context.Pool(1, limit, (1_000_000, 3)) as pool:
        few, nbytes = pool.apply(measured, (20, 1000))
        print("kept", few <= 3, nbytes <= 1_000_000)
        print("arrived", [float(x[-1]) for x in pool.apply(several, (8,))])
    with context.Pool(1, limit, (100, 3)) as pool:  # one array may be larger than the limit
        count, nbytes = pool.apply(measured, (5, 1000))
        print("large", count, nbytes > 8000)


if __name__ == "__main__":
    main(sys.argv[1])
