"""PyTorch's dtypes by the names that NumPy has for them."""

from __future__ import annotations

import torch

from arraybridge.frameworks.hostmemory import EXTENDED

__all__ = ["CARRIERS", "DTYPES", "NAMES", "PLAIN"]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)  # float8_e8m0fnu came with torch 2.7
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Real numbers of NumPy, which need no look at the tensor's bits.
PLAIN = frozenset(dtype for name, dtype in DTYPES.items() if name not in EXTENDED and not dtype.is_complex)

#: As what the others travel: neither NumPy nor CUDA's array interface has a name for them.
CARRIERS = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in DTYPES.items()
    if name in EXTENDED
}
