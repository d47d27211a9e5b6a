"""What is here, and what is the same card: views of one reading of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from arraybridge import machine
from arraybridge.errors import DeviceNotFoundError, MissingGpuWarning, warn
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework, visible_devices
from arraybridge.frameworks.registry import loaded
from arraybridge.memory.stats import DeviceMemory, memory_stats
from arraybridge.options import missing_gpu
from arraybridge.types import Device, FrameworkLike

__all__ = [
    "FoundDevice",
    "device_info",
    "devices",
    "find_device",
    "framework_for_numpy_code",
    "gpu_available",
    "least_used_gpu",
]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundDevice(Device):
    """A device of this machine, as `devices` describes it. It prints and compares as any `Device`.

    Attributes:
        kind, index, name: as of `Device`.
        frameworks: names of the frameworks that can use it under this name.
        total, free: bytes of its memory; None where nobody tells without opening it.
        identity: the card's UUID, or where that is not known its PCI address; ``""`` where there is neither.
    """

    frameworks: tuple[str, ...] = field(default=())
    total: int | None = None
    free: int | None = None
    identity: str = ""


def devices(framework: FrameworkLike | Sequence[FrameworkLike] | None = None) -> list[FoundDevice]:
    """The devices that frameworks can use here.

    No accelerator is opened, but by frameworks that cannot tell otherwise (pyclesperanto's OpenCL).
    CUDA's numbers are those of ``CUDA_VISIBLE_DEVICES``, and mean the same card in every framework.

    Args:
        framework: one, or several, which are imported; ``"all"``: every one that is installed; None: NumPy
            and those that this process has imported, and NVIDIA's cards.

    Returns:
        one `FoundDevice` for each device, the CPUs first; each says which of the frameworks have it.

    Raises:
        UnknownFrameworkError: no framework of that name is known.
        FrameworkNotInstalledError: the framework that was named is not installed.

    >>> [str(device) for device in devices("numpy")]
    ['cpu']
    """
    owners: dict[Device, list[Framework]] = {}
    for one in _frameworks(framework):
        for device in visible_devices(one):
            owners.setdefault(device, []).append(one)
    if framework is None:  # cards that no framework is loaded for
        for card in machine.cards():
            owners.setdefault(Device("gpu", card.index), [])
    memory = {one.device: one for one in memory_stats().devices}
    kinds = ("cpu", "gpu", "opencl")
    order = sorted(owners, key=lambda device: (kinds.index(device.kind), device.index))
    return [_described(device, owners[device], memory) for device in order]


def _frameworks(named: Any) -> list[Framework]:
    if named is None:
        return loaded()
    if isinstance(named, str) and named == "all":
        usable = (registry.usable(name) for name in registry.framework_names())
        return [one for one in usable if one is not None]
    return [registry.framework(name) for name in ([named] if isinstance(named, str) else named)]


def _described(device: Device, owners: list[Framework], memory: dict[str, DeviceMemory]) -> FoundDevice:
    place, frameworks = (device.kind, device.index), tuple(one.name for one in owners)
    cards = [card for card in machine.cards() if device == Device("gpu", card.index)]
    described = [("", "", None), *(one.pool.card_of(device) for one in owners if not cards)]
    name, identity, total = (next(filter(None, facts), None) for facts in zip(*described, strict=True))
    cards = cards or [card for card in machine.cards() if card.pci == identity]  # of an OpenCL device
    if cards:
        card = cards[0]
        free = memory[f"gpu:{card.index}"].free
        return FoundDevice(*place, card.name, frameworks, card.total, free, card.uuid or card.pci)
    reading = memory.get("cpu" if device.kind == "cpu" else str(device))
    total, free = (total or reading.total, reading.free) if reading else (total, None)
    return FoundDevice(*place, name or "", frameworks, total, free, identity or "")


def find_device(device: Device) -> Device:
    """``device``, if a framework has it: one that is loaded, or else one that is installed.

    Under ``settings(missing_gpu="host")`` the CPU stands in for a GPU, with a warning.

    Raises:
        DeviceNotFoundError: none has it; the message lists the devices that are there.
    """
    if device == CPU or any(device in visible_devices(one) for one in loaded()):
        return device
    usable = devices("all")
    if device in usable:
        return device
    if device.kind != "cpu" and missing_gpu() == "host":
        warn(f"{device} is missing, so the CPU is used", MissingGpuWarning)
        return CPU
    have = ", ".join(str(d) for d in usable)
    advice = "" if device.kind == "cpu" else " (gpu_available() says whether there is one at all)"
    raise DeviceNotFoundError(
        f"no installed framework has a device {device} here; there are {have}{advice}.",
        reason=f"there is no device {device}",
    )


def gpu_available() -> bool:
    """Whether there is a GPU that this process can use; imports no framework and opens no card.

    An NVIDIA card with its driver, or an accelerator of a framework that is loaded.

    >>> gpu_available() in (True, False)
    True
    """
    if machine.cards():
        return True
    return any(device.kind == "gpu" for one in loaded() for device in visible_devices(one))


def framework_for_numpy_code(device: Device) -> str | None:
    """The first framework with that device that runs functions written for NumPy; None where none does."""
    usable = (registry.usable(name) for name in registry.for_numpy_code())
    return next((one.name for one in usable if one is not None and device in visible_devices(one)), None)


def least_used_gpu() -> int | None:
    """The number of the GPU with the most free memory, to be passed as ``gpu_id``; None without a GPU.

    NVIDIA's driver says it, so that what other processes hold counts; of other GPUs, a framework that is
    loaded and has opened them.

    >>> gpu_id = least_used_gpu()
    """
    gpus = [device for device in devices() if device.kind == "gpu"]
    freest = max(gpus, key=lambda device: device.free or 0, default=None)
    return None if freest is None else freest.index


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
    gpus = [device for device in devices() if device.kind == "gpu"]
    owners = [name for device in gpus for name in device.frameworks]
    return DeviceInfo(
        available=bool(gpus),
        backend="cuda" if machine.cards() else next(iter(owners), "cpu"),
        names=[device.name for device in gpus],
        memory=[(device.total, device.free) for device in gpus],
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str] = {}
    for name in registry.framework_names():
        for distribution in registry.facts(name).distributions:
            with suppress(PackageNotFoundError):
                versions.setdefault(name, version(distribution))
    return versions
