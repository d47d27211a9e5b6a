"""Conversion of the dtype of results.

The rule for each pair of dtypes:

==================  ==========================================================================
floating → integer  ``round((x - min) / (max - min) * (hi - lo) + lo)``: scales the range of the
                    data, ``min`` to ``max``, to the range of the dtype, ``lo`` to ``hi``. Rounds
                    to the nearest integer, and halves to the nearest even integer. If all values
                    are equal, they all become ``lo``.
integer → integer   Keeps the values. Raises `ArrayNotSupportedError` for values outside the range
                    of the dtype. Bool counts as an integer dtype with the values 0 and 1.
any → floating      Casts as the framework of the array does.
floating → bool     Raises `DtypeNotSupportedError`, and so does complex to any real dtype.
==================  ==========================================================================

Arrays that already have the dtype are unchanged. NaN and infinity cannot become integers and raise
`ArrayNotSupportedError`. NumPy scales values to integers on the host, in float64; the result is copied back
to the device of the array. Casts run on that device.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, TypeAlias

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError, nearest
from arraybridge.formatting import one_of
from arraybridge.interface.framework import Framework

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
    """The dtype of the arrays in the result of a decorated function. By default, they keep their dtype.

    ``help("arraybridge.decorators.dtype_conversion")`` states how the values are converted.

    >>> DtypeConversion("uint8")
    <DtypeConversion.UINT8: 'uint8'>
    """

    #: The dtype of the first array argument.
    PRESERVE_INPUT = "preserve_input"
    #: The dtype that the decorated function returns. This is the default.
    NATIVE_OUTPUT = "native_output"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @classmethod
    def _missing_(cls, value: object) -> DtypeConversion:
        """Return the member that has this name, in upper or lower case."""
        members = {member.value: member for member in cls}
        text = value.lower() if isinstance(value, str) else ""
        if text in members:
            return members[text]
        hint = nearest(text, members)
        raise ValueError(f"{value!r} is not a DtypeConversion{hint}. Pass {one_of(members)}.")

    @property
    def dtype(self) -> str | None:
        """The NumPy name of the dtype; None if the dtype depends on an array.

        >>> DtypeConversion.UINT8.dtype
        'uint8'
        """
        depends = self in (DtypeConversion.PRESERVE_INPUT, DtypeConversion.NATIVE_OUTPUT)
        return None if depends else self.value


def convert_dtype(x: Any, dtype: str) -> Any:
    """Return ``x`` with another dtype, in the same framework and on the same device.

    The table in the docstring of this module states how the values are converted.

    Args:
        x: An array of any framework and any shape.
        dtype: The NumPy name of a dtype.

    Raises:
        DtypeNotSupportedError: If there is no rule for these dtypes, or the framework has no such dtype.
        ArrayNotSupportedError: If ``x`` is traced, has values outside the range of the dtype, or has NaN or
            infinity and the dtype is an integer dtype.

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
        fix = "a comparison, such as abs(x) > 0.5" if dtype == "bool" else "the real part, such as x.real"
        reason = f"there is no rule for {source}"
        raise _dtype_error(DtypeNotSupportedError, owner, dtype, reason, f"Return {fix}.")
    if not _is_integer(dtype) or 0 in owner.shape(x):
        with owner.runtime.x64_context():
            return owner.cast(x, dtype)
    host = np.asarray(convert_memory(x, "numpy", grad="detach"))  # integers have no gradient
    device = owner.devices.device_of(x)
    return convert_memory(_integers(host, owner, source, dtype), owner.name, device=device)


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _integers(x: np.ndarray, owner: Framework, source: str, dtype: str) -> np.ndarray:
    """Return an array of an integer dtype; floating-point values are scaled to the range of the dtype."""
    lo, hi = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    values = x if _is_integer(source) else x.astype(np.float64)
    least = values.min().item()
    most = values.max().item()
    if _is_integer(source):
        if lo <= least and most <= hi:
            return x.astype(dtype)
        reason = f"its values range from {least} to {most}, those of {dtype} from {lo} to {hi}"
        fix = f"Return floating-point values, which are scaled to the range of {dtype}."
        raise _dtype_error(ArrayNotSupportedError, owner, dtype, reason, fix)
    if not np.isfinite(most - least):
        reason = "it contains NaN or infinity, or its values are too far apart to be scaled"
        fix = "Replace them in the function, for example with nan_to_num and clip."
        raise _dtype_error(ArrayNotSupportedError, owner, dtype, reason, fix)
    with np.errstate(all="ignore"):  # denormal numbers underflow
        scaled = np.round((values - least) / ((most - least) or 1.0) * float(hi - lo) + float(lo))
    # float64 cannot represent `hi` of the 64-bit dtypes, and rounds it up to a number that overflows.
    at_top = scaled >= float(hi)
    return np.where(at_top, np.array(hi, dtype), np.where(at_top, lo, scaled).astype(dtype))


def _dtype_error(
    error: type[MemoryConversionError], owner: Framework, dtype: str, reason: str, fix: str
) -> Exception:
    problem = f"Cannot convert the result to {dtype}: {reason}."
    return error(problem, source_type=owner.name, target_type=owner.name, reason=reason, advice=fix)
