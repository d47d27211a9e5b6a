"""Convert high ranks or raise: rank 255 aborts TensorFlow, and NumPy supports at most rank 64."""

from __future__ import annotations

import numpy as np
import torch

from arraybridge import MemoryConversionError, convert_memory
from tests.matrix_data import bits

numpys = 64 if np.__version__ >= "2" else 32
for rank in (numpys, 65, 254, 255, 256, 300):
    for target, most in (("numpy", numpys), ("tensorflow", 254), ("jax", 300)):
        try:
            result = convert_memory(torch.full([1] * rank, 7.0), target)
        except MemoryConversionError:
            assert rank > numpys, f"{rank} axes were rejected for {target}"
            continue
        assert rank <= most, f"{rank} axes were converted to {target}"
        assert tuple(result.shape) == (1,) * rank
        assert bits(result) == np.float32(7).tobytes()

array = np.full([1] * numpys, 7.0, np.float32)
for target in ("torch", "jax", "tensorflow"):
    assert bits(convert_memory(array, target)) == array.tobytes(), target
