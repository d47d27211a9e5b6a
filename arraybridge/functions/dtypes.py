"""Converting the dtype of a result, on request and by a rule that is written down.

The rule, for each pair of dtypes:

==================  ==========================================================================
floating → integer  ``round((x - min) / (max - min) * (hi - lo) + lo)``: the range of the data,
                    ``min`` to ``max``, fills the range of the dtype, ``lo`` to ``hi``, rounded to
                    the nearest, halves to even. Where all values are equal, all become ``lo``.
integer → integer   the same numbers; one that the dtype does not have is refused. Bool counts as
                    an integer of 0 and 1.
any → floating      the same numbers, rounded to the precision of the dtype; a finite number that
                    would become infinite is refused.
floating → bool     refused, and so is what is complex to anything real.
==================  ==========================================================================

A dtype that the array has already leaves it as it is. NaN and infinity have no place in the range of an
integer dtype and are refused. The arithmetic is done in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from arraybridge.arrays import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework

__all__ = ["DtypeConversion"]


class DtypeConversion(Enum):
    """Which dtype the arrays of a result are to have; by default they keep what the function made.

    The docstring of `arraybridge.functions.dtypes` states the rule by which the values follow.

    >>> DtypeConversion("uint8")
    <DtypeConversion.UINT8: 'uint8'>
    """

    #: The dtype of the first array argument.
    PRESERVE_INPUT = "preserve"
    #: What the function made. The default.
    NATIVE_OUTPUT = "native"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def numpy_dtype(self) -> type[np.generic] | None:
        """NumPy's type of that dtype; None where it is that of an array.

        >>> DtypeConversion.UINT8.numpy_dtype
        <class 'numpy.uint8'>
        """
        if self in (DtypeConversion.PRESERVE_INPUT, DtypeConversion.NATIVE_OUTPUT):
            return None
        scalar: type[np.generic] = np.dtype(self.value).type
        return scalar


def convert_dtype(x: Any, dtype: str) -> Any:
    """``x`` with another dtype, by the rule above, in its framework and on its device.

    Args:
        x: an array of any framework, any shape.
        dtype: NumPy's name of a dtype.

    Raises:
        DtypeNotSupportedError: bool or complex stand against it, or the framework has no such dtype.
        ArrayNotSupportedError: the values do: NaN or infinity on the way to integers, a number outside the
            range of the dtype, or an array that is traced and has no values.

    >>> import numpy as np
    >>> convert_dtype(np.array([0.0, 0.25, 1.0]), "uint8")
    array([  0,  64, 255], dtype=uint8)
    """
    owner, x = source_of(x)
    source = owner.dtype_name(x)
    if source == dtype:
        return x
    owner.check(x)
    owner.supports(dtype, owner.shape(x))
    # A framework without the whole array API makes the journey through NumPy, which is the same arithmetic.
    rule = _rule(owner, source, dtype)
    with owner.wide():
        if owner.conforms:
            return rule(owner, x, dtype)
        numpy = registry.framework("numpy")
        host = rule(numpy, convert_memory(x, "numpy"), dtype)
        return convert_memory(host, owner.name, device=owner.device_of(x))


def _rule(owner: Framework, source: str, dtype: str) -> Callable[[Framework, Any, str], Any]:
    if dtype.startswith("complex"):
        return lambda owner, x, dtype: owner.cast(x, dtype)
    complex_source = source.startswith("complex")
    if complex_source or (dtype == "bool" and not _is_integer(source)):
        what = "complex numbers have no order and no place" if complex_source else "has no rule for it"
        raise DtypeNotSupportedError(
            f"a result of dtype {source} cannot be converted to {dtype}: {what} there; take its real part,"
            " its magnitude or a comparison in the function",
            source_type=owner.name,
            target_type=owner.name,
            reason=f"{source} does not become {dtype}",
        )
    if not _is_integer(dtype):
        return _to_floating
    return _integer_to_integer if _is_integer(source) else _scale


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _limits(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _refuse(owner: Framework, dtype: str, reason: str, advice: str) -> ArrayNotSupportedError:
    return ArrayNotSupportedError(
        f"the result cannot become {dtype}: {reason}; {advice}",
        source_type=owner.name,
        target_type=owner.name,
        reason=reason,
    )


def _namespace(x: Any) -> Any:
    import array_api_compat  # costs time, and few ask for another dtype

    return array_api_compat.array_namespace(x)


def _to_floating(owner: Framework, x: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):  # NumPy warns of an overflow, which is looked for here
        result = owner.cast(x, dtype)
    # In float64, for not every framework tells the infinities of bfloat16 and float8.
    before, after, xp = owner.cast(x, "float64"), owner.cast(result, "float64"), _namespace(x)
    if bool(xp.any(xp.isfinite(before) & ~xp.isfinite(after))):
        reason = f"a finite number exceeds the range of {dtype}"
        raise _refuse(owner, dtype, reason, "ask for a wider dtype")
    return result


def _integer_to_integer(owner: Framework, x: Any, dtype: str) -> Any:
    lo, hi = _limits(dtype)
    least, most = _limits(owner.dtype_name(x))
    if 0 not in owner.shape(x) and (least < lo or most > hi):
        values = convert_memory(x, "numpy")  # torch has no min and max of the wider unsigned integers
        smallest, largest = int(values.min()), int(values.max())
        if smallest < lo or largest > hi:
            raise _refuse(
                owner,
                dtype,
                f"its values go from {smallest} to {largest}, and {dtype} holds {lo} to {hi}",
                "scale them in the function, or let it return floating numbers, which are scaled",
            )
    return owner.cast(x, dtype)


def _scale(owner: Framework, x: Any, dtype: str) -> Any:
    if 0 in owner.shape(x):
        return owner.cast(x, dtype)
    xp = _namespace(x)
    values = owner.cast(x, "float64")
    if not bool(xp.all(xp.isfinite(values))):
        raise _refuse(
            owner,
            dtype,
            "it holds NaN or infinity, which have no place in the range of integers",
            "replace them in the function, e.g. by nan_to_num",
        )
    smallest, largest = float(xp.min(values)), float(xp.max(values))
    lo, hi = _limits(dtype)
    if smallest == largest:
        return owner.cast(xp.full_like(values, lo), dtype)
    if largest - smallest > 1e307:  # too far for float64, or for XLA, which takes the reciprocal
        values, smallest, largest = values / 16, smallest / 16, largest / 16
    scaled = xp.round((values - smallest) / (largest - smallest) * float(hi - lo) + float(lo))
    if hi < 2**53:
        return owner.cast(scaled, dtype)
    # hi of the 64-bit dtypes is no float64, and the next one above overflows. What reaches it gets hi itself.
    below = math.nextafter(float(hi), 0.0)
    at_top = scaled > below
    below_top = owner.cast(xp.where(at_top, xp.full_like(scaled, below), scaled), dtype)
    top = convert_memory(np.full(owner.shape(x), hi, dtype), owner.name, device=owner.device_of(x))
    return xp.where(at_top, top, below_top)
