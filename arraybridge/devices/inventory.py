"""The devices of this machine, by one reading of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from arraybridge.errors import DeviceNotFoundError, MissingGpuWarning, warn
from arraybridge.frameworks import registry
from arraybridge.frameworks.accelerators import DeviceDetails
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.frameworks.registry import loaded
from arraybridge.reasons import Reason
from arraybridge.settings import missing_gpu
from arraybridge.types import Device, FrameworkLike

__all__ = [
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

    frameworks: tuple[str, ...] = ()
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
    from arraybridge import hardware  # it and the next cost 2 ms, which `import arraybridge` saves
    from arraybridge.memory.stats import memory_stats

    owners: dict[Device, list[Framework]] = {}
    if framework is None:  # also GPUs that no framework has opened
        owners |= {Device("gpu", gpu.index): [] for gpu in hardware.gpus()}
    for one in _selected_frameworks(framework):
        for device in one.devices.visible_devices():
            owners.setdefault(device, []).append(one)
    readings = {one.device: one for one in memory_stats().devices}
    readings |= {gpu.pci: readings[f"gpu:{gpu.index}"] for gpu in hardware.gpus()}  # OpenCL knows no more
    described = (_described(device, owners[device], readings) for device in owners)
    return sorted(described, key=attrgetter("kind", "index"))  # cpu, gpu, opencl


def _selected_frameworks(framework: FrameworkLike | Sequence[FrameworkLike] | None) -> list[Framework]:
    """Return the frameworks that the argument of `devices` selects.

    Raises:
        UnknownFrameworkError: No framework of that name is known.
        FrameworkNotInstalledError: The framework is not installed.
    """
    if framework is None:
        return loaded()
    if isinstance(framework, str):
        if framework == "all":
            return [one for one in map(registry.usable, registry.framework_names()) if one is not None]
        return [registry.framework(framework)]
    return [registry.framework(name) for name in framework]


def _described(device: Device, owners: list[Framework], readings: dict[Any, Any]) -> FoundDevice:
    """A device by the reading of the machine, or else by what its frameworks know of it."""
    known = _known_to_frameworks(device, owners)
    name = known.name
    identity = known.identity
    total = known.total
    free = None
    key = "cpu" if device.kind == "cpu" else str(device)
    reading = readings.get(identity or key) or readings.get(key)
    if reading is not None:
        name = reading.name or name
        identity = reading.uuid or identity
        total = reading.total or total
        free = reading.free
    users = tuple(one.name for one in owners)
    return FoundDevice(device.kind, device.index, name, users, total, free, identity)


def _known_to_frameworks(device: Device, owners: list[Framework]) -> DeviceDetails:
    """Return the details of a device, each from the first framework that knows it."""
    known = DeviceDetails()
    for owner in owners:
        here = owner.memory.device_details(device)
        known = DeviceDetails(
            name=known.name or here.name,
            identity=known.identity or here.identity,
            total=known.total or here.total or None,
        )
    return known


def find_device(device: Device) -> Device:
    """``device``, if a framework has it: one that is loaded, or else one that is installed.

    Under ``settings(missing_gpu="host")`` the CPU stands in for a GPU, with a warning.

    Raises:
        DeviceNotFoundError: none has it; the message lists the devices that are there.
    """
    if device == CPU or any(device in one.devices.visible_devices() for one in _loaded_for(device)):
        return device
    usable = devices("all")
    if device in usable:
        of_kind = _loaded_for(device)  # which now has all that are installed
        if not device.accelerator or any(device in one.devices.available() for one in of_kind):
            return device
    if device.kind != "cpu" and missing_gpu() == "host":
        warn(f"{device} is missing, so the CPU is used", MissingGpuWarning)
        return CPU
    raise _missing(device, usable)


def _loaded_for(device: Device) -> list[Framework]:
    """Return the loaded frameworks that have accelerators of the kind that the device's name asks for."""
    return [one for one in loaded() if one.devices.has_accelerator(device.accelerator)]


def _missing(device: Device, usable: list[FoundDevice]) -> DeviceNotFoundError:
    """Return the error for a device that is not there."""
    asked = f"{device} of kind {device.accelerator!r}" if device.accelerator else str(device)
    return DeviceNotFoundError(
        f"no installed framework has a device {asked} here; there are {', '.join(map(str, usable))}.",
        reason=f"there is no device {device}",
        code=Reason.NO_DEVICE,
    )


def gpu_available() -> bool:
    """Whether there is a GPU that this process can use; imports no framework and opens no card.

    An NVIDIA card with its driver, or an accelerator of a framework that is loaded.

    >>> gpu_available() in (True, False)
    True
    """
    from arraybridge import hardware  # as in `devices`

    visible = (device for one in loaded() for device in one.devices.visible_devices())
    return bool(hardware.gpus()) or any(device.kind == "gpu" for device in visible)


def framework_for_numpy_code(device: Device) -> str | None:
    """The first framework with that device that runs functions written for NumPy; None where none does."""
    usable = (registry.usable(name) for name in registry.for_numpy_code())
    for one in usable:
        if one is not None and device in one.devices.visible_devices():
            return one.name
    return None


def least_used_gpu() -> int | None:
    """The number of the GPU with the most free memory, to be passed as ``gpu_id``; None without a GPU.

    NVIDIA's driver says it, so that what other processes hold counts; of other GPUs, a framework that is
    loaded and has opened them.

    >>> gpu_id = least_used_gpu()
    """
    gpus = [device for device in devices() if device.kind == "gpu"]
    if not gpus:
        return None
    return max(gpus, key=_free_bytes).index


def _free_bytes(device: FoundDevice) -> int:
    return device.free or 0


class DeviceInfo(dict[str, Any]):
    """What `device_info` found: a dictionary that prints as one line."""

    def __str__(self) -> str:
        gpus = ", ".join(f"gpu:{i} {name}".rstrip() for i, name in enumerate(self["names"]))
        return f"{self['backend']}: {gpus}" if gpus else "no GPU; arrays live on the host"


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
    from arraybridge import hardware  # as in `devices`

    gpus = [device for device in devices() if device.kind == "gpu"]
    return DeviceInfo(
        available=bool(gpus),
        backend="cuda" if hardware.gpus() else next((d.frameworks[0] for d in gpus), "cpu"),
        names=[device.name for device in gpus],
        memory=[(device.total, device.free) for device in gpus],
        versions={name: words for name in registry.framework_names() if (words := registry.version_of(name))},
    )
