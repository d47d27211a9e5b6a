"""DLPack producers on devices that no installed framework reads: they export a copy on the host."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, CopyRequiredError, convert_memory, explain, trace
from arraybridge.host import dlpack_capsules, dtype_names
from tests import matrix_data as data
from tests.helpers import require

TARGETS = ("numpy", "torch", "jax", "tensorflow")
# OpenCL, Vulkan, Metal, VPI, ROCm, an extension, oneAPI, WebGPU, Hexagon, MAIA, and one from the future.
DEVICES = (4, 7, 8, 9, 10, 12, 14, 15, 16, 17, 99)


class Producer:
    """An array in unified memory, which would be shared without ``copy=True``."""

    device = 8

    def __init__(self, array: Any) -> None:
        self.array = array
        self.requests: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def _export(self, copy: Any, max_version: Any = None, **wish: Any) -> Any:
        self.requests.append({"copy": copy, "max_version": max_version, **wish})
        return self.array.__dlpack__(copy=copy, max_version=max_version)


class Newest(Producer):
    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if dl_device is None:
            raise BufferError("this memory is on a device")
        return self._export(copy, max_version, dl_device=dl_device)


class WithoutVersions(Producer):
    def __dlpack__(self, *, stream: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        if dl_device is None:
            raise BufferError("this memory is on a device")
        return self._export(copy, dl_device=dl_device)


class WithoutCopy(Producer):
    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None) -> Any:
        if dl_device is None:
            raise BufferError("this memory is on a device")
        return self._export(None, max_version, dl_device=dl_device)


class CannotCopy(Producer):
    def __dlpack__(self, *, dl_device: Any = None, copy: Any = None, **_: Any) -> Any:
        if copy:
            raise NotImplementedError("copy=True")
        return self._export(None, dl_device=dl_device)


class TakesAnything(Producer):
    """A producer that ignores unknown arguments, including ``copy``."""

    def __dlpack__(self, **_: Any) -> Any:
        return self._export(None)


class Old(Producer):
    def __dlpack__(self, stream: Any = None) -> Any:
        return self._export(None)


class StaysOnDevice(Producer):
    """A producer that ignores ``dl_device`` and returns memory of its device."""

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._export(None)
        ctypes.c_int32.from_address(dlpack_capsules._tensor_of(capsule) + 8).value = self.device
        return capsule


class Fails(Producer):
    def __dlpack__(self, **_: Any) -> Any:
        raise KeyError("the device is gone")


class NoCapsule(Producer):
    def __dlpack__(self, **_: Any) -> Any:
        return 3


READABLE = (Newest, WithoutVersions, WithoutCopy, CannotCopy, TakesAnything)


def values(dtype: str, layout: str) -> Any:
    array = np.arange(24).reshape(4, 6).astype(dtype_names.np_dtype(dtype))
    layouts: dict[str, Callable[[Any], Any]] = {
        "plain": np.ascontiguousarray,
        "transposed": np.transpose,
        "strided": lambda x: x[::2, ::3],
        "empty": lambda x: x[:0],
        "scalar": lambda x: np.array(x[1, 1]),
    }
    return layouts[layout](array)


@pytest.mark.parametrize("cls", READABLE)
@pytest.mark.parametrize("target", TARGETS)
def test_any_device_is_read_through_the_host(target: str, cls: type[Producer]) -> None:
    require(target)
    dtypes = ("float32", "int64", "bool", "complex128", "uint8", "float16")
    layouts = ("plain", "transposed", "strided", "empty", "scalar")
    for (dtype, layout), device in zip(itertools.product(dtypes, layouts), itertools.cycle(DEVICES)):
        for copy in (None, True):
            array = values(dtype, layout)
            before = array.tobytes()
            x = cls(array)
            x.device = device
            route = explain(x, target, copy=copy)
            with trace() as log:
                result = convert_memory(x, target, copy=copy)
            assert log.records == [route]
            assert not route.shares_memory
            assert str(device) in route.reason or copy
            array[...] = 0
            assert (data.bits(result), data.dtype_name(result)) == (before, dtype), (layout, device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_extended_dtypes_are_read_through_the_host(dtype: str) -> None:
    torch = require("torch")

    class Torch(Newest):
        def _export(self, copy: Any, max_version: Any = None, **wish: Any) -> Any:
            return self.array.clone().__dlpack__(max_version=max_version)

    tensor = torch.arange(6).to(getattr(torch, dtype))
    for target in ("numpy", "torch", "jax"):
        require(target)
        result = convert_memory(Torch(tensor), target)
        assert (data.bits(result), data.dtype_name(result)) == (data.bits(tensor), dtype)


class OnHost(Producer):
    """Host memory of an unknown library."""

    device = 1

    def __dlpack__(self, **wish: Any) -> Any:
        return self.array.__dlpack__(**wish)


class OnHostWithoutVersions(OnHost):
    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32"])
def test_writable_host_memory_of_every_dtype_is_shared(dtype: str) -> None:
    torch = require("torch")
    tensor = torch.arange(6).to(getattr(torch, dtype))
    for target in ("numpy", "torch"):
        for x in (OnHost(tensor), OnHost(tensor)):  # the second call uses a plan
            assert explain(x, target).shares_memory
            result = convert_memory(x, target)
            assert data.address(result) == tensor.data_ptr()
            assert (data.bits(result), data.dtype_name(result)) == (data.bits(tensor), dtype)
            assert target == "torch" or result.flags.writeable
    # An unversioned capsule cannot state whether its memory is read-only.
    for _ in range(2):
        unknown = OnHostWithoutVersions(tensor)
        assert convert_memory(unknown, "torch").data_ptr() == tensor.data_ptr()
        assert explain(unknown, "torch", copy=False).shares_memory
        assert data.address(convert_memory(unknown, "numpy")) == tensor.data_ptr()
        assert not convert_memory(unknown, "numpy").flags.writeable


def test_plans_of_extended_dtypes_inspect_each_array() -> None:
    torch = require("torch")
    jnp = require("jax").numpy
    brain = torch.arange(6).to(torch.bfloat16)
    for _ in range(3):
        for array in (
            *(brain, brain[::2], brain[:0], brain[1], brain.reshape(2, 3).T, torch.arange(6.0)),
            *(jnp.arange(6, dtype="bfloat16"), np.arange(6)[::-1], torch.ones(3, dtype=torch.bool)),
        ):
            x = OnHost(array)
            for copy in (None, False, True):
                if copy is False and isinstance(array, np.ndarray):
                    continue  # this array has to be copied
                route = explain(x, "torch", copy=copy)
                result = convert_memory(x, "torch", copy=copy)
                assert (data.bits(result), data.dtype_name(result)) == (
                    data.bits(array),
                    data.dtype_name(array),
                )
                if array.ndim and len(array):
                    shares = result.data_ptr() == data.address(array)
                    assert shares == route.shares_memory, (array, copy)
        unknown = OnHost(brain)
        unknown.device = 8
        with pytest.raises(CopyRequiredError):
            convert_memory(unknown, "torch", copy=False)


def test_a_copy_is_requested_and_made_once() -> None:
    x = Newest(np.arange(64.0))
    for _ in range(2):
        x.requests.clear()
        result = convert_memory(x, "numpy")
        assert [(wish["copy"], wish["dl_device"]) for wish in x.requests] == [(True, (1, 0))]
        assert result.flags.writeable
        result[...] = 5
        assert x.array.tolist() == list(range(64))
    assert explain(x, "numpy").copies == 1


@pytest.mark.parametrize("cls", [*READABLE, Old, Fails])
def test_copy_false_raises_without_a_request(cls: type[Producer]) -> None:
    x = cls(np.arange(3.0))
    for call in (convert_memory, explain):
        with pytest.raises(CopyRequiredError, match="copy=None"):
            call(x, "numpy", copy=False)
    assert x.requests == []


@pytest.mark.parametrize("cls", [Old, StaysOnDevice, Fails, NoCapsule])
@pytest.mark.parametrize("target", TARGETS)
def test_producers_that_cannot_export_to_the_host(target: str, cls: type[Producer]) -> None:
    require(target)
    x = cls(np.arange(3.0))
    for call, copy in itertools.product((convert_memory, explain), (None, True)):
        with pytest.raises(ArrayNotSupportedError, match=r"device type 8.*copy it to the host"):
            call(x, target, copy=copy)


def test_cuda_memory_without_a_driver_is_read_through_the_host() -> None:
    cupy = require("cupy")
    if arraybridge.framework("cupy").devices.available() or cupy is None:
        pytest.skip("needs a machine without a GPU")
    x = Newest(np.arange(3.0))
    x.device = 2
    assert convert_memory(x, "torch").tolist() == [0, 1, 2]
    x.requests.clear()
    with pytest.raises(CopyRequiredError, match="copy=None"):
        convert_memory(x, "torch", copy=False)
    assert x.requests == []


@pytest.mark.parametrize("answer", [None, (), ("a", 0), KeyError("gone")])
def test_unknown_devices_raise_a_typed_error(answer: Any) -> None:
    class Confused(Newest):
        def __dlpack_device__(self) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    with pytest.raises(ArrayNotSupportedError, match="__dlpack_device__"):
        convert_memory(Confused(np.arange(3.0)), "numpy")


def test_plans_of_unknown_producers_inspect_each_array() -> None:
    torch = require("torch")

    class Mixed(Newest):
        def __dlpack__(self, **wish: Any) -> Any:
            if self.device == 1:
                return self.array.__dlpack__(**wish)
            return super().__dlpack__(**wish)

    def made(array: Any, device: int = 1) -> Mixed:
        x = Mixed(array)
        x.device = device
        return x

    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    for _ in range(3):
        shared = np.arange(4.0)
        assert convert_memory(made(shared), "torch").data_ptr() == shared.ctypes.data
        assert convert_memory(made(shared, 8), "torch").data_ptr() != shared.ctypes.data
        assert convert_memory(made(frozen), "torch").data_ptr() != frozen.ctypes.data
        assert convert_memory(made(shared[::-1]), "torch").tolist() == [3, 2, 1, 0]
        assert convert_memory(made(shared), "torch", dtype="float32").dtype is torch.float32
        assert convert_memory(made(shared), "torch", copy=True).data_ptr() != shared.ctypes.data
        assert convert_memory(made(torch.ones(2).to(torch.bfloat16)), "torch").dtype is torch.bfloat16
        with pytest.raises(arraybridge.SourceMismatchError):
            convert_memory(made(shared), "jax", "torch")


# ---- fuzz --------------------------------------------------------------------------------------------

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def random_layout(rng: np.random.Generator, array: Any) -> Any:
    """Return the array after some random slices, transpositions and broadcasts."""
    for _ in range(int(rng.integers(0, 3))):
        kind = int(rng.integers(5)) if array.ndim else 4
        axis = int(rng.integers(array.ndim)) if array.ndim else 0
        first = np.moveaxis(array, axis, 0) if array.ndim else array
        if kind == 0:
            array = first
        elif kind == 1:
            array = np.moveaxis(first[:: int(rng.integers(1, 4))], 0, axis)
        elif kind == 2:
            start, stop = sorted(int(i) for i in rng.integers(0, array.shape[axis] + 1, 2))
            array = np.moveaxis(first[start:stop], 0, axis)
        elif kind == 3:
            array = first[0] if len(first) else array
        else:
            array = np.broadcast_to(array, (2, *array.shape)).copy()
    return np.asarray(array)


@pytest.mark.parametrize("seed", range(3))
def test_fuzz_of_devices_signatures_layouts_and_dtypes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name in TARGETS:
        require(name)
    classes = (*READABLE, OnHost, Old, StaysOnDevice, Fails, NoCapsule)
    for _ in range(300):
        dtype = str(rng.choice(DTYPES))
        shape = tuple(int(n) for n in rng.integers(0, 5, int(rng.integers(0, 4))))
        noise = np.asarray(rng.integers(0, 2 if dtype == "bool" else 100, shape))
        array = random_layout(rng, noise.astype(dtype))
        before = array.tobytes()
        cls = classes[int(rng.integers(len(classes)))]
        x = cls(array)
        x.device = 1 if cls is OnHost else int(rng.choice(DEVICES))
        target = str(rng.choice(TARGETS))
        copy = (None, True, False)[int(rng.integers(3))]
        about = (cls.__name__, dtype, array.shape, array.strides, x.device, target, copy)
        try:
            route = explain(x, target, copy=copy)
        except (CopyRequiredError, ArrayNotSupportedError) as error:
            assert copy is False or cls not in (*READABLE, OnHost), about
            with pytest.raises(type(error)):
                convert_memory(x, target, copy=copy)
            continue
        assert cls is OnHost or (copy is not False and not route.shares_memory), about
        for _ in range(2):  # the second call may use a plan
            result = convert_memory(x, target, copy=copy)
            assert data.bits(result) == before, about
            assert data.dtype_name(result) == dtype, about
            assert tuple(result.shape) == array.shape, about
            if array.size and array.ndim:
                shares = data.address(result) == array.__array_interface__["data"][0]
                assert shares == route.shares_memory, about
        if not route.shares_memory:
            array[...] = 0 if dtype == "bool" else 101
            assert data.bits(result) == before, about
