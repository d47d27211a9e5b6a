"""The arguments of a call to a `gpu` function: their arrays, size and call signature."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.offload.call_signature import signature_of
from arraybridge.trees import ARRAY, kind_of, leaves_of, map_arrays


class Arguments:
    """The arguments of a call: ``self``, which is never converted, and the other arguments."""

    def __init__(self, own: tuple[Any, ...], batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.own = own
        self.batch = batch
        self.named = named

    def inspect(self) -> Arguments:
        """Set ``arrays``, ``nbytes`` (their total size), ``signature`` and flags, and return ``self``."""
        self.arrays: list[Any] = []
        parts: list[Any] = [tuple(self.named)]
        self.nbytes = 0
        self.in_numpy = True
        self.has_sparse = False
        self._exact: Any = None
        values = (*self.batch, *self.named.values())
        is_flat = all(type(x) is np.ndarray for x in values)
        for x in values if is_flat else leaves_of(values):
            if type(x) is np.ndarray:
                parts.append((x.dtype, x.ndim))
                nbytes = x.nbytes
            elif kind_of(x) is ARRAY:
                owner, data = source_of(x)
                parts.append((np.dtype(owner.dtype_name(data)), len(owner.shape(data))))
                nbytes = owner.nbytes(data)
                self.in_numpy = False
                self.has_sparse = self.has_sparse or bool(owner.sparse.layout(data))
            else:
                parts.append(_key_of_leaf(x))
                continue
            self.arrays.append(x)
            self.nbytes += nbytes
        self.signature = (self.nbytes.bit_length(), *parts)
        return self

    def exact(self) -> Any:
        """Return the exact signature. A verification is valid only for calls with an equal exact signature.

        Raises:
            NoSignatureError: If an argument cannot be compared between calls.
        """
        if self._exact is None:
            exact = signature_of((self.batch, self.named))
            self._exact = self.nbytes.bit_length(), exact
        return self._exact

    def mapped(self, convert: Callable[[Any], Any]) -> Arguments:
        """Return the arguments with each array replaced by ``convert(array)``."""
        batch = tuple([map_arrays(x, convert) for x in self.batch])
        return Arguments(self.own, batch, {name: map_arrays(x, convert) for name, x in self.named.items()})

    def run(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` with these arguments."""
        return fn(*self.own, *self.batch, **self.named)

    def on_host(self) -> Arguments:
        """Return the arguments with each array converted to NumPy."""
        return self if self.in_numpy else self.mapped(lambda x: convert_memory(x, "numpy"))


def _key_of_leaf(x: Any) -> Any:
    """Return the part of a call signature for a value that is not an array.

    Floating-point numbers are represented by their type only. Functions are represented by their code,
    because a lambda is a new object in each call. This is sufficient for timings. Verifications use the
    stricter `Arguments.exact`.
    """
    cls = type(x)  # not isinstance, because `__class__` of an object may raise
    if cls in (int, bool, str, bytes) or issubclass(cls, np.dtype):
        return cls, x
    if issubclass(cls, (np.integer, np.bool_)):
        return cls, x.item()
    if cls is FunctionType:
        return x.__code__
    return x if issubclass(cls, type) else cls
