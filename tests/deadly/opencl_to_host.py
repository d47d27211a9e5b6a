"""torch.from_dlpack() of a pyclesperanto array segfaults: to every framework, with and without copy=."""

from __future__ import annotations

import numpy as np

from arraybridge import convert_memory
from tests.deadly._common import outcome_of, report
from tests.matrix_data import bits

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

for target in ("numpy", "torch", "jax", "tensorflow", "pyclesperanto"):
    for copy in (None, True):
        array = convert_memory(VALUES, "pyclesperanto")
        result = convert_memory(array, target, copy=copy)
        report(f"{target}, copy={copy}", "right" if bits(result) == VALUES.tobytes() else "WRONG")
    if target != "pyclesperanto":
        report(f"{target}, copy=False", outcome_of(lambda: convert_memory(array, target, copy=False)))  # noqa: B023
