"""Strides of arrays, and names of stride patterns, for traces and routes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraybridge.errors import MemoryConversionError
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import is_c_contiguous

__all__ = ["Steps", "steps", "stride_pattern"]

#: Shape, strides and itemsize of an array. Strides and itemsize have the same unit, bytes or elements.
Steps = tuple[tuple[int, ...], tuple[int, ...], int]


def steps(source: Framework, x: Any) -> Steps | None:
    """Return the shape, strides and itemsize of an array, for `stride_pattern`.

    The result is None if the framework raises an error. A trace must not break the conversion that it
    records.
    """
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.itemsize
    try:
        if callable(getattr(x, "stride", None)):  # PyTorch's strides count elements
            return x.shape, x.stride(), 1
        shape = source.shape(x)
        return shape, source.interchange.strides(x), source.nbytes(x) // max(1, math.prod(shape))
    except (MemoryConversionError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def stride_pattern(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
    """Return the name of a pattern of strides; see `Event.layout`."""
    if 0 in shape or is_c_contiguous(shape, strides, itemsize):
        return ""
    axes = [(step, extent) for step, extent in zip(strides, shape, strict=True) if extent != 1]
    if any(step == 0 for step, _ in axes):
        return "broadcast"
    if any(step < 0 for step, _ in axes):
        return "reversed"
    return "sliced" if axes == sorted(axes, reverse=True) else "transposed"
