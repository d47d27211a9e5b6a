"""Two fake frameworks with two GPUs each, which share their memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    Device,
    DeviceNotFoundError,
    MissingGpuWarning,
    convert_memory,
    device_of,
    explain,
    register,
    settings,
)
from arraybridge.interface.component import component
from arraybridge.interface.memory import Memory
from tests import matrix_data as data
from tests.fake_gpu import FakeGpuArray, FakeGpuFramework, GpuDevices, GpuInterchange
from tests.helpers import registry_kept, require


class RedGpu(FakeGpuArray):
    __module__ = "redcards"


class BlueGpu(FakeGpuArray):
    __module__ = "bluecards"


class RedMemory(Memory):
    framework: Red

    def free_memory_of(self, device: Device) -> int:
        return self.framework.free[device.index]


class RedDevices(GpuDevices):
    framework: Red

    def to_device(self, x: FakeGpuArray, device: Device) -> FakeGpuArray:
        self.framework.done.append(f"{self.device_of(x)} to {device}")
        return self.framework.array(x.values.copy(), -1 if device.kind == "cpu" else device.index)


class RedInterchange(GpuInterchange):
    framework: Red
    dlpack_device = 99

    def import_from(self, x: FakeGpuArray, source: arraybridge.Framework, device: Device) -> FakeGpuArray:
        self.framework.done.append(f"adopt from {source.name}")
        return self.framework.array(x.values, x.gpu)


class Red(FakeGpuFramework):
    """A framework with two GPUs, whose memory it shares with blue, and arrays on the host."""

    name, modules, array, has_host = "red", ("redcards",), RedGpu, True

    free = (100, 900)
    memory = component(RedMemory)
    devices = component(RedDevices)
    interchange = component(RedInterchange)

    def copy(self, x: FakeGpuArray) -> FakeGpuArray:
        self.done.append("copy")
        return self.array(x.values.copy(), x.gpu)

    def cast(self, x: FakeGpuArray, dtype: str) -> FakeGpuArray:
        return self.array(x.values.astype(dtype), x.gpu)


class BlueInterchange(RedInterchange):
    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        return "blue wants no negative strides" if any(step < 0 for step in strides) else ""


class Blue(Red):
    name, modules, array = "blue", ("bluecards",), BlueGpu
    interchange = component(BlueInterchange)


@pytest.fixture
def red() -> Iterator[Red]:
    with registry_kept():
        register(Blue())
        yield register(Red())  # type: ignore[misc]


def values() -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3)


def backwards() -> np.ndarray[Any, Any]:
    return values()[::-1]


# fmt: off
TRAVELS = [
    # source, target, gpu_id      method   device  copies  calls on red or blue
    (values(), "red", 0,          "device", "gpu:0", 1, ["to gpu:0"]),
    (values(), "red", 1,          "device", "gpu:1", 1, ["to gpu:1"]),
    (values(), "red", "auto",     "device", "gpu:1", 1, ["to gpu:1"]),
    *((RedGpu(values(), 1), name, None, "host", "cpu", 1, ["to host"]) for name in data.FRAMEWORKS[:4]),
    (RedGpu(values(), 1), "red", None, "same", "gpu:1", 0, []),
    (RedGpu(values(), 1), "red", 1,    "same", "gpu:1", 0, []),
    (RedGpu(values(), 0), "red", 1,    "device", "gpu:1", 1, ["gpu:0 to gpu:1"]),
    (RedGpu(values(), 1), "blue", None, "dlpack", "gpu:1", 0, ["adopt from red"]),
    (RedGpu(values(), 0), "blue", 1,   "device", "gpu:1", 1, None),
    (RedGpu(backwards(), 0), "blue", None, "device", "gpu:0", 1, None),
    (BlueGpu(backwards(), 0), "red", None, "dlpack", "gpu:0", 0, ["adopt from blue"]),
]
# fmt: on


@pytest.mark.parametrize(("x", "target", "gpu_id", "method", "device", "copies", "done"), TRAVELS)
def test_conversions_between_gpus(
    red: Red, x: Any, target: str, gpu_id: Any, method: str, device: str, copies: int, done: list[str] | None
) -> None:
    if target not in ("red", "blue"):
        require(target)
    blue: Any = arraybridge.framework("blue")
    source = np.asarray(getattr(x, "values", x))
    route = explain(x, target, gpu_id)
    assert (route.method, str(route.device), route.copies, route.nbytes) == (method, device, copies, 48)
    assert route.shares_memory == (copies == 0)
    assert red.done + blue.done == []
    result = convert_memory(x, target, gpu_id)
    assert (arraybridge.detect_memory_type(result), device_of(result)) == (target, device)
    assert (result is x) == (method == "same")
    if done is not None:
        assert red.done + blue.done == done
    if target in ("red", "blue"):
        assert result.values.tolist() == source.tolist()
        assert np.shares_memory(result.values, source) == route.shares_memory
    else:
        assert data.bits(result) == source.tobytes()
    if copies:
        with pytest.raises(CopyRequiredError):
            convert_memory(x, target, gpu_id, copy=False)
    else:
        assert convert_memory(x, target, gpu_id, copy=False).values is not None
        red.done.clear()
        assert not np.shares_memory(convert_memory(x, target, gpu_id, copy=True).values, source)


def test_gpu_device_strings_and_missing_gpus(red: Red) -> None:
    x = values()
    for words in ("gpu:1", "cuda:1", Device("gpu", 1)):
        assert device_of(convert_memory(x, "red", device=words)) == "gpu:1"
    red.free = (901, 900)
    assert device_of(convert_memory(x, "red", "auto")) == "gpu:0"
    with pytest.raises(CopyRequiredError, match="separate memory"):
        convert_memory(x, "red", 0, copy=False)
    with pytest.raises(CopyRequiredError, match="negative strides"):
        convert_memory(RedGpu(backwards(), 0), "blue", copy=False)
    with pytest.raises(DeviceNotFoundError, match=r"cpu, gpu:0, gpu:1"):
        convert_memory(x, "red", 2)
    with settings(missing_gpu="host"), pytest.warns(MissingGpuWarning):
        assert device_of(convert_memory(x, "red", 2)) == "cpu"


def test_to_cpu_and_to_gpu_on_gpus(red: Red) -> None:
    gpu = RedGpu(values(), 0)
    assert arraybridge.to_gpu(gpu) is gpu
    assert arraybridge.to_gpu(gpu, 1).gpu == arraybridge.to_gpu(gpu, "auto").gpu == 1
    on_host = arraybridge.to_cpu(gpu)
    assert (type(on_host), on_host.gpu) == (RedGpu, -1)
    assert arraybridge.to_gpu(on_host, 1).gpu == 1
    assert arraybridge.to_cpu(on_host) is on_host


def test_casts_on_gpus(red: Red) -> None:
    gpu = RedGpu(values(), 0)
    for target, gpu_id, copies in (("red", None, 1), ("blue", None, 1), ("red", 1, 2), ("numpy", None, 2)):
        route = explain(gpu, target, gpu_id, dtype="float32")
        assert route.copies == copies
        assert "cast to float32" in route.reason
        result = convert_memory(gpu, target, gpu_id, dtype="float32")
        cast = result if target == "numpy" else result.values
        assert (cast.dtype, cast.tolist()) == (np.float32, values().tolist())
        with pytest.raises(CopyRequiredError):
            convert_memory(gpu, target, gpu_id, dtype="float32", copy=False)


def test_numpy_results_are_no_subclasses() -> None:
    class Matrices(FakeGpuFramework):
        name, modules = "matrices", ("tests",)

        def to_host(self, x: FakeGpuArray) -> np.ndarray[Any, Any]:
            return super().to_host(x).view(type("Sub", (np.ndarray,), {}))

    with registry_kept():
        register(Matrices())
        x = FakeGpuArray(np.arange(6.0).reshape(2, 3))
        for _ in range(2):  # the second conversion may have a plan
            result = convert_memory(x, "numpy")
            assert type(result) is np.ndarray
            np.testing.assert_array_equal(result, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], strict=True)
