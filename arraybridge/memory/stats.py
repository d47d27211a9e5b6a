"""Who holds what: memory of every framework, device and process, now and at most, and the load of the cards.

A reading imports no framework and opens no accelerator: a framework that has not opened a card holds nothing
on it. What the cards themselves say comes from `arraybridge.hardware`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

from arraybridge import hardware
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
    """A device's memory in bytes, who holds it, its load in per cent and temperature in degrees Celsius.

    On a card what the holders have used and cached, and what is free, add up to ``total``. None stands for
    what it does not tell.
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
    """One reading of `memory_stats`: a table, also in a notebook; ``to_dict()`` is ready for JSON.

    Attributes:
        devices: the host first, then each card.
        note: what could not be seen, and why; or ``""``.
    """

    devices: tuple[DeviceMemory, ...]
    note: str = ""

    @property
    def rows(self) -> tuple[Holding, ...]:
        """The holdings of all devices."""
        return tuple(holding for device in self.devices for holding in device.holdings)

    def __getitem__(self, device: str) -> DeviceMemory:
        """The device of that name, ``stats["gpu:0"]``.

        Raises:
            KeyError: the reading has no such device.
        """
        for one in self.devices:
            if one.device == str(device):
                return one
        raise KeyError(f"{device} is not among {', '.join(d.device for d in self.devices)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
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
    """This process on the host, and each framework on each device that it has opened.

    Opens nothing, and costs next to nothing.
    """
    process = hardware.process_memory()
    own = Holding("cpu", "this process", process.used, peak=process.peak)
    return [own, *(holding for one in loaded() for holding in one.memory.usage())]


# -- one reading -------------------------------------------------------------------------------------


def memory_stats() -> MemoryStats:
    """Who holds the memory of the host and of each card, now.

    For each device: total, free, and per framework used, cached and peak, and where it tells both how much of
    what it reserved no array uses (fragmentation); what other processes hold, and what this process holds
    besides (CUDA's contexts and libraries). A framework that has opened no card, or that
    does not count what it holds (NumPy, pyclesperanto), has no row. Opens nothing, and needs no card.

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
    if now.used is None:  # a card that shares the host's memory
        remainder = []
    elif own is None:  # the driver counts processes from outside a container, or without their sizes
        remainder = [Holding(device, "everything else", max(0, now.used - ours))]
    else:
        remainder = [
            # Contexts, libraries, and pools whose owner does not count them.
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
    """A device that the driver does not show, through a framework that has opened it."""
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
    """How busy a card is: ``load`` in per cent, memory in bytes, ``temperature`` in degrees Celsius.

    None stands for what the card does not tell.
    """

    device: str
    name: str
    load: int | None
    memory_used: int | None
    memory_total: int | None
    temperature: int | None


def gpu_utilization() -> tuple[GpuLoad, ...]:
    """Load, memory and temperature of each NVIDIA card; empty without one.

    >>> for card in gpu_utilization():
    ...     print(card.device, card.load)  # doctest: +SKIP
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


# -- again and again ---------------------------------------------------------------------------------


@contextmanager
def _repeated(probe: Callable[[], object], interval: float) -> Iterator[None]:
    """Look every so many seconds, in a thread, while a ``with`` block runs, and once more at its end."""
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
    """Bytes that a holder used before a block, and the most it used within; ``growth`` is the difference."""

    device: str
    holder: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)


# Reentrant: a block that begins looks at those around it.
_peaks_lock = threading.RLock()
_open_peaks: list[MemoryPeak] = []


@dataclass(slots=True, eq=False)
class _Watched:
    """Bytes of one holder on one device.

    Attributes:
        before: Those that it used before the block.
        peak: The most that it used so far.
        counted: The peak that a framework had counted before the block. Only a larger one is of the block.
    """

    before: int = 0
    peak: int = 0
    counted: int = 0


class MemoryPeak(Table):
    """What a block of `memory_peak` used at most so far: ``rows``, ``m["torch"]``."""

    def __init__(self) -> None:
        #: By device and holder.
        self._watched: dict[tuple[str, str], _Watched] = {}
        for one in holdings():
            if one.used is not None:
                self._watched[one.device, one.holder] = _Watched(one.used, one.used, one.peak or 0)

    @property
    def rows(self) -> tuple[PeakRow, ...]:
        """One for each device and holder."""
        return tuple(
            PeakRow(device, holder, before=one.before, peak=one.peak)
            for (device, holder), one in self._watched.items()
        )

    def __getitem__(self, holder: str) -> PeakRow:
        """The row of a framework (of its first card), or of ``"this process"``: the host's memory.

        Raises:
            KeyError: it has none: it holds nothing that it counts.
        """
        for row in self.rows:
            if row.holder == holder:
                return row
        raise KeyError(f"{holder} is not among {', '.join(row.holder for row in self.rows) or 'no rows'}")

    def _table(self) -> Contents:
        rows = [(r.device, r.holder, *map(format_bytes, (r.before, r.peak, r.growth))) for r in self.rows]
        return _PEAK_HEAD, rows, _PEAK_HEAD[2:], ""

    def _probe(self) -> None:
        with _peaks_lock:
            for one in holdings():
                if one.used is not None:
                    watched = self._watched.setdefault((one.device, one.holder), _Watched())
                    watched.peak = max(watched.peak, one.used)
                    if one.peak is not None and one.peak > watched.counted:
                        watched.peak = max(watched.peak, one.peak)


@contextmanager
def memory_peak() -> Iterator[MemoryPeak]:
    """Measure the most memory that each framework uses within a ``with`` block, and this process on the host.

    PyTorch and TensorFlow count it themselves (their own peak counters start anew with the block); so does
    JAX, when the block goes beyond what came before. CuPy, and the host below the highest mark that the
    process ever reached, are looked at every two milliseconds.

    Yields:
        The measurement, which is complete once the block has ended.

    >>> with memory_peak() as m:
    ...     pass
    >>> m["this process"].growth >= 0
    True
    """
    with _peaks_lock:
        for outer in _open_peaks:  # keep what they have seen: the counters start anew
            outer._probe()
        for one in loaded():
            one.memory.reset_peak()
        measured = MemoryPeak()
        _open_peaks.append(measured)
    try:
        with _repeated(measured._probe, 0.002):
            yield measured
    finally:
        _open_peaks.remove(measured)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a record: the time in seconds since 1970, a holder's bytes, and its device's."""

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
    """Writes a reading of `memory_stats` to a file, again and again, in the background.

    One line for each holder of each device: ``time`` (seconds since 1970), ``device``, ``holder``,
    ``used``, ``cached``, ``peak`` (of the holder), ``free`` and ``total`` (of the device), in bytes,
    and of a card ``load`` in per cent and ``temperature`` in degrees Celsius, where it tells them. The
    suffix of the file says the form: ``.csv``, or ``.jsonl`` for a JSON object a line. A file that exists is
    continued.

    Args:
        path: the file.
        interval: seconds between two readings.

    Raises:
        ValueError: another suffix, or an interval that is not positive.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "memory.csv"
    >>> with MemoryCollector(file, interval=60):
    ...     pass
    >>> file.read_text().splitlines()[0]
    'time,device,holder,used,cached,peak,free,total,load,temperature'
    """

    def __init__(self, path: str | os.PathLike[str], interval: float = 1.0) -> None:
        from pathlib import Path  # costs 3 ms, which `import arraybridge` saves

        self._path = Path(path)
        if self._path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"{self._path.name} must end in .csv or .jsonl, which says how to write it")
        if not interval > 0:
            raise ValueError(f"interval={interval!r} must be a positive number of seconds")
        self._interval = interval

    def __enter__(self) -> Self:
        self.write()  # a file that cannot be written shows now
        self._writing = _repeated(self.write, self._interval)
        self._writing.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._writing.__exit__(None, None, None)

    def write(self, stats: MemoryStats | None = None) -> None:
        """Write a reading to the file: this one, or one that is made now."""
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
