"""A tensor of rank 255 or more aborts TensorFlow; NumPy ends at 64. Right, or refused: never the end."""

from __future__ import annotations

import numpy as np
import torch

from arraybridge import convert_memory
from tests.deadly._common import outcome_of, report
from tests.matrix_data import bits


def arrive(rank: int, target: str) -> str:
    result = convert_memory(torch.full([1] * rank, 7.0), target)
    assert tuple(result.shape) == (1,) * rank
    assert bits(result) == np.float32(7).tobytes()
    return "right"


most = 64 if np.__version__ >= "2" else 32
for rank in (most, 65, 254, 255, 256, 300):
    for target in ("numpy", "jax", "tensorflow"):
        report(f"rank {rank} -> {target}", outcome_of(lambda: arrive(rank, target)))  # noqa: B023

array = np.full([1] * most, 7.0, np.float32)
for target in ("torch", "jax", "tensorflow"):
    result = convert_memory(array, target)
    report(f"numpy at its most -> {target}", "right" if bits(result) == array.tobytes() else "WRONG")
