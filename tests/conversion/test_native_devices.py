"""``device=`` takes the device objects of the frameworks themselves, and so does `Device.parse`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device, convert_memory, explain
from tests.helpers import require, run_python


def natives() -> list[tuple[Any, str]]:
    torch, jax, tf = require("torch"), require("jax"), require("tensorflow")
    found: list[tuple[Any, str]] = [
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        (torch.device("cuda:1"), "gpu:1"),
        (torch.device("xpu", 2), "gpu:2"),
        *((d, "cpu" if d.id == 0 else f"cpu:{d.id}") for d in jax.devices("cpu")),
        *((d, str(Device.parse(d.name))) for d in tf.config.list_logical_devices("CPU")),
        ("/device:GPU:1", "gpu:1"),
        ("/CPU:0", "cpu"),
        ("/job:localhost/replica:0/task:0/device:CPU:1", "cpu:1"),
    ]
    cupy = pytest.importorskip("cupy")
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # without a driver it cannot even be made
        found.append((cupy.cuda.Device(1), "gpu:1"))
    return found


def test_native_devices_are_read() -> None:
    for native, words in natives():
        assert str(Device.parse(native)) == words, native


def test_native_devices_place_an_array() -> None:
    torch, jax = require("torch"), require("jax")
    x = np.arange(4.0)
    for _ in range(3):
        assert convert_memory(x, "torch", device=torch.device("cpu")).tolist() == [0, 1, 2, 3]
        for place in jax.devices("cpu"):
            (device,) = convert_memory(x, "jax", device=place).devices()
            assert device is place
            assert explain(x, "jax", device=place).device == Device("cpu", place.id)
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:5"):
        convert_memory(x, "torch", device=torch.device("cuda:5"))


def test_what_is_no_device_stays_refused() -> None:
    torch = require("torch")
    for thing in (0, 1.5, "cpus", object(), torch.float32, torch.device("meta"), np.zeros(2)):
        with pytest.raises(ValueError, match="device"):
            Device.parse(thing)
        with pytest.raises(ValueError, match="device"):
            convert_memory(np.zeros(2), "torch", device=thing)


@pytest.mark.parametrize(("words", "advice"), [("mps", "'gpu'"), ("xpu:1", "'gpu:1'")])
def test_words_of_one_framework_say_what_to_write(words: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"write {advice}"):
        convert_memory(np.zeros(2), "torch", device=words)


def test_reading_a_device_imports_no_other_framework() -> None:
    require("torch")
    done = run_python(
        "-c",
        "import sys, torch, arraybridge; print(arraybridge.Device.parse(torch.device('cpu')));"
        "print('jax' in sys.modules, 'tensorflow' in sys.modules, 'cupy' in sys.modules)",
    )
    assert done.stdout.split() == ["cpu", "False", "False", "False"], done.stderr
