"""What `@gpu` must know of one call: its arrays, what distinguishes it from others, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.trees import LEAF, TREE, arrays_of, kind_of, leaves_of, map_arrays, outline, source_of

__all__ = ["Footprint", "Home", "dtype_name", "results", "size"]

#: Arguments of these types are told apart by their values; numbers that are not whole by their type alone.
_BY_VALUE = frozenset({int, str, bytes, type, type(None), slice, range, BuiltinFunctionType, np.ufunc})
_BY_TYPE = frozenset({float, complex})
_names: dict[Any, str] = {}  # np.dtype → its name, which NumPy makes anew each time


class Footprint:
    """The arrays of one call, and what distinguishes it from others."""

    __slots__ = ("arrays", "dtypes", "extras", "nbytes", "numpy_alone", "on_gpu", "shapes")

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        #: Numbers, words and functions among the arguments, which may decide what the function does.
        self.extras: list[Any] = []
        self.nbytes = 0
        self.numpy_alone = True
        #: Whether an array is on some card already.
        self.on_gpu = False

    def add(self, value: Any) -> None:
        cls = type(value)
        if cls is np.ndarray:
            dtype = value.dtype
            name = _names.get(dtype)
            if name is None:
                name = _names[dtype] = dtype.name
            self.arrays.append(value)
            self.dtypes.append(name)
            self.shapes.append(value.shape)
            self.nbytes += value.nbytes
            return
        kind = kind_of(value)
        if kind == LEAF:
            if cls in _BY_VALUE:
                self.extras.append(value)
            elif cls in _BY_TYPE:
                self.extras.append(cls)
            elif cls is bool:
                self.extras.append((bool, value))  # True is 1, but not to a function
            elif cls is FunctionType:
                self.extras.append(value.__code__)  # a lambda is a new function each time
            elif isinstance(value, (np.dtype, Enum)):
                self.extras.append(value)
        elif kind == TREE:
            self.extras.append(outline(value))
            for leaf in leaves_of(value):
                self.add(leaf)
        else:
            owner, data = source_of(value)
            self.arrays.append(value)
            self.dtypes.append(owner.dtype_name(data))
            self.shapes.append(owner.shape(data))
            self.nbytes += owner.nbytes(data)
            self.numpy_alone = False
            self.on_gpu = self.on_gpu or owner.device_of(data).kind == "gpu"


def size(arrays: list[Any]) -> tuple[int, int]:
    """How many arrays, and bytes of them all together."""
    total = 0
    for x in arrays:
        if isinstance(x, (np.ndarray, np.generic)):
            total += x.nbytes
        else:
            owner, data = source_of(x)
            total += owner.nbytes(data)
    return len(arrays), total


def results(result: Any) -> list[Any]:
    """The arrays of a result, NumPy's scalars among them: elsewhere those are 0-d arrays."""
    return arrays_of(result, also=np.generic)


def dtype_name(x: Any) -> str:
    if isinstance(x, (np.ndarray, np.generic)):
        return str(x.dtype.name)
    owner, data = source_of(x)
    return owner.dtype_name(data)


class Home:
    """Where results go back to: framework and device of the first array among the arguments."""

    def __init__(self, first: Any) -> None:
        self.source, data = source_of(first)
        self.device = self.source.device_of(data)

    def __call__(self, result: Any, scalars: Sequence[bool] = ()) -> Any:
        """The result with its arrays there; ``scalars`` says of each 0-d one whether NumPy gives a scalar."""
        told = iter(scalars)
        return map_arrays(result, lambda x: self._bring(x, next(told, True)), also=np.generic)

    def _bring(self, x: Any, is_scalar: bool) -> Any:
        if self.source.name != "numpy":
            return convert_memory(
                np.asarray(x) if isinstance(x, np.generic) else x, self.source.name, device=self.device
            )
        if isinstance(x, np.generic):
            return x if is_scalar else np.asarray(x)
        host = convert_memory(x, "numpy")
        if not host.ndim and is_scalar:
            return host[()]
        return host if host.flags.writeable else host.copy()  # as NumPy's results are
