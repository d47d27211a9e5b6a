"""Release results of other processes immediately or at the end; run by test_serialization.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np

from arraybridge import device_map
from tests.parallel.functions import same


def items() -> Iterator[np.ndarray]:
    for i in range(60):
        yield np.full((1 << (18 + i % 6)) + 8, i % 100, np.uint8)


def main() -> None:
    kept = []
    for i, result in enumerate(device_map(same, items(), ["cpu"], processes=True)):
        assert result[0] == result[-1] == i % 100
        if i < 8:
            kept.append(result)
        del result
    while kept:
        kept.pop(0)
        gc.collect()
    print("released")


if __name__ == "__main__":
    main()
