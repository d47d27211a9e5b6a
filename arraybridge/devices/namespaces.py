"""Array API namespaces of arrays and of the default device."""

from __future__ import annotations

from typing import Any

from arraybridge.compilers import run_eagerly
from arraybridge.conversion.detection import detect_memory_type
from arraybridge.device import Device
from arraybridge.devices.default_device import get_device
from arraybridge.devices.inventory import framework_for_numpy_code
from arraybridge.errors import ArrayNotSupportedError, DeviceNotFoundError
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.settings import device_setting

__all__ = ["array_namespace"]


@run_eagerly
def array_namespace(*xs: Any) -> Any:
    """Return the array API namespace of arrays; without arrays, the namespace for the default device.

    The namespaces of NumPy, CuPy, PyTorch and JAX come from array-api-compat. That of TensorFlow is
    ``tf.experimental.numpy``, which implements a large part of the array API. pyclesperanto has none.

    Args:
        *xs: Arrays of one framework. Python scalars and None are ignored.

    Returns:
        A module. Without arrays, it depends on the default device. For the CPU, it is the NumPy namespace.
        For a GPU, it is the namespace of the first of CuPy, PyTorch and JAX that is installed and has the
        GPU. If none of them has the GPU, and no device was chosen, it is the NumPy namespace.

    Raises:
        TypeError: If the arrays belong to several frameworks.
        ArrayNotSupportedError: If their framework has no namespace (pyclesperanto).
        UnknownArrayError: If an argument is not an array.
        DeviceNotFoundError: If a default device was chosen, but none of these frameworks has it.

    Example:
        >>> import numpy as np
        >>> xp = array_namespace(np.zeros(3))
        >>> xp.concat([np.zeros(1), np.ones(1)])
        array([0., 1.])
    """
    names = {detect_memory_type(x) for x in xs if not isinstance(x, (bool, int, float, complex, type(None)))}
    if len(names) > 1:
        raise TypeError(
            f"The arrays belong to {' and '.join(sorted(names))}, which have no common namespace. Convert"
            " them to one framework first, with convert_memory()."
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
        return "pyclesperanto"  # the caller raises an error with advice
    name = "numpy" if device == CPU else framework_for_numpy_code(device)
    if name is not None:
        return name
    if device_setting() is None:
        return "numpy"  # the user did not choose this GPU, and no installed framework supports it
    raise DeviceNotFoundError(
        f"There is no array API namespace for {device}: none of {', '.join(registry.numpy_like_names())} is"
        " installed with support for this device.",
        reason=f"no array namespace for {device}",
        advice="Install one of them for this device, or call use_device('cpu').",
    )
