"""Ten thousand conversions, failures and empties among them; print what the process holds more than before.

Arguments: the frameworks to convert between. Prints JSON.
"""

import gc
import json
import sys
import threading
from typing import Any

import numpy as np
import psutil

import arraybridge
from arraybridge.conversion import plans
from arraybridge.types import Cache

frameworks = ("numpy", *sys.argv[1:])
values = np.arange(16384, dtype=np.float32).reshape(2, 64, 128)  # 64 KiB: a leak of 1 in 100 is 6 MiB
layouts: list[Any] = [
    *(
        values,
        values[::-1],
        values[:, ::2],
        values.T,
        values.astype(">f4"),
        np.broadcast_to(values[0], (2, 64, 128)),
    ),
    *(values.astype(np.float64), values[:0], values.astype(bool), np.ma.masked_array(values), np.array(1.0)),
    *(np.array(["a", "b"]), [1, 2], None),
]
options: list[dict[str, Any]] = [
    *({}, {"copy": True}, {"copy": False}, {"dtype": "float32"}, {"gpu_id": 99}, {"dtype": "nonsense"}),
    *({"gpu_id": -1}, {"device": "nowhere"}),
]


def rounds(least: int) -> tuple[int, int]:
    """Convert at least so many times; how many were done, and how many of them failed."""
    done = failed = 0
    while done < least:
        for layout in layouts:
            for source in frameworks:
                try:
                    array = arraybridge.convert_memory(layout, source)
                except arraybridge.MemoryConversionError:
                    failed += 1
                    array = layout
                done += 1
                for target in frameworks:
                    for option in options:
                        try:
                            arraybridge.convert_memory(array, target, **option)
                        except (arraybridge.MemoryConversionError, ValueError):
                            failed += 1
                        done += 1
                # A class of its own for each array, as in code that makes classes in a loop.
                fleeting = type("Fleeting", (np.ndarray,), {})
                arraybridge.convert_memory(values.view(fleeting), "numpy")
        with arraybridge.trace():
            arraybridge.convert_memory(values, "numpy", copy=True)
    return done, failed


process = psutil.Process()


def held() -> dict[str, int]:
    gc.collect()
    return {
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }


rounds(6_000)
before = held()
done, failed = rounds(10_000)
after = held()
memos = [one for one in gc.get_objects() if type(one) is Cache]
report = {
    "done": done,
    "failed": failed,
    "types": max(len(known) for known in (*memos, *plans.by_form.values())),
    "grown": {name: after[name] - before[name] for name in before},
}
print(json.dumps(report))
