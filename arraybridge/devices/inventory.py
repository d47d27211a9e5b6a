"""Inventory of the devices of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from arraybridge.compilers import run_eagerly
from arraybridge.device import Device
from arraybridge.errors import DeviceNotFoundError, MissingGpuWarning, warn
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.interface.memory import DeviceDetails
from arraybridge.interface.registry import loaded
from arraybridge.reasons import Reason
from arraybridge.settings import missing_gpu
from arraybridge.types import FrameworkLike
from arraybridge.validation import add_hints

if TYPE_CHECKING:
    from arraybridge.devices.found_device import FoundDevice
else:
    # For `typing.get_type_hints`. Creating the class takes 0.5 ms, so it is imported on first use.
    FoundDevice = Device

__all__ = [
    "device_info",
    "devices",
    "find_device",
    "framework_for_numpy_code",
    "gpu_available",
    "least_used_gpu",
]


@add_hints
def devices(framework: FrameworkLike | Sequence[FrameworkLike] | None = None) -> list[FoundDevice]:
    """Return the devices that frameworks can use on this machine.

    Accelerators are not initialized, except by frameworks that cannot list them otherwise (pyclesperanto with
    OpenCL). CUDA devices are numbered according to ``CUDA_VISIBLE_DEVICES``, so that a number means the
    same GPU in every framework.

    Args:
        framework: A framework, or a sequence of frameworks, which are imported; or ``"all"`` for every
            installed framework. Defaults to None: the frameworks that this process has imported, and all
            NVIDIA GPUs.

    Returns:
        One `FoundDevice` per device, CPUs first, with the frameworks that can use it.

    Raises:
        UnknownFrameworkError: If no framework of that name is known.
        FrameworkNotInstalledError: If a named framework is not installed.

    Example:
        >>> [str(device) for device in devices("numpy")]
        ['cpu']
    """
    # These imports take 2 ms. They are here to keep `import arraybridge` fast.
    from arraybridge import hardware
    from arraybridge.memory.stats import memory_stats

    owners: dict[Device, list[Framework]] = {}
    if framework is None:  # also list GPUs that no framework has initialized
        owners |= {Device("gpu", gpu.index): [] for gpu in hardware.gpus()}
    for one in _select_frameworks(framework):
        for device in one.devices.visible_devices():
            owners.setdefault(device, []).append(one)
    readings = {one.device: one for one in memory_stats().devices}
    # OpenCL reports only the PCI address of a GPU, and no UUID.
    readings |= {gpu.pci: readings[f"gpu:{gpu.index}"] for gpu in hardware.gpus()}
    described = (_describe(device, owners[device], readings) for device in owners)
    return sorted(described, key=attrgetter("kind", "index"))  # cpu, gpu, opencl


def _select_frameworks(framework: FrameworkLike | Sequence[FrameworkLike] | None) -> list[Framework]:
    """Return the frameworks that the argument of `devices` selects.

    Raises:
        TypeError: If the argument is neither a name nor a sequence of names.
        UnknownFrameworkError: If no framework of that name is known.
        FrameworkNotInstalledError: If the framework is not installed.
    """
    if framework is None:
        return loaded()
    if isinstance(framework, str) and framework == "all":
        return [one for one in map(registry.load_or_none, registry.framework_names()) if one is not None]
    if isinstance(framework, str) or not isinstance(framework, Iterable):
        return [registry.framework(framework)]
    return [registry.framework(name) for name in framework]


def _describe(device: Device, owners: list[Framework], readings: dict[Any, Any]) -> FoundDevice:
    """Describe a device from its entry in ``readings``, or from its frameworks if there is no entry."""
    from arraybridge.devices.found_device import FoundDevice

    name, identity, total = _known_to_frameworks(device, owners)
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
    """Return the details of a device, each from the first framework that reports it."""
    name = ""
    identity = ""
    total = None
    for owner in owners:
        details = owner.memory.device_details(device)
        name = name or details.name
        identity = identity or details.identity
        total = total or details.total or None
    return DeviceDetails(name, identity, total)


def find_device(device: Device) -> Device:
    """Return the device if a framework has it. Other installed frameworks are loaded only if necessary.

    With ``settings(missing_gpu="host")``, return the CPU instead of a missing GPU, with a warning.

    Raises:
        DeviceNotFoundError: If no framework has the device. The message lists the available devices.
    """
    if device == CPU or any(device in one.devices.visible_devices() for one in _frameworks_for(device)):
        return device
    usable = devices("all")
    if device in usable:
        of_kind = _frameworks_for(device)  # `devices` has loaded all installed frameworks
        if not device.accelerator or any(device in one.devices.available() for one in of_kind):
            return device
    if device.kind != "cpu" and missing_gpu() == "host":
        warn(f"{device} is not available, so the CPU is used.", MissingGpuWarning)
        return CPU
    name = f"{device} of kind {device.accelerator!r}" if device.accelerator else str(device)
    raise DeviceNotFoundError(
        f"No installed framework has a device {name}. Available devices: {', '.join(map(str, usable))}.",
        reason=f"there is no device {device}",
        code=Reason.NO_DEVICE,
        advice="Pass one of these.",
    )


def _frameworks_for(device: Device) -> list[Framework]:
    """Return the loaded frameworks that have the kind of accelerator that the device string named, if any."""
    return [one for one in loaded() if one.devices.has_accelerator(device.accelerator)]


@run_eagerly
def gpu_available() -> bool:
    """Return whether this process can use a GPU, without importing a framework or initializing the GPU.

    Returns:
        True if there is an NVIDIA GPU with its driver, or if a loaded framework has an accelerator.

    Example:
        >>> gpu_available() in (True, False)
        True
    """
    from arraybridge import hardware  # imported here, as in `devices`

    visible = (device for one in loaded() for device in one.devices.visible_devices())
    return bool(hardware.gpus()) or any(device.kind == "gpu" for device in visible)


def framework_for_numpy_code(device: Device) -> str | None:
    """Return the first framework that has the device and runs functions written for NumPy, or None."""
    usable = (registry.load_or_none(name) for name in registry.numpy_like_names())
    for one in usable:
        if one is not None and device in one.devices.visible_devices():
            return one.name
    return None


@run_eagerly
def least_used_gpu() -> int | None:
    """Return the number of the GPU with the most free memory.

    The NVIDIA driver reports the free memory of its GPUs, which accounts for other processes. For other GPUs,
    the free memory is known only if a loaded framework has initialized them.

    Returns:
        The number, to pass as ``gpu_id``; None if there is no GPU.

    Example:
        >>> gpu_id = least_used_gpu()
    """
    gpus = [device for device in devices() if device.kind == "gpu"]
    return max(gpus, key=lambda gpu: gpu.free or 0).index if gpus else None


class DeviceInfo(dict[str, Any]):
    """The result of `device_info`: a dict that prints as one line."""

    def __str__(self) -> str:
        gpus = ", ".join(f"gpu:{i} {name}".rstrip() for i, name in enumerate(self["names"]))
        return f"{self['backend']}: {gpus}" if gpus else "no GPU; arrays are on the host"


@run_eagerly
def device_info() -> DeviceInfo:
    """Summarize the GPUs and frameworks of this machine, without importing or initializing them.

    Returns:
        A dict that prints as one line. Its keys are ``available`` (whether there is a GPU), ``backend``
        (``"cuda"``, or the framework that has an accelerator, or ``"cpu"``), ``names`` (of the GPUs),
        ``memory`` (total and free bytes of each GPU, or None) and ``versions`` (of the installed frameworks).

    Example:
        >>> info = device_info()
        >>> sorted(info)
        ['available', 'backend', 'memory', 'names', 'versions']
    """
    from arraybridge import hardware  # imported here, as in `devices`

    gpus = [device for device in devices() if device.kind == "gpu"]
    return DeviceInfo(
        available=bool(gpus),
        backend="cuda" if hardware.gpus() else next((d.frameworks[0] for d in gpus), "cpu"),
        names=[device.name for device in gpus],
        memory=[(device.total, device.free) for device in gpus],
        versions={
            name: version for name in registry.framework_names() if (version := registry.version_of(name))
        },
    )
