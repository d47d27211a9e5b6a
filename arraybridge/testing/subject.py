"""The framework under trial: how its arrays are made and read, and what a broken promise raises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import Framework
from arraybridge.testing.samples import DTYPES, sample

__all__ = ["BrokenPromiseError", "Subject", "bits", "churn", "held", "hold", "same"]


class Subject:
    """The framework under trial, and how to make and read its arrays."""

    def __init__(self, framework: Framework, make: Callable[[np.ndarray], Any] | None) -> None:
        self.framework = framework
        self.name = framework.name
        self._make = make
        self.dtypes = [
            name for name in DTYPES if (framework.dtypes is None or name in framework.dtypes) and held(name)
        ]
        #: A dtype for everything that is not about dtypes.
        self.dtype = next((d for d in ("float32", "int32", "uint8") if d in self.dtypes), self.dtypes[0])

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """The wanted shape, or one of the same size that the framework takes; None where it takes neither."""
        size = int(np.prod(wanted))
        for shape in (wanted, (size,), (1, size)):
            try:
                self.framework.supports(self.dtype, shape)
            except MemoryConversionError:
                continue
            return shape
        return None

    def sample(self, layout: str = "aligned", dtype: str | None = None) -> np.ndarray:
        result: np.ndarray = sample(dtype or self.dtype, layout, self.shape((4, 6)) or (24,))
        return result

    def line(self, layout: str = "aligned", dtype: str | None = None, more: str = "") -> str:
        shape = self.shape((4, 6)) or (24,)
        return f'convert_memory(sample("{dtype or self.dtype}", "{layout}", {shape}), "{self.name}"{more})'

    def make(self, values: np.ndarray) -> Any:
        if self._make is not None:
            return self._make(values)
        target = self.framework
        return target.from_host(hostmemory.fresh(values), target.default_device())

    def to(self, values: Any, **options: Any) -> Any:
        return convert_memory(values, self.name, **options)

    def read(self, x: Any) -> np.ndarray:
        result: np.ndarray = convert_memory(x, "numpy", copy=True, grad="detach")
        return result


class BrokenPromiseError(AssertionError):
    """A promise is not kept; the message says how."""


def hold(condition: object, otherwise: str) -> None:
    # No `assert`, which `python -O` would leave out.
    if not condition:
        raise BrokenPromiseError(otherwise)


def held(dtype: str) -> bool:
    try:
        hostmemory.np_dtype(dtype)
    except DtypeNotSupportedError:  # ml_dtypes is missing
        return False
    return True


def bits(x: np.ndarray) -> bytes:
    return x.astype(x.dtype.newbyteorder("="), copy=False).tobytes()


def same(got: np.ndarray, want: np.ndarray) -> None:
    hold(got.dtype.name == want.dtype.name, f"the dtype is {got.dtype.name}, and was {want.dtype.name}")
    hold(got.shape == want.shape, f"the shape is {got.shape}, and was {want.shape}")
    hold(bits(got) == bits(want), f"the values differ: {got.reshape(-1)[:4]} and {want.reshape(-1)[:4]}")


def churn(nbytes: int) -> None:
    """Fill what was freed with other values."""
    gc.collect()
    for _ in range(20):
        np.full(max(nbytes, 1), 0xA5, np.uint8)
