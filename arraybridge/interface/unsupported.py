"""Errors for dtypes and arrays that a framework does not support, with advice on what to use instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from arraybridge.advice import Advice, Cast
from arraybridge.errors import ArrayNotSupportedError, CannotSplitError, DtypeNotSupportedError

__all__ = ["sparse_array_error"]


# Names such as float6_e2m3fn and int1. NumPy stores each element in a byte; other libraries pack several
# elements into one byte.
_SUB_BYTE = re.compile(r"(?:u?int[1-7]|float[1-7]_\w+)$")
# Maps dtypes that only NumPy has to the nearest common dtype.
_NEAREST = {
    "float128": "float64",
    "float96": "float64",
    "complex256": "complex128",
    "complex192": "complex128",
}


def missing_dtype_error(framework: Any, dtype: str, dtypes: Iterable[str]) -> DtypeNotSupportedError:
    """Return the error for a dtype that arrays of ``framework`` cannot have."""
    if is_sub_byte(dtype):
        reason = f"each library packs {dtype} differently"
        problem = reason
    else:
        reason = f"{framework.name} has no dtype {dtype}"
        problem = f"{reason}, and any other dtype could lose values"
    cast = _possible_cast(dtype, dtypes)
    if cast is None:
        advice = Advice(
            f"{framework.name} has no {_kind_of_dtype(dtype)} dtype: convert x.real and x.imag separately."
        )
    else:
        advice = cast.by_option()
    return DtypeNotSupportedError(
        f"Cannot convert {dtype} to {framework.name}: {problem}.",
        target_type=framework.name,
        reason=reason,
        advice=advice,
        cast=cast,
    )


def _possible_cast(dtype: str, dtypes: Iterable[str]) -> Cast | None:
    """Return the suggested cast to one of ``dtypes`` of the same kind; None if there is no such dtype."""
    kind = _kind_of_dtype(dtype)
    same = [other for other in dtypes if _kind_of_dtype(other) == kind]
    if not same:
        return None
    exact = _exact_cast(dtype)
    if exact is not None and exact in same:
        return Cast(exact, keeps_values=True)
    nearest = _NEAREST.get(dtype)
    if nearest is not None and nearest in same:
        return Cast(nearest)
    usual = ("float32", "complex64", "int32")
    first, *others = [*sorted(set(same) & set(usual)), *sorted(set(same) - set(usual))]
    return Cast(first, tuple(others))


def _exact_cast(dtype: str) -> str | None:
    """Return a common dtype that holds every value of an uncommon dtype; None if there is none."""
    if is_sub_byte(dtype):
        return wider_dtype(dtype)
    if dtype in ("float16", "bfloat16") or dtype.startswith("float8"):
        return "float32"
    return "uint8" if dtype == "bool" else None


def _kind_of_dtype(dtype: str) -> str:
    if dtype.startswith(("int", "uint", "bool")):
        return "integer"
    return "complex" if dtype.startswith("complex") else "floating"


def cast_error(
    framework: Any, source: str, dtype: str, instead: str, *expressions: str
) -> DtypeNotSupportedError:
    """Return the error for a cast that a framework does not support, with expressions to use instead."""
    return DtypeNotSupportedError(
        f"Cannot cast {source} to {dtype}: {framework.name} does not support this cast.",
        reason=f"{framework.name} cannot cast {source} to {dtype}",
        advice=Advice(instead, expressions),
    )


def array_error(
    framework: Any, what: str, cause: str, advice: str = "", *expressions: str
) -> ArrayNotSupportedError:
    """Return the error for an array of ``framework`` that cannot be converted.

    Args:
        framework: The framework of the array.
        what: The array, such as ``"a ragged TensorFlow tensor"``.
        cause: The reason, as a clause.
        advice: A sentence with a ``{}`` for each of the expressions, which refer to the array as ``{x}``.
        expressions: The expressions.
    """
    return ArrayNotSupportedError(
        f"Cannot convert {what}: {cause}.",
        source_type=framework.name,
        reason=cause,
        advice=Advice(advice, expressions),
    )


def no_counterpart_error(
    framework: Any, what: str, cause: str, advice: str, *expressions: str
) -> ArrayNotSupportedError:
    """Return the error for an array of another framework that ``framework`` cannot represent."""
    return ArrayNotSupportedError(
        f"Cannot convert {what} to {framework.name}: {cause}.",
        target_type=framework.name,
        reason=cause,
        advice=Advice(advice, expressions),
    )


def cannot_split_error(framework: Any, what: str, expression: str) -> CannotSplitError:
    """Return the error for an array that cannot be split, because the other processes would not split it.

    ``expression`` returns the part of this process. It refers to the array as ``{x}``.
    """
    return CannotSplitError(
        f"Cannot split {what}: the other processes do not know that this one ran out of memory, and would"
        " not split it.",
        source_type=framework.name,
        reason=f"other processes share {what}",
        advice=Advice("Pass {}, which only this process has.", (expression,)),
    )


def sparse_array_error(framework: Any, x: Any) -> ArrayNotSupportedError:
    """Return the error for a sparse array passed to a function that supports only dense arrays."""
    sparse = framework.sparse
    layout = sparse.layout(x)
    return ArrayNotSupportedError(
        f"A sparse {layout.upper()} array of {sparse.title} is not a dense array.",
        source_type=framework.name,
        reason=f"it is a sparse {layout.upper()} array",
        advice=Advice("Pass its stored values, {}.", (sparse.expressions(x).values,)),
    )


def dtype_error(
    framework: Any, what: str, cause: str, advice: str, *expressions: str
) -> DtypeNotSupportedError:
    """Return the error for an array of ``framework`` whose dtype no other framework supports.

    The arguments are those of `array_error`.
    """
    return DtypeNotSupportedError(
        f"Cannot convert {what}: {cause}.",
        source_type=framework.name,
        reason=cause,
        advice=Advice(advice, expressions),
    )


def sub_byte_dtype_error(framework: Any, what: str, dtype: str) -> DtypeNotSupportedError:
    """Return the error for a dtype with elements smaller than a byte. It suggests an exact cast."""
    return dtype_error(
        framework,
        what,
        f"each library packs {dtype} differently",
        "Pass {}, which holds every value.",
        f'{{x}}.astype("{wider_dtype(dtype)}")',
    )


def is_sub_byte(dtype: str) -> bool:
    """Return whether the elements of a dtype are smaller than a byte."""
    return _SUB_BYTE.match(dtype) is not None


def wider_dtype(dtype: str) -> str:
    """Return a byte-sized or larger dtype that holds every value of a dtype with smaller elements."""
    if dtype.startswith("float"):
        return "float32"
    return "uint8" if dtype.startswith("u") else "int8"
