"""Converting the dtype of a result, on request and by a rule that is written down.

The rule, for each pair of dtypes:

==================  ==========================================================================
floating → integer  ``round((x - min) / (max - min) * (hi - lo) + lo)``: the range of the data,
                    ``min`` to ``max``, fills the range of the dtype, ``lo`` to ``hi``, rounded to
                    the nearest, halves to even. Where all values are equal, all become ``lo``.
integer → integer   the same numbers; one that the dtype does not have is refused. Bool counts as
                    an integer of 0 and 1.
any → floating      a cast, as the framework of the array does it.
floating → bool     refused, and so is what is complex to anything real.
==================  ==========================================================================

A dtype that the array has already leaves it as it is. NaN and infinity have no place in the range of an
integer dtype and are refused. The arithmetic is done in float64, in the framework of the array and where it
lives; a framework without the whole array API makes the journey through NumPy.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.trees import source_of

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
    turns_real = source.startswith("complex") and not dtype.startswith("complex")
    if turns_real or (dtype == "bool" and not _is_integer(source)):
        reason = f"there is no rule for {source}; take real parts, or compare with a number, in the function"
        raise _refused(DtypeNotSupportedError, owner, dtype, reason)
    with owner.wide():
        if not _is_integer(dtype) or 0 in owner.shape(x):
            return owner.cast(x, dtype)
        if owner.conforms:
            return _to_integer(owner, x, source, dtype)
        host = _to_integer(registry.framework("numpy"), convert_memory(x, "numpy"), source, dtype)
        return convert_memory(host, owner.name, device=owner.device_of(x))


#: Numbers that are farther apart cannot be scaled: XLA takes the reciprocal of the distance.
_WIDEST = 1e307


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _to_integer(owner: Framework, x: Any, source: str, dtype: str) -> Any:
    """Integers as they are, where the dtype has them; floating numbers scaled into its range."""
    import array_api_compat  # costs time, and few ask for another dtype

    xp, values = array_api_compat.array_namespace(x), owner.cast(x, "float64")
    smallest, largest = float(xp.min(values)), float(xp.max(values))
    lo, hi = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if _is_integer(source):
        if lo <= smallest and largest <= hi:
            return owner.cast(x, dtype)
        reason = f"its values go from {smallest:.0f} to {largest:.0f}, and {dtype} holds {lo} to {hi}"
        raise _refused(
            ArrayNotSupportedError, owner, dtype, f"{reason}; return floating numbers to be scaled"
        )
    if not largest - smallest <= _WIDEST:
        reason = (
            "it holds NaN or infinity, or numbers too far apart to be scaled; replace them, as by nan_to_num"
        )
        raise _refused(ArrayNotSupportedError, owner, dtype, reason)
    span = (largest - smallest) or 1.0
    scaled = xp.round((values - smallest) / span * float(hi - lo) + float(lo))
    # hi of the 64-bit dtypes is no float64, and the next one above overflows. What reaches it gets hi itself.
    at_top = scaled >= float(hi)
    below_top = owner.cast(xp.where(at_top, xp.full_like(scaled, float(lo)), scaled), dtype)
    top = convert_memory(np.full(owner.shape(x), hi, dtype), owner.name, device=owner.device_of(x))
    return xp.where(at_top, top, below_top)


def _refused(
    error: type[MemoryConversionError], owner: Framework, dtype: str, reason: str
) -> MemoryConversionError:
    words = f"the result cannot become {dtype}: {reason}"
    return error(words, source_type=owner.name, target_type=owner.name, reason=reason)
