"""Recovery: cleanup between attempts, results equal to those of the whole batch, and the final error."""

from __future__ import annotations

import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CannotSplitError,
    Pipeline,
    fixed,
    run_with_oom_recovery,
    split_and_retry,
)
from arraybridge.interface import registry
from arraybridge.memory import cleanup, oom_recovery
from arraybridge.testing import inject_oom
from tests.helpers import require


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection, which takes 0.1 s with all frameworks loaded."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def out_of_memory(*_: Any) -> Any:
    raise MemoryError("no")


def failing(times: int, error: Callable[[], Exception] = MemoryError) -> Callable[[Any], Any]:
    """Return a function that fails this many times, and then adds 1."""
    left = [times]

    def fn(x: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error()
        return x + 1

    return fn


# -- retries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_attempts(retries: int) -> None:
    assert run_with_oom_recovery(failing(retries), 1, max_retries=retries) == 2
    with pytest.raises(MemoryError):
        run_with_oom_recovery(failing(retries + 1), 1, max_retries=retries)
    with pytest.raises(ValueError, match="max_retries"):
        run_with_oom_recovery(len, "", max_retries=-1 - retries)


@pytest.mark.parametrize("options", [{"split_axis": 1}, {"min_split": 4}])
def test_options_of_a_split_need_a_split(options: dict[str, int]) -> None:
    (option,) = options
    with pytest.raises(ValueError, match=f"{option}={options[option]} has no effect without split=True"):
        run_with_oom_recovery(len, "", **options)


def test_the_next_attempt_runs_outside_the_except_block() -> None:
    seen: list[Any] = []

    def fn() -> None:
        seen.append(sys.exception())
        if len(seen) < 2:
            raise MemoryError

    run_with_oom_recovery(fn)
    assert seen == [None, None]


def test_last_error_has_notes_about_the_attempts() -> None:
    errors = [MemoryError("first"), MemoryError("second"), MemoryError("third")]
    waiting = iter(errors)

    def fail() -> None:
        raise next(waiting)

    with pytest.raises(MemoryError) as caught:
        run_with_oom_recovery(fail)
    assert caught.value is errors[2]
    assert (str(caught.value), caught.value.args) == ("third", ("third",))
    assert caught.value.__notes__[0].startswith("arraybridge: Out of memory in each of 3 attempts")
    assert any(entry.name == "fail" for entry in caught.traceback)


@pytest.mark.parametrize("arguments", [(), ("full",), (12, "Cannot allocate memory")])
def test_the_message_and_arguments_of_an_error_stay(arguments: Any) -> None:
    error = OSError(*arguments) if len(arguments) == 2 else MemoryError(*arguments)
    before = str(error)

    def fn() -> None:
        raise error

    for _ in range(2):  # an error that is raised again gets no second note
        with pytest.raises(type(error)) as caught:
            run_with_oom_recovery(fn)
        assert (str(caught.value), caught.value.args) == (before, arguments)
        assert len(caught.value.__notes__) == 1


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, KeyboardInterrupt])
def test_other_errors_propagate_unchanged(error: Any) -> None:
    raised, calls = error("shape"), []

    def fn() -> None:
        calls.append(1)
        raise raised

    with pytest.raises(error) as caught:
        run_with_oom_recovery(fn)
    assert (caught.value, str(raised), len(calls)) == (raised, "shape", 1)
    assert not hasattr(raised, "__notes__")
    errors = iter([MemoryError(), raised])
    with pytest.raises(error) as caught:  # after a retry
        run_with_oom_recovery(lambda: (_ for _ in ()).throw(next(errors)))
    assert caught.value.__context__ is None


def test_caches_of_all_loaded_frameworks_are_freed_between_attempts() -> None:
    freed: list[Any] = []

    def empty(device: Any, name: str | None) -> int:
        freed.append((name, str(device)))
        return 7

    cleanup.own_caches.append(empty)
    try:
        run_with_oom_recovery(failing(1), 1, gpu_id=1)
        assert {name for name, _ in freed} == {one.name for one in registry.loaded()}
        assert {device for _, device in freed} <= {"gpu:1", "opencl:1"}
        freed.clear()
        run_with_oom_recovery(failing(0), 1)
        assert freed == []
    finally:
        cleanup.own_caches.remove(empty)


@pytest.mark.parametrize("bad", [-1, True, 0.0, "auto", "gpu:0"])
@pytest.mark.parametrize("split", [False, True])
def test_a_wrong_gpu_id_raises_before_the_call(bad: Any, split: bool) -> None:
    problem = re.escape(f"run_with_oom_recovery() does not accept gpu_id={bad!r}. Pass the number of a GPU")
    with pytest.raises(ValueError, match=problem):
        run_with_oom_recovery(pytest.fail, "the function was called", gpu_id=bad, split=split)
    assert run_with_oom_recovery(failing(1), 1, gpu_id=np.int64(1), split=split) == 2  # type: ignore[arg-type]


def test_asynchronous_jax_errors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX raises errors of asynchronous computations when the result is awaited."""
    require("jax")
    waited = []
    x = arraybridge.to_jax(np.ones(3, np.float32))

    def raising(result: Any) -> None:
        waited.append(result)
        if len(waited) == 1:
            raise arraybridge.framework("jax").memory.oom_error()

    monkeypatch.setitem(oom_recovery._waits, type(x), raising)
    result = run_with_oom_recovery(lambda: {"a": (x,)})
    assert result["a"][0] is x
    assert len(waited) == 2


def test_before_retry() -> None:
    steps: list[str] = []

    def train() -> str:
        steps.append("train")
        if len(steps) < 5:
            raise MemoryError
        return "trained"

    reset = lambda: steps.append("reset")  # noqa: E731
    assert run_with_oom_recovery(train, max_retries=5, before_retry=reset) == "trained"
    assert steps == ["train", "reset", "train", "reset", "train"]
    with pytest.raises(KeyError, match="grad") as caught:
        run_with_oom_recovery(out_of_memory, before_retry=lambda: {}["grad"])
    assert caught.value.__context__ is None
    with pytest.raises(TypeError, match="before_retry"):
        run_with_oom_recovery(len, "", before_retry=3)  # type: ignore[arg-type]


def test_simulated_oom() -> None:
    with inject_oom("numpy", above_rows=4) as simulation:
        run_with_oom_recovery(np.sum, np.ones((4, 9)))
        with pytest.raises(MemoryError):
            run_with_oom_recovery(np.sum, np.ones((5, 9)), max_retries=1)
    assert simulation.attempts == [4, 5, 5]
    with inject_oom("numpy", skip=1, count=2) as simulation:
        assert [run_with_oom_recovery(lambda: 1) for _ in range(2)] == [1, 1]
    assert (simulation.raised, simulation.attempts) == (2, [None] * 4)
    for name in ("skip", "count", "above_rows"):
        with pytest.raises(TypeError, match=name), inject_oom("numpy", **{name: "1"}):
            pass
        with pytest.raises(ValueError, match=name), inject_oom("numpy", **{name: -1}):
            pass


def test_simulation_without_a_protected_call_warns() -> None:
    with (
        pytest.warns(UserWarning, match=r"saw no attempt.*oom_recovery=True") as seen,
        inject_oom("numpy"),
    ):
        np.ones(2).sum()  # without recovery
    assert seen[0].filename == __file__


# -- released and retained objects ---------------------------------------------------------------------


def chained(pin: Callable[[], Any]) -> Exception:
    """Return an error with arrays in the frames of its cause, its context and its group."""

    def inner() -> None:
        array = pin()
        raise MemoryError(array.shape)

    try:
        try:
            inner()
        except MemoryError as error:
            array = pin()
            raise RuntimeError(array.shape) from error
    except RuntimeError as error:
        return ExceptionGroup("both", [error])


def test_arrays_of_a_failed_attempt_are_freed_before_the_next() -> None:
    references: list[weakref.ref[Any]] = []
    alive = []

    def pin() -> Any:
        array = np.zeros(1000)
        references.append(weakref.ref(array))
        return array

    def rows() -> Iterator[Any]:
        array = pin()
        yield array.size
        raise chained(pin)

    def fn() -> int:
        alive.append(sum(reference() is not None for reference in references))
        return 5 if len(alive) == 3 else sum(rows())

    assert run_with_oom_recovery(fn) == 5
    assert alive == [0, 0, 0]
    assert len(references) == 6


def test_suspended_generators_continue_after_the_cleanup() -> None:
    log: list[str] = []

    def suspended() -> Iterator[Any]:
        try:
            try:
                raise MemoryError("inside")
            except MemoryError as error:  # its frame is in the traceback
                yield error
            yield 2
        finally:
            log.append("closed")

    generator, attempts = suspended(), []

    def fn() -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise next(generator)
        return next(generator)

    assert run_with_oom_recovery(fn) == 2
    assert log == []
    generator.close()  # type: ignore[attr-defined]
    assert log == ["closed"]


def test_arrays_in_an_error_are_freed_before_the_next_attempt() -> None:
    references: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def fn(x: Any) -> Any:
        alive.append(sum(reference() is not None for reference in references))
        if len(x) > 1:
            array = np.zeros(1000)
            references.append(weakref.ref(array))
            raise MemoryError(array)
        return x

    np.testing.assert_array_equal(split_and_retry(fn, numbered(8)), numbered(8))
    assert alive == [0] * 12
    assert len(references) == 4


def test_tracebacks_can_be_dropped_in_an_except_block() -> None:
    references: list[weakref.ref[Any]] = []

    def fail() -> None:
        array = np.zeros(1000)
        references.append(weakref.ref(array))
        raise MemoryError

    try:
        fail()
    except MemoryError as error:
        oom_recovery.drop_tracebacks(error)
        assert references[0]() is None


@pytest.mark.parametrize("mode", [True, "split"])
def test_converted_arguments_are_freed_before_the_next_attempt(mode: Any) -> None:
    """Check converted arguments (positional, keyword and nested), but not the caller's own."""
    torch = require("torch")
    references: list[weakref.ref[Any]] = []
    alive: list[int] = []

    @arraybridge.torch(oom_recovery=mode, output_type="numpy")
    def fn(x: Any, *rest: Any, deep: Any, named: Any) -> Any:
        alive.append(sum(reference() is not None for reference in references))
        arrays = [x, *rest, deep["a"][0], named]
        assert all(isinstance(one, torch.Tensor) for one in arrays)
        references.extend(weakref.ref(one) for one in arrays)
        if len(alive) < 3:
            raise MemoryError
        return x * 2

    x = np.ones((8, 3))
    caller = {"deep": {"a": [x + 1]}, "named": x + 2}
    np.testing.assert_array_equal(fn(x, x + 4, **caller), np.full((8, 3), 2.0))
    assert alive[:3] == [0, 0, 0]
    assert isinstance(caller["deep"]["a"][0], np.ndarray)  # type: ignore[index]


# -- splitting ---------------------------------------------------------------------------------------


class Small:
    """A row-wise function that runs out of memory above a number of rows and records finished rows."""

    def __init__(self, rows: int, fails: Callable[[int], bool] = lambda attempt: False) -> None:
        self.rows, self.fails = rows, fails
        self.attempts: list[int] = []
        self.finished: list[int] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.attempts.append(len(x))
        if len(x) > self.rows or self.fails(len(self.attempts) - 1):
            raise MemoryError
        self.finished.extend(int(row[0]) for row in x)
        return x * 3 + 1


def numbered(rows: int) -> np.ndarray:
    """Return rows that start with their number."""
    return np.stack([np.arange(rows), np.arange(rows) ** 2], axis=1)


def in_halves(fn: Callable[..., Any], x: Any, **options: Any) -> Any:
    with inject_oom("numpy", above_rows=4):
        return split_and_retry(fn, x, **options)


def test_the_size_that_fits_is_used_for_the_rest() -> None:
    fn, x = Small(4), numbered(64)
    np.testing.assert_array_equal(split_and_retry(fn, x), x * 3 + 1)
    assert fn.attempts == [64, 64, 32, 16, 8, *[4] * 16]
    assert fn.finished == list(range(64))
    fn = Small(4)
    run_with_oom_recovery(fn, numbered(8), split=True, max_retries=0)
    assert fn.attempts == [8, 4, 4]
    assert split_and_retry(lambda y: y, x) is x  # without an error, the original batch is passed


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12])
def test_oom_at_every_index(rows: int) -> None:
    """Let each attempt fail in turn, and each pair of neighbors; every row is finished once."""
    x = numbered(rows)
    for first in range(2 * rows + 4):
        for length in (1, 2):
            fn = Small(max(1, rows // 3), lambda attempt, a=first, n=length: a <= attempt < a + n)  # type: ignore[misc]
            try:
                result = split_and_retry(fn, x)
            except MemoryError:
                # Two consecutive errors at a single row: a retry fails as well.
                assert length == 2
                assert fn.attempts[-1] == fn.attempts[-2] == 1
                continue
            np.testing.assert_array_equal(result, x * 3 + 1)
            assert fn.finished == list(range(rows))


def by_decorator(fn: Callable[..., Any], x: Any) -> Any:
    return arraybridge.numpy(oom_recovery="split")(fn)(x)


def by_option(fn: Callable[..., Any], x: Any) -> Any:
    return run_with_oom_recovery(fn, x, split=True)


@pytest.mark.parametrize("run", [split_and_retry, by_option, by_decorator])
def test_a_batch_without_rows_is_not_split(run: Callable[..., Any]) -> None:
    empty = np.ones((0, 3))
    assert run(lambda x: x.sum(), empty) == 0
    with pytest.raises(MemoryError, match="with a batch that has no rows") as caught:
        run(out_of_memory, empty)
    assert caught.value.args == ("no",)


@pytest.mark.parametrize(
    ("rows", "fits", "parts"),
    [
        (8, 4, [4, 4]),
        (7, 3, [3, 2, 2]),  # at most 7 // 2 rows, divided evenly
        (5, 3, [2, 2, 1]),
        (10, 5, [5, 5]),
        (11, 2, [4, 2, 2, 2, 2, 2, 1]),
    ],
)
def test_sizes_of_parts(rows: int, fits: int, parts: list[int]) -> None:
    fn = Small(fits)
    np.testing.assert_array_equal(split_and_retry(fn, numbered(rows)), numbered(rows) * 3 + 1)
    assert fn.attempts == [rows, rows, *parts]


def test_garbage_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is collected again only if memory runs out with as many rows as fitted before."""
    fn = Small(4)
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(fn.attempts)))
    split_and_retry(fn, numbered(64))
    assert collected == [1]

    collected.clear()
    fn = Small(4, lambda attempt: attempt in (7, 10))
    np.testing.assert_array_equal(split_and_retry(fn, numbered(32)), numbered(32) * 3 + 1)
    assert fn.attempts == [32, 32, 16, 8, 4, 4, 4, 4, 2, 2, 2, *[1] * 16]
    assert collected == [1, 8, 11]

    collected.clear()
    with pytest.raises(MemoryError):
        run_with_oom_recovery(out_of_memory, 1, max_retries=5)
    assert len(collected) == 1


def test_min_split_is_respected(caplog: pytest.LogCaptureFixture) -> None:
    fn = Small(11)
    with pytest.raises(MemoryError, match=r"12 of 100 rows.*min_split=10"):
        split_and_retry(fn, numbered(100), min_split=10)
    assert fn.attempts == [100, 100, 50, 25, 12, 12]
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="min_split"):
            split_and_retry(fn, numbered(8), min_split=wrong)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "arraybridge.memory"):
        split_and_retry(Small(4), numbered(8))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("8 rows ran out of memory (MemoryError: )")
    assert "continuing with 4 rows at a time (0 of 8 rows are done)" in second


NAMES = ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"]
WIDE = ["int64", "float64", "complex128", "bool"]  # OpenCL does not support these


@pytest.mark.parametrize(
    ("name", "dtype", "axis"),
    [
        *((name, "float32", axis) for name in NAMES for axis in (0, 1, -1)),
        *((name, dtype, 0) for name in NAMES[1:4] for dtype in WIDE),
    ],
)
def test_frameworks_and_dtypes(name: str, dtype: str, axis: int) -> None:
    require(name)
    host = (np.arange(210).reshape(5, 6, 7) + (1 << 40 if dtype in WIDE else 0)).astype(dtype)
    with inject_oom(name, above_rows=2) as simulation:
        result = split_and_retry(lambda y: y, arraybridge.convert_memory(host, name), axis=axis)
    assert simulation.raised >= 2
    assert (arraybridge.detect_memory_type(result), arraybridge.to_numpy(result).dtype) == (name, dtype)
    np.testing.assert_array_equal(arraybridge.to_numpy(result), host)


def test_gradients_flow_through_split_calls() -> None:
    torch = require("torch")
    x = torch.ones(6, 2, requires_grad=True)
    with inject_oom("torch", above_rows=2):
        split_and_retry(lambda y: y * 3, x).sum().backward()
    assert x.grad.tolist() == [[3.0, 3.0]] * 6


# -- arguments and results ----------------------------------------------------------------------------


def test_which_arguments_are_split() -> None:
    x, weights = numbered(2).astype(float), np.array([[1.0, 2.0], [3.0, 4.0]])
    with inject_oom("numpy", above_rows=1):
        by_name = {"b": fixed(weights), "a": x}
        result = run_with_oom_recovery(lambda a, b: a @ b, split=True, **by_name)  # type: ignore[arg-type]
        np.testing.assert_array_equal(result, x @ weights)
        np.testing.assert_array_equal(split_and_retry(np.matmul, (x, fixed(weights))), x @ weights)
        with pytest.raises(ValueError, match="matmul"):
            split_and_retry(np.matmul, (x, weights))
    np.testing.assert_array_equal(split_and_retry(np.matmul, (x, fixed(weights))), x @ weights)
    with pytest.raises(TypeError, match=r"fixed\(x\)"):
        run_with_oom_recovery(lambda images: images, numbered(8), split="images")  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", [lambda y: y.sum(0), lambda y: y[:1]])
def test_results_of_another_length_raise(fn: Callable[..., Any]) -> None:
    with pytest.raises(CannotSplitError, match="one row per input row"):
        in_halves(fn, numbered(8))


def test_iterators_are_read_once() -> None:
    def fn(x: np.ndarray, shifts: Any) -> np.ndarray:
        return x + sum(shifts)

    x = np.arange(8.0)
    assert split_and_retry(fn, (x, iter([1, 2])))[0] == 3  # it is called once
    for run in (split_and_retry, lambda f, args: arraybridge.numpy(oom_recovery=True)(f)(*args)):
        with (
            inject_oom("numpy", above_rows=3) as simulation,
            pytest.raises(MemoryError, match=r"an argument that is an iterator .*Pass a list"),
        ):
            run(fn, (x, iter([1, 2])))
        assert len(simulation.attempts) == 1


@pytest.mark.parametrize("arguments", [(), (3,), (np.array(2.0),), ("text", None)])
def test_calls_without_rows_run_until_oom(arguments: tuple[Any, ...]) -> None:
    assert split_and_retry(lambda *args: args, arguments) == arguments
    assert arraybridge.numpy(oom_recovery="split")(lambda *args: len(args))(*arguments) == len(arguments)
    with pytest.raises(CannotSplitError, match="Memory ran out, and no argument to split") as caught:
        split_and_retry(out_of_memory, arguments)
    assert type(caught.value.__cause__) is MemoryError
    assert arraybridge.is_oom_error(caught.value)


# -- results in memory that the function overwrites -----------------------------------------------------

ROWS = np.arange(16.0, dtype=np.float32).reshape(8, 2)


# -- cost ----------------------------------------------------------------------------------------------


def into_ring(count: int) -> Callable[[Any], Any]:
    """Return a function that doubles an array into one of several NumPy buffers, in turn."""
    buffers = [np.empty((8, 2), np.float32) for _ in range(count)]

    def fn(x: np.ndarray) -> np.ndarray:
        buffers.append(buffers.pop(0))
        return np.multiply(x, 2, out=buffers[-1][: len(x)])

    return fn


@pytest.mark.parametrize("count", [1, 2])
def test_results_in_reused_buffers(count: int) -> None:
    np.testing.assert_array_equal(in_halves(into_ring(count), ROWS), ROWS * 2)
    np.testing.assert_array_equal(Pipeline(into_ring(count))(ROWS), ROWS * 2)


@pytest.mark.parametrize("output", ["torch", "numpy", "jax", "tensorflow"])
def test_results_in_a_torch_buffer_and_a_variable(output: Any) -> None:
    torch, tf = require("torch"), require("tensorflow")
    buffer, variable = torch.empty(8, 2), tf.Variable(np.zeros((2, 2), np.float32))

    @arraybridge.torch(oom_recovery="split", output_type=output)
    def into_tensor(x: Any) -> Any:
        return torch.mul(x, 2, out=buffer[: len(x)])

    @arraybridge.tensorflow(oom_recovery="split", output_type=output)
    def into_variable(x: Any) -> Any:
        variable.assign(x * 2)
        return variable

    for fn in (into_tensor, into_variable):
        with inject_oom("numpy", above_rows=2):
            np.testing.assert_array_equal(arraybridge.to_numpy(fn(ROWS)), ROWS * 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arraybridge.split_and_retry(5, np.ones(2)), "split_and_retry expected a function, got int"),  # type: ignore[arg-type]
        (lambda: arraybridge.split_and_retry(abs, np.ones(2), axis="x"), "axis='x' must be an int"),  # type: ignore[arg-type]
        (lambda: arraybridge.run_with_oom_recovery(5), "run_with_oom_recovery expected a function, got int"),  # type: ignore[arg-type]
        (
            lambda: arraybridge.run_with_oom_recovery(abs, np.ones(2), split=True, split_axis=1.5),  # type: ignore[call-overload]
            "split_axis=1.5 must be an int",
        ),
        (
            lambda: arraybridge.process_slices(np.ones((2, 2, 2)), 5),  # type: ignore[arg-type]
            r"process_slices expected a function, got int\. Pass it as the second argument: process_slices\(",
        ),
    ],
)
def test_arguments_of_the_wrong_type_raise_before_the_call(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
