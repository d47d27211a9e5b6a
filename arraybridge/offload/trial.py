"""The trial of `@gpu`: what a function gives on a card beside what it gives in NumPy.

A card's framework may mean something else by the same words: torch's ``x.std()`` divides by N−1, and its
``x.max(axis=1)`` is a named tuple. So the first run of a footprint on a card is computed in NumPy as well,
and the two are compared here.
"""

from __future__ import annotations

import inspect
import math
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import CannotSplitError
from arraybridge.frameworks.hostmemory import np_dtype
from arraybridge.offload.footprint import dtype_name, results
from arraybridge.trees import ARRAY, arrays_of, kind_of, leaves_of, outline, together

__all__ = ["Rounding", "Watch", "aliasing", "difference", "widened"]

#: Values that differ by no more than so many times the precision of their dtype are equal.
EQUAL = 4.0
#: A sum of n numbers may be off by so many times the precision and the root of n, added in another order.
SUMMED = 16.0
#: But no rounding explains more than this share of a result.
TENTH = 0.1


class Rounding:
    """What rounding alone may make of the results of one call.

    Args:
        arrays: the arrays among the arguments, in NumPy.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._arrays = list(arrays)
        #: The largest difference that was found, in multiples of the precision.
        self.worst = 0.0

    def difference(self, expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> str:
        """How the values differ, in words, or ``""``; both arrays have one dtype and one shape."""
        if np.array_equal(expected, found):
            return ""
        epsilon = _epsilon(expected.dtype)
        if not epsilon:
            return self._shown(expected, found, expected != found)
        # The coarsest dtype on the way tells.
        epsilon = max(epsilon, *(_epsilon(x.dtype) for x in self._arrays))
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        a, b = expected.astype(wide), found.astype(wide)
        finite = np.isfinite(a)
        if not np.array_equal(finite, np.isfinite(b)):
            return self._shown(expected, found, finite != np.isfinite(b))
        odd = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
        if odd.any():
            return self._shown(expected, found, odd)
        if not finite.any():
            return ""
        a, b = a[finite], b[finite]
        apart = np.abs(a - b)
        if not apart.any():
            return ""
        with np.errstate(divide="ignore", over="ignore"):
            self.worst = max(self.worst, float((apart / np.abs(a)).max()) / epsilon)
        # Where large numbers cancel out, what is left is as uncertain as they were.
        elements = max(x.size for x in (expected, *self._arrays))
        scale = max((_magnitude(x) for x in self._arrays), default=0.0)
        share = min(SUMMED * epsilon * math.sqrt(elements), max(TENTH, EQUAL * epsilon))
        allowed = share * np.abs(a).max() + 2 * epsilon * scale
        if apart.max() <= allowed:
            return ""
        place = np.zeros(expected.shape, bool)
        place[finite] = apart > allowed
        return self._shown(expected, found, place)

    def _shown(
        self, expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any], where: np.ndarray[Any, Any]
    ) -> str:
        first = tuple(int(i) for i in np.argwhere(where)[0]) if expected.ndim else ()
        at = f" at {list(first)}" if first else ""
        share = f" ({int(where.sum())} of {where.size} values differ)" if first else ""
        return f"it gives {found[first]!s}{at} there, and {expected[first]!s} in NumPy{share}"


def _epsilon(dtype: np.dtype[Any]) -> float:
    """The precision of a floating or complex dtype; 0 for others."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    if not dtype.name.startswith(("bfloat", "float")):
        return 0.0
    one = epsilon = np.ones((), dtype)  # np.finfo does not know bfloat16 and float8
    while one + epsilon / dtype.type(2) != one:
        epsilon = epsilon / dtype.type(2)
    return float(epsilon)


def _magnitude(x: np.ndarray[Any, Any]) -> float:
    if not x.size or x.dtype.kind not in "biufc":
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.max(np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))))
    return largest if math.isfinite(largest) else 0.0


def difference(expected: Any, found: Any, rounding: Rounding) -> str:
    """How the result of a card differs from NumPy's: in structure, dtype, shape or values; or ``""``.

    Args:
        expected: what the function returned in NumPy.
        found: what it returned on the card, with arrays of any framework.
        rounding: how far values may be apart; it keeps how far they are.
    """
    differences: list[str] = []

    def compare(pair: Any, where: str) -> Any:
        why = _leaf_difference(pair[0], pair[1], rounding)
        if why:
            differences.append(f"at {where}, {why}" if where else why)
        return pair[0]

    try:
        together([expected, found], compare, "result")
    except CannotSplitError:
        return f"it gives {_told(found)} there, and {_told(expected)} in NumPy"
    return differences[0] if differences else ""


def _leaf_difference(expected: Any, found: Any, rounding: Rounding) -> str:
    if kind_of(expected) == ARRAY or isinstance(expected, np.generic):
        return _array_difference(expected, found, rounding)
    if expected is found:
        return ""
    if type(expected) is not type(found):
        return f"it gives {_told(found)} there, and {_told(expected)} in NumPy"
    if isinstance(expected, (float, complex)):
        return rounding.difference(np.asarray(expected), np.asarray(found))
    if isinstance(expected, (int, str, bytes, slice, range)):
        return "" if expected == found else f"it gives {found!r} there, and {expected!r} in NumPy"
    return f"it gives {_told(expected)}, in which nobody can look for arrays"


def _array_difference(expected: Any, found: Any, rounding: Rounding) -> str:
    of_subclass = isinstance(expected, np.ndarray) and type(expected) is not np.ndarray
    if not (kind_of(found) == ARRAY or isinstance(found, np.generic)) or (
        of_subclass and type(found) is not type(expected)
    ):
        return f"it gives {_told(found)} there, and {_told(expected)} in NumPy"
    names = dtype_name(expected), dtype_name(found)
    if names[0] != names[1]:
        return f"it gives {names[1]} there, and {names[0]} in NumPy"
    a, b = (
        np.asarray(x) if isinstance(x, np.generic) else convert_memory(x, "numpy") for x in (expected, found)
    )
    if a.shape != b.shape:
        return f"it gives shape {b.shape} there, and {a.shape} in NumPy"
    return rounding.difference(a, b)


def _told(x: Any) -> str:
    if kind_of(x) == ARRAY and not isinstance(x, np.generic):
        return f"an array of {dtype_name(x)}"
    return outline(x)


def widened(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in the widest precision of its kind, in which rounding hides nothing."""
    if not _epsilon(x.dtype):
        return x
    return x.astype(np_dtype("complex128" if x.dtype.kind == "c" else "float64"))


# -- what a function does besides --------------------------------------------------------------------


def aliasing(result: Any, given: list[Any]) -> str:
    """Why a caller could tell the result from one that was computed on a copy of the arguments, or ``""``."""
    if result is None:
        return "it returns nothing, so that it works on its arguments in place"
    for x in results(result):
        if any(x is y for y in given):
            return "it returns its own argument, which it may have changed in place"
        if isinstance(x, np.ndarray) and any(np.may_share_memory(x, y) for y in given):
            return "it returns a view of its argument, in which changes in place show"
    return ""


class Watch:
    """Looks whether a run in NumPy changes its arguments in place, or draws random numbers.

    Args:
        fn: the function.
        own: what it is called with besides the arguments: self.
        arguments: in NumPy.
    """

    def __init__(self, fn: Callable[..., Any], own: Iterable[Any], arguments: list[Any]) -> None:
        self._before = [
            (x, x.copy()) for x in arrays_of(arguments) if isinstance(x, np.ndarray) and x.flags.writeable
        ]
        self._generators = list(_generators(fn, own, arguments))
        self._states = self._random_states()

    def _random_states(self) -> list[bytes]:
        states: list[Any] = [random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002  # that is asked
        for generator in self._generators:
            is_old = isinstance(generator, np.random.RandomState)
            states.append(generator.get_state(legacy=False) if is_old else generator.bit_generator.state)
        return [pickle.dumps(state) for state in states]

    def changed(self) -> str:
        """What the run has changed in place, in words, or ``""``."""
        for x, before in self._before:
            same = np.array_equal(x, before)
            if not same and not (x.dtype.kind in "fc" and np.array_equal(x, before, equal_nan=True)):
                return "it changes its arguments in place"
        return ""

    def drew(self) -> str:
        """Whether random numbers were drawn, in words, or ``""``."""
        if self._random_states() != self._states:
            return "it draws random numbers, which a card would draw otherwise"
        return ""


def _generators(fn: Callable[..., Any], own: Iterable[Any], arguments: list[Any]) -> Iterable[Any]:
    """The random generators within reach of the function."""
    within = [*leaves_of(arguments)]
    for holder in own:
        within.extend(getattr(holder, "__dict__", {}).values())
    functions, seen = [fn], set()
    while functions:
        plain = inspect.unwrap(functions.pop())
        if not inspect.isfunction(plain) or plain in seen:
            continue
        seen.add(plain)
        names = inspect.getclosurevars(plain)
        reached = [*names.nonlocals.values(), *names.globals.values()]
        within += reached
        functions += [x for x in reached if inspect.isfunction(x)]
    return (x for x in within if isinstance(x, (np.random.Generator, np.random.RandomState)))
