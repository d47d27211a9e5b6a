"""torch.from_dlpack() of a pyclesperanto array segfaults: to every framework, copied, shared and released."""

from __future__ import annotations

import gc

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import outcome_of, report, report_right
from tests.matrix_data import bits

VALUES = np.arange(1 << 16, dtype=np.float32).reshape(16, 64, 64)

for target in ("numpy", "torch", "jax", "tensorflow", "pyclesperanto"):
    array = convert_memory(VALUES, "pyclesperanto")
    for copy in (None, True):
        result = convert_memory(array, target, copy=copy)
        report_right(f"{target}, copy={copy}", bits(result) == VALUES.tobytes())
    if target != "pyclesperanto":
        report(f"{target}, copy=False", outcome_of(lambda: convert_memory(array, target, copy=False)))  # noqa: B023
        result = convert_memory(array, target)
        del array
        gc.collect()
        litter = [convert_memory(np.zeros_like(VALUES), "pyclesperanto") for _ in range(8)]
        report_right(f"{target}, released", bits(result) == VALUES.tobytes())
        del litter
