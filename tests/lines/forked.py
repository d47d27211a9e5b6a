"""Goes on with half-read iterators in a forked process; test_ends.py runs it."""

from __future__ import annotations

import os
import sys
from itertools import count

from arraybridge import Pipeline, device_map, prefetch
from arraybridge.lines import threads


def main() -> None:
    begun = [
        prefetch(count(), "numpy"),
        device_map(abs, count(), "cpu"),
        Pipeline(abs).map(count()),
    ]
    assert [next(one) for one in begun] == [0, 0, 0]
    # As a thread does for moments: the child finds the futures locked.
    locks = [future._condition for one in threads._runs for future in one._window]
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child == 0:
        for one in begun:
            said = ""
            try:
                for _ in range(1000):
                    next(one)
            except RuntimeError as error:
                said = str(error)
            print("refused:", said, flush=True)
        print("anew:", list(device_map(abs, [-1, 2], "cpu")), list(prefetch([3], "numpy")), flush=True)
        sys.exit(5)
    for lock in locks:
        lock.release()
    print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print("goes on:", [next(one) for one in begun], flush=True)


if __name__ == "__main__":
    main()
