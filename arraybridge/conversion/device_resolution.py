"""Resolve ``gpu_id`` and ``device`` to the device on which an array is placed."""

from __future__ import annotations

from typing import Any, NamedTuple

from arraybridge.device import Device, DeviceLike
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.interface.missing_gpu import find_device_or_host
from arraybridge.types import GpuId
from arraybridge.validation import whole_number

__all__ = [
    "Placement",
    "check_gpu_id",
    "check_placement",
    "freest_device",
    "gpu_index_of",
    "resolve_device",
    "shares_gpus",
    "target_device",
]

#: The number of the only GPU that this process uses, to which decorators map every ``gpu_id``. It is set on
#: workers of a Dask cluster, because ``gpu_id=1`` in a program refers to the machine on which it was written.
only_gpu: int | None = None


class Placement(NamedTuple):  # a dataclass would account for 3 % of the package's import time
    """The framework of a decorated function, and at most one device.

    Attributes:
        framework: The name of the framework; None for `gpu`, which chooses one on each call.
        device: The device that was passed to the decorator, or None.
        gpu_id: The number of the framework's accelerator, ``"auto"``, or None.
        converts: Whether the arguments are converted. False for decorators that only declare types.
    """

    framework: str | None
    device: Device | None = None
    gpu_id: GpuId = None
    converts: bool = True

    @property
    def is_named(self) -> bool:
        """Whether the decorator names a device, including ``gpu_id="auto"``."""
        return self.device is not None or self.gpu_id is not None

    @property
    def is_fixed(self) -> bool:
        """Whether every call runs on the same device, unlike with ``gpu_id="auto"``."""
        return self.device is not None or isinstance(self.gpu_id, int)

    def resolve(self, framework: Framework) -> Device | None:
        """Return the device in this process; None if the placement does not specify one."""
        return resolve_device(framework, gpu_index_of(self.gpu_id), self.device)

    def __str__(self) -> str:
        name = self.framework or "the faster of cpu and gpu"
        if self.device is not None:
            return f"{name} on {self.device}"
        if self.gpu_id == "auto":
            return f"{name} on the gpu with the most free memory"
        if self.gpu_id is not None:
            return f"{name} on gpu:{self.gpu_id}"
        return f"{name}, on the device of its input" if self.framework else name


def resolve_device(
    framework: Framework, gpu_id: GpuId = None, device: DeviceLike | None = None
) -> Device | None:
    """Return the framework's device that ``gpu_id`` or ``device`` names; None if neither does.

    ``gpu_id`` has no effect for NumPy, whose arrays are always in host memory.

    Raises:
        DeviceNotFoundError: If the framework does not have the device, and the CPU does not replace it.
        ValueError: If ``gpu_id`` or ``device`` is invalid, or both are given.
    """
    if gpu_id is None and device is None:
        return None
    number, named = check_placement(gpu_id, device)
    if named is not None:
        return find_device_or_host(framework, named)
    if number is None or framework.devices.has_only_host:
        return None
    if isinstance(number, str):  # "auto"
        return freest_device(framework) or find_device_or_host(framework, framework.devices.accelerator(0))
    return find_device_or_host(framework, framework.devices.accelerator(number))


def check_placement(gpu_id: Any, device: DeviceLike | None) -> tuple[GpuId, Device | None]:
    """Return the number of the accelerator and the device; at least one of them is None.

    Raises:
        ValueError: If ``gpu_id`` or ``device`` is invalid, or both are given.
    """
    number = check_gpu_id(gpu_id)
    if device is None:
        return number, None
    if number is not None:
        raise ValueError(
            f"gpu_id={gpu_id!r} and device={device!r} both name a device. Pass gpu_id or device, not both."
        )
    return None, Device.parse(device)


def check_gpu_id(gpu_id: Any) -> GpuId:
    """Return ``gpu_id`` as a plain int, ``"auto"`` or None.

    Raises:
        ValueError: If ``gpu_id`` is negative, a bool, a float or another string.
    """
    if gpu_id is None:
        return None
    if isinstance(gpu_id, str) and gpu_id == "auto":
        return "auto"
    try:
        return whole_number("gpu_id", gpu_id, least=0)
    except (TypeError, ValueError):
        raise ValueError(f"gpu_id={gpu_id!r} is not a GPU number. Pass 0, 1, … or 'auto'.") from None


def gpu_index_of(gpu_id: GpuId) -> GpuId:
    """Return the GPU number in this process for the ``gpu_id`` of a decorator."""
    return gpu_id if gpu_id is None or only_gpu is None else only_gpu


def target_device(
    source: Framework, target: Framework, source_device: Device, gpu_id: GpuId, device: DeviceLike | None
) -> Device:
    """Return the device that the caller named. By default, return the device closest to the array.

    Raises:
        DeviceNotFoundError: If the target does not have the device, and the CPU does not replace it.
        ValueError: If ``gpu_id`` or ``device`` is invalid, or both are given.
    """
    named = resolve_device(target, gpu_id, device)
    return _nearest(source, target, source_device) if named is None else named


def _nearest(source: Framework, target: Framework, source_device: Device) -> Device:
    """Return the array's device if the target has it, otherwise the host or the target's default device."""
    if source is target:
        return source_device
    if source_device is CPU or source_device == CPU:  # `is` holds for most arrays, and is faster
        return CPU if target.has_host else target.devices.default_device()
    reachable = source_device.kind == "cpu" or shares_gpus(source, target)
    if reachable and source_device in target.devices.available():
        return source_device
    # Arrays on a GPU move to the host. For an array on another CPU device, such as cpu:1, the target chooses.
    return CPU if target.has_host and source_device.kind != "cpu" else target.devices.default_device()


def shares_gpus(source: Framework, target: Framework) -> bool:
    """Return whether the two frameworks can share memory on an accelerator."""
    kind = source.interchange.dlpack_device
    return kind is not None and kind == target.interchange.dlpack_device


def freest_device(framework: Framework) -> Device | None:
    """Return the accelerator with the most free memory; None if the framework has none."""
    accelerators = [device for device in framework.devices.available() if device.kind != "cpu"]
    return max(accelerators, key=framework.memory.free_memory_of, default=None)
