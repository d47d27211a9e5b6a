"""Detect the framework and the device of an array."""

from __future__ import annotations

from typing import Any

from arraybridge.carriers import third_party_arrays
from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.compilers import run_eagerly
from arraybridge.device import Device
from arraybridge.interface.registry import find_owner

__all__ = ["detect_memory_type", "device_of"]


@run_eagerly
def detect_memory_type(x: Any) -> str:
    """Return the name of the framework of an array, without importing any framework.

    Instances of classes such as ``torch.nn.Parameter``, ``tf.Variable`` and ``np.memmap`` are arrays, too.
    For objects of other libraries with ``__dlpack__`` or an array interface, the result is ``"numpy"`` for
    host memory and ``"cupy"`` for GPU memory.

    Args:
        x: An array of any framework and shape, or a carrier.

    Returns:
        The name, such as ``"torch"``.

    Raises:
        UnknownArrayError: If ``x`` is not an array. Lists and Python numbers are not arrays, but NumPy
            scalars are.

    Example:
        >>> import numpy as np
        >>> detect_memory_type(np.zeros(3))
        'numpy'
    """
    owner = find_owner(x)
    if owner is not None:
        return owner.name
    if carrier_of(x) is not None:
        return source_of(x)[0].name
    if not third_party_arrays.is_protocol_producer(x):
        source_of(x)  # raises UnknownArrayError
    return "cupy" if third_party_arrays.is_on_gpu(x) else "numpy"


@run_eagerly
def device_of(x: Any) -> Device:
    """Return the device of an array.

    Args:
        x: An array of any framework and shape, or a carrier.

    Returns:
        A `Device`, such as ``cpu`` or ``gpu:1``. It equals that string. For a meta tensor of PyTorch,
        which has no memory, ``cpu``.

    Raises:
        UnknownArrayError: If ``x`` is not an array.

    Example:
        >>> import numpy as np
        >>> device_of(np.zeros(3)) == "cpu"
        True
    """
    owner = find_owner(x)
    if owner is not None:
        return owner.devices.device_of(x)
    source, data = source_of(x)
    return source.devices.device_of(data)
