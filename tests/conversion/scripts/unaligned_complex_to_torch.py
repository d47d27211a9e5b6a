"""Use complex128 arrays in torch that lie where NumPy puts them: 8-byte aligned is aligned to NumPy."""

import sys
from typing import Any

import numpy as np

import arraybridge

for offset in (8, 4, 1):
    raw = np.zeros(48 * 17 + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64 + offset
    array = raw[start : start + 48 * 16].view(np.complex128)
    array[...] = np.arange(48) * (1 + 2j)
    views: tuple[Any, ...] = (array, array[::3], array.reshape(6, 8).T, array[1:2])
    for view in views:
        for _ in range(2):  # the second call has a plan
            tensor = arraybridge.convert_memory(view, "torch")
            # Each of these ends the process on memory that torch thinks is aligned to 16 bytes.
            if tensor.clone().tolist() != view.tolist() or tensor.flatten()[-1].item() != view.ravel()[-1]:
                sys.exit("wrong values")
            tensor.fill_(1)
            tensor.zero_()
            view[...] = np.arange(view.size).reshape(view.shape) * (1 + 2j)
print("right")
