"""split_and_retry: the same bits as the whole, no finished row computed twice, and clear refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import CannotSplitError, fixed, run_with_oom_recovery, split_and_retry
from arraybridge.memory import recovery
from arraybridge.testing import inject_oom
from tests.counting import functions_entered
from tests.helpers import require


class Small:
    """A device that holds a number of rows: a row-wise function that notes which rows it finished."""

    def __init__(self, rows: int, failing: Callable[[int], bool] = lambda attempt: False) -> None:
        self.rows = rows
        self.failing = failing
        self.attempts: list[int] = []
        self.finished: list[int] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.attempts.append(len(x))
        if len(x) > self.rows or self.failing(len(self.attempts) - 1):
            raise MemoryError
        self.finished.extend(int(row[0]) for row in x)
        return x * 3 + 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage takes a tenth of a second once every framework is loaded; many faults take long."""
    monkeypatch.setattr(recovery, "release_caches", lambda frameworks, index: 0)


def batch(rows: int) -> np.ndarray:
    return np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) * np.float32(0.5)


def numbered(rows: int) -> np.ndarray:
    """Rows that begin with their number."""
    return np.stack([np.arange(rows), np.arange(rows) ** 2], axis=1)


def test_halves_in_order() -> None:
    fn = Small(4)
    x = numbered(8)
    np.testing.assert_array_equal(split_and_retry(fn, x), x * 3 + 1)
    assert fn.attempts == [8, 8, 4, 4]


def test_the_size_that_fits_is_used_for_the_rest() -> None:
    fn = Small(4)
    x = numbered(64)
    np.testing.assert_array_equal(split_and_retry(fn, x), x * 3 + 1)
    assert fn.attempts == [64, 64, 32, 16, 8, *[4] * 16]
    assert fn.finished == list(range(64))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12])
def test_a_fault_at_every_index(rows: int) -> None:
    """Each attempt fails in turn, and so does each pair of neighbours; every row is finished once."""
    x = numbered(rows)
    for first in range(2 * rows + 4):
        for length in (1, 2):
            fn = Small(max(1, rows // 3), lambda attempt, a=first, n=length: a <= attempt < a + n)  # type: ignore[misc]
            try:
                result = split_and_retry(fn, x)
            except MemoryError:
                # Two faults one after the other at a single row: a retry there fails too.
                assert length == 2
                assert fn.attempts[-1] == fn.attempts[-2] == 1
                continue
            np.testing.assert_array_equal(result, x * 3 + 1)
            assert fn.finished == list(range(rows))


def test_the_floor() -> None:
    fn = Small(0)
    with pytest.raises(MemoryError) as caught:
        split_and_retry(fn, batch(100), min_split=10)
    assert fn.attempts == [100, 100, 50, 25, 12, 12]
    note = str(caught.value).splitlines()[-1]
    assert "12 of 100 rows" in note
    assert "min_split=10" in note


def test_each_step_is_logged_with_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "arraybridge.memory"):
        split_and_retry(Small(4), numbered(8))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("8 rows ran out of memory (MemoryError: )")
    assert "go on with 4 rows at a time (0 of 8 rows are done)" in messages[1]


# -- every framework ---------------------------------------------------------------------------------

AXES = [0, 1, 2, -1]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_frameworks(name: str, axis: int) -> None:
    if name != "numpy":
        require(name)
    host = np.arange(5 * 6 * 7, dtype=np.float32).reshape(5, 6, 7)
    x = arraybridge.convert_memory(host, name)
    with inject_oom(name, above_rows=2) as rehearsal:
        result = split_and_retry(lambda y: arraybridge.convert_memory(y, name), x, axis=axis)
    assert rehearsal.raised >= 2
    assert arraybridge.detect_memory_type(result) == name
    np.testing.assert_array_equal(arraybridge.to_numpy(result), host)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128", "bool"])
@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])
def test_dtypes_survive(name: str, dtype: str) -> None:
    require(name)
    host = (np.arange(12).reshape(6, 2) + (1 << 40)).astype(dtype)
    x = arraybridge.convert_memory(host, name)
    with inject_oom(name, above_rows=3):
        result = split_and_retry(lambda y: y, x)
    back = arraybridge.to_numpy(result)
    assert back.dtype == host.dtype
    np.testing.assert_array_equal(back, host)


def test_gradients_pass() -> None:
    torch = require("torch")
    x = torch.ones(6, 2, requires_grad=True)
    with inject_oom("torch", above_rows=2):
        split_and_retry(lambda y: y * 3, x).sum().backward()
    assert x.grad.tolist() == [[3.0, 3.0]] * 6


# -- arguments ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A container with a type of its own."""

    left: Any
    right: Any


def test_a_tuple_of_arguments() -> None:
    x, weights, scale = numbered(8), np.array([[1, 2], [3, 4]]), 10
    seen = []

    def fn(rows: np.ndarray, w: np.ndarray, s: int) -> np.ndarray:
        seen.append((len(rows), w.shape, s))
        return rows @ w * s

    with inject_oom("numpy", above_rows=4):
        result = split_and_retry(fn, (x, weights, scale))
    np.testing.assert_array_equal(result, x @ weights * scale)
    assert seen == [(4, (2, 2), 10)] * 2


def test_an_array_of_the_same_length_by_chance() -> None:
    x, weights = numbered(2).astype(float), np.array([[1.0, 2.0], [3.0, 4.0]])
    with inject_oom("numpy", above_rows=1):
        result = split_and_retry(np.matmul, (x, fixed(weights)))
        with pytest.raises(ValueError, match="matmul"):
            split_and_retry(np.matmul, (x, weights))
    np.testing.assert_array_equal(result, x @ weights)
    np.testing.assert_array_equal(split_and_retry(np.matmul, (x, fixed(weights))), x @ weights)


def test_arrays_within_containers() -> None:
    x = numbered(8)
    arguments = ({"image": x, "name": "a"}, [x + 1, None], Pair(x + 2, 5))

    def fn(first: dict[str, Any], second: list[Any], third: Pair) -> np.ndarray:
        assert first["name"] == "a"
        assert second[1] is None
        assert third.right == 5
        return np.asarray(first["image"] + second[0] + third.left)

    with inject_oom("numpy", above_rows=3):
        result = split_and_retry(fn, arguments)
    np.testing.assert_array_equal(result, 3 * x + 3)


def test_arguments_by_name() -> None:
    x, w = numbered(2), np.array([[1, 2], [3, 4]])

    def fn(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return images @ weights

    for split in ("images", ("images",), 0, [0]):
        with inject_oom("numpy", above_rows=1):
            result = run_with_oom_recovery(fn, x, w, split=split)
        np.testing.assert_array_equal(result, x @ w)
    with inject_oom("numpy", above_rows=1):
        result = run_with_oom_recovery(fn, weights=w, images=x, split="images")
    np.testing.assert_array_equal(result, x @ w)


def test_run_with_oom_recovery_splits_after_a_retry() -> None:
    fn = Small(4)
    x = numbered(8)
    np.testing.assert_array_equal(run_with_oom_recovery(fn, x, split=True), x * 3 + 1)
    assert fn.attempts == [8, 8, 4, 4]
    fn = Small(4)
    run_with_oom_recovery(fn, x, split=True, max_retries=0)
    assert fn.attempts == [8, 4, 4]


# -- results -----------------------------------------------------------------------------------------


def in_halves(fn: Callable[..., Any], x: Any, **options: Any) -> Any:
    with inject_oom("numpy", above_rows=4):
        return split_and_retry(fn, x, **options)


def test_containers_are_reassembled() -> None:
    x = numbered(8)
    result = in_halves(lambda y: {"a": y, "b": [y + 1, None], "c": Pair(y[:, 0], "name")}, x)
    np.testing.assert_array_equal(result["a"], x)
    np.testing.assert_array_equal(result["b"][0], x + 1)
    assert result["b"][1] is None
    assert type(result["c"]) is Pair
    np.testing.assert_array_equal(result["c"].left, x[:, 0])
    assert result["c"].right == "name"


@pytest.mark.parametrize("value", [1.5, 3, True, np.float64(2)])
def test_scalars_are_refused(value: Any) -> None:
    with pytest.raises(CannotSplitError, match="cannot be joined"):
        in_halves(lambda y: {"sum": value}, numbered(8))


@pytest.mark.parametrize(
    "fn", [lambda y: y.sum(), lambda y: y.sum(0), lambda y: y.sum(0, keepdims=True), lambda y: y[:1]]
)
def test_results_of_another_length_are_refused_after_the_first_part(fn: Callable[..., Any]) -> None:
    calls = []

    def counted(y: np.ndarray) -> Any:
        calls.append(1)
        return np.asarray(fn(y))

    with pytest.raises(CannotSplitError, match="one row for each row"):
        in_halves(counted, numbered(8))
    assert len(calls) == 1


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), (3,), (np.array(2.0),), ("text", None), (np.float64(1),)])
def test_a_call_with_nothing_to_split_just_runs(arguments: tuple[Any, ...]) -> None:
    assert split_and_retry(lambda *given: given, arguments) == arguments
    assert run_with_oom_recovery(lambda *given: given, *arguments, split=True) == arguments
    decorated = arraybridge.numpy(oom_recovery="split")(lambda *given: len(given))
    assert decorated(*arguments) == len(arguments)


def test_it_is_refused_once_memory_has_run_out() -> None:
    fn = Small(-1)
    with pytest.raises(CannotSplitError, match=r"memory has run out.*axis 2.*ndarray \(8, 2\)") as caught:
        split_and_retry(fn, numbered(8), axis=2)
    assert fn.attempts == [8, 8]
    assert type(caught.value.__cause__) is MemoryError
    assert arraybridge.is_oom_error(caught.value)

    def fail(*_: Any) -> None:
        raise MemoryError

    for arguments in ((), (3,), (np.array(2.0),), (fixed(numbered(8)),)):
        with pytest.raises(ValueError, match="no argument to split"):
            split_and_retry(fail, arguments)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_bad_floor(bad: Any) -> None:
    with pytest.raises(ValueError, match="min_split"):
        split_and_retry(lambda y: y, numbered(8), min_split=bad)


def test_an_unknown_argument() -> None:
    with pytest.raises(CannotSplitError, match="'imags'"):
        run_with_oom_recovery(lambda images: images, numbered(8), split="imags")
    with pytest.raises(CannotSplitError, match="2"):
        run_with_oom_recovery(lambda images: images, numbered(8), split=2)


def test_arguments_of_different_lengths() -> None:
    with pytest.raises(CannotSplitError, match="3 rows"):
        run_with_oom_recovery(lambda a, b: a, numbered(8), numbered(3), split=("a", "b"))


def test_joining_may_run_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = arraybridge.framework("numpy").write, []

    def written(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        write(*args)

    monkeypatch.setattr(arraybridge.framework("numpy"), "write", written)
    np.testing.assert_array_equal(in_halves(lambda y: y, numbered(8)), numbered(8))
    assert len(calls) == 3


# -- what it costs -------------------------------------------------------------------------------------


def test_how_many_functions_a_decorated_split_enters() -> None:
    """Without trouble, and with one failure."""
    require("torch")
    failing: list[int] = []

    @arraybridge.torch(oom_recovery="split")
    def fn(x: Any) -> Any:
        if failing:
            failing.clear()
            raise MemoryError
        return x * 2

    x = np.ones((8, 4))

    def fail_once() -> None:
        failing.append(1)
        fn(x)

    calls: list[tuple[Callable[[], Any], int]] = [(lambda: fn(x), 24), (fail_once, 55)]
    for call, most in calls:
        call()
        call()
        names = set(functions_entered(call))
        # What the loaded frameworks do to free their caches is their own affair.
        names -= {
            name for name in names if name.endswith((":free_cache", ":_opened", ":is_started", ":is_awake"))
        }
        assert len(names) <= most, sorted(names)


# -- what cannot be cut, or called again ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_batch_is_not_split(layout: str) -> None:
    torch = require("torch")
    x = getattr(torch.eye(8), layout)()
    with (
        inject_oom("torch", above_rows=4) as rehearsal,
        pytest.raises(CannotSplitError, match=r"cannot be cut along axis 0: .*x.to_dense\(\)"),
    ):
        split_and_retry(lambda y: y.to_dense(), x)
    assert rehearsal.attempts == [8, 8, 4]


def test_an_iterator_is_not_read_twice() -> None:
    def fn(x: np.ndarray, shifts: Any) -> np.ndarray:
        return x + sum(shifts)

    x = np.arange(8.0)
    for run, name in (
        (lambda: split_and_retry(fn, (x, iter([1, 2]))), "list_iterator"),
        (lambda: split_and_retry(fn, {"x": x, "shifts": (i for i in (1, 2))}), "generator"),
        (lambda: run_with_oom_recovery(lambda x, y: fn(x, *y), x, [map(abs, [1])]), "map"),
        (lambda: arraybridge.numpy(oom_recovery=True)(fn)(x, shifts=iter([1])), "list_iterator"),
        (lambda: arraybridge.numpy(oom_recovery="split")(fn)(x, iter([1])), "list_iterator"),
    ):
        with inject_oom("numpy", above_rows=3) as rehearsal, pytest.raises(MemoryError) as caught:
            run()
        assert len(rehearsal.attempts) == 1
        note = str(caught.value).splitlines()[-1]
        assert f"one of its arguments is an iterator ({name})" in note
        assert "pass a list" in note
    assert split_and_retry(fn, (x, iter([1, 2])))[0] == 3  # it is called once


def test_arguments_that_cannot_be_looked_through_are_no_iterators() -> None:
    tree: dict[str, Any] = {"children": []}
    tree["children"].append({"parent": tree})
    deep: Any = None
    for _ in range(1500):
        deep = {"next": deep}
    for argument in (tree, deep):
        calls = []

        def fn(x: Any, calls: list[int] = calls) -> str:
            calls.append(1)
            if len(calls) == 1:
                raise MemoryError
            return "done"

        assert arraybridge.run_with_oom_recovery(fn, argument) == "done"
