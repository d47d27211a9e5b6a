"""Current and peak memory use per framework, device and process, and the load of GPUs.

A reading imports no framework and opens no accelerator: a framework that has not opened a GPU uses no memory
on it. `arraybridge.hardware` reads the GPUs themselves.
"""

from __future__ import annotations

import numbers
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

from arraybridge import hardware
from arraybridge.errors import nearest
from arraybridge.formatting import Contents, Table, format_bytes
from arraybridge.frameworks import registry
from arraybridge.frameworks.accelerators import Holding
from arraybridge.frameworks.registry import loaded
from arraybridge.types import Device

__all__ = [
    "DeviceMemory",
    "MemoryCollector",
    "MemoryStats",
    "gpu_utilization",
    "memory_peak",
    "memory_stats",
]

_HEAD = ("device", "holder", "used", "cached", "peak", "fragmentation")


class DeviceMemory(NamedTuple):
    """The memory of a device and its holders, its load and its temperature.

    On a GPU, the used and cached bytes of all holders and the free bytes add up to ``total``. A value is None
    if the device does not report it.

    Attributes:
        device: The device string, such as ``"gpu:0"``.
        name: The model; an empty string if unknown.
        uuid: The UUID; an empty string if unknown.
        total: The total memory in bytes.
        free: The free memory in bytes.
        holdings: The memory of each framework and process.
        load: The utilization in percent.
        temperature: The temperature in degrees Celsius.
    """

    device: str
    name: str
    uuid: str
    total: int | None
    free: int | None
    holdings: tuple[Holding, ...]
    load: int | None = None
    temperature: int | None = None


@dataclass(frozen=True)
class MemoryStats(Table):
    """One reading of `memory_stats`. It prints as a table, also in a notebook.

    Attributes:
        devices: The host first, then each accelerator.
        note: The reason, if the driver could not be read; an empty string otherwise.
    """

    devices: tuple[DeviceMemory, ...]
    note: str = ""

    @property
    def rows(self) -> tuple[Holding, ...]:
        """The holdings of all devices."""
        return tuple(holding for device in self.devices for holding in device.holdings)

    def __getitem__(self, device: str) -> DeviceMemory:
        """Return the device of that name, as in ``stats["gpu:0"]``.

        Raises:
            KeyError: If the reading has no such device.
        """
        for one in self.devices:
            if one.device == str(device):
                return one
        names = ", ".join(one.device for one in self.devices)
        raise KeyError(f"no device {device!r}. Pass one of {names}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the reading as dicts, lists, strings and numbers, ready for JSON."""
        return {
            "devices": [
                {**device._asdict(), "holdings": [holding.to_dict() for holding in device.holdings]}
                for device in self.devices
            ],
            "note": self.note,
        }

    def _table(self) -> Contents:
        rows: list[tuple[str, ...]] = []
        for device in self.devices:
            free = f"{format_bytes(device.free)} free of {format_bytes(device.total)}"
            rows.append((device.device, f"{device.name}: {free}" if device.name else free))
            for h in device.holdings:
                scattered = "" if h.fragmentation is None else f"{h.fragmentation:.0%}"
                sizes = (format_bytes(n) for n in (h.used, h.cached, h.peak))
                rows.append(("", h.holder, *sizes, scattered))
        return _HEAD, rows, _HEAD[2:], self.note


def holdings() -> list[Holding]:
    """Return the memory of this process on the host, and of each framework on each device that it has opened.

    The call opens no device, and is cheap enough for frequent sampling.
    """
    process = hardware.process_memory()
    own = Holding("cpu", "this process", process.used, peak=process.peak)
    return [own, *(holding for one in loaded() for holding in one.memory.usage())]


# -- one reading -------------------------------------------------------------------------------------


def memory_stats() -> MemoryStats:
    """Return the current memory use of the host and of each accelerator.

    For each device, the reading contains the total and free memory, and one row per holder. Frameworks have
    used, cached and peak bytes, and the fragmentation (the part of the reserved memory that no array uses) if
    they report it. Further rows contain the memory of other processes and the rest of this process, such as
    CUDA contexts and libraries. A framework has no row if it has opened no device or does not count its
    memory (NumPy, pyclesperanto). The call opens no device and works without a GPU.

    Returns:
        The reading, in bytes.

    Example:
        >>> memory_stats()["cpu"].total > 0
        True
    """
    by_device: dict[str, list[Holding]] = {}
    for one in holdings():
        by_device.setdefault(one.device, []).append(one)
    own = by_device["cpu"][0]
    host = hardware.host_memory()
    others = Holding("cpu", "other processes", max(0, host.total - host.available - (own.used or 0)))
    rows = (*by_device.pop("cpu"), others)
    devices = [DeviceMemory("cpu", "", "", total=host.total, free=host.available, holdings=rows)]
    devices += [_read_gpu(gpu, by_device.pop(f"gpu:{gpu.index}", [])) for gpu in hardware.gpus()]
    devices += [_read_through_framework(device, rows) for device, rows in by_device.items()]
    driver = hardware.driver()
    return MemoryStats(tuple(devices), f"{driver.reason}." if driver.is_silent else "")


def _read_gpu(gpu: hardware.Gpu, rows: list[Holding]) -> DeviceMemory:
    device = f"gpu:{gpu.index}"
    now = hardware.read_gpu(gpu)
    own = now.memory_by_process.get(os.getpid())
    ours = _reserved(rows)
    if now.used is None:  # a GPU that shares the host's memory
        remainder = []
    elif own is None:  # the driver lists ids from outside a container, or no sizes
        remainder = [Holding(device, "everything else", max(0, now.used - ours))]
    else:
        remainder = [
            # Contexts, libraries, and pools that no framework counts.
            Holding(device, "this process, otherwise", max(0, own - ours)),
            Holding(device, "other processes", max(0, now.used - max(own, ours))),
        ]
    return DeviceMemory(
        device,
        gpu.name,
        gpu.uuid,
        total=now.total,
        free=now.free,
        holdings=(*rows, *remainder),
        load=now.load,
        temperature=now.temperature,
    )


def _read_through_framework(device: str, rows: list[Holding]) -> DeviceMemory:
    """Return the memory of a device that the driver does not report, from a framework that has opened it."""
    for row in rows:
        memory = registry.framework(row.holder).memory.device_memory(Device.parse(device))
        if memory is not None:
            rest = max(0, memory.total - memory.free - _reserved(rows))
            remainder = Holding(device, "everything else", rest)
            return DeviceMemory(
                device, "", "", total=memory.total, free=memory.free, holdings=(*rows, remainder)
            )
    return DeviceMemory(device, "", "", total=None, free=None, holdings=tuple(rows))


def _reserved(rows: list[Holding]) -> int:
    return sum(row.reserved or row.used or 0 for row in rows)


class GpuLoad(NamedTuple):
    """The utilization of a GPU. A value is None if the GPU does not report it.

    Attributes:
        device: The device string, such as ``"gpu:0"``.
        name: The model.
        load: The utilization in percent.
        memory_used: The used memory in bytes.
        memory_total: The total memory in bytes.
        temperature: The temperature in degrees Celsius.
    """

    device: str
    name: str
    load: int | None
    memory_used: int | None
    memory_total: int | None
    temperature: int | None


def gpu_utilization() -> tuple[GpuLoad, ...]:
    """Return the load, memory and temperature of each NVIDIA GPU.

    Returns:
        One `GpuLoad` per GPU; an empty tuple without an NVIDIA GPU.

    Example:
        >>> for gpu in gpu_utilization():
        ...     print(gpu.device, gpu.load)  # doctest: +SKIP
    """
    readings = [(gpu, hardware.read_gpu(gpu)) for gpu in hardware.gpus()]
    return tuple(
        GpuLoad(
            f"gpu:{gpu.index}",
            gpu.name,
            load=now.load,
            memory_used=now.used,
            memory_total=now.total,
            temperature=now.temperature,
        )
        for gpu, now in readings
    )


# -- repeated readings -------------------------------------------------------------------------------


@contextmanager
def _repeated(probe: Callable[[], object], interval: float) -> Iterator[None]:
    """Call ``probe`` every ``interval`` seconds in a thread during a ``with`` block, and once at its end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(interval):
            probe()

    watcher = threading.Thread(target=watch, name="arraybridge-memory", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        probe()


_PEAK_HEAD = ("device", "holder", "before", "peak", "growth")


class PeakRow(NamedTuple):
    """The bytes that a holder used before a `memory_peak` block, and the most that it used within it."""

    device: str
    holder: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        """The difference between ``peak`` and ``before``, in bytes."""
        return max(0, self.peak - self.before)


# Reentrant: the start of a block probes the enclosing blocks.
_peaks_lock = threading.RLock()
_open_peaks: list[MemoryPeak] = []


@dataclass(slots=True, eq=False)
class _Watched:
    """Bytes of one holder on one device.

    Attributes:
        before: The bytes in use before the block.
        peak: The largest number of bytes in use so far.
        counted: The peak that the framework reported before the block. Only a larger peak is from the block.
    """

    before: int = 0
    peak: int = 0
    counted: int = 0


class MemoryPeak(Table):
    """The peak memory use of a `memory_peak` block so far: all ``rows``, or one such as ``m["torch"]``."""

    def __init__(self) -> None:
        #: The measured bytes, by device and holder.
        self._watched: dict[tuple[str, str], _Watched] = {}
        for one in holdings():
            if one.used is not None:
                self._watched[one.device, one.holder] = _Watched(one.used, one.used, one.peak or 0)

    @property
    def rows(self) -> tuple[PeakRow, ...]:
        """One row per device and holder."""
        return tuple(
            PeakRow(device, holder, before=one.before, peak=one.peak)
            for (device, holder), one in self._watched.items()
        )

    def __getitem__(self, holder: str) -> PeakRow:
        """Return the row of a framework on its first device, or of ``"this process"`` on the host.

        Raises:
            KeyError: If the holder has no row: it is not loaded, has opened no device, or does not count its
                memory.
        """
        for row in self.rows:
            if row.holder == holder:
                return row
        holders = list(dict.fromkeys(row.holder for row in self.rows))
        known = registry.framework_names()
        if holder in known:
            cause = f"{holder} has opened no device, or its memory is not counted."
        else:
            cause = f"it is not the name of a framework{nearest(str(holder), [*known, *holders])}."
        raise KeyError(f"no row for {holder!r}: {cause} Pass one of {', '.join(map(repr, holders))}.")

    def _table(self) -> Contents:
        rows = [(r.device, r.holder, *map(format_bytes, (r.before, r.peak, r.growth))) for r in self.rows]
        return _PEAK_HEAD, rows, _PEAK_HEAD[2:], ""

    def probe(self) -> None:
        """Read the current memory of all frameworks, and update the peaks."""
        with _peaks_lock:
            for one in holdings():
                if one.used is not None:
                    watched = self._watched.setdefault((one.device, one.holder), _Watched())
                    watched.peak = max(watched.peak, one.used)
                    if one.peak is not None and one.peak > watched.counted:
                        watched.peak = max(watched.peak, one.peak)


@contextmanager
def memory_peak() -> Iterator[MemoryPeak]:
    """Measure the peak memory of each framework, and of this process on the host, in a ``with`` block.

    PyTorch and TensorFlow count their peaks; the block resets these counters. JAX counts as well, but reports
    the peak of the block only if it exceeds every earlier one. CuPy is sampled every two milliseconds, and so
    is the host while it stays below the highest peak of the process.

    Yields:
        The measurement. It is complete when the block has ended.

    Example:
        >>> with memory_peak() as m:
        ...     pass
        >>> m["this process"].growth >= 0
        True
    """
    with _peaks_lock:
        for outer in _open_peaks:  # read their peaks before the counters are reset
            outer.probe()
        for one in loaded():
            one.memory.reset_peak()
        measured = MemoryPeak()
        _open_peaks.append(measured)
    try:
        with _repeated(measured.probe, 0.002):
            yield measured
    finally:
        _open_peaks.remove(measured)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a record: the time in seconds since 1970, and the bytes of a holder and its device."""

    time: float
    device: str
    holder: str
    used: int | None
    cached: int | None
    peak: int | None
    free: int | None
    total: int | None
    load: int | None
    temperature: int | None


#: The columns of a record.
COLUMNS = tuple(field.name for field in fields(_Line))


class MemoryCollector:
    """A background recorder that appends readings of `memory_stats` to a file, in a ``with`` block.

    Each reading is one line per holder and device: ``time`` (seconds since 1970), ``device``, ``holder``,
    ``used``, ``cached`` and ``peak`` (bytes of the holder), ``free`` and ``total`` (bytes of the device), and
    for GPUs that report them, ``load`` (percent) and ``temperature`` (degrees Celsius). Readings
    are appended to an existing file.

    Args:
        path: The file. Its suffix determines the format: ``.csv``, or ``.jsonl`` for one JSON object per
            line.
        interval: The seconds between two readings. Defaults to 1.

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

    def __init__(self, path: str | os.PathLike[str], interval: float = 1.0) -> None:
        from pathlib import Path  # takes 3 ms, imported here to keep `import arraybridge` fast

        self._path = Path(path)
        if self._path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"The file name {self._path.name!r} must end in .csv or .jsonl.")
        if isinstance(interval, bool) or not isinstance(interval, numbers.Real):
            raise TypeError(f"interval={interval!r} must be a positive number of seconds.")
        if not interval > 0:
            raise ValueError(f"interval={interval!r} must be a positive number of seconds.")
        self._interval: float = interval

    def __enter__(self) -> Self:
        self.write()  # raises an error here if the file cannot be written
        self._writing = _repeated(self.write, self._interval)
        self._writing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._writing.__exit__(None, None, None)

    def write(self, stats: MemoryStats | None = None) -> None:
        """Append a reading to the file.

        Args:
            stats: The reading. Defaults to a new one.
        """
        import csv
        import json

        lines = _lines_of(stats or memory_stats())
        with self._path.open("a", newline="", encoding="utf-8") as file:
            if self._path.suffix == ".jsonl":
                file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
            else:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if not file.tell():
                    writer.writeheader()
                writer.writerows(asdict(one) for one in lines)


def _lines_of(stats: MemoryStats) -> list[_Line]:
    """Return the lines that record a reading."""
    now = round(time.time(), 3)
    return [
        _Line(
            time=now,
            device=device.device,
            holder=holding.holder,
            used=holding.used,
            cached=holding.cached,
            peak=holding.peak,
            free=device.free,
            total=device.total,
            load=device.load,
            temperature=device.temperature,
        )
        for device in stats.devices
        for holding in device.holdings
    ]
