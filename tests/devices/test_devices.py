"""Devices: names, numbers, memory, one number per GPU in all frameworks, and the default device."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device, array_namespace, devices, get_device, hardware, set_device, use_device
from arraybridge.devices import inventory as module
from arraybridge.hardware import Gpu
from arraybridge.interface.component import component
from arraybridge.interface.framework import Framework
from arraybridge.interface.memory import DeviceDetails, Memory
from tests.fake_gpu import FakeGpuFramework
from tests.helpers import jax_with, require, run_python
from tests.test_hardware import FakeNvml, install_nvml

FIRST = Gpu(0, "Card A", "GPU-aaaa", "0000:3b:00.0", 8 << 30)
SECOND = Gpu(1, "Card B", "GPU-bbbb", "0000:5e:00.0", 4 << 30)


class GpusMemory(Memory):
    framework: Gpus

    def device_details(self, device: Device) -> DeviceDetails:
        return DeviceDetails(identity=self.framework.error_text.get(str(device), ""))


class Gpus(FakeGpuFramework):
    """Devices and GPUs that a test defines."""

    has_host = True
    memory = component(GpusMemory)

    def __init__(self, error_text: dict[str, str]) -> None:
        super().__init__()
        self.gpus = tuple(map(Device.parse, error_text))
        self.error_text = error_text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, FakeNvml(("Card A", "GPU-aaaa", 0x3B, ()), ("Card B", "GPU-bbbb", 0x5E, ())))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def listed(monkeypatch: pytest.MonkeyPatch, *frameworks: Framework) -> list[Any]:
    monkeypatch.setattr(module, "loaded", lambda: list(frameworks))
    return devices()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
def test_devices_and_device_strings_match_the_framework(name: str) -> None:
    require(name)
    listed, every = devices(name), devices("all")
    assert listed == list(arraybridge.framework(name).devices.available())
    assert all(name in next(one for one in every if one == device).frameworks for device in listed)
    for device in listed:
        assert device.frameworks == (name,)
        assert str(device) == device == Device(device.kind, device.index)
        assert device.total is None or 0 < (device.free or 1) < device.total
        for words in (device, str(device)):
            x = arraybridge.convert_memory(np.zeros((2, 2), np.float32), name, device=words)
            assert arraybridge.device_of(x) == device


def test_devices_expects_framework_names() -> None:
    with pytest.raises(TypeError, match="Expected a framework name, got int"):
        devices(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_have_names_and_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    error_text = {"gpu:0": "GPU-aaaa", "gpu:1": "0000:5e:00.0", "opencl:0": "0000:5e:00.0", "opencl:1": ""}
    found = {str(d): d for d in listed(monkeypatch, Gpus(error_text))}
    assert list(found) == ["cpu", "gpu:0", "gpu:1", "opencl:0", "opencl:1"]
    assert found["gpu:0"].name == "Card A"
    assert found["gpu:0"].identity == "GPU-aaaa"
    assert (found["gpu:0"].total, found["gpu:0"].free) == (1000, 100)
    assert found["opencl:0"].identity == found["gpu:1"].identity == "GPU-bbbb"
    assert found["opencl:1"].identity == ""


def _opencl(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], *addresses: str) -> Any:
    """Simulate OpenCL devices: the two GPUs in reverse order, and a CPU."""
    from arraybridge.frameworks.pyclesperanto import framework as pyclesperanto

    require("pyclesperanto")
    one: Any = copy.copy(arraybridge.framework("pyclesperanto"))
    for name in ("described", "devices", "memory", "batching", "interchange", "runtime"):
        vars(one).pop(name, None)
    names = ("Card B", "Card A", "CPU")
    monkeypatch.setattr(pyclesperanto.hardware, "gpus", lambda: gpus)
    seen = [DeviceDetails(name, address, 1) for name, address in zip(names, addresses, strict=True)]
    monkeypatch.setattr(pyclesperanto.opencl, "describe", lambda: seen)
    one._arrange([SimpleNamespace(name=name) for name in names], 2)
    return one


def test_opencl_numbers_mean_the_gpus_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _opencl(monkeypatch, (FIRST, SECOND), SECOND.pci, FIRST.pci, "")
    assert [str(one.devices.accelerator(i)) for i in range(3)] == ["opencl:0", "opencl:1", "opencl:2"]
    assert [native.name for native in one.natives] == ["Card A", "Card B", "CPU"]
    assert str(one.devices.find_device(Device("gpu", 0))) == "opencl:0"
    assert one.memory.device_details(Device("opencl", 0)) == DeviceDetails("Card A", FIRST.pci, 1)


# -- construction ------------------------------------------------------------------------------------

KINDS = "must be 'cpu', 'gpu' or 'opencl'. For a device string such as 'cuda:1', use Device.parse()."
WRONG_DEVICES: list[tuple[tuple[Any, ...], str]] = [
    (("tpuu",), f"kind='tpuu' {KINDS}"),
    (("cuda", 1), f"kind='cuda' {KINDS}"),
    (("gpu:1",), f"kind='gpu:1' {KINDS}"),
    ((0,), f"kind=0 {KINDS}"),
    ((["gpu"],), f"kind=['gpu'] {KINDS}"),
    (("gpu", -1), "index=-1 must be at least 0."),
    (("gpu", True), "index=True must be an int, at least 0."),
    (("gpu", np.True_), f"index={np.True_!r} must be an int, at least 0."),
    (("gpu", 1.5), "index=1.5 must be an int, at least 0."),
    (("gpu", "1"), "index='1' must be an int, at least 0."),
    (("gpu", None), "index=None must be an int, at least 0."),
]


@pytest.mark.parametrize("text", ["cpu", "cpu:3", "gpu:0", "opencl:1"])
def test_a_device_equals_its_own_string_and_has_its_hash(text: str) -> None:
    device = Device.parse(text)
    assert str(device) == text == device
    assert hash(device) == hash(text)
    assert {text: 1}[device] == {device: 1}[text] == 1  # type: ignore[index]


@pytest.mark.parametrize("text", ["gpu", "cuda:0", "gpu:00", "GPU:0", "cpu:0", ""])
def test_a_device_differs_from_other_strings(text: str) -> None:
    for device in (Device("gpu", 0), Device("cpu"), Device.parse("cuda:0")):
        assert device != text
    assert Device.parse("cuda:0") == Device("gpu", 0) == "gpu:0"


@pytest.mark.parametrize(("arguments", "message"), WRONG_DEVICES)
def test_invalid_devices_raise(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Device(*arguments)


def test_indices_of_numpy_become_ints() -> None:
    device = Device("gpu", np.int64(1))  # type: ignore[arg-type]
    assert (type(device.index), device, str(device)) == (int, "gpu:1", "gpu:1")


def test_device_objects_of_tensorflow_have_a_known_kind() -> None:
    tf = require("tensorflow")
    cases = {("CPU", 1): ("cpu:1", ""), ("GPU", 0): ("gpu:0", ""), ("TPU", 2): ("gpu:2", "tpu")}
    for (kind, index), expected in cases.items():
        device = Device.parse(tf.config.LogicalDevice(f"/device:{kind}:{index}", kind))
        assert (str(device), device.accelerator) == expected


# -- text of devices ---------------------------------------------------------------------------------


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(module, "loaded", lambda: [arraybridge.framework("numpy")])
    assert not arraybridge.gpu_available()
    assert arraybridge.least_used_gpu() is None
    info = arraybridge.device_info()
    assert (info["available"], info["backend"], info["names"]) == (False, "cpu", [])


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_listed_before_a_framework_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "loaded", lambda: [arraybridge.framework("numpy")])
    listed = {str(device): device for device in devices()}
    assert list(listed) == ["cpu", "gpu:0", "gpu:1"]
    assert (listed["gpu:1"].name, listed["gpu:1"].frameworks) == ("Card B", ())
    assert arraybridge.least_used_gpu() == 0  # the first of equals
    monkeypatch.setattr(hardware._nvml(), "free", {"GPU-aaaa": 3})
    assert arraybridge.least_used_gpu() == 1
    info = arraybridge.device_info()
    assert (info["available"], info["backend"]) == (True, "cuda")
    assert info["memory"] == [(1000, 3), (1000, 100)]
    assert info["versions"]["numpy"]


def test_loaded_frameworks_are_listed_unless_all_are_requested() -> None:
    code = (
        "import sys, arraybridge; found = arraybridge.devices();"
        " print(sorted({n for d in found for n in d.frameworks}), 'jax' in sys.modules);"
        " found = arraybridge.devices('jax'); print('jax' in found[0].frameworks)"
    )
    require("jax")
    done = run_python("-c", code)
    assert done.stdout.splitlines() == ["['numpy'] False", "True"], done.stderr


# -- the default device ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_default_device() -> Any:
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


def test_threads_and_tasks_have_separate_devices(jax_devices: Any) -> None:
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
def test_missing_devices_raise(words: str) -> None:
    with pytest.raises(arraybridge.DeviceNotFoundError, match=r"No installed framework has a device .*:97"):
        set_device(words)
    with pytest.raises(arraybridge.DeviceNotFoundError), use_device(words):
        pass
    assert str(get_device()) == ("gpu:0" if arraybridge.gpu_available() else "cpu")


def test_to_gpu_uses_the_default_device(jax_devices: Any) -> None:
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

    def normalized(x: Any) -> Any:
        xp = array_namespace(x)
        return (x - xp.mean(x)) / xp.max(xp.abs(x))

    host = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
    result = normalized(arraybridge.convert_memory(host, name))
    assert arraybridge.detect_memory_type(result) == name
    np.testing.assert_allclose(arraybridge.to_numpy(result), (host - 3.0) / 6.0, rtol=1e-6)


def test_default_device_applies_without_arrays(jax_devices: Any) -> None:
    with use_device("cpu"):
        assert array_namespace().asarray([1]).__class__ is np.ndarray
    with use_device("cpu:1"):
        assert array_namespace() is jax_devices.numpy


def test_mixed_arrays_and_pyclesperanto_have_no_namespace() -> None:
    torch = require("torch")
    with pytest.raises(TypeError, match="numpy and torch"):
        array_namespace(np.zeros(2), torch.zeros(2))
    require("pyclesperanto")
    image = arraybridge.to_pyclesperanto(np.zeros((2, 2), np.float32))
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="no array API namespace"):
        array_namespace(image)
    with use_device("opencl:0"), pytest.raises(TypeError, match="Convert them first"):
        array_namespace()


# -- the whole process -------------------------------------------------------------------------------


def test_environment_variable_applies_to_all_threads(
    jax_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = arraybridge.to_jax(np.ones(2, np.float32))
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "cpu:2")

    def look() -> tuple[str, str]:
        return str(get_device()), str(arraybridge.device_of(arraybridge.to_gpu(x)))

    assert in_a_thread(look) == look() == ("cpu:2", "cpu:2")
    with use_device("cpu:1"):  # the device of a thread takes precedence
        assert look() == ("cpu:1", "cpu:1")
    assert list(arraybridge.device_map(lambda _: str(get_device()), [1], ["cpu:1"])) == ["cpu:1"]


def test_meta_devices_have_no_memory() -> None:
    meta = require("torch").device("meta")
    message = r"^device\(type='meta'\) has no memory\. Pass a device with memory, such as 'cpu'\.$"
    with pytest.raises(ValueError, match=message):
        arraybridge.convert_memory(np.ones(2), "torch", device=meta)


def test_invalid_environment_variables_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "the fast one")
    with pytest.raises(ValueError, match=r"ARRAYBRIDGE_DEVICE.*'the fast one' is not a device"):
        get_device()
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "gpu:97")
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:97"):
        get_device()
    monkeypatch.setenv("ARRAYBRIDGE_DEVICE", "")
    assert str(get_device()) in ("cpu", "gpu:0")


# -- native devices ----------------------------------------------------------------------------------


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
