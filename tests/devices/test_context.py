"""The default device: chosen, restored, per thread and task; and the namespaces that go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device, array_namespace, get_device, set_device, use_device
from tests.helpers import jax_with, require


@pytest.fixture(autouse=True)
def chosen_by_nobody() -> Any:
    set_device(None)
    yield
    set_device(None)


@pytest.fixture
def jax_devices() -> Any:
    return jax_with(4)


def in_a_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


def test_blocks_nest_and_restore(jax_devices: Any) -> None:
    set_device("cpu:1")
    with use_device("cpu:2") as device:
        assert str(device) == "cpu:2"
        with pytest.raises(KeyError), use_device(arraybridge.Device("cpu", 3)) as inner:
            raise KeyError(str(inner))
        assert str(inner) == "cpu:3"
        assert str(get_device()) == "cpu:2"
    assert str(get_device()) == "cpu:1"


def test_a_thread_and_a_task_have_their_own(jax_devices: Any) -> None:
    async def use(words: str) -> str:
        with use_device(words):
            await asyncio.sleep(0.01)
            return str(get_device())

    async def tasks() -> list[str]:
        return await asyncio.gather(*(use(f"cpu:{i}") for i in (1, 2, 3)))

    def other() -> list[str]:
        set_device("cpu:3")
        return [*asyncio.run(tasks()), str(get_device())]

    set_device("cpu:2")
    assert in_a_thread(other) == ["cpu:1", "cpu:2", "cpu:3", "cpu:3"]
    assert str(get_device()) == "cpu:2"


@pytest.mark.parametrize("words", ["gpu:97", "cuda:97", "cpu:97", "opencl:97"])
def test_a_device_that_is_not_there(words: str) -> None:
    with pytest.raises(arraybridge.DeviceNotFoundError, match=r"no installed framework has a device .*:97"):
        set_device(words)
    with pytest.raises(arraybridge.DeviceNotFoundError), use_device(words):
        pass
    assert str(get_device()) == ("gpu:0" if arraybridge.gpu_available() else "cpu")


def test_to_gpu_goes_to_the_chosen_device(jax_devices: Any) -> None:
    x = arraybridge.to_jax(np.arange(3, dtype=np.float32))
    with use_device("cpu:2"):
        moved = arraybridge.to_gpu(x)
    assert str(arraybridge.device_of(moved)) == "cpu:2"
    np.testing.assert_array_equal(np.asarray(moved), [0, 1, 2])
    host = np.arange(3)
    with use_device("cpu"):
        assert arraybridge.to_gpu(host) is host
        assert arraybridge.to_gpu(x) is x
    if not arraybridge.gpu_available():
        with use_device("cpu:2"), pytest.raises(arraybridge.DeviceNotFoundError):
            arraybridge.to_gpu(x, 0)
        with pytest.raises(arraybridge.DeviceNotFoundError):
            arraybridge.to_gpu(x)


# -- namespaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow"])
def test_one_function_for_every_framework(name: str) -> None:
    require(name)

    def normalised(x: Any) -> Any:
        xp = array_namespace(x)
        return (x - xp.mean(x)) / xp.max(xp.abs(x))

    host = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
    result = normalised(arraybridge.convert_memory(host, name))
    assert arraybridge.detect_memory_type(result) == name
    np.testing.assert_allclose(arraybridge.to_numpy(result), (host - 3.0) / 6.0, rtol=1e-6)


def test_without_arrays_the_default_device_decides(jax_devices: Any) -> None:
    with use_device("cpu"):
        assert array_namespace().asarray([1]).__class__ is np.ndarray
    with use_device("cpu:1"):
        assert array_namespace() is jax_devices.numpy


def test_arrays_of_two_frameworks_and_of_pyclesperanto_have_none() -> None:
    torch = require("torch")
    with pytest.raises(TypeError, match="numpy and torch"):
        array_namespace(np.zeros(2), torch.zeros(2))
    require("pyclesperanto")
    image = arraybridge.to_pyclesperanto(np.zeros((2, 2), np.float32))
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="no array API namespace"):
        array_namespace(image)
    with use_device("opencl:0"), pytest.raises(TypeError, match="convert them first"):
        array_namespace()


# -- the whole process -------------------------------------------------------------------------------


def test_the_environment_chooses_for_every_thread(jax_devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = arraybridge.to_jax(np.ones(2, np.float32))
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "cpu:2")

    def look() -> tuple[str, str]:
        return str(get_device()), str(arraybridge.device_of(arraybridge.to_gpu(x)))

    assert in_a_thread(look) == look() == ("cpu:2", "cpu:2")
    with use_device("cpu:1"):  # what a thread chooses comes first
        assert look() == ("cpu:1", "cpu:1")
    assert list(arraybridge.device_map(lambda _: str(get_device()), [1], ["cpu:1"])) == ["cpu:1"]


def test_the_environment_may_say_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "the fast one")
    with pytest.raises(ValueError, match=r"ARRAYBRIDGE_DEVICE.*'the fast one' is not a device"):
        get_device()
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "gpu:97")
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:97"):
        get_device()
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "")
    assert str(get_device()) in ("cpu", "gpu:0")


# -- devices by their own names ----------------------------------------------------------------------


def test_native_devices() -> None:
    torch = require("torch")
    jax = require("jax")
    tf = require("tensorflow")
    cpu = Device("cpu")
    assert cpu.native("torch") == torch.device("cpu")
    assert cpu.native(arraybridge.MemoryType.JAX) is jax.devices("cpu")[0]
    with tf.device(cpu.native("tensorflow")):
        assert tf.zeros(1).device.endswith("CPU:0")
    assert cpu.native("numpy") == "cpu"
    for other in jax.devices("cpu"):
        assert Device("cpu", other.id).native("jax") is other
