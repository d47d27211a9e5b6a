"""Works until somebody presses Ctrl-C; test_device_map.py does."""

from __future__ import annotations

import sys
import threading
import time
from itertools import count

from arraybridge import device_map


def work(i: int) -> int:
    time.sleep(0.05)
    return i


def main(mode: str) -> None:
    try:
        for i in device_map(work, count(), "cpu", per_device=2, processes=mode == "processes"):
            if i == 2:
                print("working", flush=True)
    except KeyboardInterrupt:
        until = time.monotonic() + 2
        while threading.active_count() > 1 and time.monotonic() < until:
            time.sleep(0.01)
        print(f"interrupted, and {threading.active_count() - 1} threads left")


if __name__ == "__main__":
    main(sys.argv[1])
