"""Exit with half-read iterators whose threads are in native code; run by test_workers.py."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import numpy as np

from arraybridge import Pipeline, convert_memory, device_map

# Alive until the interpreter clears its modules.
kept: list[Any] = []


def begin(name: str) -> None:
    x = convert_memory(np.ones((300, 300), np.float32), name)

    def work(i: int) -> Any:
        result = x
        for _ in range(20):
            result = result @ x
        return result

    lines = [device_map(work, count(), "cpu", per_device=3), Pipeline(work, lambda y: y @ x).map(count())]
    kept.extend(lines)
    for results in lines:
        for _ in range(3):
            next(results)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begin(name)
    print("done", flush=True)
