"""Arrays of unknown libraries, read by their protocols, and objects that are not arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    MemoryConversionError,
    UnknownArrayError,
    convert_memory,
    detect_memory_type,
    explain,
)
from tests import matrix_data as data
from tests.helpers import require

HOST = ("numpy", "torch", "jax", "tensorflow")


# ---- objects that are not arrays -------------------------------------------------------------------------


class OnlyArrayMethod:
    """An object with ``__array__`` and no other protocol."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.arange(3.0)


NO_ARRAYS: tuple[tuple[Any, str], ...] = (
    *(([1, 2], "asarray"), ([np.zeros(2)], "convert_tree"), ({"a": np.zeros(2)}, "convert_tree")),
    *((3, "asarray"), (np.datetime64("2020-01-01"), "asarray"), (np.zeros(1, [("a", "i4")])[0], "x['a']")),
    *((None, "NoneType"), ("torch", "str"), (range(3), "range"), (object(), "__dlpack__")),
    *((OnlyArrayMethod(), "np.asarray"), (MagicMock(), "MagicMock"), (np.ndarray, "type")),
    *((np.dtype("f4"), "Float32DType"), (type("Array", (), {"__module__": "pyopencl.array"})(), "x.get()")),
)


def test_non_arrays_raise_with_advice() -> None:
    for thing, help_ in NO_ARRAYS:
        for call, *names in (
            *((detect_memory_type,), (convert_memory, "numpy"), (convert_memory, "numpy", "numpy")),
            *((explain, "numpy"), (arraybridge.to_numpy,), (arraybridge.device_of,)),
        ):
            with pytest.raises(UnknownArrayError) as caught:
                call(thing, *names)
            assert help_ in str(caught.value)
            assert caught.value.reason


# ---- array protocols -------------------------------------------------------------------------------------


class Interface:
    """An array that only has ``__array_interface__``."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class Dlpack:
    """An array that only has DLPack in its newest version, in host memory."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldDlpack(Dlpack):
    """An array with DLPack before version 1: without ``copy`` and ``max_version``."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self._array.__dlpack__()


def aligned() -> np.ndarray[Any, Any]:
    memory: Any = arraybridge.aligned((2, 3), "float64")
    memory[...] = [[1, 2, 3], [4, 5, 6]]
    return memory


@pytest.mark.parametrize("wrap", [Interface, Dlpack, OldDlpack])
@pytest.mark.parametrize("target", HOST)
def test_foreign_host_arrays_are_shared(wrap: Callable[[Any], Any], target: str) -> None:
    require(target)
    memory = aligned()
    thing = wrap(memory)
    assert detect_memory_type(thing) == "numpy"
    assert arraybridge.device_of(thing) == "cpu"
    for _ in range(2):
        result = convert_memory(thing, target)
        assert data.framework_of(result) == target
        assert data.bits(result) == memory.tobytes()
        assert data.dtype_name(result) == "float64"
    # NumPy imports memory as read-only if the capsule does not state it; NumPy 1 always does.
    readonly = wrap is not Interface and (wrap is OldDlpack or np.__version__ < "2")
    if not readonly:
        assert explain(thing, target).shares_memory
        assert data.address(result) == data.address(memory)
    copied, expected = convert_memory(thing, target, copy=True), memory.tobytes()
    memory[...] = 0
    assert data.bits(copied) == expected
    if not readonly:
        del memory, thing  # the memory outlives both
        assert data.bits(result) == bytes(48)


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
def test_read_only_foreign_memory_is_not_written(wrap: Callable[[Any], Any]) -> None:
    require("torch")
    if wrap is Dlpack and np.__version__ < "2":
        pytest.skip("NumPy 1 exports no read-only array through DLPack")
    memory = aligned()
    memory.setflags(write=False)
    thing = wrap(memory)
    assert not convert_memory(thing, "numpy").flags.writeable
    convert_memory(thing, "torch").zero_()
    assert memory.ravel().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("wrap", [Dlpack, OldDlpack])
@pytest.mark.parametrize("target", HOST)
def test_arrays_with_only_dlpack_keep_their_dtype(target: str, wrap: type[Dlpack]) -> None:
    torch = require("torch")
    require(target)
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int64", "bool"):
        tensor = torch.tensor([1, 0, 1, 1]).to(getattr(torch, dtype))
        for _ in range(2):
            result = convert_memory(wrap(tensor), target)
            assert (data.dtype_name(result), data.bits(result)) == (dtype, data.bits(tensor))
        if target == "numpy":
            assert explain(wrap(tensor), target, copy=False).shares_memory


class Thing:
    """An object without any protocol until a test sets one."""


@pytest.mark.parametrize("protocols", [1, 3])
def test_protocols_set_on_the_instance_are_found(protocols: int) -> None:
    require("torch")
    kept, thing = np.arange(6.0), Thing()
    for name in ("__array_interface__", "__dlpack__", "__dlpack_device__")[:protocols]:
        setattr(thing, name, getattr(kept, name))
    assert detect_memory_type(thing) == "numpy"
    assert convert_memory(thing, "torch").data_ptr() == data.address(kept)
    with pytest.raises(UnknownArrayError):
        convert_memory(Thing(), "torch")


def fail(error: Exception) -> Any:
    raise error


# A separate function object, because all users of `ctypes.pythonapi` share the argument types.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def capsule_of_dtype(array: np.ndarray[Any, Any], *, code: int, bits: int) -> Any:
    """Return the DLPack capsule of an array, changed to another type code and number of bits."""
    capsule = array.__dlpack__()
    # The dtype follows a pointer, the device (two int32) and the number of axes (int32).
    place = _capsule_pointer(capsule, b"dltensor") + 20
    ctypes.c_uint8.from_address(place).value = code
    ctypes.c_uint8.from_address(place + 1).value = bits
    return capsule


class EmptyMessageError(BufferError):
    def __str__(self) -> str:
        raise KeyError("no words")


def exporter(capsule: Callable[[], Any], device: int = 1) -> Any:
    """Return an object with a DLPack method on the instance."""
    methods = {"__dlpack__": lambda self, **_: capsule(), "__dlpack_device__": lambda self: (device, 0)}
    return type("Exporter", (), methods)()


def interface(value: Any) -> Any:
    """Return an object with an array interface on the instance."""
    return type("Exporter", (), {"__array_interface__": value})()


BROKEN: tuple[tuple[str, Any], ...] = (
    ("cannot be exported", exporter(lambda: fail(BufferError("this memory cannot be exported")))),
    ("device type 8", exporter(lambda: fail(BufferError()), 8)),
    ("capsule|read", exporter(lambda: "no capsule")),
    ("cannot be read", exporter(lambda: fail(EmptyMessageError()))),
    *(
        (f"{cls.__name__}: a reason", exporter(partial(fail, cls("a reason"))))
        for cls in (OSError, IndexError, AssertionError, ImportError, Exception)
    ),
    (
        "a reason|property",
        type("Exporter", (), {"__dlpack__": property(lambda _: fail(OSError("a reason")))})(),
    ),
    (
        "OSError: a reason",
        type("Exporter", (), {"__array_interface__": property(lambda _: fail(OSError("a reason")))})(),
    ),
    ("dtype in DLTensor", exporter(lambda: capsule_of_dtype(np.ones(3, np.int8), code=0, bits=4))),
    ("dtype in DLTensor", exporter(lambda: capsule_of_dtype(np.ones(3, np.float32), code=99, bits=32))),
    # bfloat16 has 16 bits; as such, these would be six numbers.
    ("dtype in DLTensor", exporter(lambda: capsule_of_dtype(np.ones(3, np.float32), code=4, bits=32))),
    ("nonsense|read", interface({"shape": (3,), "typestr": "nonsense", "version": 3})),
    ("Exporter", interface({})),
    ("object", interface(np.array([1, None], object).__array_interface__)),
)


@pytest.mark.parametrize("target", HOST)
def test_broken_exporters_raise_a_typed_error(target: str) -> None:
    require(target)
    for words, broken in BROKEN:
        with pytest.raises(MemoryConversionError, match=words) as caught:
            convert_memory(broken, target)
        assert words != "cannot be exported" or isinstance(caught.value.__cause__, BufferError)


def test_masks_of_array_interfaces_are_never_dropped() -> None:
    require("torch")
    values, mask = np.arange(3.0), np.array([True, False, True])
    masks: list[Any] = [None]

    class Masked:
        @property
        def __array_interface__(self) -> dict[str, Any]:
            return {**values.__array_interface__, "mask": masks[-1]}

    for _ in range(2):  # the second call follows the plan
        assert convert_memory(Masked(), "torch").tolist() == [0.0, 1.0, 2.0]
    masks.append(mask)
    for call in (convert_memory, explain):
        with pytest.raises(arraybridge.ArrayNotSupportedError, match="mask would be lost"):
            call(Masked(), "torch")
    masks.pop()
    assert convert_memory(Masked(), "torch").tolist() == [0.0, 1.0, 2.0]


def test_dlpack_is_read_if_the_instance_has_no_array_interface() -> None:
    values = np.arange(3.0)

    class OnlyDlpack(Dlpack):
        @property
        def __array_interface__(self) -> Any:
            raise AttributeError("this array is not in host memory")

    assert convert_memory(OnlyDlpack(values), "numpy").tolist() == [0.0, 1.0, 2.0]
    assert explain(OnlyDlpack(values), "numpy").shares_memory


def test_argument_types_that_other_libraries_set_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = require("ml_dtypes")
    require("torch")
    tensor = convert_memory(np.arange(3).astype(ml_dtypes.bfloat16), "torch")
    for name in ("PyCapsule_GetPointer", "PyCapsule_GetName"):
        function = getattr(ctypes.pythonapi, name)
        monkeypatch.setattr(function, "argtypes", [ctypes.c_void_p, ctypes.c_char_p])
        monkeypatch.setattr(function, "restype", ctypes.c_int)
    assert convert_memory(Dlpack(tensor), "numpy").astype(float).tolist() == [0.0, 1.0, 2.0]


def test_cuda_interfaces_without_memory_raise() -> None:
    require("cupy")
    broken: Any = Thing()
    broken.__cuda_array_interface__ = {}
    for call in (convert_memory, explain):
        with pytest.raises(MemoryConversionError, match="CUDA array"):
            call(broken, "numpy")
    broken.__cuda_array_interface__ = {"mask": np.ones(2, bool)}
    with pytest.raises(MemoryConversionError, match="mask would be lost"):
        convert_memory(broken, "numpy")


def test_gpu_arrays_without_a_driver_raise() -> None:
    require("cupy")
    if arraybridge.framework("cupy").devices.available():
        pytest.skip("needs a machine without a GPU")
    on_gpu: Any = Thing()
    on_gpu.__cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (64, True), "version": 3}
    for call in (convert_memory, explain):
        with pytest.raises(MemoryConversionError, match=r"CUDA array.*copy it to the host"):
            call(on_gpu, "numpy")
