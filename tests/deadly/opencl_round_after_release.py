"""Arrays of pyclesperanto released while their results live, and results of released sources."""

from __future__ import annotations

import gc

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import report
from tests.matrix_data import bits

VALUES = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)

for target in ("numpy", "torch", "jax", "tensorflow"):
    source = convert_memory(VALUES.copy(), "pyclesperanto")
    result = convert_memory(source, target)
    del source
    gc.collect()
    litter = [convert_memory(np.zeros_like(VALUES), "pyclesperanto") for _ in range(8)]
    report(target, "right" if bits(result) == VALUES.tobytes() else "WRONG")
    del litter
