"""A tensor of rank 255 or more aborts TensorFlow; NumPy ends at 64. Right, or refused: never the end."""

from __future__ import annotations

import numpy as np
import torch

from arraybridge import convert_memory
from tests.deadly._common import outcome_of, report_right
from tests.matrix_data import bits


def arrive(rank: int, target: str) -> str:
    result = convert_memory(torch.full([1] * rank, 7.0), target)
    assert tuple(result.shape) == (1,) * rank
    assert bits(result) == np.float32(7).tobytes()
    return "right"


numpys = 64 if np.__version__ >= "2" else 32
for rank in (numpys, 65, 254, 255, 256, 300):
    for target, most in (("numpy", numpys), ("tensorflow", 254), ("jax", 300)):
        # Between what NumPy holds and the most of a framework either will do.
        allowed = ["right"] if rank == numpys else ["refused"] if rank > most else ["right", "refused"]
        report_right(f"rank {rank} -> {target}", outcome_of(lambda: arrive(rank, target)) in allowed)  # noqa: B023

array = np.full([1] * numpys, 7.0, np.float32)
for target in ("torch", "jax", "tensorflow"):
    result = convert_memory(array, target)
    report_right(f"numpy at its most -> {target}", bits(result) == array.tobytes())
