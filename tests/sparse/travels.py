"""Convert a matrix of 200,000 × 200,000 with a million entries to each target; print the extra memory."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import arraybridge
from tests.sparse.arrays import PAIRS, Contents, framework_of, made, read

SIZE = 200_000
COUNT = 1_000_000


def resident() -> int:
    """Return the bytes of memory that this process occupies."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


class Peak:
    """The largest memory while a block runs, in bytes."""

    most = 0


@contextmanager
def measured() -> Iterator[Peak]:
    peak = Peak()
    peak.most = resident()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak.most = max(peak.most, resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.most = max(peak.most, resident())


def entries(layout: str, shape: tuple[int, int], count: int) -> Contents:
    random = np.random.default_rng(0)
    rows = np.sort(random.integers(0, shape[0], count))
    columns = random.integers(0, shape[1], count)
    values = random.normal(size=count).astype(np.float32)
    if layout == "coo":
        return Contents("coo", shape, values, (np.stack([rows, columns], axis=1),))
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    indices = columns.astype(np.int32), pointers.astype(np.int32)
    if layout == "bsr":  # half as many rows and columns of blocks
        return Contents("bsr", (2 * shape[0], 2 * shape[1]), np.ones((count, 2, 2), np.float32), indices)
    return Contents(layout, shape, values, indices)


def extra_bytes(source: str, target: str, layout: str) -> int:
    """Return the memory that a conversion takes at its peak, and check its result."""
    half = layout == "bsr"
    shape = (SIZE // 2, SIZE // 2) if half else (SIZE, SIZE)
    small = made(source, entries(layout, (10, 10), 10))
    arraybridge.convert_memory(small, target)  # load the framework, and let JAX compile
    x = made(source, entries(layout, shape, COUNT // 4 if half else COUNT))
    ctypes.CDLL(None).malloc_trim(0)  # otherwise, memory of freed arrays would be reused
    before = resident()
    with measured() as peak:
        y = arraybridge.convert_memory(x, target)
    assert framework_of(y) == target
    result = read(y)
    expected = read(x)
    assert (result.layout, result.shape) == (expected.layout, expected.shape)
    assert result.values.tobytes() == expected.values.tobytes()
    for index, other in zip(result.indices, expected.indices, strict=True):
        assert np.array_equal(index, other)
    return peak.most - before


def main(source: str) -> None:
    warnings.simplefilter("ignore")
    for one, target, layout in PAIRS:
        if one == source:
            print(target, layout, extra_bytes(source, target, layout))


if __name__ == "__main__":
    main(*sys.argv[1:])
