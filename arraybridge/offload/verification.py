"""Comparison of GPU results with NumPy's results, up to rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import CannotSplitError
from arraybridge.host.dtype_names import NUMERIC_KINDS
from arraybridge.trees import ARRAY, kind_of, outline, together


def difference(expected: Any, actual: Any, arguments: list[Any] | None = None) -> str:
    """Describe the first difference between two results of a function; return "" if they agree.

    Args:
        expected: The NumPy result.
        actual: The result on the GPU, with arrays of any framework.
        arguments: The array arguments as NumPy arrays. Their precision and magnitude bound the rounding
            error. Defaults to None: values must be exactly equal.
    """
    differences: list[str] = []

    def compare(pair: Any, where: str) -> Any:
        expected, actual = pair
        text = _difference_of_leaves(expected, actual, arguments)
        if text:
            differences.append(f"at {where}, {text}" if where else text)
        return expected

    try:
        together([expected, actual], compare, "result")
    except CannotSplitError:
        return _texts(actual, expected)
    return differences[0] if differences else ""


def _texts(actual: Any, expected: Any) -> str:
    return f"it returns {_as_text(actual)}, but {_as_text(expected)} in NumPy"


def _as_text(x: Any) -> str:
    host = _on_host(x)
    return f"an array of {host.dtype.name}" if isinstance(host, np.ndarray) else outline(x)


def _on_host(x: Any) -> Any:
    """Return an array or scalar of any framework as a NumPy array, and other values unchanged."""
    if isinstance(x, np.generic):
        return np.asarray(x)
    return convert_memory(x, "numpy") if kind_of(x) is ARRAY and not isinstance(x, np.ndarray) else x


def _difference_of_leaves(expected: Any, actual: Any, arguments: list[Any] | None) -> str:
    a = _on_host(expected)
    b = _on_host(actual)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if type(a) not in (np.ndarray, type(actual)):  # `a` is an ndarray subclass, but the GPU result is not
            return _texts(actual, expected)
        if a.dtype.name != b.dtype.name:
            return f"it returns {b.dtype.name}, but {a.dtype.name} in NumPy"
        if a.shape != b.shape:
            return f"it returns shape {b.shape}, but {a.shape} in NumPy"
        return _difference_of_values(a, b, arguments)
    if expected is actual:
        return ""
    if type(a) is not type(b):
        return _texts(actual, expected)
    if isinstance(expected, (float, complex)):
        return _difference_of_values(np.asarray(expected), np.asarray(actual), arguments)
    if isinstance(expected, (int, str, bytes, slice, range)):
        return "" if expected == actual else f"it returns {actual!r}, but {expected!r} in NumPy"
    return f"it returns {outline(expected)}, which cannot be compared"


def _difference_of_values(expected: Any, actual: Any, arguments: list[Any] | None) -> str:
    """Compare two arrays of the same dtype and shape."""
    same = expected == actual
    precision = _precision(expected)
    if precision and arguments is not None:
        # Values must agree to half of the digits of the dtype. If large arguments cancel out, their rounding
        # errors remain in the result.
        precision = max([precision, *map(_precision, arguments)])
        allowed = math.sqrt(precision) * _magnitude(expected)
        allowed += 2 * precision * max(map(_magnitude, arguments), default=0.0)
        wide = _wide_dtype(expected)
        same = np.isclose(actual.astype(wide), expected.astype(wide), rtol=0, atol=allowed, equal_nan=True)
    if np.all(same):
        return ""
    if not expected.ndim:
        return f"it returns {actual!s}, but {expected!s} in NumPy"
    wrong = np.argwhere(~same)
    first = tuple(map(int, wrong[0]))
    share = f"{len(wrong)} of {expected.size} values differ"
    return f"it returns {actual[first]!s} at {list(first)}, but {expected[first]!s} in NumPy ({share})"


def _precision(x: Any) -> float:
    """Return the machine epsilon of an array's dtype; 0 if the dtype is neither floating nor complex."""
    if x.dtype.kind in "fc":
        return float(np.finfo(x.dtype).eps)
    if not x.dtype.name.startswith(("bfloat", "float")):
        return 0.0
    one = x.dtype.type(1)
    eps = 1.0  # np.finfo does not support bfloat16 and float8 dtypes
    while x.dtype.type(1 + eps / 2) != one:
        eps /= 2
    return eps


def _magnitude(x: Any) -> float:
    """Return the largest absolute value of an array, ignoring infinities and NaNs."""
    if x.dtype.kind not in NUMERIC_KINDS and not _precision(x):
        return 0.0
    sizes = np.abs(x.astype(np.complex128))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def widen(x: Any) -> Any:
    """Return a NumPy array in double precision, which reduces only rounding errors."""
    return x.astype(_wide_dtype(x)) if _precision(x) else x


def _wide_dtype(x: Any) -> type:
    return np.complex128 if x.dtype.kind == "c" else np.float64
