"""Who holds what: memory of every framework, device and process, and the load of the cards.

A reading imports no framework and opens no accelerator: a framework that has not opened a card holds nothing
on it. What the cards themselves say comes from NVML, where ``nvidia-ml-py`` is installed.
"""

from __future__ import annotations

import os
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.hostmemory import PAGE_SIZE, own_memory
from arraybridge.frameworks.parts import Usage
from arraybridge.frameworks.registry import loaded
from arraybridge.show import format_bytes, html_table, text_table

if TYPE_CHECKING:
    from arraybridge.memory import nvml

__all__ = [
    "DeviceMemory",
    "GpuLoad",
    "Holding",
    "MemoryCollector",
    "MemoryStats",
    "gpu_utilization",
    "memory_stats",
]

THIS_PROCESS = "this process"
REST_OF_PROCESS = "this process, otherwise"  # contexts, libraries, and pools whose owner does not count them
OTHERS = "other processes"
REST = "everything else"  # where NVML does not say which process holds what

_READING = ("device", "holder", "used", "cached", "peak", "fragmentation")


class Holding(NamedTuple):
    """Bytes that one holder has on one device; None where nobody counts them.

    Attributes:
        device: the device in words, ``"cpu"`` or ``"gpu:0"``.
        holder: a framework's name, ``"this process"`` (on the host), ``"this process, otherwise"``,
            ``"other processes"``, or ``"everything else"``.
        used: held by live arrays (by a process: all that it holds).
        cached: kept by the framework for arrays to come.
        peak: the most that ``used`` has been.
    """

    device: str
    holder: str
    used: int | None
    cached: int | None = None
    peak: int | None = None

    @property
    def reserved(self) -> int | None:
        """What the holder has taken from the device: ``used`` and ``cached``; None where it does not tell."""
        return None if self.used is None or self.cached is None else self.used + self.cached

    @property
    def fragmentation(self) -> float | None:
        """The part of what is reserved that no live array uses, from 0 to 1; None where it does not tell.

        Much of it beside an error of memory that has run out says that free memory lies in pieces, or in
        another framework's cache.
        """
        return None if self.reserved is None else (self.cached or 0) / max(1, self.reserved)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ``reserved`` and ``fragmentation``."""
        return {**self._asdict(), "reserved": self.reserved, "fragmentation": self.fragmentation}


class DeviceMemory(NamedTuple):
    """A device's memory in bytes, and who holds it.

    On a card what the holders have used and cached, and what is free, add up to ``total``.
    """

    device: str
    name: str
    uuid: str
    total: int | None
    free: int | None
    holdings: tuple[Holding, ...]


class MemoryStats:
    """One reading of `memory_stats`: a table, also in a notebook; ``to_dict()`` is ready for JSON.

    Attributes:
        devices: the host first, then each card.
        note: what could not be seen, and why; or ``""``.
    """

    __slots__ = ("devices", "note")

    def __init__(self, devices: tuple[DeviceMemory, ...], note: str = "") -> None:
        self.devices = devices
        self.note = note

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

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for device in self.devices:
            free = f"{format_bytes(device.free)} free of {format_bytes(device.total)}"
            rows.append((device.device, f"{device.name}: {free}" if device.name else free))
            for h in device.holdings:
                scattered = "" if h.fragmentation is None else f"{h.fragmentation:.0%}"
                sizes = (format_bytes(n) for n in (h.used, h.cached, h.peak))
                rows.append(("", h.holder, *sizes, scattered))
        return rows

    def __str__(self) -> str:
        table = text_table(_READING, self._rows(), right=_READING[2:])
        return f"{table}\n{self.note}" if self.note else table

    def _repr_html_(self) -> str:
        return html_table(_READING, self._rows(), caption=self.note)


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
    frameworks = loaded()
    holdings: dict[str, list[tuple[str, Usage]]] = {}
    for one in frameworks:
        for usage in one.pool.usage():
            holdings.setdefault(str(usage.device), []).append((one.name, usage))
    devices = [_host()]
    from arraybridge.memory import nvml  # with the cards 2 ms, which `import arraybridge` shall not take

    library = nvml.library()
    if library is not None:
        seen = nvml.cards_of(library)
        devices.extend(_read_card(library, card, holdings.pop(f"gpu:{card.number}", [])) for card in seen)
    for device, held in holdings.items():
        devices.append(_read_through(frameworks, device, held))
    blind = library is None and os.path.exists("/proc/driver/nvidia/version")  # noqa: PTH110
    note = "Cards that no framework has opened are not listed; pip install nvidia-ml-py shows them."
    return MemoryStats(tuple(devices), note if blind else "")


def _rows(device: str, held: list[tuple[str, Usage]]) -> tuple[list[Holding], int]:
    rows = [Holding(device, name, usage.used, usage.cached, usage.peak) for name, usage in held]
    return rows, sum((row.used or 0) + (row.cached or 0) for row in rows)


def _read_card(library: ModuleType, card: nvml.SeenCard, held: list[tuple[str, Usage]]) -> DeviceMemory:
    from arraybridge.memory import nvml

    device = f"gpu:{card.number}"
    rows, ours = _rows(device, held)
    memory = nvml.asked(library, "nvmlDeviceGetMemoryInfo", card.handle)
    if memory is None:  # some integrated cards
        return DeviceMemory(device, card.name, card.uuid, None, None, tuple(rows))
    used = int(memory.total - memory.free)
    processes = nvml.asked(library, "nvmlDeviceGetComputeRunningProcesses", card.handle) or []
    mine = next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)
    if mine is None:  # NVML counts processes from outside a container, or tells no sizes
        rows.append(Holding(device, REST, max(0, used - ours)))
    else:
        rows.append(Holding(device, REST_OF_PROCESS, max(0, mine - ours)))
        rows.append(Holding(device, OTHERS, max(0, used - max(mine, ours))))
    return DeviceMemory(device, card.name, card.uuid, int(memory.total), int(memory.free), tuple(rows))


def _read_through(frameworks: list[Framework], device: str, held: list[tuple[str, Usage]]) -> DeviceMemory:
    """A card that NVML does not show, through a framework that has it open."""
    rows, ours = _rows(device, held)
    for one in frameworks:
        for _, usage in held:
            memory = one.pool.card_memory(usage.device)
            if memory is not None:
                free, total = memory
                rows.append(Holding(device, REST, max(0, total - free - ours)))
                return DeviceMemory(device, "", "", total, free, tuple(rows))
    return DeviceMemory(device, "", "", None, None, tuple(rows))


def _host() -> DeviceMemory:
    total, free = _host_memory()
    used, peak = own_memory()
    rows = [Holding("cpu", THIS_PROCESS, used, None, peak)]
    if total is not None and free is not None and used is not None:
        rows.append(Holding("cpu", OTHERS, max(0, total - free - used)))
    return DeviceMemory("cpu", "", "", total, free, tuple(rows))


def _host_memory() -> tuple[int | None, int | None]:
    """Bytes of the host: all, and those to be had without swapping."""
    try:
        with open("/proc/meminfo", "rb") as file:  # noqa: PTH123 - half the time that Path takes
            lines = file.read(512).split(b"\n")
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
        return (pages * PAGE_SIZE if pages else None), None
    found = {line.partition(b":")[0]: line for line in lines}
    kib = [int(found[key].split()[1]) if key in found else None for key in (b"MemTotal", b"MemAvailable")]
    total, free = (None if n is None else n * 1024 for n in kib)
    return total, free


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
    """Load, memory and temperature of each NVIDIA card; empty without one, or without ``nvidia-ml-py``.

    >>> for card in gpu_utilization():
    ...     print(card.device, card.load)  # doctest: +SKIP
    """
    from arraybridge.memory import nvml  # with the cards 2 ms, which `import arraybridge` shall not take

    library = nvml.library()
    if library is None:
        return ()
    found = []
    for card in nvml.cards_of(library):
        rates = nvml.asked(library, "nvmlDeviceGetUtilizationRates", card.handle)
        memory = nvml.asked(library, "nvmlDeviceGetMemoryInfo", card.handle)
        found.append(
            GpuLoad(
                f"gpu:{card.number}",
                card.name,
                None if rates is None else int(rates.gpu),
                None if memory is None else int(memory.total - memory.free),
                None if memory is None else int(memory.total),
                nvml.asked(library, "nvmlDeviceGetTemperature", card.handle, library.NVML_TEMPERATURE_GPU),
            )
        )
    return tuple(found)


# -- a record over time ------------------------------------------------------------------------------

_COLUMNS = ("time", "device", "holder", "used", "cached", "peak", "free", "total", "load", "temperature")
#: Load and temperature of what does not tell them.
_UNTOLD = (None, None)


class MemoryCollector:
    """Writes a reading of `memory_stats` to a file, again and again, in the background.

    One line for each holder of each device: ``time`` (seconds since 1970), ``device``, ``holder``,
    ``used``, ``cached``, ``peak`` (of the holder), ``free`` and ``total`` (of the device), in bytes,
    and of a card ``load`` in per cent and ``temperature`` in degrees Celsius, where it tells them. The
    suffix of the file says the form: ``.csv``, or ``.jsonl`` for a JSON object a line. A file that exists is
    continued, one of fewer columns (from before there were ``load`` and ``temperature``) with its own.

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
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Take a first reading, so that a file that cannot be written shows now, and go on behind."""
        if self._thread is not None:
            return
        self._ended.clear()
        self._write()
        self._thread = threading.Thread(target=self._run, name="arraybridge-memory-collector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last reading and end."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._write()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._write()

    def _columns_there(self) -> int | None:
        """The number of columns of a CSV file that is continued; None for a new one."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return None
        with self._path.open(encoding="utf-8") as file:
            return file.readline().count(",") + 1

    def _write(self) -> None:
        import csv
        import io
        import json

        now = round(time.time(), 3)
        loads = {card.device: (card.load, card.temperature) for card in gpu_utilization()}
        records = [
            (
                now,
                d.device,
                h.holder,
                h.used,
                h.cached,
                h.peak,
                d.free,
                d.total,
                *loads.get(d.device, _UNTOLD),
            )
            for d in memory_stats().devices
            for h in d.holdings
        ]
        text = io.StringIO()
        if self._path.suffix == ".csv":
            writer = csv.writer(text, lineterminator="\n")
            columns = self._columns_there()
            if columns is None:
                writer.writerow(_COLUMNS)
            writer.writerows(record[:columns] for record in records)
        else:
            for record in records:
                text.write(json.dumps(dict(zip(_COLUMNS, record, strict=True))) + "\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
