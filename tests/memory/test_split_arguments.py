"""Arguments of split calls: lists with one entry per row, and notes that name the split arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, fixed, run_with_oom_recovery, split_and_retry
from arraybridge.testing import inject_oom


def numbered(rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float64).reshape(rows, 3)


def by_splitting(fn: Callable[..., Any], **batch: Any) -> Any:
    return split_and_retry(fn, batch)


def by_position(fn: Callable[..., Any], **batch: Any) -> Any:
    return split_and_retry(fn, tuple(batch.values()))


def by_recovery(fn: Callable[..., Any], **batch: Any) -> Any:
    return run_with_oom_recovery(fn, split=True, **batch)


def by_decorator(fn: Callable[..., Any], **batch: Any) -> Any:
    return arraybridge.numpy(oom_recovery="split")(fn)(**batch)


def by_decorated_method(fn: Callable[..., Any], **batch: Any) -> Any:
    class Model:
        @arraybridge.numpy(oom_recovery="split")
        def call(self, x: Any, weights: Any) -> Any:
            return fn(x, weights)

    return Model().call(*batch.values())


every_entry = pytest.mark.parametrize(
    "run", [by_splitting, by_position, by_recovery, by_decorator, by_decorated_method]
)


# -- row lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [str, lambda i: None, lambda i: {"box": [i]}, lambda i: (i, i), np.int64])
@pytest.mark.parametrize("run", [by_splitting, by_position, by_recovery, by_decorator])
def test_a_list_with_one_entry_per_row_is_split(run: Callable[..., Any], entry: Callable[[int], Any]) -> None:
    names, seen = [entry(i) for i in range(8)], []

    def fn(x: Any, names: Any) -> Any:
        seen.append(list(names))
        return x * 2

    x = numbered(8)
    with inject_oom("numpy", above_rows=3):
        np.testing.assert_array_equal(run(fn, x=x, names=names), x * 2)
    assert seen == [names[i : i + 2] for i in range(0, 8, 2)]


@pytest.mark.parametrize(
    "whole",
    [
        ["a", "b", "c"],
        fixed(["a"] * 4),
        ("a", "b", "c", "d"),
        [fixed("a"), "b", "c", "d"],
        {"a": 1, "b": 2, "c": 3, "d": 4},
        "abcd",
    ],
)
def test_other_arguments_are_passed_whole(whole: Any) -> None:
    seen = []

    def fn(x: Any, names: Any) -> Any:
        seen.append(len(names))
        return x

    with inject_oom("numpy", above_rows=2):
        split_and_retry(fn, (numbered(4), whole))
    assert seen == [len(whole.value if isinstance(whole, fixed) else whole)] * 2


def test_a_list_of_arrays_is_a_structure() -> None:
    x = numbered(2)
    seen: list[Any] = []

    def fn(x: Any, pair: Any, dicts: Any) -> Any:
        seen.append([len(pair), len(pair[0]), len(dicts), len(dicts[0]["x"])])
        return x

    with inject_oom("numpy", above_rows=1):
        split_and_retry(fn, (x, [x, x], [{"x": x}, {"x": x}]))
    assert seen == [[2, 1, 2, 1]] * 2


def test_nested_lists_and_pipelines() -> None:
    x, names = numbered(4), ["a", "b", "c", "d"]
    seen = []

    def fn(batch: Any) -> Any:
        seen.append(batch["deep"]["names"])
        return batch["x"]

    Pipeline(fn, microbatches=2)({"x": x, "deep": {"names": names}})
    with inject_oom("numpy", above_rows=2):
        split_and_retry(fn, ({"x": x, "deep": {"names": names}},))
    assert seen == [["a", "b"], ["c", "d"]] * 2


# -- arrays that have as many rows as the batch by chance ---------------------------------------------

IMAGES = np.arange(36.0).reshape(3, 2, 2, 3)


def centered(x: Any, weights: Any) -> Any:
    return x - weights


@every_entry
def test_channel_means_as_long_as_the_batch_cause_one_warning(run: Callable[..., Any]) -> None:
    means = np.array([1.0, 2.0, 3.0])
    with inject_oom("numpy", above_rows=1):
        with pytest.warns(
            UserWarning, match=r"weights is split with it.*arraybridge\.fixed\(weights\)"
        ) as seen:
            run(centered, x=IMAGES, weights=means)
        assert len(seen) == 1
        assert seen[0].filename == __file__
        np.testing.assert_array_equal(run(centered, x=IMAGES, weights=fixed(means)), IMAGES - means)
        with pytest.warns(UserWarning, match="weights is split with it"):
            run(lambda x, weights: x, x=IMAGES, weights=[1, 2.5, np.float32(3)])
        run(lambda x, weights: x, x=IMAGES, weights=["cat", "dog", None])
        run(lambda x, weights: x, x=IMAGES[..., :2], weights=[0, 1, 2])
    run(centered, x=IMAGES, weights=means)  # not split, so it does not warn


@pytest.mark.parametrize(
    ("shape", "other", "axis", "warns"),
    [
        ((3, 2, 2, 3), (3,), 0, True),
        ((3, 3, 4, 5), (3, 1, 1), 0, True),  # channels first
        ((3, 4, 3, 4), (3, 4), 0, True),
        ((5, 3, 4, 3), (4, 3), -1, True),
        ((4, 4), (4,), 0, True),
        ((3, 2, 2, 4), (3,), 0, False),  # labels
        ((3, 3), (3, 3), 0, False),  # another batch
        ((3, 3, 4, 5), (3, 1, 2), 0, False),
        ((2, 3, 4, 4), (4, 3), 1, False),
    ],
)
@pytest.mark.parametrize("larger_first", [True, False])
def test_which_shapes_may_be_a_coincidence(
    shape: tuple[int, ...], other: tuple[int, ...], axis: int, warns: bool, larger_first: bool
) -> None:
    def fn(given: Any) -> Any:
        return given["images"]

    arrays = {"images": np.ones(shape), "other": np.ones(other)}
    batch = arrays if larger_first else dict(reversed(arrays.items()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with inject_oom("numpy", above_rows=2):
            split_and_retry(fn, (batch,), axis=axis)
        Pipeline(fn, microbatches=2, axis=axis)(batch)
    expected = [f"{name}['other'] is split with it" for name in ("given", "batch") if warns]
    assert [text in str(one.message) for text, one in zip(expected, seen, strict=True)] == [True] * len(seen)


# -- notes on exceptions -------------------------------------------------------------------------------


@every_entry
def test_errors_in_a_part_name_the_split_arguments(run: Callable[..., Any]) -> None:
    def fn(x: Any, weights: Any) -> Any:
        return x @ weights

    with inject_oom("numpy", above_rows=2), pytest.raises(ValueError, match="matmul") as caught:
        run(fn, x=np.ones((4, 4)), weights=np.eye(4))
    (note,) = caught.value.__notes__
    assert "x (2 of 4 rows), weights (2 of 4 rows)" in note
    assert "rows 0 to 1 of a batch of 4 rows" in note
    assert "fixed(" in note


def test_notes_name_container_items_and_only_split_arguments() -> None:
    def fn(x: Any, options: Any, scale: Any) -> Any:
        raise KeyError("missing")

    options = {"mean": np.ones(6), "names": list("abcdef"), "w": fixed(np.eye(6)), "k": [np.ones(3)]}
    with inject_oom("numpy", above_rows=3), pytest.raises(KeyError) as caught:
        split_and_retry(fn, (numbered(6), options, np.ones(2)))
    (note,) = caught.value.__notes__
    assert "x (3 of 6 rows), options['mean'] (3 of 6 rows), options['names'] (3 of 6 rows)." in note


def test_a_function_without_a_signature() -> None:
    with inject_oom("numpy", above_rows=1), pytest.raises(ValueError, match="matmul") as caught:
        split_and_retry(lambda *args: np.matmul(*args), (np.ones((2, 2)), np.eye(2)))
    assert "argument 0 (1 of 2 rows), argument 1 (1 of 2 rows)" in caught.value.__notes__[0]


def test_an_error_of_the_whole_batch_has_no_note() -> None:
    def fn(x: Any) -> Any:
        raise KeyError("missing")

    with pytest.raises(KeyError) as caught:
        split_and_retry(fn, numbered(4))
    assert not hasattr(caught.value, "__notes__")


def test_an_error_without_a_message_propagates_from_a_part() -> None:
    class EmptyMessageError(Exception):
        def __str__(self) -> str:
            raise TypeError("no message")

    error = EmptyMessageError()

    def fn(x: Any) -> Any:
        raise error

    with inject_oom("numpy", above_rows=2), pytest.raises(EmptyMessageError) as caught:
        split_and_retry(fn, numbered(4))
    assert caught.value is error


def test_a_single_row_that_does_not_fit() -> None:
    with inject_oom("numpy", above_rows=0), pytest.raises(MemoryError) as caught:
        split_and_retry(lambda x: x, numbered(4))
    assert (
        "Out of memory even with a single row. Free memory (see memory_stats()) or reduce"
        in caught.value.__notes__[-1]
    )


def test_before_retry_is_called_before_each_further_attempt() -> None:
    steps: list[Any] = []

    def fn(x: Any) -> Any:
        steps.append(len(x))
        if len(x) > 1:
            raise MemoryError
        return x

    run_with_oom_recovery(fn, numbered(4), split=True, before_retry=lambda: steps.append("reset"))
    assert steps == [4, "reset", 4, "reset", 2, "reset", 1, 1, 1, 1]
