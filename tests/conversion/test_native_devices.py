"""``device=`` takes the device objects of the frameworks themselves, and so does `Device.parse`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from arraybridge import Device, DeviceNotFoundError, convert_memory, explain
from tests.helpers import require, run_python

X = np.arange(4.0)


def natives() -> list[tuple[Any, str]]:
    torch, jax, tf, cupy = (require(name) for name in ("torch", "jax", "tensorflow", "cupy"))
    of_cupy = []
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # without a driver it cannot even be made
        of_cupy.append((cupy.cuda.Device(1), "gpu:1"))
    return [
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        (torch.device("cuda:1"), "gpu:1"),
        (torch.device("xpu", 2), "gpu:2"),
        *((d, f"cpu:{d.id}".removesuffix(":0")) for d in jax.devices("cpu")),
        *((d, str(Device.parse(d.name))) for d in tf.config.list_logical_devices("CPU")),
        ("/device:GPU:1", "gpu:1"),
        ("/CPU:0", "cpu"),
        ("/job:localhost/replica:0/task:0/device:CPU:1", "cpu:1"),
        *of_cupy,
    ]


def test_native_devices_are_read_and_place_an_array() -> None:
    for native, words in natives():
        assert str(Device.parse(native)) == words, native
    torch, jax = require("torch"), require("jax")
    for _ in range(3):
        assert convert_memory(X, "torch", device=torch.device("cpu")).tolist() == [0, 1, 2, 3]
        for place in jax.devices("cpu"):
            assert convert_memory(X, "jax", device=place).devices() == {place}
            assert explain(X, "jax", device=place).device == Device("cpu", place.id)
    with pytest.raises(DeviceNotFoundError, match="gpu:5"):
        convert_memory(X, "torch", device=torch.device("cuda:5"))


def test_what_is_no_device_stays_refused() -> None:
    torch = require("torch")
    for thing in (0, 1.5, "cpus", object(), torch.float32, torch.device("meta"), np.zeros(2)):
        with pytest.raises(ValueError, match="device"):
            Device.parse(thing)
        with pytest.raises(ValueError, match="device"):
            convert_memory(X, "torch", device=thing)
    for words, advice in (("mps", "'gpu'"), ("xpu:1", "'gpu:1'")):
        with pytest.raises(ValueError, match=f"write {advice}"):
            convert_memory(X, "torch", device=words)


def test_reading_a_device_imports_no_other_framework() -> None:
    require("torch")
    done = run_python(
        "-c",
        "import sys, torch, arraybridge; print(arraybridge.Device.parse(torch.device('cpu')));"
        "print([name for name in ('jax', 'tensorflow', 'cupy') if name in sys.modules])",
    )
    assert done.stdout.split() == ["cpu", "[]"], done.stderr
