"""Open the source of a conversion: the framework and the array of any object that is read as an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, unsupported_contents_error
from arraybridge.carriers.registry import carrier_of, why_not_recognized
from arraybridge.errors import MemoryConversionError, error_text
from arraybridge.frameworks import host_memory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.protocol_producers import (
    framework_of_producer,
    is_protocol_producer,
    unknown_array_error,
)
from arraybridge.reasons import as_cause

__all__ = ["advise_about", "is_array", "source_of"]


class _ToRead(NumpyFramework):
    """Values that are read when they are needed, and then are nobody else's."""

    def to_host(self, x: Any) -> np.ndarray:
        values = np.asarray(x[...])
        return (
            host_memory.aligned_copy(values)
            if isinstance(x, np.ndarray) or not values.flags.writeable
            else values
        )

    host_view = copy = to_host


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array that can be a source."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_protocol_producer(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read: that which a carrier carries, a foreign one opened.

    Raises:
        UnknownArrayError: it is no array.
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x
    carrier = carrier_of(x)
    if carrier is not None:
        return _open_carrier(carrier, x)
    if not is_protocol_producer(x):
        raise unknown_array_error(x) from why_not_recognized(x)
    return framework_of_producer(x)


def advise_about(error: MemoryConversionError, x: Any) -> None:
    """Make the advice of an error about a carried array one about ``x``, the object that the user has."""
    carrier = carrier_of(x)
    if carrier is not None:
        error.advise_about(carrier.expression)


def _open_carrier(carrier: Carrier, x: Any) -> tuple[Framework, Any]:
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # the code of others may raise anything
        instead = f"it cannot be read ({error_text(error)})"
        raise unsupported_contents_error(f"an object of type {type(x).__qualname__}", instead) from error
    if type(array) is tuple:
        return _ToRead(as_cause(array[1])), array[0]
    if array is x:
        raise TypeError(f"{type(carrier).__name__}.array() gave back the object itself")
    try:
        return source_of(array)
    except MemoryConversionError as error:
        advise_about(error, x)
        raise
