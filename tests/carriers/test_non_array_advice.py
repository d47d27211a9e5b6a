"""Advice about objects that are not arrays, and about arrays that cannot be converted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.advice import Advice
from arraybridge.errors import MemoryConversionError
from tests.carriers.refused import Lazy, Scan, ml, package, sparse_frame
from tests.carriers.test_refused import run
from tests.helpers import require


@pytest.mark.parametrize(
    ("name", "cast", "values"),
    [
        ("int4", "int8", [-8, 7, 0, 1]),
        ("uint4", "uint8", [15, 7, 0, 1]),
        ("int2", "int8", [-2, 1, 0, 1]),
        ("float4_e2m1fn", "float32", [-6, 1.5, 0.5, 0]),
    ],
)
def test_dtypes_of_less_than_a_byte_are_cast_exactly_if_asked(name: str, cast: str, values: Any) -> None:
    require("torch")
    x = ml(name, values)
    with pytest.raises(ab.DtypeNotSupportedError, match=f'dtype="{cast}"') as caught:
        ab.to_torch(x)
    assert f"has no dtype {name}" not in str(caught.value)
    assert ab.to_torch(x, dtype=cast).tolist() == values
    if name in ("int4", "uint4", "float4_e2m1fn"):
        y = require("jax").numpy.asarray(x)
        with pytest.raises(ab.DtypeNotSupportedError) as caught:
            ab.to_numpy(y)
        assert caught.value.expressions == (f'x.astype("{cast}")',)
        assert ab.to_numpy(run(caught.value.expressions[0], y)).tolist() == values


def test_advice_about_frames_of_pandas_is_exact() -> None:
    require("torch")
    pandas = package("pandas")
    large = pandas.array([2**53 + 1, None], dtype="Int64")
    for frame, values in (
        (pandas.DataFrame({"t": ["a", "b"], "a": large}), [2**53 + 1]),
        (pandas.DataFrame([["a", 1.5, "b", 2.5]], columns=["c", "c", "d", "d"]), [1.5]),
        (sparse_frame([0, 7]), [0, 7]),
    ):
        with pytest.raises(ab.UnknownArrayError) as caught:
            ab.to_torch(frame)
        converted = ab.to_torch(run(caught.value.expressions[0], frame))
        assert converted.to_dense().flatten().tolist() == values


def test_objects_whose_metaclass_raises_are_not_arrays() -> None:
    require("torch")

    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            raise OSError(name)

    class Broken(metaclass=Meta):
        pass

    broken = Broken()
    assert ab.torch(lambda x: x)(broken) is broken
    with pytest.raises(ab.UnknownArrayError):
        ab.to_torch(broken)


def test_wide_floats_are_cast_to_the_widest() -> None:
    require("torch")
    for name, cast in (("longdouble", "float64"), ("clongdouble", "complex128")):
        with pytest.raises(ab.DtypeNotSupportedError, match=f'dtype="{cast}"'):
            ab.to_torch(np.ones(2, name))


def test_closed_images_raise_with_advice_to_reopen(tmp_path: Path) -> None:
    pillow, path = package("PIL.Image"), tmp_path / "a.png"
    pillow.fromarray(np.zeros((2, 2), np.uint8)).save(path)
    closed = pillow.open(path)
    closed.close()
    with pillow.open(path) as unread:
        pass
    loaded = pillow.open(path)
    loaded.load()
    loaded.close()
    for image in (closed, unread, loaded):
        with pytest.raises(ab.ArrayNotSupportedError, match="Open the file again"):
            ab.to_numpy(image)


def test_advice_is_a_field_and_can_be_about_the_carrier() -> None:
    advice = Advice("pass {} or {}", ("{x}.filled(0)", "np.exp({x})"))
    assert str(advice) == "pass x.filled(0) or np.exp(x)"
    assert str(advice.about("{x}.data")) == "pass x.data.filled(0) or np.exp(x.data)"
    of_result = advice.about_result()
    assert str(of_result) == "pass result.filled(0) or np.exp(result). Return that from the function instead."
    assert of_result.code() == advice.code()
    error = MemoryConversionError("it has a mask", advice=advice)
    assert str(error) == "it has a mask: pass x.filled(0) or np.exp(x)"
    assert (error.advice, error.expressions) == (str(advice), ("x.filled(0)", "np.exp(x)"))
    assert MemoryConversionError("text").advice == ""


NOT_ARRAYS: dict[str, tuple[Any, str]] = {
    "range": (range(3), "Pass np.asarray(x)."),
    "numbers": ([[1, 2], [3, 4]], "Pass np.asarray(x)."),
    "arrays": (
        [np.ones(2), np.ones(2)],
        (
            "Convert the arrays inside it with convert_tree(x, target). Or pass all of them in one array,"
            " np.asarray(x)."
        ),
    ),
    "set": ({3, 1}, "Pass np.asarray(list(x))."),
    "set of text": ({"a"}, "It holds no array of numbers. Pass an object that does."),
    "text": ("x.npy", "To convert a file, read it first, as in np.load(x)."),
    "path": (Path("x.npy"), "To convert a file, read it first, as in np.load(x)."),
    "iterator": (
        iter([1]),
        "Convert its arrays with convert_tree(list(x), target). For numbers, pass np.array(list(x)).",
    ),
    "None": (None, "Pass an array. Functions without a return statement return None."),
    "class": (int, "It is a class. Pass an instance of it."),
    "function": (np.ones(2).copy, "It is a function. Call it, and pass the array that it returns."),
    "namespace": (
        SimpleNamespace(a=np.ones(2)),
        "Convert the arrays inside it with convert_tree(x, target).",
    ),
    "to_numpy": (Scan(), "If its values are numbers, pass x.to_numpy()."),
    "__array__": (
        Lazy(),
        (
            "It can be read only by calling __array__, which may compute it. If it is numeric, pass"
            " np.asarray(x)."
        ),
    ),
    "object": (
        object(),
        (
            "Pass an array of numpy, cupy, torch, jax, tensorflow or pyclesperanto, or any object with"
            " __dlpack__, __array_interface__ or __cuda_array_interface__."
        ),
    ),
}


@pytest.mark.parametrize("kind", NOT_ARRAYS)
def test_objects_that_are_not_arrays_get_advice_for_their_class(kind: str) -> None:
    x, advice = NOT_ARRAYS[kind]
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_numpy(x)
    assert caught.value.advice == advice
    message = str(caught.value)
    assert message.startswith("Cannot convert an object of type ")
    assert message.endswith(f"{type(x).__name__}: it is not an array. {advice}")


def test_containers_get_the_advice_to_convert_their_arrays() -> None:
    require("torch")

    @dataclass
    class Batch:
        image: np.ndarray

    batch = Batch(np.ones(2))
    for call in (ab.to_torch, ab.explain):
        with pytest.raises(ab.UnknownArrayError, match=r"convert_tree\(x, target\)"):
            call(batch, *(["torch"] if call is ab.explain else []))
    assert ab.convert_tree(batch, "torch").image.tolist() == [1, 1]


def test_objects_of_numba_and_ctypes_get_advice_for_their_class() -> None:
    numba, ctypes = package("numba"), package("ctypes")
    function = numba.njit(lambda x: x)
    table = package("numba.typed").Dict()
    table["a"] = 1.0
    values = (ctypes.c_float * 2)(1, 2)
    pointer = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
    for x, advice in (
        (function, "It is a function. Call it, and pass the array that it returns."),
        (table, "Convert the arrays inside it with convert_tree(dict(x), target)."),
        (
            pointer,
            "It is a pointer. Pass np.ctypeslib.as_array(x, shape), with the shape of its memory.",
        ),
    ):
        with pytest.raises(ab.UnknownArrayError) as caught:
            ab.to_numpy(x)
        assert caught.value.advice == advice
    assert ab.to_numpy(np.ctypeslib.as_array(pointer, (2,))).tolist() == [1, 2]


def test_modules_that_are_pytrees_get_the_advice_to_map_them() -> None:
    equinox, jax = package("equinox"), require("jax")
    made = type("Data", (equinox.Module,), {"__annotations__": {"values": Any}})
    x = made(jax.numpy.ones(2))
    with pytest.raises(ab.UnknownArrayError, match=r"jax\.tree\.map\(arraybridge\.to_numpy, x\)"):
        ab.to_numpy(x)
    assert ab.convert_tree([x], "numpy")[0] is x
    assert type(jax.tree.map(ab.to_numpy, x).values) is np.ndarray


def test_uninitialized_parameters_get_the_advice_to_call_their_module() -> None:
    torch = require("torch")
    layer = torch.nn.LazyLinear(3)
    for x in (layer.weight, layer):
        with pytest.raises((ab.ArrayNotSupportedError, ab.UnknownArrayError), match="once with a batch"):
            ab.to_numpy(x)
    assert ab.to_torch(layer.weight) is layer.weight
    with pytest.raises(ab.ArrayNotSupportedError, match="once with a batch"):
        ab.convert_tree(layer.state_dict(), "numpy")
    layer(torch.ones(1, 2))
    assert ab.convert_tree(layer.state_dict(), "numpy")["bias"].shape == (3,)


def test_advice_about_geometries_and_compressed_arrays_names_their_values() -> None:
    require("torch")
    blosc2 = package("blosc2")
    x = blosc2.asarray(np.arange(6.0).reshape(2, 3))
    assert ab.explain(x, "torch").copies == 1
    assert "compressed blosc2 array" in ab.explain(x, "torch").reason
    assert ab.to_torch(x).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_models_and_data_loaders_get_advice_that_runs() -> None:
    torch = package("torch")
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ab.UnknownArrayError, match=r"convert_tree\(x\.state_dict\(\), target\)\.$"):
        ab.to_numpy(model)
    assert ab.convert_tree(model.state_dict(), "numpy")["weight"].shape == (3, 2)
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
    with pytest.raises(ab.UnknownArrayError, match=r"Convert its batches with prefetch\(x, target\)\.$"):
        ab.to_numpy(loader)
    assert [x.tolist() for x in ab.prefetch(loader, "numpy")] == [[0, 1], [2, 3]]


def test_a_frame_of_one_unsupported_dtype_is_not_described_as_several_dtypes() -> None:
    polars = package("polars")
    frame = polars.DataFrame({"a": [1, 2], "b": [3, 4]}).cast(polars.Int128)
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_numpy(frame)
    assert caught.value.advice == (
        "NumPy has no dtype for its Int128 columns. Pass x.cast(float).to_numpy(), which rounds them."
    )
    text = polars.DataFrame({"a": ["x"], "b": ["y"]})
    with pytest.raises(
        ab.UnknownArrayError, match=r"None of its columns converts as it is\. Pass one as numbers, x"
    ):
        ab.to_numpy(text)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("Date", "Pass the integers that represent its values, x.to_physical()."),
        ("Datetime", "Pass the integers that represent its values, x.to_physical()."),
        ("Int128", "Pass x.cast(float), which rounds its numbers."),
    ],
)
def test_errors_for_polars_series_name_the_dtype_and_the_class(dtype: str, advice: str) -> None:
    polars = package("polars")
    series = polars.Series([1]).cast(getattr(polars, dtype))
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_torch(series)
    assert str(caught.value) == (
        "Cannot convert an object of type polars.Series: it is not an array. Its dtype is"
        f" {dtype}, and no framework has arrays of that dtype. {advice}"
    )


def test_errors_for_arrays_of_third_party_classes_name_no_framework() -> None:
    class Producer:
        __array_interface__: ClassVar = {"shape": (2,)}

    with pytest.raises(
        ab.ArrayNotSupportedError, match=r"Cannot convert an array of type .*Producer: its memory cannot"
    ):
        ab.to_numpy(Producer())


def test_groups_without_arrays_and_expressions_get_advice(tmp_path: Path) -> None:
    h5py, zarr, polars = (package(name) for name in ("h5py", "zarr", "polars"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"] = ["a", "b"]
        with pytest.raises(ab.UnknownArrayError, match="It holds no array of numbers"):
            ab.to_numpy(file.create_group("empty"))
        with pytest.raises(ab.UnknownArrayError, match="None of its datasets converts as it is"):
            ab.to_numpy(file)
    with pytest.raises(ab.UnknownArrayError, match="It holds no array of numbers"):
        ab.to_numpy(zarr.open_group(tmp_path / "z", mode="w"))
    with pytest.raises(ab.UnknownArrayError, match="An expression holds no data"):
        ab.to_numpy(polars.col("a"))


class _Lazy:
    """An object whose values are computed by ``__array__``."""

    def __init__(self) -> None:
        self.computed = 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.computed += 1
        return np.ones(2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, x], lambda x: ([x], 1), lambda x: {x}])
def test_an_error_does_not_compute_values(wrap: Any) -> None:
    lazy = _Lazy()
    with pytest.raises(ab.UnknownArrayError):
        ab.to_numpy(wrap(lazy))
    assert lazy.computed == 0


@pytest.mark.parametrize("x", [[[1, 2], [3]], ([1.0], 2), [[[1], [2, 3]]]], ids=str)
def test_lists_of_numbers_of_different_lengths_get_the_advice_to_pad_them(x: Any) -> None:
    with pytest.raises(ab.UnknownArrayError, match="Its rows have different lengths"):
        ab.to_numpy(x)


@pytest.mark.parametrize("x", [[[1, 2], ["a"]], [2**70], [np.ones(2), np.ones(3)]], ids=str)
def test_other_lists_are_not_described_as_rows(x: Any) -> None:
    with pytest.raises(ab.UnknownArrayError, match="convert_tree"):
        ab.to_numpy(x)


def test_a_list_that_contains_itself_gets_advice() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    with pytest.raises(ab.UnknownArrayError, match="convert_tree"):
        ab.to_numpy(endless)


class _ComputedList(list[Any]):
    """A list whose items cannot be computed."""

    def __iter__(self) -> Any:
        raise RuntimeError("no connection")


class _ComputedSet(set[Any]):
    """A set whose items cannot be computed."""

    def __iter__(self) -> Any:
        raise RuntimeError("no connection")


class _ClosedProxy:
    """A proxy that cannot return the class of its object."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("closed")


@pytest.mark.parametrize(
    "x", [_ComputedList([1, 2]), _ComputedSet([1, 2]), [_ComputedList([1])], [_ClosedProxy()]]
)
def test_items_that_raise_do_not_replace_the_error(x: Any) -> None:
    with pytest.raises(ab.UnknownArrayError):
        ab.to_numpy(x)


def test_pinned_takes_no_shape() -> None:
    for shape in ((2, 2), 3):
        with pytest.raises(ab.UnknownArrayError, match="pinned takes an array, not a shape") as caught:
            ab.pinned(shape)
        assert caught.value.expressions == ("np.empty(x)",)
    with pytest.raises(ab.UnknownArrayError, match="convert_tree"):
        ab.pinned((np.ones(2), np.ones(3)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["complex32", "field", "nested field", "masked"])
def test_advice_keeps_imaginary_parts(name: str) -> None:
    require("pyclesperanto")
    torch = require("torch")
    values = np.array([1 + 2j], np.complex64)
    x = {
        "complex32": lambda: torch.from_numpy(values).to(torch.complex32),
        "field": lambda: values.view([("a", "c8")]),
        "nested field": lambda: values.view([("a", [("b", "c8")])]),
        "masked": lambda: np.ma.masked_array(values, [False]),
    }[name]()
    with pytest.raises(ab.MemoryConversionError, match="convert the real and imaginary parts") as caught:
        ab.to_pyclesperanto(x)
    assert not caught.value.expressions
