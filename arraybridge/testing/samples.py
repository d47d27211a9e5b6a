"""Arrays to try: every dtype that travels, with its extreme values, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.frameworks import hostmemory

#: Names of the dtypes that travel.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
LAYOUTS = (
    *("aligned", "offset", "unaligned", "fortran", "strided", "negative", "broadcast"),
    *("read-only", "big-endian"),
)


def sample(dtype: str = "float32", layout: str = "aligned", shape: tuple[int, ...] = (4, 6)) -> Any:
    """A NumPy array with the extreme values of its dtype, the same at each call.

    Args:
        dtype: one of `DTYPES`.
        layout: ``"aligned"``: C-contiguous, at a multiple of 64 bytes; ``"offset"``: one element further;
            ``"unaligned"``: one byte further; ``"fortran"``; ``"strided"``: every second element;
            ``"negative"``: the last axis reversed; ``"broadcast"``: a row repeated; ``"read-only"``;
            ``"big-endian"``.
        shape: its shape.

    >>> sample("uint8", shape=(3,)).tolist()
    [0, 255, 1]
    """
    values = np.resize(_values(hostmemory.np_dtype(dtype)), shape)
    axes = values.ndim > 0
    match layout:
        case "aligned" | "read-only":
            values = _at(values, 0)
            values.flags.writeable = layout == "aligned"
            return values
        case "offset":
            return _at(values, values.itemsize)
        case "unaligned":
            return _at(values, 1)
        case "fortran":
            return np.asfortranarray(values)
        case "strided":
            return np.repeat(values, 2, axis=-1)[..., ::2] if axes else values
        case "negative":
            return np.ascontiguousarray(values[..., ::-1])[..., ::-1] if axes else values
        case "broadcast":
            return np.broadcast_to(values[:1], shape) if axes else values
        case "big-endian":
            return values if values.itemsize == 1 else values.astype(values.dtype.newbyteorder(">"))
    raise ValueError(f"layout={layout!r} is none of {', '.join(LAYOUTS)}")


def _values(dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([True, False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([limits.min, limits.max, 1, 0, 7, 100], dtype)
    numbers = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 6e-5, 0.1]
    if dtype.name == "float8_e4m3fn":  # which has no infinity
        numbers = [0.0, -0.0, 1.5, -2.0, 448.0, 0.0625, np.nan]
    if dtype.kind == "c":
        return np.array([complex(a, b) for a, b in zip(numbers, reversed(numbers), strict=True)], dtype)
    with np.errstate(all="ignore"):
        real = np.array(numbers, np.float64).astype(dtype)
    if dtype.name in ("float32", "float64"):
        real[-1] = np.finfo(dtype).tiny
        real[-2] = np.finfo(dtype).max
    return real


def _at(values: np.ndarray, offset: int) -> np.ndarray:
    """A C-contiguous copy ``offset`` bytes behind a multiple of 64."""
    memory = hostmemory.packed((values.nbytes + 64,), np.dtype(np.uint8))
    result = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
    result[...] = values
    return result
