"""run_with_oom_recovery: what stands between two attempts, and what comes out in the end."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import run_with_oom_recovery
from arraybridge.frameworks import registry
from arraybridge.memory import cleanup, recovery
from arraybridge.testing import inject_oom
from tests.helpers import require


class Failing:
    """A function that runs out of memory a number of times, and notes what became of its arrays."""

    def __init__(self, failures: int, error: Callable[[], Exception] = MemoryError) -> None:
        self.failures = failures
        self.error = error
        self.calls = 0
        self.arrays: list[weakref.ref[np.ndarray]] = []
        self.alive: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.alive.append(sum(ref() is not None for ref in self.arrays))
        return self.work(x)

    def work(self, x: Any) -> Any:
        large = np.zeros(1000)
        self.arrays.append(weakref.ref(large))
        if self.calls <= self.failures:
            raise self.error()
        return x + 1


def chained() -> Exception:
    """An error with arrays in the frames of its cause, its context and its group as well."""

    def inner() -> None:
        pin = np.zeros(1000)
        refs.append(weakref.ref(pin))
        raise MemoryError

    try:
        try:
            inner()
        except MemoryError as error:
            pin = np.zeros(1000)
            refs.append(weakref.ref(pin))
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        return ExceptionGroup("both", [error])


refs: list[weakref.ref[np.ndarray]] = []


def test_arrays_along_the_whole_chain_are_gone() -> None:
    refs.clear()
    alive = []

    def fn() -> int:
        alive.append(sum(ref() is not None for ref in refs))
        if len(alive) < 3:
            raise chained()
        return 5

    assert run_with_oom_recovery(fn) == 5
    assert alive == [0, 0, 0]


def test_the_next_attempt_runs_outside_the_except_block() -> None:
    import sys

    seen = []

    def fn() -> None:
        seen.append(sys.exception())
        if len(seen) < 2:
            raise MemoryError

    run_with_oom_recovery(fn)
    assert seen == [None, None]


def test_the_last_error_comes_out_with_a_note_and_its_lines() -> None:
    errors = [MemoryError("first"), MemoryError("second"), MemoryError("third")]
    waiting = iter(errors)

    def fail() -> None:
        raise next(waiting)

    with pytest.raises(MemoryError) as caught:
        run_with_oom_recovery(fail)
    assert caught.value is errors[2]
    note = str(caught.value).splitlines()[-1]
    assert "3 attempts" in note
    assert any(entry.name == "fail" for entry in caught.traceback)
    assert next(waiting, None) is None


@pytest.mark.parametrize("retries", [0, 1, 5])
def test_max_retries(retries: int) -> None:
    fn = Failing(100)
    with pytest.raises(MemoryError):
        run_with_oom_recovery(fn, 1, max_retries=retries)
    assert fn.calls == retries + 1


@pytest.mark.parametrize("error", [ValueError, KeyError, ZeroDivisionError, KeyboardInterrupt])
def test_other_errors_pass_untouched(error: Callable[[], Exception]) -> None:
    fn = Failing(5, error)
    raised = error()
    fn.error = lambda: raised
    with pytest.raises(error) as caught:  # type: ignore[call-overload]
        run_with_oom_recovery(fn, 1)
    assert caught.value is raised
    assert fn.calls == 1
    assert not hasattr(raised, "__notes__")


def test_another_error_after_a_retry_passes() -> None:
    errors = iter([MemoryError(), ValueError("shape")])

    def fail() -> None:
        raise next(errors)

    with pytest.raises(ValueError, match="shape") as caught:
        run_with_oom_recovery(fail)
    assert caught.value.__context__ is None


def test_an_error_that_is_being_handled_is_not_this_ones_cause() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("a bug")

    try:
        raise MemoryError
    except MemoryError:
        with pytest.raises(ValueError, match="a bug"):
            run_with_oom_recovery(fail)
    assert len(calls) == 1


@pytest.fixture
def caches() -> Iterator[list[Any]]:
    """Frees of caches, as they come."""
    freed: list[Any] = []

    def empty(device: Any, name: str | None) -> int:
        freed.append((name, device))
        return 7

    cleanup.own_caches.append(empty)
    yield freed
    cleanup.own_caches.remove(empty)


def test_caches_of_all_loaded_frameworks_are_freed_between_attempts(caches: list[Any]) -> None:
    loaded = {one.name for one in registry.loaded()}
    run_with_oom_recovery(Failing(1), 1, gpu_id=1)
    assert {name for name, _ in caches} == loaded
    assert {str(device) for _, device in caches} <= {"gpu:1", "opencl:1"}
    caches.clear()
    run_with_oom_recovery(Failing(0), 1)
    assert caches == []


def test_each_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "arraybridge.memory"):
        run_with_oom_recovery(Failing(1), 1)
    assert len(caplog.records) == 1
    assert "one of 3 attempts ran out of memory (MemoryError: )" in caplog.text


def test_jax_errors_that_come_late_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX raises what failed behind the caller's back when the result is waited for."""
    require("jax")
    waited = []
    framework = arraybridge.framework("jax")
    x = arraybridge.to_jax(np.ones(3, np.float32))

    def raising(result: Any) -> None:
        waited.append(result)
        if len(waited) == 1:
            raise framework.pool.oom_error()

    monkeypatch.setitem(recovery._waits, type(x), raising)
    result = run_with_oom_recovery(lambda: {"a": (x,)})
    assert result["a"][0] is x
    assert len(waited) == 2


def test_a_rehearsal_by_rows() -> None:
    with inject_oom("numpy", above_rows=4) as rehearsal:
        run_with_oom_recovery(np.sum, np.ones((4, 9)))
        with pytest.raises(MemoryError):
            run_with_oom_recovery(np.sum, np.ones((5, 9)), max_retries=1)
    assert rehearsal.attempts == [4, 5, 5]


def test_a_rehearsal_of_nothing_warns() -> None:
    with (
        pytest.warns(UserWarning, match=r"saw no attempt.*oom_recovery=True") as seen,
        inject_oom("numpy"),
    ):
        np.ones(2).sum()  # without protection
    assert seen[0].filename == __file__


# -- what is let go, and what is not -------------------------------------------------------------------


def suspended(log: list[str]) -> Iterator[int]:
    """A generator that is in the midst of handling an error, so that its frame stands in the traceback."""
    try:
        try:
            raise MemoryError("inside")
        except MemoryError as error:
            log.append("waits")
            yield error  # type: ignore[misc]
        yield 2
    finally:
        log.append("closed")


def test_a_suspended_generator_goes_on_after_the_clean_up() -> None:
    log: list[str] = []
    generator = suspended(log)
    attempts = []

    def fn() -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise next(generator)  # type: ignore[misc]
        return next(generator)

    assert run_with_oom_recovery(fn) == 2
    assert log == ["waits"]
    generator.close()  # type: ignore[attr-defined]
    assert log == ["waits", "closed"]


@pytest.mark.parametrize("mode", [True, "split"])
def test_converted_arguments_are_gone_before_the_next_attempt(mode: Any) -> None:
    """Positional, by keyword and nested: those that were converted for an attempt, and not the caller's."""
    torch = require("torch")
    refs: list[weakref.ref[Any]] = []
    alive: list[int] = []

    @arraybridge.torch(oom_recovery=mode, output_type="numpy")
    def fn(x: Any, *rest: Any, deep: Any, named: Any, **more: Any) -> Any:
        alive.append(sum(ref() is not None for ref in refs))
        arrays = [x, *rest, deep["a"][0], named, more["late"][0]]
        assert all(isinstance(one, torch.Tensor) for one in arrays)
        refs.extend(weakref.ref(one) for one in arrays)
        if len(alive) < 3:
            raise MemoryError
        return x * 2

    x = np.ones((8, 3))
    given = {"deep": {"a": [x + 1]}, "named": x + 2, "late": (x + 3,)}
    np.testing.assert_array_equal(fn(x, x + 4, **given), np.full((8, 3), 2.0))
    assert alive[:3] == [0, 0, 0]
    assert isinstance(given["named"], np.ndarray)
    assert isinstance(given["deep"]["a"][0], np.ndarray)  # type: ignore[index]


@pytest.mark.parametrize("split", [False, True])
def test_nothing_of_a_recovered_call_is_left_to_the_collector(split: bool) -> None:
    import gc

    fn = Failing(1)
    gc.collect()
    gc.disable()
    try:
        x = np.zeros(1000)
        ref = weakref.ref(x)
        run_with_oom_recovery(fn, x, split=split)
        del x
        assert ref() is None
    finally:
        gc.enable()


def test_before_retry() -> None:
    steps: list[str] = []

    def train() -> str:
        steps.append("train")
        if len(steps) < 5:
            raise MemoryError
        return "trained"

    result = run_with_oom_recovery(train, max_retries=5, before_retry=lambda: steps.append("reset"))
    assert result == "trained"
    assert steps == ["train", "reset", "train", "reset", "train"]
    assert run_with_oom_recovery(lambda: 3, before_retry=lambda: steps.append("never")) == 3
    with pytest.raises(MemoryError):
        run_with_oom_recovery(Failing(9), 1, max_retries=1, before_retry=lambda: steps.append("once"))
    assert steps[5:] == ["once"]


def test_an_error_of_before_retry_comes_out() -> None:
    def reset() -> None:
        raise KeyError("grad")

    with pytest.raises(KeyError, match="grad") as caught:
        run_with_oom_recovery(Failing(9), 1, before_retry=reset)
    assert caught.value.__context__ is None


class Watched(np.ndarray):
    """An array that a weak reference can be made of."""


def out_of_memory(_: Any) -> Any:
    raise MemoryError("no")


@pytest.mark.parametrize(
    "run",
    [
        lambda x: run_with_oom_recovery(out_of_memory, x),
        lambda x: run_with_oom_recovery(out_of_memory, x, max_retries=0),
        lambda x: arraybridge.split_and_retry(out_of_memory, x),
        arraybridge.numpy(oom_recovery=True)(out_of_memory),
        arraybridge.numpy(oom_recovery="split")(out_of_memory),
    ],
)
def test_a_recovery_that_gives_up_keeps_nothing(run: Callable[[Any], Any]) -> None:
    gc.disable()
    try:
        for _ in range(2):  # the second call of a decorated function goes another way
            x = np.zeros(4).view(Watched)
            reference = weakref.ref(x)
            with pytest.raises(MemoryError) as caught:
                run(x)
            del x, caught
            assert reference() is None
    finally:
        gc.enable()
