"""Two frameworks with two cards each, which share their memory, and one that shares with nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    Device,
    DeviceNotFoundError,
    MissingGpuWarning,
    convert_memory,
    convert_tree,
    device_of,
    explain,
    register,
    settings,
    trace,
)
from arraybridge.frameworks.parts import Pool
from tests import matrix_data as data
from tests.cards import CardArray, CardFramework
from tests.helpers import registry_kept, require


class CardPool(Pool):
    """The free memory of two cards."""

    def __init__(self) -> None:
        self.free = (100, 900)

    def free_memory_of(self, device: Device) -> int:
        return self.free[device.index]


class PluginCards(CardFramework):
    """What the arrays of a framework with two cards would need."""

    has_host = True

    def __init__(self) -> None:
        super().__init__()
        self.pool: CardPool = CardPool()

    def to_device(self, x: CardArray, device: Device) -> CardArray:
        self.done.append(f"{self.device_of(x)} to {device}")
        return self.array(x.values.copy(), -1 if device.kind == "cpu" else device.index)

    def adopt(self, x: CardArray, source: arraybridge.Framework, device: Device) -> CardArray:
        self.done.append(f"adopt from {source.name}")
        return self.array(x.values, x.card)

    def copy(self, x: CardArray) -> CardArray:
        self.done.append("copy")
        return self.array(x.values.copy(), x.card)

    def cast(self, x: CardArray, dtype: str) -> CardArray:
        return self.array(x.values.astype(dtype), x.card)


class RedCard(CardArray):
    __module__ = "redcards"


class BlueCard(CardArray):
    __module__ = "bluecards"


class LoneCard(CardArray):
    __module__ = "lonecards"


class Red(PluginCards):
    name, modules, array, dlpack_device = "red", ("redcards",), RedCard, 99


class Blue(PluginCards):
    name, modules, array, dlpack_device = "blue", ("bluecards",), BlueCard, 99

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        return "blue wants no negative strides" if any(step < 0 for step in strides) else ""


class Lone(PluginCards):
    """Cards that no other framework reaches, and no arrays on the host."""

    name, modules, array, has_host = "lone", ("lonecards",), LoneCard, False

    def __init__(self) -> None:
        super().__init__()
        self.current = 1


@pytest.fixture
def red() -> Iterator[Red]:
    with registry_kept():
        register(Blue())
        register(Lone())
        yield register(Red())  # type: ignore[misc]


def values() -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3)


def check_route(route: Any, wanted: str) -> None:
    """``"method device copies"``; it shares memory when it makes no copies."""
    assert f"{route.method} {route.device} {route.copies}" == wanted
    assert route.shares_memory == (route.copies == 0)
    assert route.nbytes == 48


@pytest.mark.parametrize("gpu_id", [0, 1])
def test_from_the_host_to_a_card(red: Red, gpu_id: int) -> None:
    x = values()
    check_route(explain(x, "red", gpu_id), f"device gpu:{gpu_id} 1")
    assert red.done == []
    card = convert_memory(x, "red", gpu_id)
    assert (type(card), str(device_of(card))) == (RedCard, f"gpu:{gpu_id}")
    x[...] = 0
    assert card.values.tolist() == values().tolist()
    assert red.done == [f"to gpu:{gpu_id}"]
    for words in (f"gpu:{gpu_id}", f"cuda:{gpu_id}", Device("gpu", gpu_id)):
        assert device_of(convert_memory(x, "red", device=words)) == f"gpu:{gpu_id}"
    with pytest.raises(CopyRequiredError, match="memory of its own"):
        convert_memory(x, "red", gpu_id, copy=False)
    with pytest.raises(DeviceNotFoundError, match=r"cpu, gpu:0, gpu:1"):
        convert_memory(x, "red", 2)
    with settings(missing_gpu="host"), pytest.warns(MissingGpuWarning):
        assert device_of(convert_memory(x, "red", 2)) == "cpu"


def test_auto_is_the_card_with_the_most_free_memory(red: Red) -> None:
    assert explain(values(), "red", "auto").device == "gpu:1"
    assert device_of(convert_memory(values(), "red", gpu_id="auto")) == "gpu:1"
    red.pool.free = (901, 900)
    assert device_of(convert_memory(values(), "red", "auto")) == "gpu:0"


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_from_a_card_to_the_host(red: Red, target: str) -> None:
    require(target)
    card = RedCard(values(), 1)
    check_route(explain(card, target), "host cpu 1")
    result = convert_memory(card, target)
    assert data.bits(result) == values().tobytes()
    assert device_of(result) == "cpu"
    with pytest.raises(CopyRequiredError):
        convert_memory(card, target, copy=False)


def test_two_frameworks_share_the_memory_of_a_card(red: Red) -> None:
    card = RedCard(values(), 1)
    assert convert_memory(card, "red") is card
    assert convert_memory(card, "red", 1) is card
    check_route(explain(card, "blue"), "dlpack gpu:1 0")
    for _ in range(2):
        other = convert_memory(card, "blue", copy=False)
        assert (type(other), other.values is card.values, other.card) == (BlueCard, True, 1)
    assert arraybridge.framework("blue").done == ["adopt from red"] * 2  # type: ignore[attr-defined]
    assert convert_memory(other, "red", 1).values is card.values
    red.done.clear()
    # A copy on the card is made once.
    for target in ("blue", "red"):
        check_route(explain(card, target, copy=True), "device gpu:1 1")
        assert not np.shares_memory(convert_memory(card, target, copy=True).values, card.values)
    assert red.done == ["copy", "copy"]


def test_strides_that_the_other_framework_lacks(red: Red) -> None:
    card = RedCard(values()[::-1], 0)
    route = explain(card, "blue")
    check_route(route, "device gpu:0 1")
    assert "negative strides" in route.reason
    other = convert_memory(card, "blue")
    assert other.values.tolist() == values()[::-1].tolist()
    assert not np.shares_memory(other.values, card.values)
    with pytest.raises(CopyRequiredError, match="negative strides"):
        convert_memory(card, "blue", copy=False)
    check_route(explain(BlueCard(values()[::-1], 0), "red"), "dlpack gpu:0 0")  # welcome the other way round


def test_from_one_card_to_another(red: Red) -> None:
    card = RedCard(values(), 0)
    check_route(explain(card, "red", 1), "device gpu:1 1")
    moved = convert_memory(card, "red", 1)
    assert (moved.card, moved.values.tolist()) == (1, values().tolist())
    assert red.done == ["gpu:0 to gpu:1"]
    with pytest.raises(CopyRequiredError):
        convert_memory(card, "red", 1, copy=False)
    check_route(explain(card, "blue", 1), "device gpu:1 1")
    other = convert_memory(card, "blue", 1)
    assert (type(other), other.card) == (BlueCard, 1)
    assert not np.shares_memory(other.values, card.values)


def test_between_cards_that_share_nothing(red: Red) -> None:
    # A framework without host arrays takes what comes from the host to its current device.
    check_route(explain(values(), "lone"), "device gpu:1 1")
    card = RedCard(values(), 1)
    check_route(explain(card, "lone"), "host gpu:1 2")
    lone = convert_memory(card, "lone")
    assert (type(lone), lone.values.tolist()) == (LoneCard, values().tolist())
    check_route(explain(lone, "lone", 0), "host gpu:0 2")
    assert convert_memory(lone, "lone", 0).card == 0
    check_route(explain(lone, "red"), "host cpu 1")
    check_route(explain(lone, "red", 1), "host gpu:1 2")
    assert device_of(convert_memory(lone, "red")) == "cpu"


def test_to_cpu_and_to_gpu_on_cards(red: Red) -> None:
    card = RedCard(values(), 0)
    assert arraybridge.to_gpu(card) is card
    assert arraybridge.to_gpu(card, 1).card == arraybridge.to_gpu(card, "auto").card == 1
    home = arraybridge.to_cpu(card)
    assert (type(home), home.card) == (RedCard, -1)
    assert arraybridge.to_gpu(home, 1).card == 1
    assert arraybridge.to_cpu(home) is home
    with pytest.raises(DeviceNotFoundError, match="to_numpy"):
        arraybridge.to_cpu(LoneCard(values(), 0))


def test_casts_on_cards(red: Red) -> None:
    card = RedCard(values(), 0)
    for target, gpu_id, copies in (("red", None, 1), ("blue", None, 1), ("red", 1, 2), ("numpy", None, 2)):
        route = explain(card, target, gpu_id, dtype="float32")
        assert route.copies == copies
        assert "cast" in route.reason
        result = convert_memory(card, target, gpu_id, dtype="float32")
        got = result if target == "numpy" else result.values
        assert (got.dtype, got.tolist()) == (np.float32, values().tolist())
        with pytest.raises(CopyRequiredError):
            convert_memory(card, target, gpu_id, dtype="float32", copy=False)


def test_trees_and_traces_with_cards(red: Red) -> None:
    with trace() as log:
        tree = convert_tree({"a": values(), "b": (RedCard(values(), 0), 1)}, "red", 1)
    assert [tree["a"].card, tree["b"][0].card, tree["b"][1]] == [1, 1, 1]
    assert log.total_bytes_copied == 96
    assert [str(record.device) for record in log.records] == ["gpu:1", "gpu:1"]
