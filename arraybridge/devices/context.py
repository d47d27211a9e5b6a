"""The default device of a thread or task, and the array namespace that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arraybridge.devices.discovery import find_device, framework_for_numpy_code, gpu_available
from arraybridge.errors import ArrayNotSupportedError, DeviceNotFoundError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU
from arraybridge.options import chosen_device, default_device
from arraybridge.types import Device, DeviceLike

__all__ = ["array_namespace", "get_device", "set_device", "use_device"]


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
    default_device.set(_checked(device))


def get_device() -> Device:
    """The default device of this thread or task.

    It is what `set_device` or `use_device` chose; inside a worker of `device_map` that worker's device; else
    what the environment variable ``ARRAYBRIDGE_DEVICE`` says for the whole process, all its threads; else
    ``gpu:0`` where there is a GPU, else ``cpu``.

    Raises:
        ValueError, DeviceNotFoundError: ``ARRAYBRIDGE_DEVICE`` names no device, or one that is not there.
    """
    chosen = default_device.get() or _checked(chosen_device())
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
    token = default_device.set(_checked(device))
    try:
        yield get_device()
    finally:
        default_device.reset(token)


def _checked(device: DeviceLike | None) -> Device | None:
    if device is None:
        return None
    usable = find_device(Device.parse(device))
    return Device(usable.kind, usable.index)


def array_namespace(*xs: Any) -> Any:
    """The array API namespace of these arrays, or of the default device's framework where there are none.

    For numpy, cupy, torch and jax it comes through array-api-compat. For tensorflow it is
    ``tf.experimental.numpy``, which has much of the array API and not all of it. pyclesperanto has none.

    Args:
        xs: arrays of one framework; Python scalars and None beside them are passed over.

    Returns:
        a module: NumPy's for the CPU, that of cupy, torch or jax (the first that is installed and has the
        device) for a GPU.

    Raises:
        TypeError: the arrays are of several frameworks.
        ArrayNotSupportedError: their framework has no such namespace (pyclesperanto).
        UnknownArrayError: one is no array.
        DeviceNotFoundError: no framework with a namespace has the default device.

    >>> import numpy as np
    >>> xp = array_namespace(np.zeros(3))
    >>> xp.concat([np.zeros(1), np.ones(1)])
    array([0., 1.])
    """
    names = set()
    for x in xs:
        if x is None or isinstance(x, (bool, int, float, complex)):
            continue
        owner = registry.find_owner(x)
        if owner is None:
            raise registry.unknown_array(x)
        names.add(owner.name)
    if len(names) > 1:
        raise TypeError(
            f"the arrays are of {' and '.join(sorted(names))}, which have no namespace in common; convert"
            " them to one framework first, with convert_memory()"
        )
    name = names.pop() if names else _framework_for(get_device())
    namespace = registry.framework(name).array_namespace()
    if namespace is None:
        raise ArrayNotSupportedError(
            f"{name} arrays have no array API namespace; convert them first, as in"
            ' convert_memory(x, "cupy") or convert_memory(x, "numpy")',
            source_type=name,
            reason=f"{name} has no array API",
        )
    return namespace


def _framework_for(device: Device) -> str:
    if device.kind == "opencl":
        return "pyclesperanto"  # whose error says what to do
    if device == CPU:
        return "numpy"
    name = framework_for_numpy_code(device)
    if name is not None:
        return name
    if chosen_device() is None:
        return "numpy"  # there is a card, but nobody asked for it, and no framework here computes on it
    names = ", ".join(registry.for_numpy_code())
    raise DeviceNotFoundError(
        f"none of {names} is installed with a device {device}, and others have no namespace; install one of"
        " them for this device, or use_device('cpu')",
        reason=f"no array namespace for {device}",
    )
