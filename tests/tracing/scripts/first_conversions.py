"""First conversions of a process, with a clock that only start-ups and conversions advance.

The arguments are the frameworks to convert to. Prints a JSON list per framework: its name, the seconds of its
start-ups, of two conversions and of all conversions, and the lines below the table. A second trace of the
framework sees no start-up.
"""

import json
import sys
import time
from typing import Any

import arraybridge
from arraybridge.conversion.request import Decision

now = 0.0
time.perf_counter = lambda: now
convert = Decision.__call__


def advance(seconds: float) -> None:
    global now
    now += seconds


class Importing:
    """A module finder that finds nothing, and takes 100 s for each framework."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        advance(100.0 if name in ("torch", "jax", "tensorflow") else 0.0)


def convert_in_a_second(self: Decision) -> Any:
    advance(1.0)
    return convert(self)


def start_in_ten_seconds(self: Any) -> Any:
    advance(10.0)
    return self.framework.available_devices()


sys.meta_path.insert(0, Importing())
Decision.__call__ = convert_in_a_second  # type: ignore[method-assign]
x = arraybridge.aligned((3,), "float32")
for name in sys.argv[1:]:
    with arraybridge.trace() as log:
        framework = arraybridge.framework(name)  # imports it
        framework.available_devices = framework.devices.available
        type(framework.devices).available = start_in_ten_seconds
        for _ in range(2):
            arraybridge.convert_memory(x, name)
    with arraybridge.trace() as second:
        arraybridge.convert_memory(x, name)
    starts = [event.seconds for event in log.start_ups]
    conversions = [record.seconds for record in log.records]
    print(json.dumps([name, starts, conversions, log.total_seconds, str(log).splitlines()[3:]]))
    assert str(second).splitlines()[2:] == ["1 conversion, 0 B copied, 1.00 s"]
    assert second.start_ups == []
