"""Where the result of a conversion is to live."""

from __future__ import annotations

from arraybridge.frameworks.base import CPU, Framework, find_or_host
from arraybridge.frameworks.holdings import freest_device
from arraybridge.types import Device, DeviceLike, GpuId, check_gpu_id

__all__ = ["resolve_device", "shares_cards"]


def resolve_device(
    source: Framework, target: Framework, here: Device, gpu_id: GpuId, device: DeviceLike | None
) -> Device:
    """Where the result is to live.

    Raises:
        DeviceNotFoundError: the target has no such device.
        ValueError: ``gpu_id`` is no number of a GPU, or stands beside ``device``.
    """
    gpu_id = None if gpu_id is None else check_gpu_id(gpu_id)
    if device is not None:
        if gpu_id is not None:
            raise ValueError(f"pass gpu_id={gpu_id!r} or device={device!r}, not both")
        wanted = Device.parse(device)
    elif gpu_id is None or target.name == "numpy":
        return _stay(source, target, here)
    else:
        wanted = target.accelerator(0 if gpu_id == "auto" else gpu_id)
    if gpu_id == "auto":
        freest = freest_device(target)
        if freest is not None:
            return freest
    return find_or_host(target, wanted)


def _stay(source: Framework, target: Framework, here: Device) -> Device:
    """Data stays where it is when the target has that device, else it goes to the host."""
    if source is target:
        return here
    if here == CPU:
        return CPU if target.has_host else target.default_device()
    if here.kind == "cpu":
        return here if here in target.devices() else target.default_device()
    if shares_cards(source, target) and here in target.devices():
        return here
    return CPU if target.has_host else target.default_device()


def shares_cards(source: Framework, target: Framework) -> bool:
    """Whether both can see each other's memory on an accelerator."""
    return source.dlpack_device is not None and source.dlpack_device == target.dlpack_device
