"""Open the source of a conversion: find the framework and the array of an object."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, unsupported_contents_error
from arraybridge.carriers.registry import carrier_of, why_not_recognized
from arraybridge.errors import MemoryConversionError, error_text
from arraybridge.frameworks import host_memory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.third_party_arrays import (
    framework_of_producer,
    is_protocol_producer,
    unknown_array_error,
)
from arraybridge.reasons import as_cause

__all__ = ["advise_about", "is_array", "source_of"]


class _LazySource(NumpyFramework):
    """A framework for values that are read when they are needed, into new memory."""

    def to_host(self, x: Any) -> np.ndarray:
        values = np.asarray(x[...])
        return (
            host_memory.aligned_copy(values)
            if isinstance(x, np.ndarray) or not values.flags.writeable
            else values
        )

    host_view = copy = to_host


def is_array(x: Any) -> bool:
    """Return whether ``x`` is an array of a framework, a carrier, or an object with an array protocol."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_protocol_producer(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """Return the framework and the array of ``x``: an array, a carrier, or an object with an array protocol.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
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
    """Rewrite the advice of an error about a carried array in terms of its carrier ``x``."""
    carrier = carrier_of(x)
    if carrier is not None:
        error.advise_about(carrier.expression)


def _open_carrier(carrier: Carrier, x: Any) -> tuple[Framework, Any]:
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # third-party code may raise anything
        instead = f"it cannot be read ({error_text(error)})"
        raise unsupported_contents_error(f"an object of type {type(x).__qualname__}", instead) from error
    if type(array) is tuple:
        return _LazySource(as_cause(array[1])), array[0]
    if array is x:
        raise TypeError(
            f"{type(carrier).__name__}.array() returned the carrier itself. Return the array that it carries."
        )
    try:
        return source_of(array)
    except MemoryConversionError as error:
        advise_about(error, x)
        raise
