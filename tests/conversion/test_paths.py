"""How long the path of a conversion is, counted in functions entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory
from tests.counting import functions_entered
from tests.helpers import require


def warm(call: Callable[[], Any]) -> list[str]:
    for _ in range(3):
        call()
    return functions_entered(call)


def test_the_counter_counts_the_package_alone() -> None:
    assert functions_entered(lambda: sorted([3, 1])) == []
    entered = functions_entered(lambda: arraybridge.MemoryType("torch") and arraybridge.Device.parse("cpu:1"))
    assert entered == ["types.py:parse"]


def test_a_lazily_conjugated_tensor_to_numpy() -> None:
    torch = require("torch")
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    entered = warm(lambda: convert_memory(x, "numpy"))
    assert len(entered) <= 20, entered
    np.testing.assert_array_equal(convert_memory(x, "numpy"), np.array([1 - 2j, 3 + 4j], np.complex64))


def test_the_careful_path_itself_is_short() -> None:
    """Where nothing is planned, as in `explain`, which asks the same questions."""
    torch = require("torch")
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    entered = warm(lambda: arraybridge.explain(x, "numpy"))
    assert len(entered) <= 25, entered
    files = [one.partition(":")[0] for one in entered]
    entries = [file for i, file in enumerate(files) if not i or file != files[i - 1]]
    assert entries.count("decide.py") <= 6, entries


@pytest.mark.parametrize(
    "options",
    [{"copy": True}, {"copy": False}, {"device": "cpu"}, {"grad": "detach"}, {"dtype": "float32"}],
    ids=str,
)
def test_options_are_planned(options: dict[str, Any]) -> None:
    require("torch")
    x = np.zeros(16, np.float32)
    entered = warm(lambda: convert_memory(x, "torch", **options))
    assert "decide.py:decide" not in entered
    assert len(entered) <= 12, entered


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0)[::-1], np.arange(6, dtype=">f4"), np.broadcast_to(np.float32(1), (3,))],
    ids=["reversed", "big-endian", "read-only"],
)
def test_arrays_that_need_care_are_planned(array: np.ndarray) -> None:
    require("torch")
    entered = warm(lambda: convert_memory(array, "torch"))
    assert "decide.py:decide" not in entered
    assert len(entered) <= 16, entered


def test_a_declared_source_is_planned() -> None:
    require("torch")
    x = np.zeros(16, np.float32)
    for call in (
        lambda: convert_memory(x, "numpy", "torch"),
        lambda: convert_memory(x, source_type="numpy", target_type="torch"),
    ):
        entered = warm(call)
        assert "decide.py:decide" not in entered
        assert len(entered) <= 10, entered
