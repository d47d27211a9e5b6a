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
from arraybridge.reasons import Reason
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
    *(
        (3, "asarray"),
        (np.datetime64("2020-01-01"), "asarray"),
        (np.zeros(1, [("a", "i4")])[0], "x['a']"),
    ),
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
    assert explain(thing, target).shares_memory
    assert data.address(result) == data.address(memory)
    if target == "numpy":  # NumPy imports a capsule without flags as read-only
        assert result.flags.writeable == (wrap is Interface or (wrap is Dlpack and np.__version__ >= "2.1"))
    copied, expected = convert_memory(thing, target, copy=True), memory.tobytes()
    memory[...] = 0
    assert data.bits(copied) == expected
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


class Both(Dlpack):
    """An array with DLPack, whose array interface has an unsigned integer in place of its dtype."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        bits = self._array.view(getattr(require("torch"), f"uint{8 * self._array.element_size()}"))
        return bits.numpy().__array_interface__


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("target", HOST)
def test_dlpack_is_asked_before_the_array_interface(target: str, dtype: str) -> None:
    torch = require("torch")
    require(target)
    tensor = torch.tensor([1.5, -2.0]).to(getattr(torch, dtype))
    for _ in range(2):
        result = convert_memory(Both(tensor), target)
        assert (data.dtype_name(result), data.bits(result)) == (dtype, data.bits(tensor))


class Failing(Both):
    """An array whose DLPack export fails, as that of a dtype without a DLPack code."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no code for this dtype")


def test_the_array_interface_is_read_if_dlpack_fails() -> None:
    torch = require("torch")
    bits = torch.tensor([1, 2], dtype=torch.uint8)
    for _ in range(2):
        assert convert_memory(Failing(bits), "torch").tolist() == [1, 2]
        assert explain(Failing(bits), "torch").shares_memory


class Masked(Both):
    """An array with DLPack and a mask in its array interface."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**super().__array_interface__, "mask": np.ones(2, bool)}


def test_a_mask_is_found_although_dlpack_is_asked_first() -> None:
    torch = require("torch")
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="mask would be lost"):
        convert_memory(Masked(torch.tensor([1, 2], dtype=torch.uint8)), "torch")


def aligned_view(memory: np.ndarray) -> np.ndarray:
    """Return 16 aligned float32 numbers in these bytes."""
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + 64].view(np.float32)


class Cached(Dlpack):
    """An array that returns the same capsule on each request."""

    def __init__(self, array: Any, *, versioned: bool) -> None:
        super().__init__(array)
        self.capsule = array.__dlpack__(**({"max_version": (1, 0)} if versioned else {}))

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule


def _skip_without_versioned_capsules() -> None:
    if tuple(map(int, np.__version__.split(".")[:2])) < (2, 1):
        pytest.skip("NumPy reads versioned capsules since 2.1")


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32"])
@pytest.mark.parametrize("target", HOST)
def test_consumed_capsules_are_not_touched(target: str, dtype: str, versioned: bool) -> None:
    torch = require("torch")
    require(target)
    if versioned:
        _skip_without_versioned_capsules()
    memory = torch.arange(16.0).to(getattr(torch, dtype))
    thing = Cached(memory, versioned=versioned)
    assert data.bits(convert_memory(thing, target)) == data.bits(memory)
    others = [memory.clone().__dlpack__(max_version=(1, 0)) for _ in range(8)]  # may use the freed memory
    for options in ({}, {}, {"copy": True}, {"copy": False}):
        for call in (convert_memory, explain):
            with pytest.raises(arraybridge.ArrayNotSupportedError, match="consumed"):
                call(thing, target, **options)
    assert all(torch.from_dlpack(one).dtype is memory.dtype for one in others)


@pytest.mark.parametrize("layout", ["misaligned", "strided", "bools"])
@pytest.mark.parametrize("target", ["jax", "tensorflow"])
def test_plans_take_the_capsule_of_an_array_once(target: str, layout: str) -> None:
    require(target)
    memory = np.zeros(4 * 16 + 64, np.uint8)
    values = aligned_view(memory)
    array = {"misaligned": values[1:], "strided": values[::2], "bools": values.view(bool)[:8]}[layout]
    for _ in range(3):  # the plan is made for aligned and contiguous arrays
        convert_memory(Cached(values, versioned=False), target)
    array[...] = np.arange(array.size) % 2
    for _ in range(3):
        result = convert_memory(Cached(array, versioned=False), target)
        assert arraybridge.to_numpy(result).tolist() == array.tolist()


# A separate function object, because all users of `ctypes.pythonapi` share the argument types.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_keep_tensor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda tensor: None)


class ReferenceCounted(Dlpack):
    """An array with one managed tensor, to which each of its capsules refers."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.capsule = array.__dlpack__()
        self.tensor = _capsule_pointer(self.capsule, b"dltensor")
        # The deleter follows the DLTensor (48 bytes) and manager_ctx. The first capsule owns the tensor.
        self.deleter = ctypes.c_void_p.from_address(self.tensor + 56)
        self.original = self.deleter.value
        self.deleter.value = ctypes.cast(_keep_tensor, ctypes.c_void_p).value

    def __dlpack__(self, **options: Any) -> Any:
        return _new_capsule(self.tensor, b"dltensor", None)

    def __del__(self) -> None:
        self.deleter.value = self.original


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int32"])
@pytest.mark.parametrize("target", HOST)
def test_a_managed_tensor_of_several_capsules_keeps_its_dtype(target: str, dtype: str) -> None:
    torch = require("torch")
    require(target)
    memory = torch.arange(16.0).to(getattr(torch, dtype))
    thing = ReferenceCounted(memory)
    for options in ({}, {}, {"copy": True}, {"copy": True}):
        result = convert_memory(thing, target, **options)
        assert (data.dtype_name(result), data.bits(result)) == (dtype, data.bits(memory))
        del result
    assert torch.from_dlpack(thing.__dlpack__()).dtype is memory.dtype


class Pinned(Dlpack):
    """An array in page-locked memory (kDLCUDAHost)."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        name, tensor = (b"dltensor_versioned", 32) if "versioned" in repr(capsule) else (b"dltensor", 0)
        ctypes.c_int32.from_address(_capsule_pointer(capsule, name) + tensor + 8).value = 3
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (3, 0)


@pytest.mark.parametrize("target", HOST)
def test_page_locked_memory_is_host_memory(target: str) -> None:
    require(target)
    memory = aligned()
    view = np.from_dlpack(Pinned(memory))  # NumPy exports it with the device type of the capsule
    assert view.__dlpack_device__() == (3, 0)
    for source in (Pinned(memory), view):
        if target == "torch" and source is view and not view.flags.writeable:
            continue  # NumPy 1
        for _ in range(2):
            assert explain(source, target).shares_memory
            result = convert_memory(source, target)
            assert (data.address(result), data.bits(result)) == (data.address(memory), memory.tobytes())
            assert data.bits(convert_memory(source, target, copy=True)) == memory.tobytes()


class Kind:
    """A device type as some extension modules return it: an enum without ``__int__``."""

    __int__ = None

    def __init__(self, value: int) -> None:
        self.value = value


class KindWithIndex(Kind):
    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [Kind, KindWithIndex])
def test_device_types_that_are_enums(kind: type[Kind]) -> None:
    require("torch")

    class Device(Dlpack):
        def __dlpack_device__(self) -> Any:
            return (kind(1), 0)

    for _ in range(2):
        for copy in (None, False, True):
            assert convert_memory(Device(np.arange(3.0)), "torch", copy=copy).tolist() == [0, 1, 2]
        assert detect_memory_type(Device(np.arange(3.0))) == "numpy"


class Renewed:
    """An array interface whose memory is new on each access."""

    def __init__(self, as_bytes: bool) -> None:
        self.as_bytes = as_bytes
        self.alive: list[Any] = []

    @property
    def __array_interface__(self) -> dict[str, Any]:
        values = np.arange(3.0)
        self.alive.append(values)
        memory = {"data": values.tobytes()} if self.as_bytes else {}
        return {**values.__array_interface__, **memory}


@pytest.mark.parametrize("as_bytes", [True, False])
def test_memory_that_is_new_on_each_access_is_copied(as_bytes: bool) -> None:
    require("torch")
    x = Renewed(as_bytes)
    for target in ("numpy", "torch"):
        for _ in range(2):
            route = explain(x, target)
            assert (route.copies, route.shares_memory, route.code) == (1, False, Reason.NEW_MEMORY)
            result = convert_memory(x, target)
            for values in x.alive:
                values[...] = 9
            assert result.tolist() == [0, 1, 2]
        with pytest.raises(arraybridge.CopyRequiredError):
            convert_memory(x, target, copy=False)


class Counting:
    """An array of an unknown library, which counts the requests by the kind of array that it contains."""

    def __init__(self, array: Any, *, old: bool = False) -> None:
        self.array = array
        self.old = old
        self.exports = 0

    def __dlpack__(self, **options: Any) -> Any:
        self.exports += 1
        if self.old and "max_version" in options:
            raise TypeError("an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("target", HOST)
def test_plans_import_a_capsule_once(target: str) -> None:
    torch = require("torch")
    require(target)
    _skip_without_versioned_capsules()

    def made(dtype: str, *, old: bool) -> Any:
        memory: Any = arraybridge.aligned(16, "int16" if dtype == "bfloat16" else dtype)
        memory[...] = 1
        tensor = torch.from_numpy(memory)
        return Counting(tensor.view(torch.bfloat16) if dtype == "bfloat16" else memory, old=old)

    for old in (False, True):
        cls: Any = type("Counting", (Counting,), {})  # its plans are not those of other arrays
        for dtype in ("float32", "bfloat16"):
            for _ in range(3):
                thing = made(dtype, old=old)
                thing.__class__ = cls
                convert_memory(thing, target)
            # NumPy and `export` first request a version, which an old producer does not accept.
            assert thing.exports == (2 if old and target == "numpy" else 1), (dtype, old)


def test_plans_follow_the_capsules_of_each_array() -> None:
    torch = require("torch")
    frozen: Any = np.arange(16.0)
    frozen.flags.writeable = False
    brain = torch.arange(16.0).bfloat16()
    cases = [
        *((np.arange(16.0), old) for old in (False, True)),
        *((brain, old) for old in (False, True)),
        *((torch.arange(16.0), True), (np.arange(16.0)[::-1], False), (np.arange(16.0)[::-1], True)),
        *((np.array(1.5), True), (np.arange(16) % 2 == 0, True), (np.arange(16) * 1j, True)),
        *(((frozen, False),) if np.__version__ >= "2.1" else ()),
    ]
    rng = np.random.default_rng(0)
    for i in [*range(len(cases)), *rng.integers(len(cases), size=100)]:
        array, old = cases[i]
        for target in HOST:
            require(target)
            route = explain(Counting(array, old=old), target)
            result = convert_memory(Counting(array, old=old), target)
            assert (data.bits(result), data.dtype_name(result)) == (data.bits(array), data.dtype_name(array))
            if array.ndim:
                assert (data.address(result) == data.address(array)) == route.shares_memory, (i, target)
    assert frozen.tolist() == list(range(16))


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


def capsule_of_dtype(array: np.ndarray[Any, Any], *, code: int, bits: int) -> Any:
    """Return the DLPack capsule of an array, changed to another type code and number of bits."""
    capsule = array.__dlpack__()
    # The dtype follows a pointer, the device (two int32) and the number of axes (int32).
    place = _capsule_pointer(capsule, b"dltensor") + 20
    ctypes.c_uint8.from_address(place).value = code
    ctypes.c_uint8.from_address(place + 1).value = bits
    return capsule


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


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class _RaisesUnprintable:
    def __dlpack__(self, **options: Any) -> Any:
        raise _UnprintableError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class _HasNoDevice(_RaisesUnprintable):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise _UnprintableError


@pytest.mark.parametrize("cls", [_RaisesUnprintable, _HasNoDevice])
def test_exceptions_without_a_text_propagate_unchanged(cls: type) -> None:
    for call in (arraybridge.to_numpy, lambda x: arraybridge.explain(x, "numpy")):
        with pytest.raises(_UnprintableError):
            call(cls())


def test_a_lack_of_memory_in_an_export_is_raised() -> None:
    """The array interface of the object is not tried instead."""

    class OutOfMemory:
        __array_interface__ = np.arange(4.0).__array_interface__

        def __dlpack__(self, **_: Any) -> Any:
            raise MemoryError

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(MemoryError):
        convert_memory(OutOfMemory(), "numpy")
