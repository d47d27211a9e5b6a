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
integer dtype and are refused. What becomes integers is read and scaled by NumPy on the host, in float64, and
goes back to where the array lives; a cast stays there.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, TypeAlias

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks.base import Framework

__all__ = ["DtypeConversion"]


#: The names of the members of `DtypeConversion`, which the decorators accept too.
DtypeConversionName: TypeAlias = Literal[
    "preserve_input",
    "native_output",
    "uint8",
    "uint16",
    "uint32",
    "int8",
    "int16",
    "int32",
    "float16",
    "float32",
    "float64",
]


class DtypeConversion(Enum):
    """Which dtype the arrays of a result are to have; by default they keep what the function made.

    The docstring of `arraybridge.decorators.dtype_conversion` states the rule by which the values follow.

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
        return np.dtype(str(self.value)).type


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
        raise _conversion_error(DtypeNotSupportedError, owner, dtype, reason)
    if not _is_integer(dtype) or 0 in owner.shape(x):
        with owner.runtime.x64_context():
            return owner.cast(x, dtype)
    host = np.asarray(convert_memory(x, "numpy", grad="detach"))  # integers have no gradient
    device = owner.devices.device_of(x)
    return convert_memory(_integers(host, owner, source, dtype), owner.name, device=device)


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _integers(x: np.ndarray, owner: Framework, source: str, dtype: str) -> np.ndarray:
    """Integers as they are, where the dtype has them; floating numbers scaled into its range."""
    lo, hi = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    values = x if _is_integer(source) else x.astype(np.float64)
    least = values.min().item()
    most = values.max().item()
    if _is_integer(source):
        if lo <= least and most <= hi:
            return x.astype(dtype)
        reason = f"it holds {least} to {most}, and {dtype} {lo} to {hi}; return floating numbers to be scaled"
        raise _conversion_error(ArrayNotSupportedError, owner, dtype, reason)
    if not np.isfinite(most - least):
        reason = "it holds NaN or infinity, or numbers too far apart to be scaled; nan_to_num replaces them"
        raise _conversion_error(ArrayNotSupportedError, owner, dtype, reason)
    scaled = np.round((values - least) / ((most - least) or 1.0) * float(hi - lo) + float(lo))
    # hi of the 64-bit dtypes is no float64, and the next one above overflows. What reaches it gets hi itself.
    at_top = scaled >= float(hi)
    return np.where(at_top, np.array(hi, dtype), np.where(at_top, lo, scaled).astype(dtype))


def _conversion_error(
    error: type[MemoryConversionError], owner: Framework, dtype: str, reason: str
) -> Exception:
    words = f"the result cannot become {dtype}: {reason}"
    return error(words, source_type=owner.name, target_type=owner.name, reason=reason)
