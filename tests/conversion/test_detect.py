"""Whose array is this: detection, and the array protocols of libraries that arraybridge does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    MemoryConversionError,
    SourceMismatchError,
    UnknownArrayError,
    convert_memory,
    detect_memory_type,
    explain,
)
from tests import matrix_data as data
from tests.helpers import require, run_python

HOST = ("numpy", "torch", "jax", "tensorflow")
SCRIPT = Path(__file__).parent / "scripts" / "detect_imports_nothing.py"


# ---- arrays and their subclasses -------------------------------------------------------------------------


class MyArray(np.ndarray):
    """A subclass of NumPy's, as users write them."""


def test_numpy_and_its_subclasses(tmp_path: Path) -> None:
    file = tmp_path / "values"
    file.write_bytes(bytes(16))
    for array in (
        np.zeros(3),
        np.array(1.0),
        np.zeros((0, 2)),
        np.array([object()]),
        np.zeros(3).view(MyArray),
        np.memmap(file, np.float32, "r"),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ):
        assert detect_memory_type(array) == "numpy", type(array)


def test_torch_and_its_subclasses() -> None:
    torch = require("torch")

    class MyTensor(torch.Tensor):
        pass

    for tensor in (
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Linear(2, 1).weight,
        torch.nn.Buffer(torch.ones(2)),
        torch.ones(2).as_subclass(MyTensor),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ):
        assert detect_memory_type(tensor) == "torch", type(tensor)


def test_tensorflow_and_its_relatives() -> None:
    tf = require("tensorflow")
    for tensor in (
        tf.constant([1.0]),
        tf.Variable([1.0]),
        tf.constant("a"),
        tf.ragged.constant([[1], [2, 3]]),
        tf.sparse.from_dense([[0, 1]]),
    ):
        assert detect_memory_type(tensor) == "tensorflow", type(tensor)


def test_jax_arrays_and_tracers() -> None:
    jax = require("jax")
    seen: list[str] = []
    assert detect_memory_type(jax.numpy.ones(2)) == "jax"
    assert detect_memory_type(jax.random.key(0)) == "jax"
    jax.jit(lambda x: seen.append(detect_memory_type(x)))(jax.numpy.ones(2))
    assert seen == ["jax"]


def test_pyclesperanto_arrays() -> None:
    require("pyclesperanto")
    assert detect_memory_type(data.build("pyclesperanto", "C", "float32").array) == "pyclesperanto"


def test_subclasses_convert_as_their_base_does(tmp_path: Path) -> None:
    torch = require("torch")
    file = tmp_path / "values"
    file.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    mine = np.arange(4.0).view(MyArray)
    mapped = np.memmap(file, np.float32, "r+")
    for array in (mine, mapped):
        tensor = convert_memory(array, "torch")
        assert tensor.data_ptr() == data.address(array)
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert convert_memory(parameter, "numpy", grad="detach").tolist() == [0.0, 1.0, 2.0]
    frozen = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    assert data.address(convert_memory(frozen, "numpy")) == frozen.data_ptr()


def test_a_variable_of_tensorflow_converts_to_its_value() -> None:
    tf = require("tensorflow")
    variable = tf.Variable([1.0, 2.0])
    for target in HOST[:3]:
        require(target)
        result = convert_memory(variable, target)
        kept = np.array(convert_memory(result, "numpy"))
        assert kept.tolist() == [1.0, 2.0]
    copied = convert_memory(variable, "numpy", copy=True)
    variable.assign([7.0, 8.0])
    assert copied.tolist() == [1.0, 2.0]


# ---- what is no array ------------------------------------------------------------------------------------


class OnlyArrayMethod:
    """As pandas and xarray have it: ``__array__`` and nothing else."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.arange(3.0)


NO_ARRAYS: dict[str, tuple[Any, str]] = {
    "list": ([1, 2], "asarray"),
    "list of arrays": ([np.zeros(2)], "convert_tree"),
    "tuple": ((1, 2), "convert_tree"),
    "dict": ({"a": np.zeros(2)}, "convert_tree"),
    "int": (3, "asarray"),
    "float": (2.5, "asarray"),
    "bool": (True, "asarray"),
    "complex": (1j, "asarray"),
    "datetime scalar": (np.datetime64("2020-01-01"), "asarray"),
    "void scalar": (np.zeros(1, [("a", "i4")])[0], "asarray"),
    "None": (None, "NoneType"),
    "string": ("torch", "str"),
    "bytes": (b"1234", "bytes"),
    "range": (range(3), "range"),
    "__array__ alone": (OnlyArrayMethod(), "np.asarray"),
    "object": (object(), "__dlpack__"),
    "mock": (MagicMock(), "MagicMock"),
    "module": (np, "module"),
    "class of arrays": (np.ndarray, "type"),
    "dtype": (np.dtype("f4"), "Float32DType"),
}


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_what_is_no_array_is_refused_with_help(what: str) -> None:
    thing, help_ = NO_ARRAYS[what]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: detect_memory_type(thing),
        lambda: convert_memory(thing, "numpy"),
        lambda: convert_memory(thing, "numpy", "numpy"),
        lambda: explain(thing, "numpy"),
        lambda: arraybridge.to_numpy(thing),
        lambda: arraybridge.device_of(thing),
    )
    for call in calls:
        with pytest.raises(UnknownArrayError) as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, MemoryConversionError)
        assert help_ in str(caught.value)
        assert caught.value.reason


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow", "pyclesperanto"])
def test_lists_and_scalars_are_no_arrays_to_any_target(target: str) -> None:
    require(target)
    for thing in ([1, 2], 3, 2.5, None, "abc", OnlyArrayMethod()):
        with pytest.raises(UnknownArrayError):
            convert_memory(thing, target)


def test_dtypes_and_devices_of_frameworks_are_no_arrays() -> None:
    torch, tf = require("torch"), require("tensorflow")
    for thing in (
        torch.float32,
        torch.device("cpu"),
        torch.Tensor,
        torch.nn.Linear(1, 1),
        tf.float32,
        tf.Tensor,
    ):
        with pytest.raises(UnknownArrayError):
            detect_memory_type(thing)


# ---- it imports nothing ----------------------------------------------------------------------------------


def loaded_by_detecting(*first: str) -> set[str]:
    done = run_python(str(SCRIPT), *first)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_detecting_imports_nothing() -> None:
    assert loaded_by_detecting() == set()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_detecting_an_array_imports_no_other_framework(framework: str) -> None:
    require(framework)
    others = {"cupy", "torch", "jax", "tensorflow", "pyclesperanto", "pyclesperanto_prototype", "pyopencl"}
    assert not loaded_by_detecting(framework) & (others - {framework})


# ---- array protocols -------------------------------------------------------------------------------------


class Interface:
    """Offers ``__array_interface__`` alone, and knows no more than that."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class Dlpack:
    """Offers DLPack alone, in its newest form, for memory on the host."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldDlpack(Dlpack):
    """Knows DLPack as it was before version 1: no ``copy``, no ``max_version``."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self._array.__dlpack__()


def aligned() -> np.ndarray[Any, Any]:
    memory = data.aligned_bytes(48).view(np.float64).reshape(2, 3)
    memory[...] = [[1, 2, 3], [4, 5, 6]]
    return memory


@pytest.mark.parametrize("wrap", [Interface, Dlpack, OldDlpack])
@pytest.mark.parametrize("target", HOST)
def test_a_foreign_array_on_the_host_is_shared(wrap: Callable[[Any], Any], target: str) -> None:
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
    # NumPy takes what it imports for read-only where the capsule cannot say, and NumPy 1 always does.
    readonly = wrap is not Interface and (wrap is OldDlpack or np.__version__ < "2")
    if not readonly:
        assert explain(thing, target).shares_memory
        assert data.address(result) == data.address(memory)
    copied = convert_memory(thing, target, copy=True)
    memory[...] = 0
    assert data.bits(copied) != memory.tobytes()


def test_a_foreign_array_to_pyclesperanto() -> None:
    require("pyclesperanto")
    memory = aligned().astype(np.float32)
    for thing in (Interface(memory), Dlpack(memory)):
        assert data.bits(convert_memory(thing, "pyclesperanto")) == memory.tobytes()


def test_strided_and_foreign() -> None:
    memory = np.arange(24.0).reshape(4, 6)[::-1, ::2]
    for target in HOST:
        require(target)
        for thing in (Interface(memory), Dlpack(memory)):
            assert data.bits(convert_memory(thing, target)) == memory.tobytes()


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
def test_read_only_foreign_memory_stays_unwritten(wrap: Callable[[Any], Any]) -> None:
    require("torch")
    if wrap is Dlpack and np.__version__ < "2":
        pytest.skip("NumPy 1 exports no read-only array through DLPack")
    memory = aligned()
    memory.setflags(write=False)
    thing = wrap(memory)
    array = convert_memory(thing, "numpy")
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    tensor = convert_memory(thing, "torch")
    tensor.zero_()
    assert memory.ravel().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_foreign_memory_outlives_its_object() -> None:
    memory = aligned()
    array = convert_memory(Interface(memory), "numpy")
    expected = memory.tobytes()
    del memory
    junk = [np.ones((2, 3)) for _ in range(100)]
    assert array.tobytes() == expected
    assert len(junk) == 100


def test_the_declared_source_of_a_foreign_array_is_checked() -> None:
    assert convert_memory(Interface(aligned()), "numpy", "numpy").shape == (2, 3)
    with pytest.raises(SourceMismatchError):
        convert_memory(Interface(aligned()), "torch", "numpy")


class Broken:
    """A DLPack exporter that fails."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("this memory cannot be exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class NoCapsule(Broken):
    def __dlpack__(self, **_: Any) -> Any:
        return "no capsule"


class BadInterface:
    __array_interface__ = {"shape": (3,), "typestr": "nonsense", "version": 3}  # noqa: RUF012


class EmptyInterface:
    __array_interface__ = {}  # noqa: RUF012


class ObjectInterface(Interface):
    def __init__(self) -> None:
        super().__init__(np.array([1, None], object))


class WordlessError(BufferError):
    def __str__(self) -> str:
        raise KeyError("no words")


class Mute(Broken):
    def __dlpack__(self, **_: Any) -> Any:
        raise WordlessError


class OnMetal(Broken):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


@pytest.mark.parametrize(
    "make", [Broken, NoCapsule, BadInterface, EmptyInterface, ObjectInterface, OnMetal, Mute]
)
def test_a_broken_exporter_ends_in_a_typed_error(make: Callable[[], Any]) -> None:
    for target in HOST:
        require(target)
        with pytest.raises(MemoryConversionError) as caught:
            convert_memory(make(), target)
        assert str(caught.value)


def test_memory_of_another_device_is_refused_in_words() -> None:
    with pytest.raises(MemoryConversionError, match="device type 8"):
        convert_memory(OnMetal(), "numpy")


def test_a_picture_of_pillow() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    picture = pillow.fromarray(pixels)
    assert detect_memory_type(picture) == "numpy"
    assert convert_memory(picture, "numpy").tolist() == pixels.tolist()
    require("torch")
    assert convert_memory(picture, "torch").tolist() == pixels.tolist()


def test_copy_false_and_a_foreign_array() -> None:
    require("tensorflow")
    memory = data.aligned_bytes(64, offset=8)[:24].view(np.float64)
    assert data.address(convert_memory(Interface(memory), "numpy", copy=False)) == data.address(memory)
    with pytest.raises(CopyRequiredError):
        convert_memory(Interface(memory), "tensorflow", copy=False)
