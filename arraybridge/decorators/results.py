"""Conversion of results to a framework, or to the framework, device and carrier of an argument."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import numpy as np

from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import open_source, source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.decorators.dtype_conversion import convert_dtype
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.interface import registry
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, LEAF, kinds, map_arrays

__all__ = ["Restoration", "ResultConversion"]


class Restoration:
    """A conversion of arrays to the framework, device and carrier of the caller's first array argument.

    Args:
        first: The first array argument, as the caller passed it.
        grad: As for `convert_memory`.
        writable: Whether read-only NumPy results are copied, so that callers can write to them.
    """

    __slots__ = ("carrier", "device", "first", "framework", "grad", "has_matrices", "shape", "writable")

    def __init__(self, first: Any, grad: Any = "error", *, writable: bool = False) -> None:
        framework, array, carrier = open_source(first)
        self.first = first
        self.grad = grad
        self.writable = writable
        self.framework = framework
        self.device = framework.devices.device_of(array)
        self.carrier = carrier
        self.shape = None if carrier is None else framework.shape(array)
        self.has_matrices = carrier is None and framework.sparse.has_matrices

    def array(self, x: Any) -> Any:
        """Convert an array of any framework and return it.

        The result is a carrier like the first argument if both have the same shape, even if the function
        reordered the axes.
        """
        framework = self.framework
        is_owned = registry.find_owner(x) is framework  # `find_owner` is cached by type, `owns` is not
        is_there = x is self.first or (is_owned and framework.devices.device_of(x) == self.device)
        if not is_there or open_logs:
            x = self._convert(x)
            if self.has_matrices and not is_there:
                x = self._as_matrix(x)
        # issubclass, because isinstance would read the __class__ of tensors.
        if self.writable and issubclass(type(x), np.ndarray) and not x.flags.writeable:
            x = x.copy()
        if self.carrier is None or x.shape != self.shape:
            return x
        return self.carrier.rebuild(self.first, x)

    def _convert(self, x: Any) -> Any:
        name = self.framework.name
        if self.framework.devices.has_only_host and self.grad == "error":  # saves 2 µs
            return convert_memory(x, name)
        return convert_memory(x, name, grad=self.grad, device=self.device)

    def _as_matrix(self, x: Any) -> Any:
        """Return a converted sparse array as a matrix if the first array argument is one."""
        sparse = self.framework.sparse
        if not sparse.layout(x) or not sparse.layout(self.first):
            return x
        parts = sparse.take_apart(x)
        return x if parts is None else sparse.put_together(parts, self.first)


class ResultConversion:
    """A conversion of the arrays in a result, including those in containers, and of NumPy scalars.

    Carriers that the function returns stay unchanged. NumPy scalars stay scalars if they would become NumPy
    arrays, or if the framework of the results does not support them as arrays.

    Args:
        deliver: A function that converts one array.
        dtype: The dtype to which arrays are converted; None keeps their dtypes. NumPy scalars keep their
            dtype.
        unchanged: Types of arrays that need no conversion.
    """

    __slots__ = ("deliver", "dtype", "unchanged")

    def __init__(
        self, deliver: Callable[[Any], Any], dtype: str | None = None, unchanged: Container[type] = ()
    ) -> None:
        self.deliver = deliver
        self.dtype = dtype
        self.unchanged = unchanged

    def tree(self, result: Any) -> Any:
        """Return a result with its arrays converted."""
        try:
            kind = kinds.get(type(result))  # what follows does the same as `map_arrays`, but is faster
        except TypeError:  # the class is unhashable
            kind = None
        if kind is ARRAY and self.dtype is None:
            return self.deliver(result)
        if kind is LEAF and not isinstance(result, np.generic):
            return result
        return map_arrays(result, self.leaf, also=np.generic)

    def leaf(self, x: Any) -> Any:
        """Convert an array or a NumPy scalar, and return it."""
        cls = type(x)
        if cls in self.unchanged and not open_logs:  # traces record all arrays
            return x
        try:
            kind = kinds.get(cls)
        except TypeError:  # the class is unhashable
            kind = None
        if not kind and carrier_of(x) is not None:
            return x
        if kind is not ARRAY and issubclass(type(x), np.generic):
            return self._scalar(x)
        return self.deliver(x) if self.dtype is None else self._with_dtype(x, self.dtype)

    def _scalar(self, x: np.generic) -> Any:
        try:
            array = self.deliver(np.asarray(x))
        except (ArrayNotSupportedError, DtypeNotSupportedError):
            return x
        return x if isinstance(array, np.ndarray) else array

    def _with_dtype(self, x: Any, dtype: str) -> Any:
        dtypes = source_of(x)[0].dtypes
        if dtypes is None or dtype in dtypes:
            return self.deliver(convert_dtype(x, dtype))
        return convert_dtype(self.deliver(x), dtype)  # the dtype may exist only in the target
