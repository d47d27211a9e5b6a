"""Batches are cut into rows and joined again: by key and structure, and never by chance."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CannotSplitError, Pipeline, batches, fixed, split_and_retry
from arraybridge.testing import inject_oom
from tests.test_trees import Config, Pair, Registered, containers, items


def numbered(rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)


def by_splitting(fn: Callable[[Any], Any], batch: Any) -> Any:
    """In four parts, by a lack of memory."""
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
def test_results_that_differ_are_refused(
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
def test_a_number_for_each_part_is_refused(run: Callable[..., Any], fn: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match=r"no arrays to join|cannot be joined"):
        run(fn, np.ones(8))


@ways
def test_what_came_in_may_come_out(run: Callable[..., Any]) -> None:
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
        with pytest.raises(CannotSplitError, match=r"different values at \['row'\]"):
            run(made, x)


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


def test_a_foreign_array_is_cut() -> None:
    x = numbered(8)

    class Offers:
        __array_interface__ = x.__array_interface__

    for run in WAYS:
        np.testing.assert_array_equal(run(lambda part: np.asarray(part) * 2, Offers()), x * 2)


def test_masks_stay() -> None:
    x = np.ma.masked_array(np.arange(8.0).astype(">f4"), [0, 1] * 4)
    for way in (by_splitting, by_pipeline):
        result = way(lambda part: part, x)
        assert (type(result), result.dtype, result.tolist()) == (type(x), x.dtype, x.tolist())


# -- lists with one entry per row ----------------------------------------------------------------------


def _joined(parts: list[tuple[Any, int]]) -> Any:
    joined = batches.Joined(sum(count for _, count in parts), 0, None, row_by_row=False)
    for result, count in parts:
        joined.add(result, count)
    return joined.result()


def test_lists_with_one_entry_per_row_are_concatenated() -> None:
    boxes = [np.zeros((3, 4)), np.ones((2, 4)), np.zeros((0, 4))]
    assert _joined([(["cat", "cat"], 2), (["dog"], 1)]) == ["cat", "cat", "dog"]
    assert _joined([([None, 1], 2), ([2, None], 2)]) == [None, 1, 2, None]
    assert _joined([({"names": ["a", "a"]}, 2), ({"names": ["a", "a"]}, 2)]) == {"names": ["a"] * 4}
    result = _joined([(boxes[:2], 2), (boxes[2:], 1)])
    assert [one.shape for one in result] == [(3, 4), (2, 4), (0, 4)]
    dicts = _joined([([{"boxes": boxes[0]}, {"boxes": boxes[1]}], 2), ([{"boxes": boxes[2]}], 1)])
    assert [one["boxes"].shape for one in dicts] == [(3, 4), (2, 4), (0, 4)]


def test_lists_of_batched_arrays_are_joined_entry_by_entry() -> None:
    first, second = np.arange(4), np.arange(4) * 10
    result = _joined([([first[:2], second[:2]], 2), ([first[2:], second[2:]], 2)])
    assert [one.tolist() for one in result] == [[0, 1, 2, 3], [0, 10, 20, 30]]
    result = _joined([([first[:2], second[:2]], 2), ([first[2:3], second[2:3]], 1)])
    assert [one.tolist() for one in result] == [[0, 1, 2], [0, 10, 20]]


def test_a_list_with_two_readings_raises() -> None:
    parts = [([{"a": np.zeros(2)}, {"a": np.ones(2)}], 2)] * 2
    with pytest.raises(CannotSplitError, match="return a tuple"):
        _joined(parts)
    as_tuples = [(tuple(entries), count) for entries, count in parts]
    assert [one["a"].tolist() for one in _joined(as_tuples)] == [[0.0] * 4, [1.0] * 4]


def test_lists_of_other_lengths_are_structures() -> None:
    assert _joined([(["a", "b", "c"], 2), (["a", "b", "c"], 2)]) == ["a", "b", "c"]
    with pytest.raises(CannotSplitError):
        _joined([(["a", "b"], 2), (["a"], 2)])
    with pytest.raises(CannotSplitError):
        _joined([(["a", "b", "c"], 2), (["a", "b", "d"], 2)])


def test_arrays_in_row_lists_are_copied_from_reused_buffers() -> None:
    buffer = np.zeros(3)

    def boxes(x: np.ndarray) -> list[np.ndarray]:
        buffer[:] = x[0]
        return [buffer for _ in x]

    with inject_oom("numpy", above_rows=1):
        result = arraybridge.split_and_retry(boxes, np.arange(3.0))
    assert [one.tolist() for one in result] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_random_results_join_as_the_unsplit_result_or_raise() -> None:
    random = np.random.default_rng(5)

    def make(depth: int, rows: np.ndarray, draw: np.random.Generator) -> Any:
        kind = draw.integers(0, 7 if depth else 4)
        if kind == 0:
            return rows * 2
        if kind == 1:
            return [f"row {value}" for value in rows]
        if kind == 2:
            return [np.full(int(value) % 3, value) for value in rows]
        if kind == 3:
            return [{"value": int(value), "box": np.full((int(value) % 2, 2), value)} for value in rows]
        children = [make(depth - 1, rows, draw) for _ in range(draw.integers(1, 4))]
        if kind == 4:
            return dict(zip("abc", children, strict=False))
        return tuple(children) if kind == 5 else children

    joined = 0
    for seed in range(400):
        count = int(random.integers(2, 7))
        cuts = np.unique([0, count, *random.integers(0, count, 2)])
        values = np.arange(count)
        parts = [values[a:b] for a, b in itertools.pairwise(cuts)]
        results = [(make(2, one, np.random.default_rng(seed)), len(one)) for one in parts]
        try:
            result = _joined(results)
        except CannotSplitError:
            continue
        joined += 1
        expected = make(2, values, np.random.default_rng(seed))
        np.testing.assert_equal(result, expected)
    assert joined > 200
