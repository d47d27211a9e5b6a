"""`memory_stats`: the current memory use per framework, device and process.

A reading imports no framework and initializes no accelerator: a framework that has not initialized a GPU uses
no memory on it. `arraybridge.hardware` queries the GPUs themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from arraybridge import hardware
from arraybridge.compilers import run_eagerly
from arraybridge.device import Device
from arraybridge.formatting import Contents, Table, format_bytes, one_of
from arraybridge.interface import registry
from arraybridge.interface.memory import Holding
from arraybridge.interface.registry import loaded

__all__ = [
    "DeviceMemory",
    "MemoryStats",
    "memory_stats",
]

_HEAD = ("device", "holder", "used", "cached", "peak", "fragmentation")


class DeviceMemory(NamedTuple):
    """The memory, load and temperature of a device, and the memory of each framework and process on it.

    On a GPU, the used and cached bytes of all ``holdings`` and the free bytes add up to ``total``. A value is
    None if the device does not report it.

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
    """One reading of `memory_stats`. It prints as a table, including in notebooks.

    Attributes:
        devices: The host first, then each accelerator.
        note: The reason why the driver could not be queried; an empty string if there is none.
    """

    devices: tuple[DeviceMemory, ...]
    note: str = ""

    @property
    def rows(self) -> tuple[Holding, ...]:
        """The holdings of all devices."""
        return tuple(holding for device in self.devices for holding in device.holdings)

    def __getitem__(self, device: str) -> DeviceMemory:
        """Return the device with that name, as in ``stats["gpu:0"]``.

        Raises:
            KeyError: If the reading has no such device.
        """
        for one in self.devices:
            if one.device == str(device):
                return one
        names = one_of(one.device for one in self.devices)
        raise KeyError(f"no device {device!r}. Pass {names}.")

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
    """Return the memory of this process on the host, and of each framework on its initialized devices.

    The call initializes no device, and is cheap enough for frequent sampling.
    """
    used, peak = hardware.process_memory()
    own = Holding("cpu", "this process", used, peak=peak)
    return [own, *(holding for one in loaded() for holding in one.memory.usage())]


@run_eagerly
def memory_stats() -> MemoryStats:
    """Return the current memory use of the host and of each accelerator.

    For each device, the reading contains the total and free memory, and one row per framework or process.
    Frameworks have used, cached and peak bytes, and the fragmentation (the part of the reserved memory that
    no array uses) if they report it. Further rows contain the memory of other processes and the rest of this
    process, such as CUDA contexts and libraries. A framework has no row if it has not initialized a device or
    does not report its memory use (NumPy, pyclesperanto). The call initializes no device and works without a
    GPU.

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
    remainder = Holding("cpu", "other processes", max(0, host.total - host.available - (own.used or 0)))
    rows = (*by_device.pop("cpu"), remainder)
    devices = [DeviceMemory("cpu", "", "", total=host.total, free=host.available, holdings=rows)]
    devices += [_read_gpu(gpu, by_device.pop(f"gpu:{gpu.index}", [])) for gpu in hardware.gpus()]
    devices += [_read_through_framework(device, rows) for device, rows in by_device.items()]
    driver = hardware.driver()
    return MemoryStats(tuple(devices), f"{driver.reason}." if driver.is_silent else "")


def _read_gpu(gpu: hardware.Gpu, rows: list[Holding]) -> DeviceMemory:
    device = f"gpu:{gpu.index}"
    now = hardware.read_gpu(gpu)
    own = now.memory_by_process.get(os.getpid())
    ours = _sum_reserved(rows)
    if now.used is None:  # a GPU that shares the host's memory
        remainder = []
    elif own is None:  # the driver lists process IDs from outside a container, or reports no sizes
        remainder = [Holding(device, "everything else", max(0, now.used - ours))]
    else:
        remainder = [
            # Contexts, libraries, and pools that no framework reports.
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
    """Return the memory of a device that the driver does not report, from a framework that uses it."""
    for row in rows:
        memory = registry.framework(row.holder).memory.device_memory(Device.parse(device))
        if memory is not None:
            unreported = max(0, memory.total - memory.free - _sum_reserved(rows))
            remainder = Holding(device, "everything else", unreported)
            return DeviceMemory(
                device, "", "", total=memory.total, free=memory.free, holdings=(*rows, remainder)
            )
    return DeviceMemory(device, "", "", total=None, free=None, holdings=tuple(rows))


def _sum_reserved(rows: list[Holding]) -> int:
    return sum(row.reserved or row.used or 0 for row in rows)
