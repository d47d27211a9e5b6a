"""`MemoryCollector`: read memory use at regular intervals, and write the readings to a file."""

from __future__ import annotations

import numbers
import os
import time
from typing import Any, Self

from arraybridge.memory.memory_peak import repeat
from arraybridge.memory.stats import MemoryStats, memory_stats
from arraybridge.validation import add_hints, file_path

__all__ = ["MemoryCollector"]


#: The columns of the file; see `MemoryCollector`.
COLUMNS = (
    *("time", "device", "holder", "used", "cached", "peak"),
    *("free", "total", "load", "temperature"),
)


class MemoryCollector:
    """A background recorder that appends readings of `memory_stats` to a file, in a ``with`` block.

    Each reading consists of one line per device and holder (a framework or process): ``time`` (seconds since
    1970), ``device``, ``holder``, ``used``, ``cached`` and ``peak`` (bytes of the holder), ``free`` and
    ``total`` (bytes of the device), and for GPUs that report them, ``load`` (percent) and ``temperature``
    (degrees Celsius). Readings are appended to an existing file.

    Args:
        path: The file. Its suffix determines the format: ``.csv``, or ``.jsonl`` for one JSON object per
            line.
        interval: The time between two readings, in seconds. Defaults to 1.

    Raises:
        ValueError: If the file has another suffix, or the interval is not positive.
        TypeError: If the interval is not a number.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "memory.csv"
        >>> with MemoryCollector(file, interval=60):
        ...     pass
        >>> file.read_text().splitlines()[0]
        'time,device,holder,used,cached,peak,free,total,load,temperature'
    """

    @add_hints
    def __init__(self, path: str | os.PathLike[str], interval: float = 1.0) -> None:
        self._path = file_path("path", path)
        if self._path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"The file name {self._path.name!r} must end in .csv or .jsonl.")
        if isinstance(interval, bool) or not isinstance(interval, numbers.Real):
            raise TypeError(f"interval={interval!r} must be a positive number of seconds.")
        if not interval > 0:
            raise ValueError(f"interval={interval!r} must be a positive number of seconds.")
        self._interval: float = interval

    def __enter__(self) -> Self:
        self.write()  # raises an error here if the file cannot be written
        self._writing = repeat(self.write, self._interval)
        self._writing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._writing.__exit__(None, None, None)

    def write(self, stats: MemoryStats | None = None) -> None:
        """Append a reading to the file.

        Args:
            stats: The reading. Defaults to a new reading of `memory_stats`.
        """
        import csv
        import json

        lines = _lines_of(stats or memory_stats())
        with self._path.open("a", newline="", encoding="utf-8") as file:
            if self._path.suffix == ".jsonl":
                file.writelines(json.dumps(line) + "\n" for line in lines)
            else:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if not file.tell():
                    writer.writeheader()
                writer.writerows(lines)


def _lines_of(stats: MemoryStats) -> list[dict[str, Any]]:
    """Return the lines that record a reading: the memory of each holder on each device, by column."""
    now = round(time.time(), 3)
    lines = []
    for device in stats.devices:
        for holding in device.holdings:
            values = device._asdict() | holding._asdict() | {"time": now}
            lines.append({column: values[column] for column in COLUMNS})
    return lines
