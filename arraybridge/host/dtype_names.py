"""Names of dtypes in NumPy and DLPack, and the NumPy dtype for each name."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from arraybridge.errors import DtypeNotSupportedError

__all__ = ["NUMERIC_KINDS", "PLAIN", "dtype_of", "name_of_any", "np_dtype"]

#: The kinds of NumPy's built-in numeric dtypes.
NUMERIC_KINDS = frozenset("biufc")
#: NumPy's built-in numeric dtypes.
PLAIN = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)

# DLPack codes of dtypes that NumPy does not export, from DLDataTypeCode in dlpack.h (DLPack 1.1). The float8
# codes start at 7.
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
DLPACK_CODES = {"bfloat16": 4, **{f"float8_{kind}": code for code, kind in enumerate(_FLOAT8, 7)}}
#: bfloat16 and the float8 dtypes, for which DLPack has codes.
DLPACK = frozenset(DLPACK_CODES)

#: The dtypes that NumPy supports through ``ml_dtypes``.
EXTENDED = DLPACK | {"int4", "uint4", "int2", "uint2", "float4_e2m1fn"}


def np_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype with a given name. Extended dtypes such as bfloat16 come from ``ml_dtypes``.

    Raises:
        DtypeNotSupportedError: If the dtype needs ``ml_dtypes`` and that package is not installed.
        TypeError: If there is no such dtype.
    """
    if name not in EXTENDED:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeNotSupportedError(
            f"NumPy supports {name} only through the package ml_dtypes, which is not installed.",
            reason="ml_dtypes is not installed",
            advice='Run pip install ml_dtypes, or pass dtype="float32" to ask for a cast.',
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def name_of_any(dtype: Any) -> str:
    """Return the name of a dtype, which may be a name, a NumPy dtype, or a framework's own dtype."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if isinstance(dtype, (type, np.dtype)):
        with suppress(TypeError):
            return np.dtype(dtype).name
    # str() of a PyTorch dtype is "torch.float32"; a TensorFlow dtype has a name.
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype for a name, a type, or a framework's own dtype such as ``torch.float32``.

    Raises:
        DtypeNotSupportedError: If the dtype needs ``ml_dtypes`` and that package is not installed.
        TypeError: If there is no such dtype.
    """
    if isinstance(dtype, np.dtype):
        return dtype
    try:
        return np.dtype(dtype) if isinstance(dtype, type) else np_dtype(name_of_any(dtype))
    except DtypeNotSupportedError:
        raise
    except (TypeError, ValueError, SyntaxError) as error:
        # NumPy parses "f4,," as Python code (numpy/numpy#25434).
        raise TypeError(
            f"dtype={dtype!r} is not understood. Pass a NumPy dtype, the name of one, or a dtype such as"
            " torch.float32."
        ) from error


@lru_cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name`` from a cache. NumPy takes 1 µs to compute the name on each access."""
    return dtype.name
