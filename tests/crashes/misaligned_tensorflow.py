"""TensorFlow imports memory of any alignment, but aborts in most operations: convert, then compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import torch

from arraybridge import convert_memory
from tests.matrix_data import aligned_bytes, bits


def compute(tensor: Any) -> float:
    """Run a few operations that check the alignment of their operands."""
    kernel = tf.matmul(tf.reshape(tensor, (1, -1)), tf.reshape(tensor, (-1, 1)))
    return float(tf.reduce_sum(tensor * 2.0 + tensor)) + 0.0 * float(kernel[0, 0])


COUNT = 1000
VALUES = np.arange(COUNT, dtype=np.float32)
WANTED = float(3.0 * VALUES.sum())

for offset in (1, 2, 4, 8, 16, 20, 32, 48, 60):
    memory = aligned_bytes(4 * COUNT, offset).view(np.float32)
    memory[...] = VALUES
    result = convert_memory(memory, "tensorflow")
    assert compute(result) == WANTED, f"NumPy, {offset} bytes"

for start in (1, 3, 4, 15, 17):
    whole = torch.zeros(COUNT + start)
    whole[start:] = torch.arange(COUNT)
    result = convert_memory(whole[start:], "tensorflow")
    assert compute(result) == WANTED, f"torch[{start}:]"


def misaligned() -> tuple[Any, Any]:
    """Return a misaligned TensorFlow tensor, as any DLPack import may create it, and the memory's owner.

    TensorFlow's kernels abort the process on such memory.
    """
    whole = torch.zeros(COUNT + 1)
    whole[1:] = torch.arange(COUNT)
    tensor = tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(whole[1:]))
    return tensor, whole


for target in ("numpy", "torch", "jax", "tensorflow"):
    for copy in (None, True):
        tensor, whole = misaligned()
        result = convert_memory(tensor, target, copy=copy)
        if copy:
            whole.zero_()
        assert bits(result) == VALUES.tobytes(), f"misaligned tensor to {target}, copy={copy}"
        if target == "tensorflow" and copy:
            assert compute(result) == WANTED

tensor, whole = misaligned()
cast = convert_memory(tensor, "tensorflow", dtype="float64")
assert bits(cast) == VALUES.astype(np.float64).tobytes(), "misaligned tensor, cast"
