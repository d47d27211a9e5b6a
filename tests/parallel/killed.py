"""Print the ID of a worker process, and send it large items until one of the two processes is killed."""

from __future__ import annotations

import gc
import threading
from itertools import repeat
from pathlib import Path

import numpy as np

from arraybridge import device_map
from arraybridge.errors import error_text
from tests.parallel.functions import with_process


def main() -> None:
    results = device_map(with_process, repeat(np.zeros(1 << 22)), ["cpu"], processes=True)
    words = ""
    try:
        for i, (_, process) in enumerate(results):
            if i == 5:
                print(process, flush=True)
    except RuntimeError as error:
        words = error_text(error)
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(20)
    name, _, rest = words.partition(":")
    exit_code = rest.partition(" ended with ")[2].partition(" while ")[0]
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    print(name, exit_code, "threads", threading.active_count() - 1, "maps", maps.count("memfd:arraybridge"))


if __name__ == "__main__":
    main()
