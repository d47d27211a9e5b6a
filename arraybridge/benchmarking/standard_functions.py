"""Standard functions to compare, and their argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from arraybridge.devices.namespaces import array_namespace

__all__ = ["STANDARD"]


def _elementwise(x: Any) -> Any:
    return array_namespace(x).sqrt(x) * 2 + 1


def _reduction(x: Any) -> Any:
    return array_namespace(x).sum(x)


def _matmul(x: Any) -> Any:
    """A square matrix of about as many elements, times itself."""
    side = max(1, int(x.shape[0] ** 0.5))
    square = array_namespace(x).reshape(x[: side * side], (side, side))
    return square @ square


def _fft(x: Any) -> Any:
    return array_namespace(x).fft.fft(x)


def _filter(x: Any) -> Any:
    """Return the mean of each three neighbors."""
    return (x[:-2] + x[1:-1] + x[2:]) / 3


#: Functions of one 1-D array that run in NumPy, CuPy, PyTorch and JAX.
STANDARD: Mapping[str, Callable[[Any], Any]] = {
    "elementwise": _elementwise,
    "reduction": _reduction,
    "matmul": _matmul,
    "fft": _fft,
    "filter": _filter,
}


def array_of(size: int) -> np.ndarray:
    """The argument for a size: that many float32 between 0 and 1, 1-D, always the same."""
    return np.random.default_rng(0).random(size, dtype=np.float32)
