"""What travels to the processes of device_map and back, bit for bit, and what is said of what cannot."""

from __future__ import annotations

import multiprocessing
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, device_map
from tests.helpers import require
from tests.lines import functions
from tests.lines.test_exchange import LARGE


def run(fn: Any, *items: Any, **options: Any) -> list[Any]:
    return list(device_map(fn, items, ["cpu"], processes=True, **options))


# -- where it runs -----------------------------------------------------------------------------------


def test_one_process_for_each_thread_and_one_model_in_each() -> None:
    results = run(functions.apply_model, *range(5), setup=functions.make_model)
    assert [(device, x, here) for _, device, x, here in results] == [("cpu", i, "cpu") for i in range(5)]
    pids = {process for process, *_ in results}
    assert len(pids) == 1
    assert os.getpid() not in pids
    results = run(functions.with_process, *range(40), per_device=2)
    assert [x for x, _ in results] == list(range(40))


def test_processes_run_on_their_devices() -> None:
    require("jax")
    items = [np.zeros(1, np.int32)] * 6
    results = device_map(functions.device_number, items, ["cpu:1", "cpu:2"], processes=True)
    assert {int(r[0]) for r in results} <= {1, 2}


# -- arrays ------------------------------------------------------------------------------------------


def test_arrays_of_every_framework_travel_both_ways() -> None:
    """By one process, which imports them all. JAX's own pickle would cut 64 bits down there."""
    torch, jax, tf = map(require, ("torch", "jax", "tensorflow"))
    batch = torch.arange(10_000, dtype=torch.float32).reshape(1000, 10)
    large = np.arange(LARGE // 4, dtype=np.float32)
    first = {
        name: arraybridge.convert_memory(large, name) for name in ("numpy", "torch", "jax", "tensorflow")
    }
    odd = [
        *(batch[7], batch[5:7].detach().requires_grad_(), jax.numpy.asarray(2.0)),
        *(arraybridge.to_jax(np.array([1 + 2.0**-40])), tf.constant(["a"]), tf.constant([0.5], tf.bfloat16)),
    ]
    back, rest = run(functions.same, first, odd)
    for name, x in back.items():
        assert arraybridge.detect_memory_type(x) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(x), large)
    row, leaf, weak, wide, words, halves = rest
    assert (row.tolist(), row.untyped_storage().nbytes()) == ([*range(70, 80)], 40)  # not the whole batch
    assert (leaf.requires_grad, leaf.tolist()) == (True, [[*range(50, 60)], [*range(60, 70)]])
    assert (str(weak.dtype), weak.weak_type) == ("float32", True)
    assert (str(wide.dtype), float(np.asarray(wide)[0])) == ("float64", 1 + 2.0**-40)
    assert words.numpy().tolist() == [b"a"]
    assert (halves.dtype, float(halves[0])) == (tf.bfloat16, 0.5)


def test_a_graph_is_refused_as_torch_itself_does() -> None:
    torch = require("torch")
    leaf = torch.ones(2, requires_grad=True)
    for fn, item in ((functions.same, partial(abs, leaf * 2)), (functions.with_graph_inside, leaf)):
        with pytest.raises(GradientError, match="its graph stays in the process"):
            run(fn, item)


# -- what cannot be sent -----------------------------------------------------------------------------

ERRORS = [FileNotFoundError, EOFError]  # which a pipe raises, too


def raised(fn: Any, *items: Any, **options: Any) -> tuple[type, str, str]:
    """Class and words of the error, and all its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the tests look at it
        run(fn, *items, **options)
    notes = "\n".join(caught.value.__notes__)
    assert "item 0, on cpu" in notes
    return type(caught.value), str(caught.value.args[0]), notes


def test_a_process_that_dies_is_named_with_its_exit_code() -> None:
    cls, words, _ = raised(functions.die, 1)
    assert issubclass(cls, arraybridge.MemoryConversionError)
    assert "the process for cpu ended at work, with exit code 7" in words


@pytest.mark.parametrize("error", ERRORS)
def test_what_does_not_come_back(error: type[Exception]) -> None:
    homebound = functions.Homebound(error)
    held = partial(functions.same, homebound)
    for result, where in (
        (raised(functions.same, homebound), "the item was sent to the process for cpu"),
        (raised(functions.make_homebound, error), "its result came from the process for cpu"),
        (raised(held, 1), "the function was sent to the process for cpu"),
        (raised(functions.same, 1, setup=held), "the function was sent to the process for cpu"),
    ):
        cls, words, notes = result
        assert (cls, words) == (error, "not made here")
        assert where in notes
        assert "fail_elsewhere" in notes or "result" in where  # the traceback of the process


def test_items_and_results_that_do_not_pickle() -> None:
    cls, words, notes = raised(functions.same, threading.Lock())
    assert cls is TypeError
    assert "lock" in words
    assert "the item cannot be pickled, to be sent to the process for cpu" in notes
    _, words, notes = raised(functions.make_function, 1)
    assert "lambda" in words
    assert "its result cannot be pickled, to leave the process for cpu" in notes


@pytest.mark.parametrize("late", [False, True])
def test_an_error_that_does_not_travel(late: bool) -> None:
    cls, words, notes = raised(functions.raise_it, (functions.StubbornError, (KeyError, late)))
    assert (cls, words) == (RuntimeError, "StubbornError: stubborn")
    assert "the error itself cannot leave its process (KeyError: " in notes
    assert "in raise_it" in notes


@pytest.mark.parametrize("where", ["function", "setup"])
def test_a_function_that_does_not_pickle_is_refused_at_once(where: str) -> None:
    held = partial(functions.same, multiprocessing.Lock())
    fn, setup = (held, None) if where == "function" else (functions.same, held)
    with pytest.raises(TypeError, match="through inheritance") as caught:
        device_map(fn, [1], ["cpu"], processes=True, setup=setup)
    assert "same" in str(caught.value)


@pytest.mark.filterwarnings("ignore::arraybridge.MissingGpuWarning")  # what threads say here
@pytest.mark.parametrize("processes", [False, True])
def test_settings_hold_and_a_missing_gpu_is_told(processes: bool, capfd: pytest.CaptureFixture[str]) -> None:
    require("jax")

    def results() -> list[list[float]]:
        items = [np.zeros(2, np.float32), np.ones(2, np.float32)]
        return [
            x.tolist() for x in device_map(functions.on_a_missing_gpu, items, ["cpu"], processes=processes)
        ]

    with arraybridge.settings(missing_gpu="host"):
        assert results() == [[1, 1], [2, 2]]
        assert capfd.readouterr().err.count("MissingGpuWarning") == processes  # the process says so itself
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:97"):
        results()
