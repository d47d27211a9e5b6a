"""Standard functions for `compare`, and the function that creates their argument."""

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
    """Return the square of a matrix that has about as many elements as ``x``."""
    side = max(1, int(x.shape[0] ** 0.5))
    square = array_namespace(x).reshape(x[: side * side], (side, side))
    return square @ square


def _fft(x: Any) -> Any:
    return array_namespace(x).fft.fft(x)


def _filter(x: Any) -> Any:
    """Return the moving average over three elements."""
    return (x[:-2] + x[1:-1] + x[2:]) / 3


#: Functions of one 1-D array, which may be a NumPy, CuPy, PyTorch or JAX array.
STANDARD: Mapping[str, Callable[[Any], Any]] = {
    "elementwise": _elementwise,
    "reduction": _reduction,
    "matmul": _matmul,
    "fft": _fft,
    "filter": _filter,
}


def array_of(size: int) -> np.ndarray:
    """Return a 1-D float32 array of ``size`` values between 0 and 1, the same on each call."""
    return np.random.default_rng(0).random(size, dtype=np.float32)
