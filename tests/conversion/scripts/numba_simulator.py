"""Convert an array of numba.cuda's simulator, which is chosen before numba is imported; prints what came."""

from __future__ import annotations

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from numba import cuda

import arraybridge


@cuda.jit
def add_one(x):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1


there = cuda.to_device(np.arange(4, dtype=np.float32))
add_one[1, 4](there)
x = arraybridge.convert_memory(there, "numpy")
there[0] = 99  # what came is a copy
doubled = arraybridge.numpy(lambda y: y * 2)(there)
route = arraybridge.explain(there, "numpy")
print(x.tolist(), x.dtype, doubled.tolist(), route.shares_memory)
try:
    arraybridge.convert_memory(there, "numpy", copy=False)
except arraybridge.CopyRequiredError:
    print("refused")
