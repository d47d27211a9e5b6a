"""What travels to the processes of device_map and back, bit for bit, and what is said of what cannot."""

from __future__ import annotations

import multiprocessing
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, device_map
from tests.helpers import require, run_python
from tests.lines import functions
from tests.matrix_data import x64


def run(fn: Any, *items: Any, **options: Any) -> list[Any]:
    return list(device_map(fn, items, ["cpu"], processes=True, **options))


# -- arrays ------------------------------------------------------------------------------------------


def test_what_is_sent_stays_where_it_is() -> None:
    """Freed memory was read here: multiprocessing moves the memory of the tensors that it sends."""
    require("torch")
    require("jax")
    done = run_python(str(Path(__file__).with_name("kept_memory.py")), env={"PYTHONWARNINGS": ""})
    sums = "[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]"
    assert done.stdout.splitlines() == [
        f"items True True {sums}",
        f"function True True {sums}",
        f"setup True True {sums}",
        "in place True True [[9.0, 9.0, 9.0], [9.0, 9.0, 9.0]]",
    ], done.stderr


def test_a_row_travels_without_the_whole_batch() -> None:
    torch = require("torch")
    batch = torch.arange(10_000, dtype=torch.float32).reshape(1000, 10)
    column = batch.T[3]  # every tenth element
    leaf = batch[5:7].detach().requires_grad_()
    (row, sent), (_, sent_column), (_, sent_leaf) = run(
        functions.first_row_and_storage, batch[7], column, leaf[:0].detach()
    )
    assert (sent, sent_column, sent_leaf) == (40, 4000, 0)
    assert row.tolist() == [70.0]
    assert row.untyped_storage().nbytes() == 4
    (back,) = run(functions.same, leaf)
    assert back.requires_grad
    assert back.tolist() == [[*range(50, 60)], [*range(60, 70)]]


def test_what_has_bits_besides_its_values_is_right() -> None:
    torch = require("torch")
    x = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    conjugate, imaginary, last, empty = run(
        functions.same, x.conj()[:2], x.conj().imag, x[2], torch.zeros(10)[:0]
    )
    assert conjugate.tolist() == [1 - 2j, 3 - 4j]
    assert imaginary.tolist() == [-2, -4, -6]
    assert last.item() == 5 + 6j
    assert empty.shape == (0,)


def test_a_model_comes_as_it_is() -> None:
    torch = require("torch")
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight[:] = torch.tensor([[2.0, 3.0]])
        model.bias[:] = 1
    (weight,) = run(functions.first_of, model)[0].weight.tolist()
    assert weight == [2, 3]


def test_64_bits_of_jax_are_kept() -> None:
    """JAX's own pickle cuts them where they are not enabled, as in a process that nobody told."""
    jax = require("jax")
    value = 1 + 2.0**-40
    x = arraybridge.to_jax(np.array([value]))
    assert not jax.config.jax_enable_x64
    (back,) = run(functions.same, x)
    assert (str(back.dtype), float(np.asarray(back)[0])) == ("float64", value)


def test_arrays_of_tensorflow_travel() -> None:
    tf = require("tensorflow")
    words, halves = run(functions.same, tf.constant(["a"]), tf.constant([0.5], tf.bfloat16))
    assert words.numpy().tolist() == [b"a"]
    assert halves.dtype == tf.bfloat16
    assert float(halves[0]) == 0.5


def test_a_graph_is_refused_as_torch_itself_does() -> None:
    torch = require("torch")
    leaf = torch.ones(2, requires_grad=True)
    for fn, item in (
        (functions.same, leaf * 2),
        (functions.same, partial(abs, leaf * 2)),
        (functions.with_graph_inside, leaf),
    ):
        with pytest.raises(GradientError, match="its graph would stay behind"):
            run(fn, item)


def test_function_and_setup_share_an_object() -> None:
    model = functions.Model()
    assert run(model.apply, 1, 2, setup=model.load) == [(True, 3), (True, 6)]
    assert model.weights is None


# -- what cannot be sent -----------------------------------------------------------------------------

ERRORS = [KeyError, IndexError, ZeroDivisionError, RuntimeError, FileNotFoundError, EOFError]


def raised(fn: Any, *items: Any, **options: Any) -> tuple[type, str, str]:
    """Class and words of the error, and all its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the tests look at it
        run(fn, *items, **options)
    notes = "\n".join(caught.value.__notes__)
    assert "item 0, on cpu" in notes
    return type(caught.value), str(caught.value.args[0]), notes


@pytest.mark.parametrize("error", ERRORS)
def test_an_item_that_does_not_come_back(error: type[Exception]) -> None:
    cls, words, notes = raised(functions.same, functions.Homebound(error))
    assert (cls, words) == (error, "not made here")
    assert "the item was sent to the process for cpu, and cannot be unpickled there" in notes
    assert "fail_elsewhere" in notes  # the traceback of the process


@pytest.mark.parametrize("error", ERRORS)
def test_a_result_that_does_not_come_back(error: type[Exception]) -> None:
    cls, words, notes = raised(functions.make_homebound, error)
    assert (cls, words) == (error, "not made here")
    assert "its result came from the process for cpu, and cannot be unpickled here" in notes


def test_items_and_results_that_do_not_pickle() -> None:
    cls, words, notes = raised(functions.same, threading.Lock())
    assert cls is TypeError
    assert "lock" in words
    assert "the item cannot be pickled, to be sent to the process for cpu" in notes
    _, words, notes = raised(functions.make_function, 1)
    assert "lambda" in words
    assert "its result cannot be pickled, to leave the process for cpu" in notes


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [KeyError, OSError, RuntimeError])
def test_an_error_that_does_not_travel(error: type[Exception], late: bool) -> None:
    cls, words, notes = raised(functions.raise_it, (functions.StubbornError, (error, late)))
    assert (cls, words) == (RuntimeError, "StubbornError: stubborn")
    assert f"the error itself cannot leave its process ({error.__name__}: " in notes
    assert "in raise_it" in notes


def test_an_error_with_a_lock_and_one_that_becomes_something_else() -> None:
    cls, words, notes = raised(functions.raise_it, (functions.LockedError, ()))
    assert (cls, words) == (RuntimeError, "LockedError: locked")
    assert "only be shared between processes through inheritance" in notes
    cls, words, notes = raised(functions.raise_it, (functions.DisguisedError, ("hidden",)))
    assert (cls, words) == (RuntimeError, "DisguisedError: hidden")
    assert "no error at all" in notes


@pytest.mark.parametrize("where", ["function", "setup"])
def test_a_function_that_does_not_come_back(where: str) -> None:
    held = partial(functions.first_of, functions.Homebound(FileNotFoundError))
    found = raised(held, 1) if where == "function" else raised(functions.first_of, 1, setup=held)
    cls, words, notes = found
    assert (cls, words) == (FileNotFoundError, "not made here")
    assert "the function was sent to the process for cpu, and cannot be unpickled there" in notes


@pytest.mark.parametrize("where", ["function", "setup"])
def test_a_function_that_does_not_pickle_is_refused_at_once(where: str) -> None:
    for held, why in (
        (partial(functions.first_of, multiprocessing.Lock()), "through inheritance"),
        (partial(functions.first_of, functions.StubbornError(KeyError, late=False)), "not pickled"),
    ):
        fn, setup = (held, None) if where == "function" else (functions.first_of, held)
        with pytest.raises(TypeError, match=why) as caught:
            device_map(fn, [1], ["cpu"], processes=True, setup=setup)
        assert "first_of" in str(caught.value)


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [False, True])
def test_settings_hold(processes: bool) -> None:
    def found() -> list[str]:
        return list(device_map(functions.settings_here, [1], ["cpu"], processes=processes))

    with arraybridge.settings(missing_gpu="host"):
        assert found() == ["host"]
    assert found() == ["error"]


@pytest.mark.filterwarnings("ignore::arraybridge.MissingGpuWarning")  # what threads say here
@pytest.mark.parametrize("processes", [False, True])
def test_the_host_instead_of_a_missing_gpu(processes: bool, capfd: pytest.CaptureFixture[str]) -> None:
    require("jax")

    def found(devices: Any) -> list[list[float]]:
        items = [np.zeros(2, np.float32), np.ones(2, np.float32)]
        results = device_map(functions.on_a_missing_gpu, items, devices, processes=processes)
        return [x.tolist() for x in results]

    with arraybridge.settings(missing_gpu="host"):
        assert found(["cpu"]) == [[1, 1], [2, 2]]
        assert capfd.readouterr().err.count("MissingGpuWarning") == processes  # the process says so itself
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:97"):
        found(["cpu"])


def test_what_the_call_has_said_no_process_says_again(capfd: pytest.CaptureFixture[str]) -> None:
    require("jax")
    items = [np.zeros(2, np.float32)]
    with arraybridge.settings(missing_gpu="host"):
        with pytest.warns(arraybridge.MissingGpuWarning, match="gpu:97 is missing"):
            results = device_map(functions.on_a_missing_gpu, items, ["gpu:97"], processes=True)
        assert [x.tolist() for x in results] == [[1, 1]]
    assert "MissingGpuWarning" not in capfd.readouterr().err


def test_a_weakly_typed_array_of_jax_stays_one() -> None:
    jax = require("jax")
    with x64(jax):
        weak = jax.numpy.asarray(2.0)
        strong = jax.numpy.asarray(np.float64(2))
    found = list(device_map(functions.weak_type, [weak, strong], ["cpu"], processes=True))
    assert found == [("float64", True), ("float64", False)]
