"""Contents of carriers: masks, NaN, nulls, units, lazily opened files, and objects that raise."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.carriers.registry import carrier_of
from arraybridge.testing import inject_oom
from tests.helpers import registry_kept, require

torch = require("torch")
pandas = pytest.importorskip("pandas", reason="pandas is not installed")
xarray = pytest.importorskip("xarray", reason="xarray is not installed")


# -- masks --------------------------------------------------------------------------------------------


class WithMask(np.ndarray):
    """An array whose class has a mask."""

    mask = None


class WithUnmasked(np.ndarray):
    @property
    def unmasked(self) -> np.ndarray:
        return self.view(np.ndarray)


class WithRaisingMask(np.ndarray):
    @property
    def mask(self) -> Any:
        raise RuntimeError("not now")


class WithoutMask(np.ndarray):
    unit = "mV"


def with_instance_mask() -> Any:
    x = np.arange(3.0).view(WithoutMask)
    x.mask = np.zeros(3, bool)  # type: ignore[attr-defined]
    return x


def astropy_masked() -> Any:
    module = pytest.importorskip("astropy.utils.masked", reason="astropy is not installed")
    return module.Masked(np.arange(3.0), mask=[False, True, False])


def masked_column() -> Any:
    table = pytest.importorskip("astropy.table", reason="astropy is not installed")
    return table.Table({"a": np.ma.masked_array([1.0, 2.0], [False, True])})["a"]


MASKED = {
    "class attribute": lambda: np.arange(3.0).view(WithMask),
    "unmasked": lambda: np.arange(3.0).view(WithUnmasked),
    "property that raises": lambda: np.arange(3.0).view(WithRaisingMask),
    "instance attribute": with_instance_mask,
    "np.ma": lambda: np.ma.masked_array([1.0, 2.0], [False, True]),
    "astropy": astropy_masked,
    "table column": masked_column,
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_subclasses_are_not_dropped(kind: str) -> None:
    x = MASKED[kind]()
    for _ in range(2):  # the second call may use a plan
        with pytest.raises(ab.ArrayNotSupportedError, match="mask would be lost"):
            ab.to_torch(x)
    with pytest.raises(ab.ArrayNotSupportedError, match="mask would be lost"):
        ab.explain(x, "torch")
    with pytest.raises(ab.ArrayNotSupportedError, match="mask would be lost"):
        ab.convert_tree({"a": x}, "torch")
    with pytest.raises(ab.ArrayNotSupportedError, match="mask would be lost"):
        ab.torch(lambda tensor: tensor)(x)
    assert ab.to_numpy(x) is x


def test_a_mask_inside_xarray() -> None:
    x = xarray.DataArray(astropy_masked(), dims="x")
    with pytest.raises(ab.ArrayNotSupportedError) as caught:
        ab.to_torch(x)
    assert "x.data.filled(0)" in caught.value.expressions


def test_subclasses_without_a_mask_are_converted() -> None:
    assert ab.to_torch(np.arange(3.0).view(WithoutMask)).tolist() == [0, 1, 2]
    fields = np.zeros(2, [("mask", "f4")]).view(np.recarray)
    # a field has that name, but it is not a mask
    with pytest.raises(ab.DtypeNotSupportedError, match="fields"):
        ab.to_torch(fields)
    assert ab.to_torch(fields.mask).tolist() == [0, 0]


# -- NaN and nulls ------------------------------------------------------------------------------------

OWN = ["Float32", "Float64", "float[pyarrow]", "double[pyarrow]", "halffloat[pyarrow]"]


def require_dtype(name: str) -> Any:
    if "pyarrow" in name:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return pandas.api.types.pandas_dtype(name)


@ab.torch(output_type="input")
def with_nan(x: Any) -> Any:
    result = x.clone()
    result[x < 0] = float("nan")
    return result


@pytest.mark.parametrize("name", [*OWN, "float16", "float32", "float64"])
def test_nan_stays_nan_in_every_dtype_of_pandas(name: str) -> None:
    dtype = require_dtype(name)
    series = pandas.Series([1.0, -1.0], index=["a", "b"], name="s").astype(dtype)
    makers = {
        "Series": lambda: series,
        "DataFrame": lambda: pandas.DataFrame({"x": series, "y": series}),
        "two columns of one name": lambda: pandas.concat([series, series], axis=1),
        "Index": lambda: pandas.Index(series.array, name="i"),
    }
    if name == "float16":
        del makers["Index"]  # pandas has no such index type
    for kind, make in makers.items():
        x = make()
        for result in (with_nan(x), with_nan(with_nan(x))):  # the result is accepted by the next call
            assert type(result) is type(x), kind
            dtypes = result.dtypes.tolist() if result.ndim == 2 else [result.dtype]
            assert set(dtypes) == {dtype}, kind
            values = ab.to_numpy(result)
            assert (values.dtype, values.dtype.kind) == (ab.to_numpy(x).dtype, "f")
            assert np.isnan(values[1]).all(), kind
            assert (values[0] == 1).all(), kind
            if name in OWN:
                assert not np.any(result.isna()), f"{kind}: NaN became a null"
    assert with_nan(series).name == "s"
    assert with_nan(series).index.tolist() == ["a", "b"]
    assert with_nan(pandas.concat([series, series], axis=1)).columns.tolist() == ["s", "s"]


@pytest.mark.parametrize("name", [*OWN, "Int64", "boolean", "int64[pyarrow]"])
def test_nulls_raise_with_working_expressions(name: str) -> None:
    x = pandas.Series([1, None], dtype=require_dtype(name))
    for each in (x, pandas.DataFrame({"a": x}), pandas.Index(x)):
        with pytest.raises(ab.ArrayNotSupportedError, match="nulls") as caught:
            ab.to_torch(each)
        value = False if name == "boolean" else 0
        assert caught.value.expressions == (f"x.fillna({value})", "x.dropna()")


@pytest.mark.parametrize("name", ["Int8", "UInt64", "boolean", "int64[pyarrow]", "bool[pyarrow]"])
def test_integer_and_boolean_dtypes_are_restored(name: str) -> None:
    x = pandas.Series([1, 0, 1], dtype=require_dtype(name), name="s")
    same = ab.torch(output_type="input")(lambda tensor: tensor.clone())
    pandas.testing.assert_series_equal(same(x), x)
    pandas.testing.assert_frame_equal(
        same(pandas.DataFrame({"a": x, "b": x})), pandas.DataFrame({"a": x, "b": x})
    )
    empty = x[:0]
    pandas.testing.assert_series_equal(same(empty), empty)


# -- lazily opened files ------------------------------------------------------------------------------

TALL = np.arange(60.0).reshape(20, 3)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("zarr", reason="zarr is not installed")
    contents = {
        "a": (("y", "x"), TALL),
        "packed": (("y", "x"), TALL, {}, {"scale_factor": 0.5, "dtype": "i4", "_FillValue": -1}),
    }
    xarray.Dataset(contents).to_zarr(tmp_path / "a.zarr", consolidated=False)
    with xarray.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False) as dataset:
        yield dataset


def opened_by_open_dataset(tmp_path: Path) -> Any:
    pytest.importorskip("scipy", reason="scipy is not installed, which reads netCDF")
    xarray.Dataset({"a": (("y", "x"), TALL)}).to_netcdf(tmp_path / "a.nc", engine="scipy")
    return xarray.open_dataset(tmp_path / "a.nc", engine="scipy")


def is_read(x: Any) -> bool:
    return bool(getattr(x, "variable", x)._in_memory)


def test_queries_do_not_read_lazily_opened_variables(opened: Any, tmp_path: Path) -> None:
    for x in (
        opened["a"],
        opened["a"].variable,
        opened["packed"],
        opened["a"][::2],
        opened_by_open_dataset(tmp_path)["a"],
    ):
        assert ab.detect_memory_type(x) == "numpy"
        assert str(ab.device_of(x)) == "cpu"
        route = ab.explain(x, "torch")
        assert not is_read(x)
        assert (route.shares_memory, route.copies, route.nbytes) == (False, 1, x.nbytes)
        assert "because it is read from a file" in str(route)
        with pytest.raises(ab.CopyRequiredError):
            ab.explain(x, "torch", copy=False)
        assert not is_read(x)
        expected = x.copy().values
        with ab.trace() as log:
            assert ab.to_torch(x).numpy().tolist() == expected.tolist()
        assert log.records == [route]
        copy = ab.to_numpy(x)
        copy[...] = -1
        assert ab.to_numpy(x).tolist() == expected.tolist()


def test_a_variable_that_was_read_is_shared(opened: Any) -> None:
    x = opened["a"].load()
    assert ab.explain(x, "torch").shares_memory
    ab.to_torch(x)[0, 0] = 7
    assert x.values[0, 0] == 7


def test_a_lazily_opened_variable_through_functions(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = opened["a"]
    doubled = ab.torch(output_type="input", oom_recovery="split")(lambda tensor: tensor * 2)
    result = doubled(x)
    assert isinstance(result, xarray.DataArray)
    assert result.values.tolist() == (TALL * 2).tolist()
    from arraybridge.carriers import labeled

    keys: list[Any] = []
    read = labeled._UnreadVariable.__getitem__

    def format_count(self: Any, key: Any) -> Any:
        keys.append(key)
        return read(self, key)

    monkeypatch.setattr(labeled._UnreadVariable, "__getitem__", format_count)
    with inject_oom("torch", above_rows=10):
        assert doubled(x).values.tolist() == (TALL * 2).tolist()
    assert [key[0] if isinstance(key, tuple) else key for key in keys][-2:] == [slice(0, 10), slice(10, 20)]


# -- objects that raise -------------------------------------------------------------------------------


class Raising:
    """A proxy whose every attribute raises, such as one of a web framework outside of a request."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("outside of a request")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


class Odd(pandas.api.extensions.ExtensionDtype):  # type: ignore[misc]
    name, type = "odd", object
    __hash__ = None


class OddFrame(pandas.DataFrame):  # type: ignore[misc]
    @property
    def dtypes(self) -> Any:
        return [Odd()]


class RaisingFrame(pandas.DataFrame):  # type: ignore[misc]
    @property
    def dtypes(self) -> Any:
        raise KeyError("dtypes")


class NoModule:
    __module__ = None  # type: ignore[assignment]


BYSTANDERS = {
    "proxy": Raising,
    "a dtype without a hash": lambda: OddFrame({"a": [1.0]}),
    "dtypes that raise": lambda: RaisingFrame({"a": [1.0]}),
    "a class without a module": NoModule,
    "a mixed table": lambda: pandas.DataFrame({"a": [1], "b": ["x"]}),
    "bytes": lambda: b"ab",
    "bytearray": lambda: bytearray(b"ab"),
    "mmap": lambda: mmap.mmap(-1, 16),
}


@pytest.mark.parametrize("kind", BYSTANDERS)
def test_raising_objects_pass_as_other_arguments(kind: str) -> None:
    x = BYSTANDERS[kind]()
    converted = ab.convert_tree({"a": np.ones(2), "b": [x]}, "torch")
    assert converted["b"][0] is x
    assert isinstance(converted["a"], torch.Tensor)

    def second(array: Any, other: Any) -> Any:
        assert isinstance(array, torch.Tensor)
        return other

    for options in ({}, {"output_type": "input"}, {"output_type": "numpy"}, {"oom_recovery": "split"}):
        assert ab.torch(**options)(second)(np.ones(2), x) is x
        assert ab.torch(**options)(second)(np.ones(2), other=x) is x


@pytest.mark.parametrize(
    "kind",
    ["proxy", "a dtype without a hash", "dtypes that raise", "a class without a module", "a mixed table"],
)
def test_raising_objects_as_the_array_give_a_clear_error(kind: str) -> None:
    x = BYSTANDERS[kind]()
    for call in (ab.to_torch, ab.detect_memory_type, lambda x: ab.explain(x, "torch"), ab.device_of):
        with pytest.raises(ab.UnknownArrayError, match="is not an array") as caught:
            call(x)
        assert caught.value.advice
        if kind == "dtypes that raise":
            assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("make", [BYSTANDERS["bytes"], BYSTANDERS["bytearray"]])
def test_bytes_are_converted_if_they_are_the_array(make: Any) -> None:
    tensor = ab.convert_memory(make(), "torch")
    assert (tensor.dtype, tensor.tolist()) == (torch.uint8, [97, 98])


def test_errors_in_carrier_and_framework_checks_are_ignored() -> None:
    class Broken(ab.Carrier):
        def carries(self, x: Any) -> bool:
            raise LookupError("broken")

    class Other:
        pass

    with registry_kept():
        ab.register_carrier(Broken())
        other = Other()
        assert carrier_of(other) is None
        assert ab.torch(lambda a, b: b)(np.ones(2), other) is other
        with pytest.raises(ab.UnknownArrayError) as caught:
            ab.to_torch(other)
        assert isinstance(caught.value.__cause__, LookupError)


def test_buffers_without_axes_are_not_carriers() -> None:
    x = memoryview(np.array(1.5))
    assert carrier_of(x) is None
    assert ab.convert_tree([x], "torch")[0] is x
    with pytest.raises(ab.UnknownArrayError, match=r"np\.asarray\(x\)"):
        ab.to_torch(x)


def test_the_first_argument_decides_whether_a_result_is_restored() -> None:
    labelled = xarray.DataArray(np.ones(3), dims="x")
    add = ab.torch(output_type="input")(lambda a, b: a + b)
    assert isinstance(add(labelled, np.ones(3)), xarray.DataArray)
    assert type(add(np.ones(3), labelled)) is np.ndarray


def test_conversion_targets_are_arrays() -> None:
    assert type(ab.to_numpy(xarray.DataArray(np.ones(3), dims="x"))) is np.ndarray
    assert type(ab.to_numpy(pandas.Series([1.0]))) is np.ndarray
