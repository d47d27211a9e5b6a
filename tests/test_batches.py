"""Batches are split into rows and joined again by key and structure."""

from __future__ import annotations

import gc
import weakref
from collections import ChainMap, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import CannotSplitError, Pipeline, fixed, split_and_retry
from arraybridge.batches import plain
from arraybridge.memory import cleanup
from arraybridge.testing import inject_oom
from tests.helpers import require
from tests.test_trees import Config, Pair, Registered, containers, items


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection between attempts, which is slow when every framework is loaded."""
    monkeypatch.setattr(cleanup.gc, "collect", lambda: 0)


def numbered(rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)


def by_splitting(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Run in four parts, by simulated memory limits."""
    with inject_oom("numpy", above_rows=2):
        return split_and_retry(lambda **given: fn(given["batch"]), {"batch": batch})


def by_pipeline(fn: Callable[[Any], Any], batch: Any) -> Any:
    return Pipeline(fn, microbatches=4)(batch)


def by_decorator(fn: Callable[[Any], Any], batch: Any) -> Any:
    with inject_oom("numpy", above_rows=2):
        return arraybridge.numpy(oom_recovery="split")(lambda given: fn(given))(batch)


WAYS = (by_splitting, by_pipeline, by_decorator)
ways = pytest.mark.parametrize("run", WAYS)


@containers
@ways
def test_batches_are_split_and_joined(run: Callable[..., Any], make: Callable[[Any, Any], Any]) -> None:
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
    ("one", "other"),
    [
        *(
            (lambda x: {"a": x, "b": x}, other)
            for other in (
                lambda x: {"a": x},
                lambda x: {"a": x, "c": x},
                lambda x: OrderedDict(a=x, b=x),
                lambda x: {"a": x, "b": [x]},
                lambda x: x,
                lambda x: {"a": x, "b": x[:, 0]},
                lambda x: {"a": x, "b": x.astype("float32")},
                lambda x: {"a": x, "b": x.sum()},
            )
        ),
        (lambda x: [x, x], lambda x: [x]),
        (lambda x: Pair(x, x), lambda x: (x, x)),
        (lambda x: Registered(x, x), lambda x: Pair(x, x)),
        (lambda x: {"y": None}, lambda x: {"y": x}),
    ],
)
def test_results_with_different_structures_raise(
    run: Callable[..., Any], one: Callable[[Any], Any], other: Callable[[Any], Any]
) -> None:
    with pytest.raises(CannotSplitError) as caught:
        run(lambda part: one(part) if part[0, 0] < 6 else other(part), numbered(8))
    assert isinstance(caught.value, ValueError)
    assert "microbatchs" not in str(caught.value)


@ways
@pytest.mark.parametrize(
    "fn",
    [np.sum, len, lambda x: 5, lambda x: True, lambda x: float(x.size), lambda x: {"n": [2.0]}],
)
def test_numbers_that_differ_between_parts_raise(run: Callable[..., Any], fn: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match="cannot be joined"):
        run(fn, np.ones(8))


@ways
def test_arguments_may_be_returned(run: Callable[..., Any]) -> None:
    model, x = object(), numbered(8)
    batch = {"x": x, "scale": 2.5, "flag": True, "model": model, "name": "cell", "none": None}
    result = run(lambda part: {**part, "x": part["x"] * part["scale"]}, batch)
    np.testing.assert_array_equal(result.pop("x"), x * 2.5)
    assert result == {"scale": 2.5, "flag": True, "model": model, "name": "cell", "none": None}


@ways
def test_equal_texts_are_joined_and_other_equal_values_are_not(run: Callable[..., Any]) -> None:
    x = numbered(8)
    result = run(lambda part: {"x": part, "unit": f"{part.ndim} axes"}, x)
    assert result["unit"] == "2 axes"
    np.testing.assert_array_equal(result["x"], x)
    for made in (lambda part: {"x": part, "row": f"{part[0, 0]}"}, lambda part: {"x": part, "row": {1}}):
        with pytest.raises(CannotSplitError, match=r"at \['row'\]: different values"):
            run(made, x)


@ways
def test_fixed_arguments_are_not_split(run: Callable[..., Any]) -> None:
    x, weights = numbered(8), np.eye(8)

    def fn(part: Any) -> Any:
        assert part["deep"][0] is weights
        return {"x": part["x"], "mean": fixed(0.5), "weights": fixed(part["deep"][0])}

    result = run(fn, {"x": x, "deep": [fixed(weights)]})
    np.testing.assert_array_equal(result["x"], x)
    assert result["mean"] == 0.5
    assert result["weights"] is weights
    # This also holds without a split.
    whole = split_and_retry(lambda x, deep: fn({"x": x, "deep": deep}), {"x": x, "deep": [fixed(weights)]})
    assert whole["mean"] == 0.5


def test_foreign_arrays_are_split() -> None:
    x = numbered(8)

    class Offers:
        __array_interface__ = x.__array_interface__

    for run in WAYS:
        np.testing.assert_array_equal(run(lambda part: np.asarray(part) * 2, Offers()), x * 2)


def test_masks_are_preserved() -> None:
    x = np.ma.masked_array(np.arange(8.0).astype(">f4"), [0, 1] * 4)
    for way in (by_splitting, by_pipeline):
        result = way(lambda part: part, x)
        assert (type(result), result.dtype, result.tolist()) == (type(x), x.dtype, x.tolist())


# -- row lists ---------------------------------------------------------------------------------------


class Batch(list[Any]):
    """A list subclass."""


@dataclass
class Boxes:
    corners: Any
    label: str


def boxes(i: int) -> np.ndarray:
    """Return the corners of 0 to 2 boxes in image ``i``."""
    return np.arange(i % 3 * 4.0).reshape(-1, 4) + i


ENTRIES: dict[str, Callable[[int], Any]] = {
    "equal texts": lambda i: "cat",
    "texts": lambda i: "odd" if i % 2 else "even",
    "none": lambda i: None,
    "none or text": lambda i: None if i % 3 else "third",
    "numbers": lambda i: i,
    "equal numbers": lambda i: 1.5,
    "NumPy scalars": np.float32,
    "arrays of different counts": boxes,
    "dict": lambda i: {"boxes": boxes(i), "label": f"image {i}"},
    "dataclass": lambda i: Boxes(boxes(i), "cell"),
    "tuple": lambda i: (boxes(i), i),
    "dicts of different keys": lambda i: {f"score {i}": 0.5},
    "lists of different lengths": lambda i: ["token"] * (i % 4),
    "mixed": lambda i: (boxes(i), "text", None, {"a": i})[i % 4],
    "arrays without rows": lambda i: np.array(float(i)),
}


def same(one: Any, other: Any) -> bool:
    """Return whether two results have the same structure, types, dtypes, shapes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Boxes):
        return same(one.corners, other.corners) and same(one.label, other.label)
    return bool(one == other)


@ways
@pytest.mark.parametrize("kind", [list, Batch])
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_row_lists_are_concatenated(run: Callable[..., Any], entry: Callable[[int], Any], kind: Any) -> None:
    def fn(part: Any) -> Any:
        return {
            "x": part,
            "rows": kind(entry(int(i)) for i in part[:, 0] // 3),
            "more": ([str(row) for row in part],),
        }

    x = numbered(8)
    assert same(run(fn, x), fn(x))
    assert same(run(lambda part: fn(part)["rows"], x), fn(x)["rows"])


@pytest.mark.parametrize("microbatches", [2, 3, 4, 7, 8])
def test_row_lists_of_parts_of_any_size(microbatches: int) -> None:
    def fn(part: Any) -> Any:
        return [f"row {int(i)}" for i in part[:, 0] // 3]

    assert Pipeline(fn, microbatches=microbatches)(numbered(8)) == [f"row {i}" for i in range(8)]


@ways
def test_arrays_in_row_lists_survive_a_reused_buffer(run: Callable[..., Any]) -> None:
    buffer = np.empty((2, 5))

    def fn(part: Any) -> Any:
        out = buffer if len(part) == 2 else np.empty((len(part), 5))
        out[...] = part[:, :1]
        return [{"row": row} for row in out]

    x = numbered(8)
    assert [entry["row"].tolist() for entry in run(fn, x)] == [[first] * 5 for first in x[:, 0]]


@ways
def test_labeled_arrays_in_row_lists_survive_a_reused_buffer(run: Callable[..., Any]) -> None:
    xarray = require("xarray")
    buffer = np.empty((2, 5))

    def fn(part: Any) -> Any:
        out = buffer if len(part) == 2 else np.empty((len(part), 5))
        out[...] = part[:, :1]
        entries = [{"row": xarray.DataArray(row, dims="x", name="a", attrs={"unit": "m"})} for row in out]
        for entry in entries:
            entry["row"].encoding["dtype"] = "int16"
        return entries

    x = numbered(8)
    for entry, first in zip(run(fn, x), x[:, 0], strict=True):
        row = entry["row"]
        assert row.values.tolist() == [first] * 5
        assert (row.name, row.attrs, row.encoding) == ("a", {"unit": "m"}, {"dtype": "int16"})


@ways
def test_files_in_row_lists_stay_files(run: Callable[..., Any]) -> None:
    zarr = require("zarr")
    file = zarr.array(np.arange(6.0), chunks=(2,))
    result = run(lambda part: [{"file": file} for _ in part], numbered(8))
    assert all(entry["file"] is file for entry in result)


@pytest.mark.parametrize("kind", [list, Batch, tuple])
def test_lists_of_other_lengths_are_joined_entry_by_entry(kind: Any) -> None:
    def fn(part: Any) -> Any:
        return kind([part, -part, {"first": part[:, 0], "names": ["row"] * len(part)}])

    x = numbered(8)
    for run in WAYS:
        assert same(run(fn, x), fn(x))


def test_ambiguous_lists_are_joined_as_in_the_other_parts() -> None:
    def fn(part: Any) -> Any:
        return [part * 2, {"a": part}]

    x = numbered(7)  # in parts of 1, 2, 2 and 2 rows
    assert same(Pipeline(fn, microbatches=4)(x), fn(x))


def test_lists_of_different_batched_arrays_are_several_results() -> None:
    x = numbered(8)
    for fn in (
        lambda part: [part, part[:, 0]],
        lambda part: {"y": [part, part > 3]},
        lambda part: [part, part + 1, part * 2],  # never as many entries as a part has rows
    ):
        for run in WAYS:
            assert same(run(fn, x), fn(x))


@ways
@pytest.mark.parametrize(
    "fn",
    [
        lambda part: [{"a": part}, {"b": part}],
        lambda part: {"y": [{"a": part}, {"b": part}]},
        lambda part: [{"a": part}, "text"],
        lambda part: [["a"] * len(part), ["b"] * len(part)],
        lambda part: [part, part + 1],
        lambda part: {"y": [np.ones(2) for _ in part]},
    ],
)
def test_ambiguous_lists_in_all_parts_raise(run: Callable[..., Any], fn: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match=r"return a tuple.*stacked array") as caught:
        run(fn, numbered(8))
    assert len(str(caught.value).split()) < 40
    x = numbered(8)
    assert same(run(lambda part: (part, part + 1), x), (x, x + 1))


@ways
def test_a_list_with_a_fixed_value_is_not_a_row_list(run: Callable[..., Any]) -> None:
    assert run(lambda part: [fixed("mean"), part], numbered(8))[0] == "mean"
    assert run(lambda part: {"x": part, "names": [fixed("a"), None]}, numbered(8))["names"] == ["a", None]


@ways
def test_only_structure_and_row_counts_decide(run: Callable[..., Any]) -> None:
    def fn(part: Any) -> Any:
        return {"names": ["positive" if v > 0 else "negative" for v in part.sum(1)]}

    for x in (np.zeros((8, 3)), np.ones((8, 3)), numbered(8) - 12):
        assert run(fn, x) == fn(x)
    for x in (np.zeros((8, 3)), numbered(8)):
        with pytest.raises(CannotSplitError):
            run(lambda part: [{"a": part}, {"b": part * 2}], x)


@ways
def test_input_lists_may_be_returned(run: Callable[..., Any]) -> None:
    x, names = numbered(8), ["height", "width"]
    result = run(lambda part: {"x": part["x"], "names": part["names"]}, {"x": x, "names": names})
    assert result["names"] == names
    result = run(lambda part: {"x": part, "names": fixed(names)}, x)
    assert result["names"] == names


@ways
@pytest.mark.parametrize(
    "fn",
    [
        lambda part: {"n": len(part)},
        lambda part: {"n": ("text", float(part[0, 0]))},
        lambda part: {"row": f"{part[0, 0]}"},
        lambda part: {"x": part, "kinds": {1}},
        lambda part: [f"row {v}" for v in part[:, 0] if v > 3],
    ],
)
def test_messages_are_short(run: Callable[..., Any], fn: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match=r"the results of the \w+ cannot be joined") as caught:
        run(fn, numbered(8))
    assert len(str(caught.value).split()) < 40


def test_row_lists_of_other_frameworks() -> None:
    for name in ("torch", "jax", "tensorflow"):
        require(name)
        to = getattr(arraybridge, f"to_{name}")

        def fn(part: Any, to: Any = to) -> Any:
            return [{"boxes": to(boxes(int(i)).astype("f4"))} for i in part[:, 0] // 3]

        for run in (by_splitting, by_pipeline):
            result = run(fn, numbered(8))
            assert [type(one["boxes"]) for one in result] == [type(to(boxes(0).astype("f4")))] * 8
            for i, one in enumerate(result):
                np.testing.assert_array_equal(np.asarray(one["boxes"]), boxes(i))


# -- random structures -------------------------------------------------------------------------------


def random_result(random: Random, depth: int = 0) -> Callable[[Any], Any]:
    """Return a row-wise function that returns a random structure."""
    if depth < 3 and random.random() < 0.6:
        inner = [random_result(random, depth + 1) for _ in range(random.randint(1, 4))]
        return random.choice([in_a_tuple, in_a_dict, in_a_list])(inner)
    entry = random.choice(list(ENTRIES.values()))
    columns = random.randint(0, 3)
    leaves = [
        lambda part: part[:, :columns],
        lambda part: part[:, 0] > 3,
        lambda part: [entry(int(i)) for i in part[:, 0] // 3],
        lambda part: [entry(int(i)) for i in part[:, 0] // 3],
        # Longer than any part, since a list of arrays with as many rows as the part would be several results.
        lambda part: [np.resize(row, 10 + columns) for row in part],
        lambda part: [{"row": row[:columns], "name": "x"} for row in part],
        lambda part: fixed("shared"),
        lambda part: float(part[0, 0]),
    ]
    return random.choice(leaves)


def in_a_tuple(inner: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda part: tuple(make(part) for make in inner)


def in_a_dict(inner: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda part: {f"key {i}": make(part) for i, make in enumerate(inner)}


def in_a_list(inner: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda part: [part[:, 0], *(make(part) for make in inner)]


def test_random_results_equal_those_of_the_whole_or_raise() -> None:
    random, joined = Random(41), 0
    for number in range(300):
        fn = random_result(random)
        x = numbered(random.randint(2, 9))
        expected = plain(fn(x))
        for run in (split_in_random_parts(random), Pipeline(fn, microbatches=random.randint(2, 9)).__call__):
            try:
                result = run(fn, x) if run.__name__ == "split" else run(x)
            except CannotSplitError:
                continue
            joined += 1
            assert same(result, expected), (number, len(x), result, expected)
    assert joined > 200


def split_in_random_parts(random: Random) -> Callable[..., Any]:
    above = random.randint(1, 4)

    def split(fn: Callable[[Any], Any], x: Any) -> Any:
        with inject_oom("numpy", above_rows=above):
            return split_and_retry(fn, x)

    return split


def test_joining_leaves_no_reference_cycle() -> None:
    """The batch and the result are freed as soon as the caller drops them."""
    x = numbered(8)
    references = []
    gc.disable()
    try:
        for run in WAYS:
            batch = x.copy()
            result = run(lambda part: {"a": [part * 2, part[:, 0]], "rows": ["r"] * len(part)}, batch)
            references += [weakref.ref(batch), weakref.ref(result["a"][0])]
            del batch, result
        assert [reference() is None for reference in references] == [True] * 6
    finally:
        gc.enable()


# -- data that joining must preserve -------------------------------------------------------------------


@ways
def test_a_mask_in_one_part_is_not_dropped(run: Callable[..., Any]) -> None:
    def fn(part: Any) -> Any:
        return np.ma.masked_greater(part, 5) if (part > 5).any() else part

    with pytest.raises(CannotSplitError, match="different classes"):
        run(fn, numbered(8))


@ways
def test_carriers_among_the_results_raise(run: Callable[..., Any]) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.raises(CannotSplitError, match="a Series contains more than an array"):
        run(lambda part: pandas.Series(part[:, 0]), numbered(8))


class _WithCount(dict[str, Any]):
    pass


@ways
def test_attributes_that_differ_between_parts_raise(run: Callable[..., Any]) -> None:
    def fn(part: Any) -> Any:
        result = _WithCount(x=part)
        result.count = len(part)  # type: ignore[attr-defined]
        return result

    with pytest.raises(CannotSplitError, match=r"at \.count"):
        run(fn, numbered(8))


@dataclass
class Names(list[str]):
    """A list with a field."""

    language: str = "en"


class Labels(list[str]):
    """A list that may have attributes."""


class SlottedLabels(list[str]):
    __slots__ = ("language",)


class Row(tuple[Any, ...]):  # noqa: SLOT001
    """A tuple that may have attributes."""


def with_language(make: Callable[[Any], Any], part: np.ndarray) -> Any:
    result = make(f"row {int(row[0])}" for row in part)
    result.language = "de"
    return result


def names_of(rows: Any) -> Names:
    names = Names()
    names.extend(rows)
    return names


@ways
@pytest.mark.parametrize("make", [names_of, Labels, SlottedLabels, Row])
@pytest.mark.parametrize("first", [True, False])
def test_lists_and_tuples_with_attributes_raise(
    run: Callable[..., Any], make: Callable[..., Any], first: bool
) -> None:
    """Also if only the results of later parts have the attribute."""

    def fn(part: np.ndarray) -> Any:
        if first or part[0, 0] or make is names_of:
            return {"rows": with_language(make, part)}
        return {"rows": make(f"row {int(row[0])}" for row in part)}

    expected = r"at \['rows'\]: a \w+ has items and the attribute language\. Return a dict or a dataclass"
    with pytest.raises(CannotSplitError, match=expected):
        run(fn, numbered(8))


@ways
def test_list_subclasses_without_attributes_are_joined(run: Callable[..., Any]) -> None:
    joined = run(lambda part: Labels(f"row {int(row[0])}" for row in part), numbered(8))
    assert type(joined) is Labels
    assert joined == [f"row {3 * i}" for i in range(8)]


class Output(OrderedDict[str, Any]):
    """A dict whose items are attributes as well, as in Hugging Face's ``ModelOutput``."""

    def __init__(self, logits: Any, best: Any = None) -> None:
        super().__init__(logits=logits)
        self.logits = logits
        self.best = best


@ways
def test_attributes_of_dicts_follow_the_item_of_the_same_name(run: Callable[..., Any]) -> None:
    joined = run(lambda part: Output(part * 2), numbered(8))
    assert type(joined) is Output
    assert joined.logits is joined["logits"]
    np.testing.assert_array_equal(joined.logits, numbered(8) * 2)
    with pytest.raises(CannotSplitError, match=r"at \.best: different values"):
        run(lambda part: Output(part, part), numbered(8))


class Point(NamedTuple):
    x: Any
    y: Any


class NamedPoint(Point):
    """A named tuple with an attribute."""


@ways
def test_attributes_of_named_tuples_are_kept_and_compared(run: Callable[..., Any]) -> None:
    def fn(part: np.ndarray, later: str) -> Any:
        point = NamedPoint(part, part * 2)
        point.name = later if part[0, 0] else "a"  # type: ignore[attr-defined]
        return point

    joined = run(lambda part: fn(part, "a"), numbered(8))
    assert type(joined) is NamedPoint
    assert joined.name == "a"
    np.testing.assert_array_equal(joined.y, numbered(8) * 2, strict=True)
    with pytest.raises(CannotSplitError, match=r"at \.name: different values \(a str, 'a' and a str, 'b'\)"):
        run(lambda part: fn(part, "b"), numbered(8))


class Option(SimpleNamespace):
    """A class whose name starts with a vowel."""


SameName = type("Same", (list,), {})
OtherName = type("Same", (list,), {"__module__": "here"})

_DIFFERENT: dict[str, tuple[Callable[[bool], Any], str]] = {
    "type": (lambda first: [None, "a"] if first else (None, "a"), "a list of 2 and a tuple of 2"),
    "classes of one name": (
        lambda first: (SameName if first else OtherName)([None]),
        r"a Same of 1 of two classes: tests\.test_batches\.Same and here\.Same",
    ),
    "keys": (lambda first: {"a": None} if first else {"b": None}, "a dict of 'a' and a dict of 'b'"),
    "fields": (
        lambda first: Option(a=None) if first else Option(b=None),
        "an Option, of which only one has a, b",
    ),
    "bound": (
        lambda first: deque([None], maxlen=3 if first else 4),
        "a deque of 1 with 3 and a deque of 1 with 4",
    ),
}


@ways
@pytest.mark.parametrize("case", _DIFFERENT)
def test_the_error_names_the_difference(run: Callable[..., Any], case: str) -> None:
    make, message = _DIFFERENT[case]
    fix = r"\. Return the same structure for every part, such as a dict with the same keys\."
    with pytest.raises(CannotSplitError, match=rf"different structures \({message}\){fix}"):
        run(lambda part: (part, make(bool(part[0, 0] == 0))), numbered(8))


@ways
def test_parts_of_different_dtypes_get_the_advice_to_return_one_dtype(run: Callable[..., Any]) -> None:
    with pytest.raises(
        CannotSplitError, match=r"different dtypes .* Return arrays of the same dtypes for every"
    ):
        run(lambda part: part.astype("f4") if part[0, 0] == 0 else part.astype("f8"), numbered(8))


@dataclass
class Scored(list[str]):
    """A list of rows with an array of rows."""

    scores: Any = None
    language: str = "fr"


def test_a_list_argument_with_fields_is_split_with_them() -> None:
    names = Scored(numbered(8) * 2)
    names.extend("abcdefgh")

    def rows_of(x: np.ndarray, part: Scored) -> Any:
        assert len(x) == len(part) == len(part.scores)
        return {"scores": part.scores, "names": [f"{part.language} {name}" for name in part]}

    joined = split_and_retry(limited(rows_of, 2), (numbered(8), names))
    np.testing.assert_array_equal(joined["scores"], names.scores, strict=True)
    assert joined["names"] == [f"fr {name}" for name in "abcdefgh"]


# -- dtypes that joining must preserve -----------------------------------------------------------------


@ways
@pytest.mark.parametrize("dtype", ["U", "S", ">U"])
@pytest.mark.parametrize("masked", [False, True])
def test_arrays_of_text_take_the_longest_length(run: Callable[..., Any], dtype: str, masked: bool) -> None:
    words = np.array(["a", "bb", "dddd", "ccc", "", "e", "ff", "g"])

    def fn(part: Any) -> Any:
        texts = np.array(words[part].tolist(), dtype)  # as long as the longest word of the part
        return np.ma.masked_equal(texts, texts[0]) if masked else texts

    joined = run(fn, np.arange(8))
    assert joined.dtype == np.array(words.tolist(), dtype).dtype
    assert np.ma.getdata(joined).tolist() == words.astype(dtype).tolist()
    assert np.ma.getmaskarray(joined).tolist() == [masked, False] * 4


def csr(cls: str, dtype: str, index: str) -> Any:
    """Return a sparse array or matrix with eight rows and the given dtypes of values and indices."""
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = getattr(sparse, cls)((8, 8))
    x.data = np.arange(1.0, 9).astype(dtype)
    x.indices = np.arange(8)[::-1].astype(index)
    x.indptr = np.arange(9).astype(index)
    return x


@ways
@pytest.mark.parametrize("cls", ["csr_array", "csr_matrix"])
@pytest.mark.parametrize(
    ("dtype", "index"), [("float64", "int64"), ("float16", "int32"), ("bfloat16", "int64"), (">f8", "int32")]
)
def test_sparse_parts_keep_index_and_value_dtypes(
    run: Callable[..., Any], cls: str, dtype: str, index: str
) -> None:
    x = csr(cls, dtype, index)
    joined = run(lambda part: part, x)
    assert (type(joined), joined.shape) == (type(x), x.shape)
    for name in ("data", "indices", "indptr"):
        part, whole = getattr(joined, name), getattr(x, name)
        assert part.dtype == whole.dtype, name
        assert part.tolist() == whole.tolist(), name


def limited(fn: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Return a function that runs out of memory with more rows than ``most``."""

    def call(x: np.ndarray, *others: Any) -> Any:
        if len(x) > most:
            raise MemoryError
        return fn(x, *others)

    return call


class Items(Mapping[str, Any]):
    def __init__(self, values: Any = ()) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@ways
@pytest.mark.parametrize("cls", [ChainMap, Items])
def test_mappings_are_joined_by_key(run: Callable[..., Any], cls: Callable[..., Any]) -> None:
    joined = run(lambda part: cls({"doubled": part * 2}), numbered(8))
    assert type(joined) is cls
    assert joined["doubled"].tolist() == (numbered(8) * 2).tolist()


class Lazy(Pair):
    """A named tuple with an attribute that is computed when it is read."""

    @cached_property
    def total(self) -> Any:
        return self[0] + self[1]


def test_named_tuples_join_if_only_some_parts_have_computed_an_attribute() -> None:
    def pair_of(x: np.ndarray) -> Lazy:
        pair = Lazy(x, x)
        if x[0] == 0:
            assert pair.total is not None
        return pair

    joined = Pipeline(pair_of, microbatches=2)(np.arange(4.0))
    assert type(joined) is Lazy
    assert [x.tolist() for x in tuple(joined)] == [[0, 1, 2, 3]] * 2
