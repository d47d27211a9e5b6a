"""Advice for one target: expressions whose values have a dtype and a shape that the target supports."""

from __future__ import annotations

import numpy as np

from arraybridge.advice import Advice
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.interface.framework import Framework

__all__ = ["advise_parts", "advise_reshape", "fit_code", "fit_expressions", "is_limited"]

#: The dtype that expressions are assumed to have if it is not known.
_DEFAULT_DTYPE = "float64"


def advise_reshape(
    error: ArrayNotSupportedError, source: Framework, target: Framework, dtype: str, shape: tuple[int, ...]
) -> None:
    """Add an expression to an error about a shape: the same elements, in a shape and dtype of the target."""
    code = fit_code("{x}", source, target, dtype, shape)
    if code not in ("", "{x}"):
        error.advise(Advice("Pass {}.", (code,)))


def fit_code(
    code: str, source: Framework, target: Framework, dtype: str, shape: tuple[int, ...] | None
) -> str:
    """Return an expression for an array of ``source``, with the cast and the reshape that ``target`` needs.

    Args:
        code: The expression for the array.
        source: The framework of the array, whose functions cast and reshape it.
        target: The framework to convert to.
        dtype: The dtype of the array.
        shape: Its shape; None for a sparse array, or if the shape is not known.

    Returns:
        The expression; ``""`` if the target has no suitable dtype.
    """
    cast, reason = _needed_cast(target, dtype)
    if reason and not cast:
        return ""
    nearest = None if shape is None else target.interchange.nearest_shape(shape)
    if nearest is not None:
        code = source.interchange.reshape_expression.format(shape=nearest).replace("{x}", code)
    return source.interchange.cast_expression.format(dtype=cast).replace("{x}", code) if cast else code


def fit_expressions(
    error: MemoryConversionError, target: Framework, dtype: str = "", values: np.ndarray | None = None
) -> None:
    """Extend the expressions of an error about a source, so that ``target`` supports their values.

    Args:
        error: The error.
        target: The framework to convert to.
        dtype: The dtype of the values of the expressions; ``""`` if it is not known.
        values: A NumPy array of the same shape as the values; None if their shape is not known.
    """
    cast, reason = _needed_cast(target, dtype or _DEFAULT_DTYPE)
    nearest = None if values is None else target.interchange.nearest_shape(values.shape)
    bool_cast, _ = _needed_cast(target, "bool")
    if bool_cast and not cast:
        error.advise_then(f'np.asarray({{x}}, "{bool_cast}")', "", part="np.ma.getmaskarray(")
    if not cast and nearest is None:
        return
    if values is None:
        code = f'arraybridge.to_numpy({{x}}, dtype="{cast}")'
    else:
        code = f'np.asarray({{x}}, "{cast}")' if cast else "np.asarray({x})"
        code += "" if nearest is None else f".reshape({nearest})"
    error.advise_then(code, f" The cast is necessary because {reason}." if cast else "")


def advise_parts(error: MemoryConversionError, target: Framework) -> bool:
    """Return whether a target lacks complex dtypes; if so, advise to convert the parts of the values."""
    lacks_complex = bool(_needed_cast(target, "complex128")[1])
    if lacks_complex:
        error.advise(Advice(f"{target.name} has no complex dtype: convert the real and imaginary parts."))
    return lacks_complex


def is_limited(target: Framework) -> bool:
    """Return whether a framework lacks the dtype, shape or layout of common NumPy and SciPy arrays."""
    has_scalars = target.interchange.nearest_shape(()) is None
    return bool(_needed_cast(target, _DEFAULT_DTYPE)[0]) or not has_scalars or not target.sparse.layouts


def _needed_cast(target: Framework, dtype: str) -> tuple[str, str]:
    """Return the dtype to which a dtype must be cast for a target, and the reason.

    Both are empty if the target supports the dtype. The dtype is empty if there is no suitable cast.
    """
    try:
        target.supports(dtype, (1,))
    except DtypeNotSupportedError as error:
        return ("" if error.cast is None else error.cast.dtype), error.reason
    return "", ""
