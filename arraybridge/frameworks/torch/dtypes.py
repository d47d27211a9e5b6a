"""PyTorch's dtypes by the names that NumPy has for them."""

from __future__ import annotations

import torch

from arraybridge.frameworks import hostmemory

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *hostmemory.PLAIN,
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)  # float8_e8m0fnu came with torch 2.7
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Real numbers of NumPy, which need no look at the tensor's bits.
REAL = frozenset(DTYPES[name] for name in hostmemory.PLAIN if not name.startswith("complex"))

#: As what the others travel: neither NumPy nor CUDA's array interface has a name for them.
CARRIERS = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in DTYPES.items()
    if name in hostmemory.EXTENDED
}
