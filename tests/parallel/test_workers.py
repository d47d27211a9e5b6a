"""Behavior shared by `device_map`, `Pipeline.map` and `prefetch`: order, bounds, errors, and shutdown."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, device_map, prefetch
from arraybridge.settings import missing_gpu
from tests.helpers import SCRIPTS, require, run_python
from tests.parallel.conftest import our_threads, wait_for_no_threads


class OwnError(Exception):
    pass


def same(x: Any) -> Any:
    return x


#: Functions that apply a function to items, by name, each with the number of items it reads ahead at most.
WAYS: dict[str, tuple[Callable[..., Iterator[Any]], int]] = {
    "device_map": (lambda fn, items: device_map(fn, items, "cpu", per_device=2), 8),
    "one stage": (lambda fn, items: Pipeline(fn, queue_size=1).map(items), 2),
    "three stages": (lambda fn, items: Pipeline(same, fn, same).map(items), 9),
    "prefetch": (lambda fn, items: prefetch(map(fn, items), "numpy", depth=3), 4),
}
ways = pytest.mark.parametrize("way", WAYS)


def run(way: str, fn: Any, items: Any) -> Iterator[Any]:
    return WAYS[way][0](fn, items)


# -- order and bounds --------------------------------------------------------------------------------


@ways
def test_results_are_in_order(way: str) -> None:
    pauses = np.random.default_rng(0).uniform(0, 0.002, 60)

    def wait(i: int) -> int:
        time.sleep(pauses[i])
        return i * 2

    assert list(run(way, wait, range(60))) == list(range(0, 120, 2))
    assert list(run(way, wait, [])) == []


@ways
def test_input_is_read_lazily_and_bounded(way: str) -> None:
    read = handed = most = 0

    def items() -> Iterator[int]:
        nonlocal read, most
        for i in count():
            read += 1
            most = max(most, read - handed)
            yield i

    results = run(way, same, items())
    assert read == 0  # no item is read before the first result is requested
    assert our_threads() == []
    for _ in range(60):
        next(results)
        handed += 1
        time.sleep(0.0005)
    results.close()  # type: ignore[attr-defined]  # a generator
    assert most <= WAYS[way][1] + 1  # the item that was passed on before the count stopped


# -- errors ------------------------------------------------------------------------------------------

NOTES = {
    "device_map": "item 4, on cpu",
    "one stage": "in stage 0 (fail), item 4",
    "three stages": "in stage 1 (fail), item 4",
    "prefetch": "while reading item 4",
}


@ways
def test_error_follows_earlier_results_and_stops_the_rest(way: str) -> None:
    begun = []

    def fail(i: int) -> int:
        begun.append(i)
        if i == 4:
            raise OwnError("four")
        return i

    for _ in range(20):
        got: list[int] = []
        begun.clear()
        with pytest.raises(OwnError, match="four") as caught:
            got.extend(run(way, fail, range(1000)))
        assert got == [0, 1, 2, 3]
        assert caught.value.__notes__ == [NOTES[way]]
        assert len(begun) < 30
        wait_for_no_threads()


def test_first_failing_item_determines_the_error() -> None:
    """Also check a later item that fails earlier in time."""
    failed = threading.Event()

    def later(x: int) -> int:
        if x == 2:
            failed.set()
            raise OwnError("two")
        return x

    def earlier(x: int) -> int:
        assert failed.wait(20)
        if x == 1:
            raise OwnError("one")
        return x

    for results in (
        Pipeline(later, earlier).map(range(100)),
        device_map(lambda x: later(x) if x == 2 else earlier(x), range(100), "cpu", per_device=3),
    ):
        failed.clear()
        got: list[int] = []
        with pytest.raises(OwnError, match="one"):
            got.extend(results)
        assert got == [0]


@ways
def test_errors_of_the_input_iterator_propagate(way: str) -> None:
    def items() -> Iterator[int]:
        yield from (0, 1)
        raise OwnError("no more")

    got: list[int] = []
    with pytest.raises(OwnError) as caught:
        got.extend(run(way, same, items()))
    assert got == [0, 1]
    assert "item 2" in caught.value.__notes__[0]
    with pytest.raises(OwnError):
        list(device_map(same, items(), "cpu", ordered=False))


@ways
def test_stop_iteration_is_an_error_and_system_exit_propagates(way: str) -> None:
    def stop(x: int) -> int:
        raise StopIteration("three") if x == 3 else SystemExit(3)

    if way != "prefetch":  # StopIteration of a source only ends it
        with pytest.raises(RuntimeError, match=r"item 3.*StopIteration") as caught:
            list(run(way, lambda x: stop(x) if x == 3 else x, range(9)))
        assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(SystemExit):
        list(run(way, stop, [0]))


# -- settings in the threads -------------------------------------------------------------------------


@ways
def test_threads_inherit_settings_and_traces(way: str) -> None:
    torch = require("torch")

    def read_settings(x: Any) -> Any:
        arraybridge.to_torch(np.zeros(2))
        return torch.is_grad_enabled(), missing_gpu()

    with torch.no_grad(), arraybridge.settings(missing_gpu="host"), arraybridge.trace() as log:
        results = list(run(way, read_settings, range(4)))
    assert results == [(False, "host")] * 4
    assert len(log.records) == 4
    kind = "stage" if "stage" in way else "item"
    assert {event.file for event in log.events if event.kind == kind} == {__file__}


# -- shutdown ----------------------------------------------------------------------------------------


@ways
def test_dropped_iterator_ends_its_threads(way: str) -> None:
    results = run(way, same, count())
    next(results)
    assert our_threads()
    circle: list[Any] = [results]
    circle.append(circle)
    del results, circle
    gc.collect()
    wait_for_no_threads()


@pytest.mark.parametrize("mode", ["threads", "processes", "stuck prefetch"])
def test_ctrl_c(mode: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.interrupted", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=SCRIPTS.parent.parent,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=120)  # the source is stuck for much longer
        finally:
            process.kill()
    if mode == "stuck prefetch":
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert (out, err, process.returncode) == ("interrupted, and 0 threads left\n", "", 0)


def test_program_exits_cleanly_with_half_read_iterators() -> None:
    """Without shutdown of these threads, the process aborted in PyTorch and in JAX."""
    require("torch")
    require("jax")
    done = run_python("-m", "tests.parallel.half_read", "torch", "jax", env={"PYTHONWARNINGS": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


LATE = """
import jax
import arraybridge
jax.numpy.ones(2)
results = arraybridge.device_map(abs, iter(range(100)))
print(next(results))
"""


def test_iterator_that_is_closed_after_its_module_was_cleared_is_silent() -> None:
    """JAX keeps the names of the script alive until the interpreter has cleared the other modules."""
    require("jax")
    done = run_python("-c", LATE, env={"PYTHONWARNINGS": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_imported_but_unused_framework_is_not_initialized() -> None:
    require("jax")
    done = run_python("-m", "tests.parallel.opens_nothing", env={"PYTHONWARNINGS": ""})
    assert (done.stdout, done.stderr) == ("left alone\n", "")


FORKED = """
import os
from itertools import count
from arraybridge import Pipeline, device_map, prefetch

begun = [prefetch(count(), "numpy"), device_map(abs, count(), "cpu"), Pipeline(abs).map(count())]
assert [next(one) for one in begun] == [0, 0, 0]
child = os.fork()
if child == 0:
    for one in begun:
        try:
            list(one)
        except RuntimeError as error:
            print("created before the process was forked" in str(error), flush=True)
    os._exit(len(list(device_map(abs, range(5), "cpu"))))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [next(one) for one in begun])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system does not have")
def test_iterators_raise_in_a_forked_process() -> None:
    done = run_python("-W", "ignore", "-c", FORKED)
    assert done.stdout.splitlines() == ["True"] * 3 + ["5 [1, 1, 1]"], done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_exception_in_the_loop_ends_the_threads(error: type[BaseException]) -> None:
    """Check without garbage collection: no reference to the dropped iterator may remain."""
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(error):
            _raise_at_two(error)
        wait_for_no_threads()
    finally:
        gc.enable()


def _raise_at_two(error: type[BaseException]) -> None:
    for i in device_map(slow_one, count(), "cpu", per_device=2):
        if i == 2:
            raise error


def slow_one(i: int) -> int:
    time.sleep(0.01)
    return i
