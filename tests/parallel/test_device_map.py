"""`device_map`: every device works with its own model, and invalid input raises. See also test_workers.py."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import device_map
from tests.helpers import jax_with, require
from tests.parallel import functions

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.fixture
def jax_devices() -> Any:
    return jax_with(4)


@pytest.mark.parametrize("devices", ["all", FOUR])
def test_decorated_function_runs_on_every_device(jax_devices: Any, devices: Any) -> None:
    number = len(list(arraybridge.framework("jax").devices.available())) if devices == "all" else 4
    meeting = threading.Barrier(number, timeout=20)

    @arraybridge.jax(output_type="numpy")
    def double(x: Any) -> Any:
        seen.append(str(arraybridge.device_of(x)))
        meeting.wait()
        return x * 2

    seen: list[str] = []
    items = [np.full(3, i, np.float32) for i in range(5 * number)]
    np.testing.assert_array_equal(np.stack(list(device_map(double, items, devices))), np.stack(items) * 2)
    assert len(set(seen)) == number
    assert devices == "all" or set(seen) == {"cpu", "cpu:1", "cpu:2", "cpu:3"}


def test_plain_function_receives_arrays_on_its_device(jax_devices: Any) -> None:
    meeting = threading.Barrier(3, timeout=20)

    def places(item: dict[str, Any]) -> tuple[str, str]:
        meeting.wait()
        made = jax_devices.numpy.zeros(2)
        return str(arraybridge.device_of(item["x"])), str(arraybridge.device_of(made))

    items = [{"x": arraybridge.to_jax(np.zeros(3, np.float32)), "name": "a"} for _ in range(24)]
    results = set(device_map(places, items, devices=FOUR[1:]))
    assert results == {(f"cpu:{i}", f"cpu:{i}") for i in (1, 2, 3)}


def test_function_with_a_fixed_device_keeps_it(jax_devices: Any) -> None:
    @arraybridge.jax(device="cpu:3")
    def own(x: Any) -> Any:
        return x

    for devices in ("all", jax_devices.devices("cpu")[1]):  # native device strings as well
        results = list(device_map(own, [np.zeros(2)] * 3, devices))
        assert {str(arraybridge.device_of(r)) for r in results} == {"cpu:3"}


def test_caller_settings_are_unchanged(jax_devices: Any) -> None:
    before = str(arraybridge.device_of(jax_devices.numpy.zeros(2))), str(arraybridge.get_device())
    list(device_map(arraybridge.jax(functions.same), [np.zeros(2)], ["cpu:2"]))
    assert (str(arraybridge.device_of(jax_devices.numpy.zeros(2))), str(arraybridge.get_device())) == before


def test_opencl_devices() -> None:
    cle = require("pyclesperanto")
    if len(arraybridge.devices("pyclesperanto")) < 2:
        pytest.skip("needs two OpenCL devices, and POCL_DEVICES gives one")
    meeting = threading.Barrier(2, timeout=20)

    @arraybridge.pyclesperanto(output_type="numpy")
    def add(x: Any) -> Any:
        seen.add(str(arraybridge.device_of(x)))
        meeting.wait()
        return cle.add_image_and_scalar(x, scalar=1)

    seen: set[str] = set()
    items = [np.full((2, 3), i, np.float32) for i in range(12)]
    results = list(device_map(add, items, ["opencl:0", "opencl:1"]))
    assert seen == {"opencl:0", "opencl:1"}
    np.testing.assert_array_equal(np.stack(results), np.stack(items) + 1)


# -- one model per device ----------------------------------------------------------------------------


def test_setup_makes_one_model_per_worker(jax_devices: Any) -> None:
    jnp = jax_devices.numpy
    made: list[Any] = []
    meeting = threading.Barrier(4, timeout=20)

    def make() -> Any:
        weights = jnp.arange(3.0)
        made.append((str(arraybridge.get_device()), str(arraybridge.device_of(weights))))
        meeting.wait()
        return weights

    def apply(weights: Any, x: Any) -> Any:
        assert arraybridge.device_of(weights) == arraybridge.get_device() == arraybridge.device_of(x)
        return weights * x

    @arraybridge.jax(output_type="numpy")
    def decorated(weights: Any, x: Any) -> Any:
        assert isinstance(x, jax_devices.Array)
        return weights * x

    items = [arraybridge.to_jax(np.full(3, i, np.float32)) for i in range(12)]
    for fn in (apply, decorated):
        made.clear()
        results = list(device_map(fn, items, FOUR, setup=make))
        assert sorted(made) == [("cpu", "cpu"), *((f"cpu:{i}", f"cpu:{i}") for i in (1, 2, 3))]
        for i, result in enumerate(results):
            np.testing.assert_array_equal(arraybridge.to_numpy(result), np.arange(3.0) * i)


@pytest.mark.parametrize("setup", [None, dict])
def test_errors_of_functions_with_other_parameters_state_the_arguments(setup: Any) -> None:
    with pytest.raises(TypeError) as caught:
        list(device_map(functions.apply_model if setup is None else len, [1], "cpu", setup=setup))
    count = "one argument" if setup is None else "two arguments"
    assert any(f"calls the function with {count}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("processes", [False, True])
def test_setup_errors_name_the_device(processes: bool) -> None:
    with pytest.raises(LookupError, match="no model here") as caught:
        list(
            device_map(
                functions.apply_model, range(5), "cpu", setup=functions.fail_to_make, processes=processes
            )
        )
    assert any("in setup, on cpu" in note for note in caught.value.__notes__)


# -- order and devices -------------------------------------------------------------------------------


def test_unordered_results_arrive_before_an_error() -> None:
    received = threading.Event()

    def work(i: int) -> int:
        if i == 12:
            raise LookupError
        if i == 0:
            assert received.wait(60), "no other item arrived first"
        return i

    # The items never end, so the loop ends only if no new items are read after the error.
    results = device_map(work, itertools.count(), "cpu", per_device=3, ordered=False)
    got = [next(results)]
    received.set()
    with pytest.raises(LookupError):
        got.extend(results)
    assert got[0] != 0
    assert 12 not in got
    loose = list(device_map(work, range(12), "cpu", per_device=3, ordered=False))
    assert sorted(loose) == list(range(12))


# -- invalid input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, [1]), {}, TypeError, "expected a function"),
        ((abs, 3), {}, TypeError, "an iterable of items"),
        ((abs, [1]), {"setup": 3}, TypeError, "setup=3"),
        ((abs, [1]), {"setup": lambda: 1, "processes": True}, TypeError, "does not pickle"),
        ((abs, [1], []), {}, ValueError, "no device to run on"),
        ((abs, [1], 3), {}, TypeError, "devices=3"),
        ((abs, [1], ["cpu", "cpu"]), {}, ValueError, "twice"),
        ((abs, [1], ["gpu 1"]), {}, ValueError, "is not a device"),
        ((abs, [1], "everything"), {}, ValueError, "devices='everything' must be 'all', a device such as"),
        ((abs, [1], [True]), {}, ValueError, r"devices= contains True, which is not a GPU number\. Pass"),
        ((abs, [1], [0, -1]), {}, ValueError, "devices= contains -1, which is not"),
        ((abs, [1], [None]), {}, ValueError, "None"),
        ((abs, [1], ["auto"]), {}, ValueError, "is not a device"),
        ((abs, [1]), {"per_device": 0}, ValueError, "per_device=0"),
        ((abs, [1]), {"per_device": True}, TypeError, "per_device=True"),
        ((abs, [1], ["cpu:97"]), {}, arraybridge.DeviceNotFoundError, "No installed framework has"),
        ((lambda x: x, [1]), {"processes": True}, TypeError, "does not pickle"),
    ],
)
def test_bad_input_raises_immediately(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        device_map(*arguments, **options)


def test_missing_gpu_falls_back_to_the_host(jax_devices: Any) -> None:
    @arraybridge.jax
    def same(x: Any) -> Any:
        return x

    for fn in (abs, same):
        with (
            arraybridge.settings(missing_gpu="host"),
            pytest.warns(arraybridge.MissingGpuWarning, match="gpu:97"),
        ):
            results = list(device_map(fn, [np.ones(2)], ["gpu:97"]))
        assert str(arraybridge.device_of(results[0])) == "cpu"


def test_progress_is_written_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(device_map(abs, [-1, -2, -3], "cpu", progress=True)) == [1, 2, 3]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err
