"""Work until Ctrl-C; run by test_workers.py."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import count

from arraybridge import device_map, prefetch


def work(i: int) -> int:
    time.sleep(0.05)
    return i


def stuck() -> Iterator[int]:
    yield 0
    print("working", flush=True)
    time.sleep(1000)


def main(mode: str) -> None:
    if mode == "stuck prefetch":
        list(prefetch(stuck(), "numpy"))
    try:
        for i in device_map(work, count(), "cpu", per_device=2, processes=mode == "processes"):
            if i == 2:
                print("working", flush=True)
    except KeyboardInterrupt:
        until = time.monotonic() + 30
        while threading.active_count() > 1 and time.monotonic() < until:
            time.sleep(0.01)
        print(f"interrupted, and {threading.active_count() - 1} threads left")


if __name__ == "__main__":
    main(sys.argv[1])
