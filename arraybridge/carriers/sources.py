"""Open the source of a conversion: find the framework and the array of an object."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, Unread, contents_error
from arraybridge.carriers.registry import carrier_of, why_not_recognized
from arraybridge.carriers.third_party_arrays import (
    framework_of_producer,
    is_protocol_producer,
    offers,
)
from arraybridge.errors import MemoryConversionError, UnknownArrayError, text_or_raise
from arraybridge.frameworks.numpy.framework import NumpyFramework, NumpyInterchange
from arraybridge.host import buffers
from arraybridge.interface import registry
from arraybridge.interface.component import component
from arraybridge.interface.framework import Framework, NoPlanError
from arraybridge.interface.installation import package_of
from arraybridge.reasons import Reason, as_cause

__all__ = [
    "PART_NBYTES",
    "advise_about",
    "check_array",
    "is_array",
    "is_planned_source",
    "key_of_values",
    "open_by_carrier",
    "open_source",
    "source_of",
    "unknown_array_error",
]


#: The size in bytes of the parts in which a file is read.
PART_NBYTES = 16 * 2**20


class _LazyInterchange(NumpyInterchange):
    """Reads of files in parts, so that a file is not read into memory as a whole."""

    def can_read_into(self, x: Any, view: np.ndarray) -> bool:
        return not isinstance(x, Unread)

    def read_into(self, x: Any, view: np.ndarray) -> None:
        if not view.size or not view.ndim:
            view[...] = x[...]
            return
        rows = max(1, PART_NBYTES * len(view) // view.nbytes)
        chunk = getattr(x, "shards", None) or getattr(x, "chunks", None)
        if chunk:
            rows = max(1, rows // chunk[0]) * chunk[0]  # whole chunks
        for start in range(0, len(view), rows):
            view[start : start + rows] = x[start : start + rows]


class _LazySource(NumpyFramework):
    """A framework for values that are read when they are needed, into new memory."""

    interchange = component(_LazyInterchange)

    def to_host(self, x: Any) -> np.ndarray:
        values = np.asarray(x[...])
        is_new = not isinstance(x, np.ndarray) and values.flags.writeable
        return values if is_new else buffers.copy_aligned(values)

    host_view = copy = to_host


def is_array(x: Any) -> bool:
    """Return whether ``x`` is an array of a framework, a carrier, or an object with an array protocol."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_protocol_producer(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """Return the framework and the array of ``x``: an array, a carrier, or an object with an array protocol.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
    """
    return open_source(x)[:2]


def open_source(x: Any) -> tuple[Framework, Any, Carrier | None]:
    """Return the result of `source_of`, and the `Carrier` that handles ``x`` or None."""
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x, None
    carrier = carrier_of(x)
    if carrier is not None:
        return *_open_carrier(carrier, x), carrier
    if not is_protocol_producer(x):
        raise unknown_array_error(x) from why_not_recognized(x)
    return *framework_of_producer(x), None


def unknown_array_error(x: Any) -> UnknownArrayError:
    """Return the error for an object that is not an array, with advice."""
    from arraybridge.carriers.non_array_advice import advice_for_object  # only errors need it

    cls = _class_name(type(x))
    return UnknownArrayError(
        f"Cannot convert an object of type {cls}: it is not an array.",
        reason=f"{cls} is not an array",
        advice=advice_for_object(x, check_array),
    )


def _class_name(cls: type) -> str:
    """Return the name by which users import a class, such as ``polars.Series``, or else its full name."""
    top = package_of(cls)
    if vars(sys.modules.get(top, builtins)).get(cls.__name__) is cls:
        return f"{top}.{cls.__name__}".removeprefix("builtins.")
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def check_array(x: Any) -> None:
    """Raise the error of the framework of an array, if no other framework can represent the array.

    The advice of the error is about ``x``. Files are not read.

    Raises:
        NotImplementedError: If ``x`` is not an array.
    """
    if not is_array(x):
        raise NotImplementedError
    source, array = source_of(x)
    try:
        if not source.sparse.layout(array):
            source.check(array)
    except MemoryConversionError as error:
        if array is not x:
            advise_about(error, x)
        raise


def advise_about(error: MemoryConversionError, x: Any) -> None:
    """Rewrite the advice of an error about an array in terms of ``x``, from which the array was read."""
    carrier = carrier_of(x)
    if carrier is not None:
        error.advise_about(carrier.expression)
    elif offers(x, "__array_interface__") or isinstance(x, np.generic):
        error.advise_about("np.asarray({x})")
    else:
        error.advise_about("np.from_dlpack({x})")


def open_by_carrier(x: Any) -> Any:
    """Return the result of `Carrier.array` for an object; raise `NoPlanError` if there is none."""
    carrier = carrier_of(x)
    if carrier is None:
        raise NoPlanError
    try:
        return carrier.array(x)
    except MemoryError:
        raise
    except Exception as error:  # third-party code may raise anything; the slow path reports it
        raise NoPlanError from error


def is_planned_source(source: Framework, values: Any) -> bool:
    """Return whether `key_of_values` determines how values that are not in memory are converted.

    Objects of third-party carriers may have any attributes, such as masks.
    """
    if not isinstance(source, _LazySource) or source.copied is None:
        return False
    return source.copied.code is not Reason.OTHER or type(values) is np.ndarray


def key_of_values(values: Any) -> Hashable:
    """Return the plan key of values that are not in memory: their class, dtype and rank."""
    shape = values.shape
    return type(values), values.dtype, shape if 0 in shape else len(shape)


def _open_carrier(carrier: Carrier, x: Any) -> tuple[Framework, Any]:
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # third-party code may raise anything
        what = f"an object of type {type(x).__qualname__}"
        cause = f"it cannot be read ({text_or_raise(error)})"
        raise contents_error(what, cause, "") from error
    if type(array) is tuple:
        return _LazySource(as_cause(array[1])), array[0]
    if array is x:
        raise TypeError(
            f"{type(carrier).__name__}.array() returned the carrier itself. Return the array that it carries."
        )
    owner = registry.find_owner(array)
    if owner is not None:
        return owner, array
    try:
        return source_of(array)
    except MemoryConversionError as error:
        advise_about(error, x)
        raise
