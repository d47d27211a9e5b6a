"""The default device: the one that a thread or task has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from arraybridge.devices.inventory import find_device, gpu_available
from arraybridge.frameworks.base import CPU
from arraybridge.settings import chosen_device, default_device
from arraybridge.types import Device, DeviceLike

__all__ = ["get_device", "set_device", "use_device"]


def set_device(device: DeviceLike | None) -> None:
    """Choose the default device of this thread or task: for `to_gpu`, ``@gpu`` and `array_namespace`.

    Args:
        device: ``"cpu"``, ``"gpu"``, ``"gpu:1"`` (or ``"cuda"``, ``"cuda:1"``), ``"cpu:2"``, a `Device`; None
            forgets the choice.

    Raises:
        ValueError: these words are no device.
        DeviceNotFoundError: no framework has that device here; the message lists those that are there.

    >>> set_device("cpu")
    >>> print(get_device())
    cpu
    >>> set_device(None)
    """
    default_device.set(_usable(device))


def get_device() -> Device:
    """The default device of this thread or task.

    It is what `set_device` or `use_device` chose; inside a worker of `device_map` that worker's device; else
    what the environment variable ``ARRAYBRIDGE_DEVICE`` says for the whole process, all its threads; else
    ``gpu:0`` where there is a GPU, else ``cpu``.

    Raises:
        ValueError, DeviceNotFoundError: ``ARRAYBRIDGE_DEVICE`` names no device, or one that is not there.
    """
    chosen = default_device.get() or _usable(chosen_device())
    return chosen or (Device("gpu", 0) if gpu_available() else CPU)


@contextmanager
def use_device(device: DeviceLike | None) -> Iterator[Device]:
    """`set_device` for a ``with`` block; what was chosen before comes back, also after an exception.

    Yields:
        the device that holds inside.

    >>> with use_device("cpu") as device:
    ...     print(device)
    cpu
    """
    token = default_device.set(_usable(device))
    try:
        yield get_device()
    finally:
        default_device.reset(token)


def _usable(device: DeviceLike | None) -> Device | None:
    return None if device is None else find_device(Device.parse(device))
