"""Where the result of a conversion lives: the device that a call names, or else where the array is."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

from arraybridge.frameworks.base import CPU, Framework, find_or_host
from arraybridge.types import Device, DeviceLike, GpuId

__all__ = ["card_meant", "check_gpu_id", "target_device"]

#: The number of the one card of this process, for which decorators then take every number: a worker of a Dask
#: cluster has one, and a function says ``gpu_id=1`` of the machine on which it was written.
only_card: int | None = None


def target_device(
    source: Framework, target: Framework, source_device: Device, gpu_id: GpuId, device: DeviceLike | None
) -> Device:
    """The device that a call names, or else the one where the array stays.

    Raises:
        DeviceNotFoundError: the target has no such device.
        ValueError: ``gpu_id`` is no number of a GPU, or stands beside ``device``.
    """
    number = check_gpu_id(gpu_id)
    if device is not None:
        if number is not None:
            raise ValueError(f"pass gpu_id={gpu_id!r} or device={device!r}, not both")
        return find_or_host(target, Device.parse(device))
    if number is None or target.has_only_host:
        return _nearest(source, target, source_device)
    if number == "auto":
        return freest_device(target) or find_or_host(target, target.accelerator(0))
    return find_or_host(target, target.accelerator(number))


def check_gpu_id(gpu_id: Any) -> GpuId:
    """``gpu_id`` as a plain int, ``"auto"`` or None.

    Raises:
        ValueError: it is negative, a bool, a float or any other word.
    """
    if gpu_id is None:
        return None
    is_bool = isinstance(gpu_id, bool) or "bool" in str(getattr(gpu_id, "dtype", ""))
    if not is_bool:  # NumPy 1 warns when a bool is taken as an index
        with suppress(TypeError):
            index = operator.index(gpu_id)
            if index >= 0:
                return index
    if isinstance(gpu_id, str) and gpu_id == "auto":
        return "auto"
    raise ValueError(f"gpu_id={gpu_id!r} is not a GPU's number; pass 0, 1, … or 'auto'")


def card_meant(gpu_id: GpuId) -> GpuId:
    """The card that the ``gpu_id`` of a decorator means in this process."""
    return gpu_id if gpu_id is None or only_card is None else only_card


def _nearest(source: Framework, target: Framework, source_device: Device) -> Device:
    """The device of the array where the target has that one, else the target's host, else its default."""
    if source is target:
        return source_device
    if source_device == CPU:
        return CPU if target.has_host else target.default_device()
    reachable = source_device.kind == "cpu" or shares_cards(source, target)
    if reachable and source_device in target.devices():
        return source_device
    return CPU if target.has_host and source_device.kind != "cpu" else target.default_device()


def shares_cards(source: Framework, target: Framework) -> bool:
    """Whether both can see each other's memory on an accelerator."""
    return source.dlpack_device is not None and source.dlpack_device == target.dlpack_device


def freest_device(framework: Framework) -> Device | None:
    """The accelerator with the most free memory, the first of equals; None where it has none."""
    accelerators = [device for device in framework.devices() if device.kind != "cpu"]
    return max(accelerators, key=framework.free_memory_of, default=None)
