"""The numbers of TensorFlow's GPUs, with fake functions of ``tf.config``."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device
from arraybridge.host import dlpack_capsules
from tests.helpers import require


@pytest.mark.parametrize(
    ("visible", "parts", "numbers"),
    [
        ([0, 1], {}, [0, 1]),
        ([1], {}, [1]),  # set_visible_devices(gpus[1:], "GPU")
        ([2, 0], {2: 2}, [2, 2, 0]),  # two logical GPUs on the first of them
    ],
)
def test_gpus_have_their_physical_numbers(
    visible: list[int], parts: dict[int, int], numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = require("tensorflow")
    devices = arraybridge.framework("tensorflow").devices
    from arraybridge.frameworks.tensorflow import framework as module

    def get_visible_devices(kind: str) -> list[Any]:
        return [SimpleNamespace(name=f"/physical_device:{kind}:{i}") for i in visible]

    def get_logical_device_configuration(physical: Any) -> list[Any] | None:
        return [None] * parts.get(int(physical.name[-1]), 0) or None

    monkeypatch.setattr(tf.config, "get_visible_devices", get_visible_devices)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", get_logical_device_configuration)
    place = "/job:localhost/replica:0/task:0/device:GPU:"
    found = [module._parse_device.__wrapped__(f"{place}{i}") for i in range(len(numbers))]
    assert found == [Device("gpu", number) for number in numbers]
    for number in visible:
        assert devices.native_device(Device("gpu", number)) == f"/device:GPU:{numbers.index(number)}"
    logical = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(len(numbers))]
    module._parse_device.cache_clear()
    assert [devices.read_device(one) for one in logical] == found
    module._parse_device.cache_clear()
    assert devices.read_device(tf.config.PhysicalDevice("/physical_device:GPU:3", "GPU")) == "gpu:3"
    gpus = [device for device in module._devices.__wrapped__() if device.kind == "gpu"]
    assert gpus == []  # TensorFlow itself lists none


def test_capsules_are_renumbered() -> None:
    host = np.arange(3.0)
    capsule = dlpack_capsules.renumber(host.__dlpack__(), 5)
    address = dlpack_capsules._tensor_of(capsule)
    assert list((ctypes.c_int32 * 2).from_address(address + 8)) == [1, 5]  # kDLCPU
    dlpack_capsules.renumber(capsule, 0)
    assert dlpack_capsules.capsule_address(capsule) == host.ctypes.data
