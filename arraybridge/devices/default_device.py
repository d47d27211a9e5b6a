"""Set and read the default device of a thread or task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from arraybridge.compilers import run_eagerly
from arraybridge.device import Device, DeviceLike
from arraybridge.devices.inventory import find_device, gpu_available
from arraybridge.interface.devices import CPU
from arraybridge.settings import default_device, device_setting

__all__ = ["get_device", "set_device", "use_device"]


@run_eagerly
def set_device(device: DeviceLike | None) -> None:
    """Set the default device of this thread or task for `to_gpu`, ``@gpu`` and `array_namespace`.

    Args:
        device: A device string (``"cpu"``, ``"cpu:2"``, ``"gpu"``, ``"cuda:1"``), a `Device`, or a native
            device of any framework. None removes the default.

    Raises:
        ValueError: If ``device`` is neither a device nor a device string.
        DeviceNotFoundError: If no framework has the device. The message lists the available devices.

    Example:
        >>> set_device("cpu")
        >>> print(get_device())
        cpu
        >>> set_device(None)
    """
    default_device.set(_usable(device))


@run_eagerly
def get_device() -> Device:
    """Return the default device of this thread or task.

    The default device is the first of these that applies:

    1. the device that `set_device` or `use_device` set;
    2. in a worker of `device_map`, the device of that worker;
    3. the environment variable ``ARRAYBRIDGE_DEVICE``, which applies to all threads of the process;
    4. ``gpu:0`` if there is a GPU, otherwise ``cpu``.

    Returns:
        The device. ``get_device().native("torch")`` is the same device as a ``torch.device``.

    Raises:
        ValueError: If ``ARRAYBRIDGE_DEVICE`` is not a device string.
        DeviceNotFoundError: If no framework has the device in ``ARRAYBRIDGE_DEVICE``.

    Example:
        >>> with use_device("cpu"):
        ...     get_device()
        Device('cpu')
    """
    chosen = default_device.get() or _usable(device_setting())
    return chosen or (Device("gpu", 0) if gpu_available() else CPU)


@run_eagerly
def use_device(device: DeviceLike | None) -> AbstractContextManager[Device]:
    """Set the default device inside a ``with`` block, and restore the previous one afterwards.

    Args:
        device: As for `set_device`.

    Returns:
        A context manager, whose value is the default device inside the block.

    Raises:
        ValueError: If ``device`` is neither a device nor a device string.
        DeviceNotFoundError: If no framework has the device.

    Example:
        >>> with use_device("cpu") as device:
        ...     print(device)
        cpu
    """
    return _using(_usable(device))


@contextmanager
def _using(device: Device | None) -> Iterator[Device]:
    token = default_device.set(device)
    try:
        yield get_device()
    finally:
        default_device.reset(token)


def _usable(device: DeviceLike | None) -> Device | None:
    return None if device is None else find_device(Device.parse(device))
