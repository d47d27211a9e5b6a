"""A container is one thing everywhere: joined by key and structure, looked into also when registered late."""

from __future__ import annotations

import collections
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import pytest

import arraybridge
from arraybridge import CannotSplitError, Pipeline, convert_tree, fixed, split_and_retry
from arraybridge.testing import inject_oom
from arraybridge.trees import ARRAY, LEAF, TREE, arrays_of, kind_of, kinds
from arraybridge.types import Cache
from tests.helpers import require

optree = pytest.importorskip("optree")


class Pair(NamedTuple):
    left: Any
    right: Any


class Config(dict[str, Any]):
    """A subclass with something of its own."""

    def __init__(self, *given: Any, note: str = "") -> None:
        super().__init__(*given)
        self.note = note


class Rows(list[Any]):
    pass


class Triple(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, a: Any, b: Any, c: Any) -> Self:
        return super().__new__(cls, (a, b, c))


class Frozen(dict[str, Any]):
    """A dict that cannot be rebuilt."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("frozen")


@optree.dataclasses.dataclass(namespace="arraybridge")
class Sample:
    pixels: Any
    label: Any


def numbered(rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)


def by_splitting(fn: Callable[[Any], Any], batch: Any) -> Any:
    """In four parts, by a lack of memory."""
    with inject_oom("numpy", above_rows=2):
        return split_and_retry(lambda **given: fn(given["batch"]), {"batch": batch})


def by_pipeline(fn: Callable[[Any], Any], batch: Any) -> Any:
    return Pipeline(fn, microbatches=4)(batch)


ways = pytest.mark.parametrize("run", [by_splitting, by_pipeline])

CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"x": a, "y": b},
    "OrderedDict": lambda a, b: OrderedDict(x=a, y=b),
    "defaultdict": lambda a, b: defaultdict(list, {"x": a, "y": b}),
    "subclass of dict": lambda a, b: Config({"x": a, "y": b}, note="kept"),
    "list": lambda a, b: [a, b],
    "subclass of list": lambda a, b: Rows([a, b]),
    "tuple": lambda a, b: (a, b),
    "subclass of tuple": lambda a, b: Triple(a, b, None),
    "named tuple": Pair,
    "deque": lambda a, b: deque([a, b], maxlen=4),
    "dataclass": Sample,
}
containers = pytest.mark.parametrize("make", CONTAINERS.values(), ids=list(CONTAINERS))


def items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [container["x"], container["y"]]
    if isinstance(container, Sample):
        return [container.pixels, container.label]
    return list(container)


# -- in and out ----------------------------------------------------------------------------------------


@containers
def test_converted(make: Callable[[Any, Any], Any]) -> None:
    torch = require("torch")
    given = make(np.ones(2), [np.zeros(3), "word"])
    result = convert_tree(given, "torch")
    assert type(result) is type(given)
    assert isinstance(items(result)[0], torch.Tensor)
    assert isinstance(items(result)[1][0], torch.Tensor)
    assert items(result)[1][1] == "word"
    assert isinstance(items(given)[0], np.ndarray)
    assert getattr(result, "note", None) == getattr(given, "note", None)
    assert getattr(result, "maxlen", None) == getattr(given, "maxlen", None)
    assert getattr(result, "default_factory", None) == getattr(given, "default_factory", None)


@containers
def test_decorated(make: Callable[[Any, Any], Any]) -> None:
    torch = require("torch")
    seen = []

    @arraybridge.torch(output_type="numpy", oom_recovery="split")
    def fn(given: Any) -> Any:
        seen.append(type(items(given)[0]))
        return make(items(given)[0] * 2, items(given)[1] + 1)

    x = numbered(8)
    with inject_oom("torch", above_rows=2):
        result = fn(make(x, x))
    assert set(seen) == {torch.Tensor}
    assert len(seen) == 4
    np.testing.assert_array_equal(items(result)[0], x * 2)
    np.testing.assert_array_equal(items(result)[1], x + 1)


@containers
@ways
def test_cut_and_joined(run: Callable[..., Any], make: Callable[[Any, Any], Any]) -> None:
    x = numbered(8)
    seen = []

    def fn(part: Any) -> Any:
        seen.append(len(items(part)[0]))
        return make(items(part)[0] * 2, items(part)[1][:, 0])

    result = run(fn, make(x, x + 1))
    assert seen == [2, 2, 2, 2]
    assert type(result) is type(make(0, 0))
    np.testing.assert_array_equal(items(result)[0], x * 2)
    np.testing.assert_array_equal(items(result)[1], (x + 1)[:, 0])


@ways
@pytest.mark.parametrize("make", [dict, OrderedDict, Config], ids=lambda cls: cls.__name__)
def test_dicts_are_joined_by_key(run: Callable[..., Any], make: Callable[..., Any]) -> None:
    x = numbered(8)

    def fn(part: Any) -> Any:
        pairs = [("a", part), ("b", -part), (3, part[:, 0])]
        return make(pairs if part[0, 0] == 0 else reversed(pairs))

    result = run(fn, x)
    assert list(result) == ["a", "b", 3]
    np.testing.assert_array_equal(result["a"], x)
    np.testing.assert_array_equal(result["b"], -x)
    np.testing.assert_array_equal(result[3], x[:, 0])


@ways
@pytest.mark.parametrize(
    "other",
    [
        lambda x: {"a": x},
        lambda x: {"a": x, "c": x},
        lambda x: {"a": x, "b": x, "c": x},
        lambda x: OrderedDict(a=x, b=x),
        lambda x: {"a": x, "b": [x]},
        lambda x: {"a": x, "b": None},
        lambda x: {"a": x, "b": (x, x)},
        lambda x: (x, x),
        lambda x: x,
        lambda x: "nothing",
        lambda x: {"a": x, "b": x[:, 0]},
        lambda x: {"a": x, "b": x.astype("float32")},
        lambda x: {"a": x, "b": x.sum()},
    ],
)
def test_structures_that_differ_are_refused(run: Callable[..., Any], other: Callable[[Any], Any]) -> None:
    def fn(part: np.ndarray) -> Any:
        return {"a": part, "b": part} if part[0, 0] < 6 else other(part)

    with pytest.raises(CannotSplitError) as caught:
        run(fn, numbered(8))
    assert isinstance(caught.value, ValueError)


@ways
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: [x, x], lambda x: [x]),
        (lambda x: Pair(x, x), lambda x: (x, x)),
        (lambda x: deque([x]), lambda x: deque([x], maxlen=2)),
        (lambda x: Sample(x, x), lambda x: Pair(x, x)),
        (lambda x: [], lambda x: [x]),
        (lambda x: None, lambda x: x),
    ],
)
def test_other_containers_that_differ_are_refused(
    run: Callable[..., Any], one: Callable[[Any], Any], other: Callable[[Any], Any]
) -> None:
    with pytest.raises(CannotSplitError):
        run(lambda part: {"y": one(part) if part[0, 0] == 0 else other(part)}, numbered(8))


# -- what is no array ------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize(
    "fn",
    [np.sum, len, lambda x: 5, lambda x: True, lambda x: float(x.size), lambda x: {"n": [2.0]}, np.float32],
)
def test_a_number_for_each_part_is_refused(run: Callable[..., Any], fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"no arrays to join|cannot be joined|no axis 0"):
        run(lambda x: fn(x) if fn is not np.float32 else np.float32(1), np.ones(8))


def test_the_number_of_the_issue() -> None:
    with pytest.raises(CannotSplitError, match="numbers are no arrays to join"):
        Pipeline(np.sum)(np.ones(8))


@ways
def test_what_came_in_may_come_out(run: Callable[..., Any]) -> None:
    model, x = object(), numbered(8)
    batch = {"x": x, "scale": 2.5, "flag": True, "model": model, "name": "cell", "none": None}
    result = run(lambda part: {**part, "x": part["x"] * part["scale"]}, batch)
    np.testing.assert_array_equal(result.pop("x"), x * 2.5)
    assert result == {"scale": 2.5, "flag": True, "model": model, "name": "cell", "none": None}


@ways
def test_what_is_equal_is_not_the_same(run: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match="different values"):
        run(lambda part: (part, [f"row {part[0, 0]}"]), numbered(8))


@ways
def test_what_is_marked_as_fixed(run: Callable[..., Any]) -> None:
    x, weights = numbered(8), np.eye(8)

    def fn(part: Any) -> Any:
        assert part["deep"][0] is weights
        return {"x": part["x"], "mean": fixed(0.5), "weights": fixed(part["deep"][0])}

    result = run(fn, {"x": x, "deep": [fixed(weights)]})
    np.testing.assert_array_equal(result["x"], x)
    assert result["mean"] == 0.5
    assert result["weights"] is weights
    # Also where nothing is split.
    whole = split_and_retry(lambda x, deep: fn({"x": x, "deep": deep}), {"x": x, "deep": [fixed(weights)]})
    assert whole["mean"] == 0.5


# -- classes ---------------------------------------------------------------------------------------------


def test_a_class_that_is_registered_after_its_first_use() -> None:
    torch = require("torch")

    class Late:
        def __init__(self, x: Any) -> None:
            self.x = x

    class LateDict(collections.UserDict[str, Any]):
        pass

    @arraybridge.torch(output_type="numpy")
    def kind(given: Any) -> str:
        inside = given.x if isinstance(given, Late) else given["x"]
        return type(inside).__name__

    x = np.ones(2)
    late, mapping = Late(x), LateDict(x=x)
    assert [kind(late), kind(mapping)] == ["ndarray", "ndarray"]
    assert arrays_of([late, mapping]) == []
    optree.register_pytree_node(
        Late, lambda one: ((one.x,), None), lambda _, xs: Late(*xs), namespace="arraybridge"
    )
    optree.register_pytree_node(
        LateDict, lambda one: ((one["x"],), None), lambda _, xs: LateDict(x=xs[0]), namespace="arraybridge"
    )
    assert [kind(late), kind(mapping)] == ["Tensor", "Tensor"]
    assert isinstance(convert_tree([late], "torch")[0].x, torch.Tensor)
    assert len(arrays_of([late, mapping])) == 2
    result = by_splitting(lambda part: Late(part.x * 2), Late(numbered(8)))
    np.testing.assert_array_equal(result.x, numbered(8) * 2)


def test_an_empty_container_says_nothing_of_its_class() -> None:
    require("torch")

    class Own(dict[str, Any]):
        pass

    assert kind_of(Own()) == LEAF
    assert kind_of(Own(x=1)) == TREE
    assert kind_of(Own()) == TREE


def test_a_subclass_that_cannot_be_rebuilt_is_registered_after_its_first_use() -> None:
    class Uncopied(dict[str, Any]):
        def __copy__(self) -> Self:
            raise TypeError("make another one")

    one = Uncopied(x=np.ones(2))
    assert kind_of(one) == LEAF
    optree.register_pytree_node(
        Uncopied, lambda d: ((d["x"],), None), lambda _, xs: Uncopied(x=xs[0]), namespace="arraybridge"
    )
    assert kind_of(one) == TREE


def test_one_that_cannot_be_rebuilt_says_nothing_of_others_of_its_class() -> None:
    class Wrapping(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, Wrapping(value) if isinstance(value, dict) else value)

    assert kind_of(Wrapping(x={"y": 1})) == LEAF
    assert kind_of(Wrapping(x=1)) == TREE


def test_a_registered_class_is_a_container_whatever_its_first_value_offers() -> None:
    class Box:
        def __init__(self, x: Any) -> None:
            self.x = x

    optree.register_pytree_node(
        Box, lambda one: ((one.x,), None), lambda _, xs: Box(*xs), namespace="arraybridge"
    )
    box = Box(np.ones(2))
    vars(box)["__array_interface__"] = np.ones(3).__array_interface__
    assert [kind_of(box), kind_of(Box(1)), kind_of(box)] == [TREE, TREE, TREE]


def test_what_cannot_be_rebuilt_stays() -> None:
    require("torch")
    frozen = Frozen(x=np.ones(2))
    assert convert_tree([frozen], "torch")[0] is frozen
    torch = require("torch")
    size = torch.Size([2, 3])
    assert convert_tree({"size": size, "x": np.ones(1)}, "torch")["size"] is size
    assert kind_of(size) == LEAF


def test_results_of_torch_are_looked_into() -> None:
    torch = require("torch")
    result = convert_tree(torch.ones(2, 3).max(1), "numpy")
    assert type(result) is torch.return_types.max
    assert isinstance(result.values, np.ndarray)
    assert result.indices.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, LEAF),
        ("a", LEAF),
        (None, LEAF),
        (np.float64(1), LEAF),
        (int, LEAF),
        (np.ones(1), ARRAY),
        ({}, TREE),
    ],
)
def test_kinds(value: Any, kind: int) -> None:
    kinds.clear()
    assert kind_of(value) == kind_of(value) == kind


def test_a_memo_is_bounded() -> None:
    memo: Cache[type, int] = Cache()
    for i in range(Cache.MOST + 1):
        memo.keep(type(f"Made{i}", (), {}), i)
    assert list(memo.values()) == [Cache.MOST]


def test_a_foreign_array_is_cut() -> None:
    class Offers:
        def __init__(self, x: np.ndarray) -> None:
            self.x = x

        @property
        def __array_interface__(self) -> Any:
            return self.x.__array_interface__

    x = numbered(8)
    np.testing.assert_array_equal(by_splitting(lambda part: np.asarray(part) * 2, Offers(x)), x * 2)
    np.testing.assert_array_equal(by_pipeline(lambda part: np.asarray(part) * 2, Offers(x)), x * 2)


# -- NumPy's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        np.arange(8.0).astype(">f8"),
        np.arange(8).astype(">i2").reshape(8, 1),
        np.rec.array([(i, i / 2) for i in range(8)], dtype=[("a", "i4"), ("b", ">f8")]),
        np.zeros(8, np.dtype([("a", "i1"), ("b", "i8")], align=True)),
        np.ma.masked_array(np.arange(8.0).astype(">f4"), [0, 1] * 4, fill_value=-7),
        np.ma.masked_array(np.arange(8), fill_value=3),
        np.arange(8).astype("m8[s]"),
        np.array(list("abcdefgh"), dtype=object),
    ],
    ids=["f8", "i2", "recarray", "structured", "masked", "no mask", "times", "objects"],
)
def test_numpys_own_are_kept(x: Any) -> None:
    for way in (by_splitting, by_pipeline):
        result = way(lambda part: part, x)
        assert type(result) is type(x)
        assert result.dtype == x.dtype
        assert result.dtype.byteorder == x.dtype.byteorder
        assert result.tolist() == x.tolist()
        if isinstance(x, np.ma.MaskedArray):
            assert result.fill_value == x.fill_value
            np.testing.assert_array_equal(np.ma.getmaskarray(result), np.ma.getmaskarray(x))


# -- objects that offer a protocol themselves, where their class does not ------------------------------


class Holder:
    """An array only where its maker gave it one."""

    def __init__(self, held: np.ndarray | None = None) -> None:
        if held is not None:
            self.held = held
            self.__array_interface__ = held.__array_interface__


@pytest.mark.parametrize("first", [True, False])
def test_a_protocol_of_the_object_says_nothing_of_its_class(first: bool) -> None:
    torch = require("torch")
    seen = []

    @arraybridge.torch
    def look(x: Any) -> None:
        seen.append(x)

    class Own(Holder):
        """Not met yet."""

    full, empty = Own(np.arange(3)), Own()
    for one in (full, empty) if first else (empty, full):
        look(one)
    for one in (empty, full):
        look(one)
    found = [x.tolist() if isinstance(x, torch.Tensor) else x for x in seen]
    values = [0, 1, 2]
    assert found == ([values, empty] if first else [empty, values]) + [empty, values]
    assert convert_tree({"a": full, "b": empty}, "torch")["b"] is empty


class Holding:
    """A registered class that is made of a tuple of its children, as optree and JAX give it."""

    def __init__(self, children: Any) -> None:
        self.children = children


def test_a_registered_class_is_made_of_a_tuple() -> None:
    optree = pytest.importorskip("optree")
    optree.register_pytree_node(
        Holding, lambda h: (h.children, None), lambda _, c: Holding(c), namespace="arraybridge"
    )
    made = arraybridge.convert_tree(Holding((np.ones(2), 3)), "numpy", copy=True)
    assert type(made.children) is tuple


def test_a_container_that_contains_itself_is_refused() -> None:
    require("torch")
    circle: list[Any] = [1.0, np.ones(2)]
    circle.append({"again": circle})
    decorated = arraybridge.torch(lambda x: x)
    decorated(np.ones(2))  # from now on there are plans
    for run in (
        lambda: arraybridge.convert_tree(circle, "torch"),
        lambda: arraybridge.split_and_retry(lambda x: x, circle),
        lambda: decorated(circle),
        lambda: arraybridge.torch(lambda x: circle)(np.ones(2)),
        lambda: arraybridge.torch(oom_recovery="split")(lambda x: x)(circle),
        lambda: arraybridge.gpu(lambda x: x)(circle),
        lambda: arraybridge.Pipeline(abs)(circle),
        lambda: list(arraybridge.prefetch([circle], "torch")),
        lambda: list(arraybridge.device_map(decorated, [circle], devices=["cpu"])),
    ):
        with pytest.raises(ValueError, match="contains itself"):
            run()


def test_a_container_that_is_in_another_one_twice_is_none() -> None:
    inner = [np.ones(1)]
    deep: Any = inner
    for _ in range(5000):
        deep = [deep]
    assert arraybridge.convert_tree([inner, inner], "numpy")[1] is inner
    with pytest.raises(RecursionError):
        arraybridge.convert_tree([deep, inner], "numpy")
