"""The array API namespace of arrays, or of the default device."""

from __future__ import annotations

from typing import Any

from arraybridge.conversion.convert import detect_memory_type
from arraybridge.devices.default_device import get_device
from arraybridge.devices.inventory import framework_for_numpy_code
from arraybridge.errors import ArrayNotSupportedError, DeviceNotFoundError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU
from arraybridge.settings import chosen_device
from arraybridge.types import Device

__all__ = ["array_namespace"]


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
    names = {detect_memory_type(x) for x in xs if not isinstance(x, (bool, int, float, complex, type(None)))}
    if len(names) > 1:
        raise TypeError(
            f"the arrays are of {' and '.join(sorted(names))}, which have no namespace in common; convert"
            " them to one framework first, with convert_memory()"
        )
    name = names.pop() if names else _framework_for(get_device())
    namespace = registry.framework(name).runtime.array_namespace()
    if namespace is None:
        raise ArrayNotSupportedError(
            f"{name} arrays have no array API namespace.",
            source_type=name,
            reason=f"{name} has no array API",
            advice='Convert them first, as in convert_memory(x, "cupy") or convert_memory(x, "numpy").',
        )
    return namespace


def _framework_for(device: Device) -> str:
    if device.kind == "opencl":
        return "pyclesperanto"  # whose error says what to do
    name = "numpy" if device == CPU else framework_for_numpy_code(device)
    if name is not None:
        return name
    if chosen_device() is None:
        return "numpy"  # there is a card, but nobody asked for it, and no framework here computes on it
    raise DeviceNotFoundError(
        f"none of {', '.join(registry.for_numpy_code())} is installed with a device {device}, and others have"
        " no namespace.",
        reason=f"no array namespace for {device}",
        advice="Install one of them for this device, or call use_device('cpu').",
    )
