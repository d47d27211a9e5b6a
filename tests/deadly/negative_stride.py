"""torch.from_dlpack() of a negative stride aborts: reversed and mixed strides, to each framework."""

from __future__ import annotations

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import report_right
from tests.matrix_data import bits

CASES = {
    "reversed": np.arange(12.0)[::-1],
    "rows": np.arange(12.0).reshape(3, 4)[::-1],
    "columns": np.arange(12.0).reshape(3, 4)[:, ::-1],
    "both": np.arange(12.0).reshape(3, 4)[::-1, ::-1],
    "stepped": np.arange(12.0)[::-3],
    "transposed": np.arange(12.0).reshape(3, 4)[::-1].T,
    "one element": np.arange(1.0)[::-1],
    "no element": np.arange(0.0)[::-1],
    "float16": np.arange(12, dtype=np.float16)[::-1],
    "float32, read-only": np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3))[:, ::-1],
}

for name, array in CASES.items():
    for target in ("torch", "jax", "tensorflow"):
        result = convert_memory(array, target)
        right = bits(result) == array.tobytes() and tuple(result.shape) == array.shape
        report_right(f"{name} -> {target}", right)
