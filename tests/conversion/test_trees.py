"""convert_tree: every array inside nested containers, and nothing else."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeNotSupportedError, GradientError, MemoryConversionError, MemoryType, convert_tree
from tests import matrix_data as data
from tests.helpers import require

optree = pytest.importorskip("optree")


class Point(NamedTuple):
    x: Any
    y: Any


@optree.dataclasses.dataclass(namespace="arraybridge")
class Sample:
    pixels: Any
    label: str


@dataclasses.dataclass
class Unregistered:
    pixels: Any


def is_torch(x: Any) -> bool:
    return data.framework_of(x) == "torch"


def test_all_containers_at_once() -> None:
    require("torch")
    a, b, c, d, e = (np.arange(3.0) + i for i in range(5))
    marker, function = object(), len
    tree = {
        "z": [a, 1, "text", None, marker],
        "a": (b, {"deep": [[(c,)]]}),
        "point": Point(d, 2.5),
        "sample": Sample(e, "cell"),
        "rest": function,
    }
    result = convert_tree(tree, "torch")
    assert list(result) == ["z", "a", "point", "sample", "rest"]
    assert [type(result[key]) for key in result] == [list, tuple, Point, Sample, type(len)]
    found = (result["z"][0], result["a"][0], result["a"][1]["deep"][0][0][0], result["point"].x)
    for tensor, array in zip((*found, result["sample"].pixels), (a, b, c, d, e), strict=True):
        assert is_torch(tensor)
        assert data.address(tensor) == data.address(array)
    assert result["z"][1:4] == [1, "text", None]
    assert result["z"][4] is marker
    assert result["rest"] is len
    assert result["point"].y == 2.5
    assert result["sample"].label == "cell"
    # The tree that was given stays as it was.
    assert tree["z"][0] is a
    assert tree["point"] == Point(d, 2.5)


@pytest.mark.parametrize("keys", [["b", "a", "c"], [3, 1, 2], ["b", 1, None, (2, "x")]])
def test_dicts_keep_their_order(keys: list[Any]) -> None:
    require("torch")
    for make in (dict, OrderedDict):
        result = convert_tree(make((key, np.array([i])) for i, key in enumerate(keys)), "torch")
        assert type(result) is make
        assert list(result) == keys
        assert [int(tensor[0]) for tensor in result.values()] == list(range(len(keys)))


def test_an_ordered_dict_that_was_reordered_keeps_its_order() -> None:
    require("torch")
    tree = OrderedDict(a=np.array([0]), b=np.array([1]))
    tree.move_to_end("a")
    result = convert_tree(tree, "torch")
    assert type(result) is OrderedDict
    assert [(key, int(tensor[0])) for key, tensor in result.items()] == [("b", 1), ("a", 0)]


def test_a_defaultdict_keeps_its_factory() -> None:
    require("torch")
    tree = defaultdict(list, {"z": np.array([1]), "a": np.array([2])})
    result = convert_tree(tree, "torch")
    assert type(result) is defaultdict
    assert result.default_factory is list
    assert list(result) == ["z", "a"]
    assert is_torch(result["z"])


def test_a_deque_keeps_its_bound() -> None:
    require("torch")
    result = convert_tree(deque([np.array([1]), 2], maxlen=5), "torch")
    assert type(result) is deque
    assert result.maxlen == 5
    assert is_torch(result[0])
    assert result[1] == 2


@pytest.mark.parametrize("empty", [{}, [], (), OrderedDict(), deque(), {"a": []}, [(), {}], None])
def test_empty_containers_stay(empty: Any) -> None:
    result = convert_tree(empty, "numpy")
    assert result == empty
    assert type(result) is type(empty)


@pytest.mark.parametrize("leaf", [None, 3, 2.5, "text", b"bytes", object(), {1, 2}, range(3), np.float32(1)])
def test_what_is_no_array_stays_the_very_object(leaf: Any) -> None:
    require("torch")
    assert convert_tree(leaf, "torch") is leaf
    assert convert_tree([leaf], "torch")[0] is leaf
    assert convert_tree({"a": (leaf, np.zeros(1))}, "torch")["a"][0] is leaf


def test_what_is_registered_nowhere_stays() -> None:
    require("torch")
    thing = Unregistered(np.zeros(2))
    assert convert_tree([thing], "torch")[0] is thing
    assert isinstance(thing.pixels, np.ndarray)


def test_a_bare_array_is_a_tree() -> None:
    require("torch")
    x = np.arange(3)
    assert data.address(convert_tree(x, "torch")) == data.address(x)
    assert convert_tree(x, "numpy") is x


def test_arrays_of_all_frameworks_in_one_tree() -> None:
    arrays = {}
    for framework in ("numpy", "torch", "jax", "tensorflow"):
        require(framework)
        arrays[framework] = data.build(framework, "aligned", "float32").array
    for target, own in arrays.items():
        result = convert_tree(arrays, target)
        for source, array in arrays.items():
            assert data.framework_of(result[source]) == target
            assert data.bits(result[source]) == data.bits(array)
        assert result[target] is own


def test_the_same_array_twice_stays_in_one_memory() -> None:
    require("torch")
    x = np.arange(3)
    first, second = convert_tree([x, x], "torch")
    assert data.address(first) == data.address(second)


def test_options_hold_for_every_array() -> None:
    require("torch")
    x, y = np.arange(3.0), np.arange(2)
    copied = convert_tree({"x": x, "y": [y]}, MemoryType.TORCH, copy=True)
    assert data.address(copied["x"]) != data.address(x)
    assert data.address(copied["y"][0]) != data.address(y)
    cast = convert_tree([x, y], "torch", dtype="float32")
    assert [data.dtype_name(tensor) for tensor in cast] == ["float32", "float32"]
    shared = convert_tree([x, y], "torch", copy=False, device="cpu")
    assert [data.address(t) for t in shared] == [data.address(x), data.address(y)]


def test_gradients_are_minded_in_trees() -> None:
    torch = require("torch")
    tree = {"weights": [torch.ones(2, requires_grad=True)]}
    with pytest.raises(GradientError):
        convert_tree(tree, "numpy")
    assert convert_tree(tree, "numpy", grad="detach")["weights"][0].tolist() == [1.0, 1.0]
    assert convert_tree(tree, "torch")["weights"][0] is tree["weights"][0]


def test_an_error_says_where_in_the_tree() -> None:
    require("torch")
    tree = {"ok": np.zeros(2), "batch": [np.zeros(1), {"names": (1, np.array(["a"]))}]}
    with pytest.raises(DtypeNotSupportedError) as caught:
        convert_tree(tree, "torch")
    notes = "\n".join(caught.value.__notes__)
    assert "['batch'][1]['names'][1]" in notes


def test_an_error_names_a_field_of_a_dataclass_or_named_tuple() -> None:
    require("torch")
    bad = np.ma.masked_array([1], [True])
    for tree, where in (
        ({"p": Point(1, bad)}, "'p'"),
        ([Sample(bad, "x")], "[0]"),
        (deque([1, bad]), "[1]"),
        (OrderedDict(a=bad), "'a'"),
    ):
        with pytest.raises(MemoryConversionError) as caught:
            convert_tree(tree, "torch")
        assert where in "\n".join(caught.value.__notes__)


def test_the_target_is_checked_also_for_a_tree_without_arrays() -> None:
    with pytest.raises(ValueError, match="did you mean 'torch'"):
        convert_tree({"a": 1}, "torhc")
    with pytest.raises(TypeError):
        convert_tree([], 3)  # type: ignore[arg-type]


def test_a_wrong_gpu_id_is_refused_in_trees() -> None:
    with pytest.raises(ValueError, match="gpu_id"):
        convert_tree([np.zeros(2)], "numpy", -1)


def test_a_deep_tree() -> None:
    require("torch")
    tree: Any = np.arange(2)
    for _ in range(200):
        tree = [tree]
    result = convert_tree(tree, "torch")
    for _ in range(200):
        (result,) = result
    assert is_torch(result)


def test_devices_in_trees() -> None:
    require("pyclesperanto")
    if len(arraybridge.framework("pyclesperanto").devices()) < 2:
        pytest.skip("OpenCL has one device here")
    result = convert_tree({"a": np.ones(2, np.float32), "n": 1}, "pyclesperanto", 1)
    assert arraybridge.device_of(result["a"]) == "opencl:1"
    assert result["n"] == 1
