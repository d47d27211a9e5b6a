"""Containers are traversed consistently, rebuilt faithfully, and only their arrays change."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self
from unittest.mock import Mock

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError, convert_tree
from arraybridge.trees import map_arrays
from tests import matrix_data as data
from tests.helpers import output_of, require

optree = pytest.importorskip("optree")


class Pair(NamedTuple):
    left: Any
    right: Any


class Noted:
    """A list with an extra attribute besides its items."""

    def __init__(self, *given: Any, note: str = "") -> None:
        super().__init__(*given)
        self.note = note


class Config(Noted, dict[str, Any]):
    pass


class Encoding(Noted, UserDict[str, Any]):
    """A mapping like the encodings of tokenizers."""


class Rows(list[Any]):
    pass


class Triple(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, a: Any, b: Any, c: Any) -> Self:
        return super().__new__(cls, (a, b, c))


@dataclasses.dataclass
class Plain:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenOne:
    left: Any
    right: Any


@optree.dataclasses.dataclass(namespace="arraybridge")
class Registered:
    left: Any
    right: Any


class Uncopied(dict[str, Any]):
    """A dict that cannot be rebuilt."""

    def __copy__(self) -> Self:
        raise TypeError("cannot be copied")


class FrozenMapping(Mapping[str, Any]):
    """A mapping that can be rebuilt from a dict."""

    def __init__(self, contents: Any) -> None:
        self._contents = dict(contents)

    def __getitem__(self, key: str) -> Any:
        return self._contents[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


@functools.cache
def attrs_class() -> Any:
    attrs = pytest.importorskip("attrs", reason="attrs is not installed")
    return attrs.make_class("AttrsPair", ["left", "right"], eq=False)


@functools.cache
def pydantic_class() -> Any:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
    return pydantic.create_model("PydanticPair", left=(Any, None), right=(Any, None))


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"left": a, "right": b},
    "OrderedDict": lambda a, b: OrderedDict(left=a, right=b),
    "defaultdict": lambda a, b: defaultdict(list, {"left": a, "right": b}),
    "subclass of dict": lambda a, b: Config({"left": a, "right": b}, note="kept"),
    "UserDict": lambda a, b: Encoding({"left": a, "right": b}, note="kept"),
    "list": lambda a, b: [a, b],
    "subclass of list": lambda a, b: Rows([a, b]),
    "tuple": lambda a, b: (a, b),
    "subclass of tuple": lambda a, b: Triple(a, b, None),
    "named tuple": Pair,
    "deque": lambda a, b: deque([a, b], maxlen=4),
    "dataclass": Plain,
    "frozen dataclass": FrozenOne,
    "registered dataclass": Registered,
    "SimpleNamespace": lambda a, b: SimpleNamespace(left=a, right=b),
    "attrs class": lambda a, b: attrs_class()(a, b),
    "pydantic model": lambda a, b: pydantic_class()(left=a, right=b),
    "MappingProxyType": lambda a, b: MappingProxyType({"left": a, "right": b}),
    "ChainMap": lambda a, b: ChainMap({"left": a, "right": b}),
    "Mapping": lambda a, b: FrozenMapping({"left": a, "right": b}),
}
containers = pytest.mark.parametrize("make", CONTAINERS.values(), ids=list(CONTAINERS))


def items(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [container["left"], container["right"]]
    if hasattr(container, "left"):
        return [container.left, container.right]
    return list(container)[:2]


@containers
def test_containers_are_traversed_and_keep_their_type(make: Callable[[Any, Any], Any]) -> None:
    torch = require("torch")

    @arraybridge.torch(output_type="numpy")
    def double(tree: Any) -> Any:
        assert isinstance(items(tree)[0], torch.Tensor)
        return make(items(tree)[0] * 2, [items(tree)[1][0] + 1, items(tree)[1][1]])

    tree = make(np.ones(2), [np.zeros(3), "word"])
    for result, kind in ((convert_tree(tree, "torch"), torch.Tensor), (double(tree), np.ndarray)):
        assert type(result) is type(tree)
        assert [type(items(result)[0]), type(items(result)[1][0])] == [kind, kind]
        assert items(result)[1][1] == "word"
    assert [items(result)[0].tolist(), items(result)[1][0].tolist()] == [[2, 2], [1, 1, 1]]
    assert isinstance(items(tree)[0], np.ndarray), "the original tree must not change"
    for attribute in ("note", "maxlen", "default_factory"):
        assert getattr(convert_tree(tree, "torch"), attribute, None) == getattr(tree, attribute, None)


@containers
def test_containers_without_changes_are_returned_as_is(make: Callable[[Any, Any], Any]) -> None:
    tree = make(np.ones(2), make("text", {"deep": 1}))
    for one in (tree, make([], {}), {}, [], (), deque(), None):
        assert convert_tree(one, "numpy") is one
    require("torch")
    assert items(convert_tree(tree, "torch"))[1] is items(tree)[1]


@pytest.mark.parametrize("leaf", [None, 3, "text", b"bytes", object(), {1, 2}, range(3), np.float32(1), int])
def test_non_arrays_are_returned_as_is(leaf: Any) -> None:
    require("torch")
    assert convert_tree(leaf, "torch") is leaf
    assert convert_tree({"a": (leaf, np.zeros(1))}, "torch")["a"][0] is leaf


def test_options_apply_to_every_array() -> None:
    require("torch")
    x, y = np.arange(3.0), np.arange(2)
    copied = convert_tree({"x": x, "y": [y]}, "torch", copy=True)
    assert data.address(copied["x"]) != data.address(x)
    assert data.address(copied["y"][0]) != data.address(y)
    assert [data.dtype_name(t) for t in convert_tree([x, y], "torch", dtype="float32")] == ["float32"] * 2
    shared = convert_tree([x, y], "torch", copy=False, device="cpu")
    assert [data.address(t) for t in shared] == [data.address(x), data.address(y)]


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"batch": [np.zeros(1), {"names": (1, np.array(["a"]))}]}, "at ['batch'][1]['names'][1]"),
        ({"p": Pair(1, np.array(["a"]))}, "at ['p'].right"),
        ([Registered(np.array(["a"]), 1)], "at [0].left"),
        (deque([Plain(1, np.array(["a"]))]), "at [0].right"),
        (SimpleNamespace(names=np.array(["a"])), "at .names"),
    ],
)
def test_errors_name_the_path_in_the_tree(tree: Any, place: str) -> None:
    require("torch")
    with pytest.raises(DtypeNotSupportedError, match=re.escape(place)):
        convert_tree(tree, "torch")


def test_classes_registered_after_their_first_use() -> None:
    torch = require("torch")

    class Late:
        def __init__(self, x: Any) -> None:
            self.x = x

    @arraybridge.torch(output_type="numpy")
    def kind(one: Any) -> str:
        return type(one.x).__name__

    late = Late(np.ones(2))
    assert kind(late) == "ndarray"
    optree.register_pytree_node(
        Late, lambda one: ((one.x,), None), lambda _, xs: Late(*xs), namespace="arraybridge"
    )
    assert kind(late) == "Tensor"
    assert isinstance(convert_tree([late], "torch")[0].x, torch.Tensor)


def test_containers_that_cannot_be_rebuilt() -> None:
    """A subclass stays unchanged; a class that a user registered raises."""
    require("torch")
    uncopied = Uncopied(x=np.ones(2))
    assert convert_tree([uncopied], "torch")[0] is uncopied

    class Refusing:
        pass

    def unflatten(_: Any, children: Any) -> Any:
        raise ValueError("other children are not accepted")

    optree.register_pytree_node(
        Refusing, lambda _: ((np.ones(2), 3), None), unflatten, namespace="arraybridge"
    )
    with pytest.raises(MemoryConversionError, match=r"Cannot rebuild a container of type .*Refusing"):
        convert_tree(Refusing(), "torch")


class Described(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        self[name] = "made"
        return self[name]


class Items(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Rooted(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return np.sqrt(super().__getitem__(key))


class Marked(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, ("set", value))


class Twice(list[Any]):
    def append(self, value: Any) -> None:
        self.extend([value, value])


@dataclasses.dataclass
class Doubled:
    x: Any

    @functools.cached_property
    def twice(self) -> Any:
        return self.x * 2


def test_classes_with_side_effects_on_access() -> None:
    described = Described(x=np.ones(2))
    assert map_arrays(described, lambda x: x + 1)["x"].tolist() == [2, 2]
    assert list(described) == ["x"]
    items = map_arrays(Items(x=np.ones(2)), lambda x: x + 1)
    assert items["x"].tolist() == items.x.tolist() == [2, 2]
    assert map_arrays(Rooted(x=np.full(2, 3.0)), lambda x: x + 1)["x"].tolist() == [2, 2]
    marked = map_arrays(Marked(x=np.ones(2)), lambda x: x + 1)
    assert type(marked) is Marked
    assert marked["x"].tolist() == [2, 2]
    twice = map_arrays(Twice([np.ones(2)]), lambda x: x + 1)
    assert (type(twice), len(twice), twice[0].tolist()) == (Twice, 1, [2, 2])
    doubled = Doubled(np.ones(2))
    assert doubled.twice.tolist() == [2, 2]
    assert map_arrays(doubled, lambda x: x + 1).twice.tolist() == [4, 4]


def test_self_referencing_containers_raise() -> None:
    require("torch")
    circle: list[Any] = [1.0, np.ones(2)]
    circle.append({"again": circle})
    decorated = arraybridge.torch(lambda x: x)
    decorated(np.ones(2))  # from now on there are plans
    for run in (
        lambda: convert_tree(circle, "torch"),
        lambda: arraybridge.split_and_retry(lambda x: x, circle),
        lambda: decorated(circle),
        lambda: arraybridge.Pipeline(abs)(circle),
    ):
        with pytest.raises(ValueError, match="contains itself"):
            run()
    inner = [np.ones(1)]
    assert convert_tree([inner, inner], "numpy")[1] is inner


def test_callable_objects_are_not_containers():
    @dataclasses.dataclass
    class Model:
        weight: Any

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    model = Model(np.eye(2))
    assert map_arrays(model, np.negative) is model
    assert map_arrays([model], np.negative)[0] is model


# -- containers of other libraries ---------------------------------------------------------------------


def test_attrs_classes_are_containers() -> None:
    attrs = pytest.importorskip("attrs", reason="attrs is not installed")
    for options in ({}, {"frozen": True}, {"slots": False}):
        cls = attrs.make_class("Pair", ["x", "name"], **options)
        pair = cls(np.ones(2), "a")
        converted = arraybridge.convert_tree(pair, "numpy", copy=True)
        assert type(converted) is cls
        assert converted.name == "a"
        assert converted.x is not pair.x
        assert converted.x.tolist() == [1.0, 1.0]


def test_dataclasses_of_pydantic_are_containers() -> None:
    torch = require("torch")
    pydantic = pytest.importorskip("pydantic")

    @pydantic.dataclasses.dataclass(config={"arbitrary_types_allowed": True})
    class Item:
        x: np.ndarray[Any, Any]
        name: str = "a"

    item = Item(np.ones(2))
    converted = convert_tree([item], "torch")[0]
    assert (type(converted), converted.name) == (Item, "a")
    assert isinstance(converted.x, torch.Tensor)
    assert isinstance(item.x, np.ndarray)


def test_pydantic_models_are_containers() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Item(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config: ClassVar = {"arbitrary_types_allowed": True, "frozen": True}
        x: Any
        name: str

    item = Item(x=np.ones(2), name="a")
    converted = arraybridge.convert_tree(item, "numpy", copy=True)
    assert type(converted) is Item
    assert converted.name == "a"
    assert converted.x is not item.x
    assert converted.x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [MappingProxyType, ChainMap, FrozenMapping])
def test_mappings_are_containers(make: Any) -> None:
    mapping = make({"x": np.ones(2), "name": "a"})
    converted = arraybridge.convert_tree(mapping, "numpy", copy=True)
    assert type(converted) is make
    assert list(converted) == ["x", "name"]
    assert converted["name"] == "a"
    assert converted["x"] is not mapping["x"]
    assert converted["x"].tolist() == [1.0, 1.0]


def test_frozen_dicts_of_flax_are_containers() -> None:
    torch = require("torch")
    frozen_dict = pytest.importorskip("flax.core", reason="Flax is not installed").FrozenDict
    tree = frozen_dict({"x": np.ones(2), "deep": {"y": np.zeros(3)}, "name": "a"})
    for converted in (convert_tree(tree, "torch"), arraybridge.torch(lambda given: given)(tree)):
        assert type(converted) is frozen_dict
        assert converted["name"] == "a"
        for x, expected in ((converted["x"], [1, 1]), (converted["deep"]["y"], [0, 0, 0])):
            assert isinstance(x, torch.Tensor)
            assert x.tolist() == expected
    assert isinstance(tree["x"], np.ndarray)


class TableOfRows(Mapping[str, Any]):
    """A mapping whose iterator yields rows instead of keys, as that of a TensorDict."""

    made = 0

    def __init__(self, contents: Any) -> None:
        type(self).made += 1
        self.contents = dict(contents)

    def keys(self) -> Any:
        return self.contents.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter([{key: value[0] for key, value in self.contents.items()}])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> Any:
        return self.contents[key]


class UnreadableTable(TableOfRows):
    def keys(self) -> Any:
        return Mapping.keys(self)


def test_mappings_are_read_by_their_keys() -> None:
    torch = require("torch")
    rows = TableOfRows({"x": np.ones(2), "y": [np.zeros(2)]})
    converted = convert_tree(rows, "torch")
    assert type(converted) is TableOfRows
    assert type(converted["x"]) is type(converted["y"][0]) is torch.Tensor
    double = arraybridge.torch(lambda given: given["x"] * 2)
    assert double(rows).tolist() == [2, 2]
    before = TableOfRows.made
    double(rows)
    assert TableOfRows.made == before + 1  # the one with converted arrays
    without = UnreadableTable({"x": np.ones(2)})
    assert convert_tree(without, "torch") is without
    assert arraybridge.torch(lambda given, x: given)(without, np.ones(2)) is without


class Indirect(Mapping[str, Any]):
    """A mapping that PyTorch knows as a pytree, and that a dict of its items cannot represent."""

    def __init__(self, contents: Any, rows: int = 0) -> None:
        self.contents = dict(contents)
        self.rows = rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents)

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, key: str) -> Any:
        return self.contents[key]


@dataclasses.dataclass
class Stored:
    """A dataclass that PyTorch knows as a pytree, and whose field is stored elsewhere."""

    x: Any

    def __getattribute__(self, name: str) -> Any:
        stored = object.__getattribute__(self, "__dict__")
        return stored["_values"]["x"] if name == "x" else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_values"] = {name: value}


def test_pytrees_of_pytorch_are_opened_as_such() -> None:
    torch = require("torch")
    pytree: Any = torch.utils._pytree

    def flatten(tree: Indirect) -> tuple[list[Any], Any]:
        return [*tree.contents.values()], ([*tree.contents], tree.rows)

    def unflatten(values: Any, state: Any) -> Indirect:
        return Indirect(zip(state[0], values, strict=True), state[1])

    pytree.register_pytree_node(Indirect, flatten, unflatten)
    pytree.register_pytree_node(Stored, lambda tree: ([tree.x], None), lambda values, _: Stored(*values))
    converted = convert_tree(Indirect({"x": np.ones(2)}, 2), "torch")
    assert (type(converted), converted.rows, type(converted["x"])) == (Indirect, 2, torch.Tensor)
    assert type(convert_tree(Stored(np.ones(2)), "torch").x) is torch.Tensor


class _NeedsMore(FrozenMapping):
    def __init__(self, contents: Any, more: int) -> None:
        super().__init__(contents)


def test_mappings_that_cannot_be_rebuilt_stay() -> None:
    mapping = _NeedsMore({"x": np.ones(2)}, 1)
    assert arraybridge.convert_tree(mapping, "numpy", copy=True) is mapping
    assert arraybridge.convert_tree(os.environ, "numpy", copy=True) is os.environ


@pytest.mark.parametrize("options", [{"copy": 3}, {"grad": "drop"}, {"gpu_id": -1}, {"gpu_id": 1.5}])
@pytest.mark.parametrize("tree", [{"a": "text"}, [], None])
def test_options_are_checked_without_an_array(tree: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|Pass 0"):
        arraybridge.convert_tree(tree, "numpy", **options)
    with pytest.raises(ValueError, match=r"must be|Pass 0"):
        arraybridge.convert_tree([], out=[], **options)


class _Box:
    def __init__(self, x: Any, name: str) -> None:
        self.x, self.name = x, name


def _convert_box(box: _Box) -> None:
    converted = arraybridge.convert_tree([box], "numpy", copy=True)[0]
    assert type(converted) is type(box)
    assert converted.name == "a"
    assert converted.x is not box.x
    assert converted.x.tolist() == [1.0, 1.0]


def test_classes_registered_with_jax_are_containers() -> None:
    jax = require("jax")

    class JaxBox(_Box):
        pass

    box = JaxBox(np.ones(2), "a")
    assert arraybridge.convert_tree([box], "numpy", copy=True)[0] is box
    jax.tree_util.register_pytree_with_keys(
        JaxBox,
        lambda box: (((jax.tree_util.GetAttrKey("x"), box.x),), box.name),
        lambda name, children: JaxBox(children[0], name),
    )
    _convert_box(box)
    with pytest.raises(DtypeNotSupportedError, match=r"\[0\]\.x"):
        arraybridge.convert_tree([JaxBox(np.array(["text"]), "a")], "jax")


def test_classes_registered_with_torch_are_containers() -> None:
    require("torch")
    from torch.utils import _pytree

    class TorchBox(_Box):
        pass

    _pytree.register_pytree_node(
        TorchBox, lambda box: ([box.x], box.name), lambda children, name: TorchBox(*children, name)
    )
    _convert_box(TorchBox(np.ones(2), "a"))


def test_models_are_not_containers() -> None:
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")

    class Model(equinox.Module):  # type: ignore[misc, name-defined]
        weight: Any

    model = Model(np.ones(2))
    assert arraybridge.convert_tree([model], "numpy", copy=True)[0] is model


def test_objects_that_claim_another_class_stay() -> None:
    mock = Mock(spec=dict)
    assert isinstance(mock, dict)
    assert arraybridge.convert_tree([mock], "numpy", copy=True)[0] is mock
    assert arraybridge.numpy(lambda x, other: other)(np.ones(2), mock) is mock


# -- containers with a custom copy method, and attributes ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Immutable:
    x: Any

    def __copy__(self) -> Self:
        return self


class ImmutableList(list[Any]):
    def __copy__(self) -> Self:
        return self


@pytest.mark.parametrize("make", [Immutable, lambda x: ImmutableList([x])])
def test_a_container_that_copies_to_itself_is_not_changed(make: Callable[[Any], Any]) -> None:
    x = np.arange(8.0).reshape(4, 2)
    container = make(x)
    converted = convert_tree(container, "numpy", copy=True)
    assert converted is not container
    assert type(converted) is type(container)
    for one, same in ((container, True), (converted, False)):
        inner = one.x if isinstance(one, Immutable) else one[0]
        assert (inner is x) is same
        np.testing.assert_array_equal(inner, x)


class Kernel(enum.Enum):
    GAUSS = Immutable(np.ones(2))


def test_enum_members_are_not_containers() -> None:
    before = Kernel.GAUSS.value.x
    assert convert_tree([Kernel.GAUSS], "numpy", copy=True) == [Kernel.GAUSS]
    assert Kernel.GAUSS.value.x is before


class ReadOnlyDict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only")


class ReadOnlyList(list[Any]):
    def append(self, value: Any) -> None:
        raise TypeError("read-only")

    extend = append


@pytest.mark.parametrize("container", [ReadOnlyDict(a=np.ones(2)), ReadOnlyList([np.ones(2)])])
def test_items_are_rebuilt_without_the_methods_of_the_class(container: Any) -> None:
    converted = convert_tree(container, "numpy", copy=True)
    assert type(converted) is type(container)
    key = "a" if isinstance(container, dict) else 0
    assert converted[key] is not container[key]


class Output(OrderedDict[str, Any]):
    """A mapping whose items are attributes as well, as in Hugging Face's ``ModelOutput``."""

    def __init__(self, logits: Any) -> None:
        super().__init__(logits=logits)
        self.logits = logits


def test_attributes_that_are_items_follow_them() -> None:
    converted = convert_tree(Output(np.ones(2)), "numpy", copy=True)
    assert converted.logits is converted["logits"]


def test_extra_fields_of_pydantic_models_are_converted() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Item(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        model_config: ClassVar = {"arbitrary_types_allowed": True, "extra": "allow"}
        x: Any

    item = Item(x=np.ones(2), y=np.zeros(2))
    converted = convert_tree(item, "numpy", copy=True)
    assert converted.x is not item.x
    assert converted.y is not item.y
    assert converted.y.tolist() == [0.0, 0.0]


CYCLE = """
import numpy as np, arraybridge as ab
{setup}
class Node:
    def __init__(self, *children): self.children = list(children)
{register}
node = Node(np.ones(2)); node.children.append(node)
try:
    ab.convert_tree(node, "numpy", copy=True)
except ValueError as error:
    assert "contains itself" in str(error), error
else:
    raise AssertionError
def deep(n): return n and deep(n - 1)
deep(100)
print(type(ab.convert_tree([np.ones(2)], "numpy", copy=True)[0]).__name__)
"""


@pytest.mark.parametrize(
    ("framework", "setup", "register"),
    [
        (
            "jax",
            "from jax.tree_util import register_pytree_node",
            "register_pytree_node(Node, lambda n: (tuple(n.children), None), lambda _, c: Node(*c))",
        ),
        (
            "torch",
            "from torch.utils import _pytree",
            "_pytree.register_pytree_node(Node, lambda n: (list(n.children), None), lambda c, _: Node(*c))",
        ),
    ],
)
def test_a_registered_object_that_contains_itself_raises(framework: str, setup: str, register: str) -> None:
    require(framework)
    assert output_of(CYCLE.format(setup=setup, register=register), imported=True) == "ndarray"


@dataclasses.dataclass
class Labeled(list[Any]):
    """A list that has fields besides its items."""

    mask: Any = None
    unit: str = "m"


@dataclasses.dataclass
class Measured(dict[str, Any]):
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen(OrderedDict[str, Any]):
    mask: Any = None


@pytest.mark.parametrize("kind", [Labeled, Measured, Frozen])
def test_fields_in_addition_to_items_are_converted(kind: Any) -> None:
    torch = require("torch")
    tree = kind({"mask": [np.ones(2)]})
    key: Any = "mask" if isinstance(tree, dict) else 0  # an item may have the name of a field
    if isinstance(tree, dict):
        tree[key] = np.zeros(2)
    else:
        tree.append(np.zeros(2))
    converted = arraybridge.convert_tree(tree, "torch")
    assert type(converted) is kind
    assert isinstance(converted.mask["mask"][0], torch.Tensor)
    assert isinstance(converted[key], torch.Tensor)
    assert isinstance(tree.mask["mask"][0], np.ndarray)
    assert isinstance(tree[key], np.ndarray)
    assert len(converted) == 1
    wrong = kind(np.array(["text"]))
    with pytest.raises(MemoryConversionError, match=r"at \.mask: "):
        arraybridge.convert_tree(wrong, "torch")


class Checked:
    def __init__(self, x: Any) -> None:
        assert isinstance(x, np.ndarray), "NumPy alone"
        self.x = x


optree.register_pytree_node(
    Checked, lambda one: ((one.x,), None), lambda _, children: Checked(*children), namespace="arraybridge"
)


def test_a_failed_assertion_of_a_class_is_the_cause_of_the_error() -> None:
    require("torch")
    with pytest.raises(ArrayNotSupportedError, match="Cannot rebuild a container of type Checked") as caught:
        arraybridge.convert_tree({"a": Checked(np.ones(2))}, "torch")
    assert isinstance(caught.value.__cause__, AssertionError)


# -- containers with items, fields and attributes ------------------------------------------------------


@dataclasses.dataclass
class OutputMapping(Mapping[str, Any]):
    """A mapping with fields, whose constructor takes the fields."""

    logits: Any = None
    loss: Any = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("logits", "loss"))

    def __len__(self) -> int:
        return 2


class Named(Mapping[str, Any]):
    """A mapping whose first parameter is not its items."""

    def __init__(self, name: Any = "", values: dict[str, Any] | None = None) -> None:
        self.name = name
        self.values_ = values or {}

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def test_a_dataclass_that_is_a_mapping_is_rebuilt_by_its_fields() -> None:
    output = convert_tree(OutputMapping(np.ones(2), 1.5), "numpy", copy=True)
    assert output.logits.tolist() == [1, 1]
    assert output.loss == 1.5


def test_a_mapping_that_takes_something_else_than_its_items_stays() -> None:
    named = Named("weights", {"w": np.ones(2)})
    assert convert_tree(named, "numpy", copy=True) is named


class Tagged(deque[Any]):
    def __init__(self, items: Any = (), maxlen: int | None = 10) -> None:
        super().__init__(items, maxlen)


class Factory(defaultdict[str, Any]):
    def __init__(self, tag: str = "") -> None:
        super().__init__(list)
        self.tag = tag


def test_attributes_and_bounds_of_subclasses_are_kept() -> None:
    queue = Tagged([np.ones(2)], maxlen=None)
    queue.tag = "T"  # type: ignore[attr-defined]
    copied = convert_tree(queue, "numpy", copy=True)
    assert copied.tag == "T"
    assert copied.maxlen is None
    assert copied[0].tolist() == [1, 1]
    factory = Factory("T")
    factory["a"] = np.ones(2)
    copied = convert_tree(factory, "numpy", copy=True)
    assert copied.tag == "T"
    assert copied.default_factory is list
    assert copied["a"] is not factory["a"]


class Logged(dict[str, Any]):
    """A dict that records each assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.log.append(key)


def test_overridden_item_methods_do_not_run() -> None:
    logged = Logged()
    logged["a"] = np.ones(2)
    copied = convert_tree(logged, "numpy", copy=True)
    assert logged.log == copied.log == ["a"]
    assert copied["a"] is not logged["a"]


@dataclasses.dataclass(slots=True)
class Page(list[Any]):
    cover: Any = None


def test_a_field_in_a_slot_that_is_also_an_item_is_converted() -> None:
    page = Page()
    page.append(np.ones(2))
    page.cover = page[0]
    copied = convert_tree(page, "numpy", copy=True)
    assert copied.cover is not page.cover
    assert copied.cover.tolist() == copied[0].tolist() == [1, 1]


class NamedPair(Pair):
    """A named tuple with attributes."""


class Summed(Pair):
    """A named tuple whose constructor computes an attribute."""

    total: Any
    name: str

    def __new__(cls, x: Any, y: Any) -> Self:
        pair = super().__new__(cls, x, y)
        pair.total = x + y
        pair.name = "new"
        return pair


def test_attributes_of_named_tuples_are_kept() -> None:
    torch = require("torch")
    first, second = Pair._fields
    pair = NamedPair(np.ones(2), np.zeros(2))
    pair.name = "a"  # type: ignore[attr-defined]
    pair.best = pair[0]  # type: ignore[attr-defined]
    converted = convert_tree(pair, "torch")
    assert type(converted) is NamedPair
    assert converted.name == "a"
    assert converted.best is converted[0] is getattr(converted, first)
    assert isinstance(getattr(converted, second), torch.Tensor)
    assert isinstance(pair.best, np.ndarray)  # type: ignore[attr-defined]

    summed = Summed(np.ones(2), np.ones(2))
    summed.name = "b"
    converted = convert_tree(summed, "torch")
    assert isinstance(converted.total, torch.Tensor)
    assert converted.total.tolist() == [2, 2]
    assert converted.name == "b"


def test_containers_whose_inspection_recurses_raise_the_error_for_cycles() -> None:
    class Endless:
        @property
        def __class__(self) -> Any:
            return self.__class__

    with pytest.raises(ValueError, match="contains itself"):
        convert_tree([Endless(), np.ones(1)], "torch")
