"""Verification of GPU results: the state of each signature, and the comparison with NumPy's results."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import CannotSplitError
from arraybridge.frameworks.dtype_names import np_dtype
from arraybridge.trees import ARRAY, kind_of, map_arrays, outline, together


def difference(expected: Any, actual: Any, arguments: list[Any]) -> tuple[str, bool]:
    """Compare the GPU result of a function with its NumPy result.

    Args:
        expected: The NumPy result.
        actual: The result on the GPU, with arrays of any framework.
        arguments: The array arguments as NumPy arrays. Their precision and magnitude bound the rounding
            error.

    Returns:
        A description of the first difference, or ``""``; and whether all values are exactly equal.
    """
    comparison = _Comparison(arguments)
    try:
        together([expected, actual], comparison.add, "result")
    except CannotSplitError:
        comparison.differences.append(_description(actual, expected))
    return "".join(comparison.differences[:1]), comparison.is_exact


class _Comparison:
    """A leaf-by-leaf comparison of two results.

    Attributes:
        differences: Descriptions of the differences so far.
        is_exact: Whether all leaves so far are exactly equal.
    """

    def __init__(self, arguments: list[Any]) -> None:
        self._arguments = arguments
        self.differences: list[str] = []
        self.is_exact = True

    def add(self, pair: Any, where: str) -> Any:
        """Compare corresponding leaves of both results, and return the expected one."""
        expected, actual = pair
        reason, same = _of_leaves(expected, actual, self._arguments)
        self.is_exact = self.is_exact and same
        if reason:
            self.differences.append(f"at {where}, {reason}" if where else reason)
        return expected


def _description(actual: Any, expected: Any) -> str:
    return f"it returns {_as_text(actual)}, but {_as_text(expected)} in NumPy"


def _as_text(x: Any) -> str:
    host = _on_host(x)
    return f"an array of {host.dtype.name}" if isinstance(host, np.ndarray) else outline(x)


def _on_host(x: Any) -> Any:
    """Return an array or scalar of any framework as a NumPy array, and other values unchanged."""
    if isinstance(x, np.generic):
        return np.asarray(x)
    return convert_memory(x, "numpy") if kind_of(x) is ARRAY and not isinstance(x, np.ndarray) else x


def _of_leaves(expected: Any, actual: Any, arguments: list[Any]) -> tuple[str, bool]:
    a = _on_host(expected)
    b = _on_host(actual)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if type(a) not in (np.ndarray, type(actual)):  # `a` is an ndarray subclass, but the GPU result is not
            return _description(actual, expected), False
        if a.dtype.name != b.dtype.name:
            return f"it returns {b.dtype.name}, but {a.dtype.name} in NumPy", False
        if a.shape != b.shape:
            return f"it returns shape {b.shape}, but {a.shape} in NumPy", False
        return _of_values(a, b, arguments)
    if expected is actual:
        return "", True
    if type(a) is not type(b):
        return _description(actual, expected), False
    if isinstance(expected, (float, complex)):
        return _of_values(np.asarray(expected), np.asarray(actual), arguments)
    if isinstance(expected, (int, str, bytes, slice, range)):
        same = expected == actual
        return ("" if same else f"it returns {actual!r}, but {expected!r} in NumPy"), same
    return f"it returns {outline(expected)}, which cannot be compared", False


def _of_values(expected: Any, actual: Any, arguments: list[Any]) -> tuple[str, bool]:
    """Compare two arrays of the same dtype and shape."""
    if np.array_equal(expected, actual):
        return "", True
    at_one_place = not expected.ndim
    expected = np.atleast_1d(expected)
    actual = np.atleast_1d(actual)
    wrong = expected != actual
    precision = max([_precision(x) for x in (expected, *arguments)]) if _precision(expected) else 0.0
    if precision:
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        a = expected.astype(wide)
        b = actual.astype(wide)
        finite = np.isfinite(a) & np.isfinite(b)
        wrong = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
        if finite.any():
            # Values must agree to half of the digits of the dtype. If large arguments cancel out, their
            # rounding errors remain in the result.
            largest = float(np.abs(a[finite]).max())
            allowed = math.sqrt(precision) * largest + 2 * precision * max(
                map(_magnitude, arguments), default=0.0
            )
            wrong[finite] = np.abs(a[finite] - b[finite]) > allowed
    if not wrong.any():
        return "", False
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    at = "" if at_one_place else f" at {list(first)}"
    share = "" if at_one_place else f" ({int(wrong.sum())} of {wrong.size} values differ)"
    return f"it returns {actual[first]!s}{at}, but {expected[first]!s} in NumPy{share}", False


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
    if not x.size or x.dtype.kind not in "biufc":
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.max(np.abs(x.astype(np.complex128))))
    return largest if math.isfinite(largest) else 0.0


def widened(tree: Any) -> Any:
    """Return a tree with its NumPy arrays cast to double precision, which reduces only rounding errors."""

    def widen(x: Any) -> Any:
        if not _precision(x):
            return x
        return x.astype(np_dtype("complex128" if x.dtype.kind == "c" else "float64"))

    return map_arrays(tree, widen)


#: The maximum number of cached verification states per function. The least recently used is evicted first.
MAX_PROOFS = 256


class Proof:
    """The verification state of one signature on one GPU.

    Attributes:
        seen: Whether a call with this signature has run on the CPU.
        is_verified: Whether a trial has shown that the result on the GPU agrees with the NumPy result.
        scalars: For each array in the NumPy result, whether it is a scalar.
    """

    __slots__ = ("is_verified", "scalars", "seen")

    def __init__(self) -> None:
        self.seen = False
        self.is_verified = False
        self.scalars: list[bool] = []


class Proofs:
    """An LRU cache of the verification states of one function's call signatures."""

    def __init__(self) -> None:
        self._proofs: dict[Hashable, Proof] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._proofs)

    def get(self, key: Hashable) -> Proof:
        """Return the verification state of a signature, created if missing, and mark it as recently used."""
        with self._lock:
            proof = self._proofs.pop(key, None) or Proof()
            while len(self._proofs) >= MAX_PROOFS:
                del self._proofs[next(iter(self._proofs))]
            self._proofs[key] = proof
            return proof

    def peek(self, key: Hashable) -> Proof | None:
        """Return the verification state of a signature without marking it as used; None if there is none."""
        return self._proofs.get(key)

    def items(self) -> list[tuple[Any, Proof]]:
        """Return all signatures and their verification states."""
        with self._lock:
            return list(self._proofs.items())
