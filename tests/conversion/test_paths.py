"""Every form of a call costs about the same once it was made before, counted in functions entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory
from tests.counting import functions_entered
from tests.helpers import require

X = np.zeros(16, np.float32)
# The door, and the functions of its plan.
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (lambda: convert_memory(X, "torch"), 2),
    "short form": (lambda: arraybridge.to_torch(X), 3),
    "transposed": (lambda: convert_memory(X.reshape(4, 4).T, "torch"), 2),
    "declared": (lambda: convert_memory(X, "numpy", "torch"), 3),
    "declared by keyword": (lambda: convert_memory(X, source_type="numpy", target_type="torch"), 3),
    "device": (lambda: convert_memory(X, "torch", device="cpu"), 3),
    "copy=False": (lambda: convert_memory(X, "torch", copy=False), 3),
    "copy=True": (lambda: convert_memory(X, "torch", copy=True), 9),
    "cast": (lambda: convert_memory(X, "torch", dtype="float64"), 10),
    "reversed": (lambda: convert_memory(X[::-1], "torch"), 10),
    "big-endian": (lambda: convert_memory(X.astype(">f4"), "torch"), 10),
    "read-only": (lambda: convert_memory(np.broadcast_to(np.float32(1), (3,)), "torch"), 10),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_was_made_before_enters_few_functions(what: str) -> None:
    require("torch")
    call, most = CALLS[what]
    for _ in range(3):
        call()
    entered = functions_entered(call)
    assert "decide.py:decide" not in entered
    assert len(entered) <= most, entered
