"""What is here, and what is the same card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from arraybridge.errors import (
    DeviceNotFoundError,
    MemoryConversionError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework, visible_devices
from arraybridge.frameworks.registry import loaded
from arraybridge.options import missing_gpu, warn_of_missing_gpu
from arraybridge.types import Device, FrameworkLike

__all__ = [
    "DeviceMismatchError",
    "FoundDevice",
    "device_info",
    "devices",
    "find_device",
    "gpu_available",
    "least_used_gpu",
]


class DeviceMismatchError(MemoryConversionError, RuntimeError):
    """Two frameworks mean different cards by one number."""

    section = "something-is-missing"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundDevice(Device):
    """A device of this machine, as `devices` describes it. It prints and compares as any `Device`.

    Attributes:
        kind, index, name: as of `Device`.
        frameworks: names of the frameworks that can use it under this name.
        total, free: bytes of its memory; None where nobody tells without opening it.
        capability: CUDA's compute capability, ``(9, 0)``; None for what is no NVIDIA card.
        identity: the card's UUID, or where that is not known its PCI address; ``""`` where there is neither.
        pci: its address on the PCI bus, by which OpenCL devices are matched to CUDA's; or ``""``.
    """

    frameworks: tuple[str, ...] = field(default=())
    total: int | None = None
    free: int | None = None
    capability: tuple[int, int] | None = None
    identity: str = ""
    pci: str = ""


def devices(framework: FrameworkLike | Sequence[FrameworkLike] | None = None) -> list[FoundDevice]:
    """The devices that frameworks can use here.

    No accelerator is opened, but by frameworks that cannot tell otherwise (pyclesperanto's OpenCL).
    CUDA's numbers are those of ``CUDA_VISIBLE_DEVICES``, and mean the same card in every framework.

    Args:
        framework: one, or several; None: every one that is installed, which imports them.

    Returns:
        one `FoundDevice` for each device, the CPUs first; each says which of the frameworks have it.

    Raises:
        UnknownFrameworkError: no framework of that name is known.
        FrameworkNotInstalledError: the framework that was named is not installed.
        DeviceMismatchError: frameworks disagree on which card a number means.

    >>> [str(device) for device in devices("numpy")]
    ['cpu']
    """
    found: dict[Device, list[tuple[Framework, Device]]] = {}
    for one in _frameworks(framework):
        for device in visible_devices(one):
            found.setdefault(device, []).append((one, device))
    rank = {"cpu": 0, "gpu": 1}
    free = _free_memory() if found else {}
    order = sorted(found, key=lambda d: (rank.get(d.kind, 2), d.index))
    return [_described(device, found[device], free) for device in order]


def _frameworks(named: Any) -> list[Framework]:
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        return [registry.framework(name) for name in names]
    there = [registry.usable(name) for name in registry.framework_names()]
    return [one for one in there if one is not None]


def _free_memory() -> dict[str, tuple[str, int | None, int | None]]:
    """Identity, total and free bytes of the host and of each card, by the device in words."""
    from arraybridge.memory.stats import memory_stats

    return {d.device: (d.uuid, d.total, d.free) for d in memory_stats().devices}


def _described(
    device: Device,
    owners: list[tuple[Framework, Device]],
    memory: dict[str, tuple[str, int | None, int | None]],
) -> FoundDevice:
    from arraybridge.frameworks.cards import cards

    names = tuple(one.name for one, _ in owners)
    told = [(one.name, *one.pool.card_of(seen)) for one, seen in owners]
    name = next((name for _, name, _, _ in told if name), "")
    identity = next((identity for _, _, identity, _ in told if identity), "")
    total = next((total for _, _, _, total in told if total), None)
    if device.kind == "cpu":
        _, total, free = memory.get("cpu", ("", None, None))
        return FoundDevice(device.kind, device.index, name, names, total, free)
    card = None
    if device.kind == "gpu" and device.index < len(cards()):
        card = cards()[device.index]
        _check_same_card(device, card, told)
    elif device.kind == "opencl" and identity:
        card = next((c for c in cards() if c.pci == identity), None)
    if card is None:
        _, whole, free = (
            memory.get(str(device), ("", None, None)) if device.kind == "gpu" else ("", None, None)
        )
        pci = identity if ":" in identity else ""
        return FoundDevice(device.kind, device.index, name, names, total or whole, free, None, identity, pci)
    free = next((f for uuid, _, f in memory.values() if uuid and uuid == card.uuid), None)
    return FoundDevice(
        device.kind,
        device.index,
        card.name,
        names,
        card.total,
        free,
        card.capability,
        card.uuid or card.pci,
        card.pci,
    )


def _check_same_card(device: Device, card: Any, told: list[tuple[str, str, str, int | None]]) -> None:
    """Refuse a number that means another card in one of the frameworks.

    Raises:
        DeviceMismatchError: it does.
    """
    for framework, _, identity, _ in told:
        if identity and identity not in (card.uuid, card.pci):
            raise DeviceMismatchError(
                f"{device} is {identity} for {framework}, but {card.uuid} at {card.pci} for CUDA's driver;"
                " set CUDA_VISIBLE_DEVICES before the first framework is imported, and leave it",
                source_type=framework,
                reason=f"{framework} counts the cards differently",
            )


def find_device(wanted: Device) -> Device:
    """``wanted``, if a framework has it: one that is loaded, or else one that is installed.

    Under ``settings(missing_gpu="host")`` the CPU stands in for a GPU, with a warning.

    Raises:
        DeviceNotFoundError: none has it; the message lists the devices that are there.
    """
    if wanted.kind == "cpu" and wanted.index == 0:
        return wanted
    for one in loaded():
        if wanted in visible_devices(one):
            return wanted
    there = devices()
    if wanted in there:
        return wanted
    if wanted.kind != "cpu" and missing_gpu() == "host":
        warn_of_missing_gpu(f"{wanted} is missing, so the CPU is used")
        return CPU
    have = ", ".join(str(d) for d in there)
    advice = "" if wanted.kind == "cpu" else " (gpu_available() says whether there is one at all)"
    raise DeviceNotFoundError(
        f"no installed framework has a device {wanted} here; there are {have}{advice}.",
        reason=f"there is no device {wanted}",
    )


def gpu_available() -> bool:
    """Whether there is a GPU that this process can use; imports no framework and opens no card.

    An NVIDIA card with its driver, or an accelerator of a framework that is loaded.

    >>> gpu_available() in (True, False)
    True
    """
    from arraybridge.frameworks.cards import cards

    return bool(cards()) or any(device.kind == "gpu" for one in loaded() for device in visible_devices(one))


def least_used_gpu() -> int | None:
    """The number of the GPU with the most free memory, to be passed as ``gpu_id``; None without a GPU.

    It is read from the driver (with ``nvidia-ml-py``), so that what other processes hold counts; where that
    is not installed, it is asked of a loaded framework.

    >>> gpu_id = least_used_gpu()
    """
    from arraybridge.frameworks.cards import cards

    by_uuid = {uuid: free for uuid, _, free in _free_memory().values() if uuid and free is not None}
    free = {card.index: by_uuid[card.uuid] for card in cards() if card.uuid in by_uuid}
    if not free:
        for one in loaded():
            for device in visible_devices(one):
                if device.kind == "gpu" and one.pool.is_started():
                    free[device.index] = max(free.get(device.index, 0), one.pool.free_memory_of(device))
    if free:
        return max(free, key=lambda index: (free[index], -index))
    return 0 if gpu_available() else None


class DeviceInfo(dict[str, Any]):
    """What `device_info` found: a dictionary that prints as one line."""

    def __str__(self) -> str:
        if not self["available"]:
            return "no GPU; arrays live on the host"
        return f"{self['backend']}: " + ", ".join(
            f"gpu:{i} {name}".rstrip() for i, name in enumerate(self["names"])
        )


def device_info() -> DeviceInfo:
    """What there is to compute on, in short; imports no framework and opens no card.

    Returns:
        a dictionary: ``available`` (is there a GPU), ``backend`` (``"cuda"``, or the framework that has an
        accelerator, or ``"cpu"``), ``names`` of the GPUs, ``memory`` (total and free bytes of each, or
        None), ``versions`` (of the installed frameworks). It prints as one line.

    >>> info = device_info()
    >>> sorted(info)
    ['available', 'backend', 'memory', 'names', 'versions']
    """
    from arraybridge.frameworks.cards import cards

    memory = _free_memory()
    by_uuid = {uuid: free for uuid, _, free in memory.values() if uuid}
    names = [card.name for card in cards()]
    sizes: list[tuple[int | None, int | None]] = [(card.total, by_uuid.get(card.uuid)) for card in cards()]
    backend = "cuda" if names else "cpu"
    if not names:
        for one in loaded():
            found = [d for d in visible_devices(one) if d.kind == "gpu"]
            if found:
                told = [one.pool.card_of(d) for d in found]
                names = [name for name, _, _ in told]
                sizes = [(total, None) for _, _, total in told]
                backend = one.name
                break
    return DeviceInfo(available=bool(sizes), backend=backend, names=names, memory=sizes, versions=_versions())


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in registry.framework_names():
        for distribution in registry.facts(name).distributions:
            try:
                found[name] = version(distribution)
                break
            except PackageNotFoundError:
                continue
    return found
