"""The device that is used in place of a missing GPU, as specified by `settings`."""

from __future__ import annotations

from arraybridge.device import Device
from arraybridge.errors import DeviceNotFoundError, MissingGpuWarning, warn
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.settings import missing_gpu

__all__ = ["find_device_or_host"]


def find_device_or_host(framework: Framework, device: Device) -> Device:
    """Return ``device``, or the CPU if a GPU is missing and ``settings(missing_gpu="host")`` applies.

    Args:
        framework: The framework to search.
        device: The requested device.

    Returns:
        The framework's own `Device` object for the device, or the CPU.

    Raises:
        DeviceNotFoundError: If the framework does not have the device, and the CPU cannot or must not
            replace it.
    """
    try:
        return framework.devices.find_device(device)
    except DeviceNotFoundError as error:
        if device.kind == "cpu" or not framework.has_host or missing_gpu() != "host":
            raise
        warn(
            f"{framework.name}: {device} is missing, so the CPU is used instead. {error.reason}",
            MissingGpuWarning,
        )
        return CPU
