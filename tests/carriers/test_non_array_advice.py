"""Advice that runs: each expression of an error's advice is executed, and its result converts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.advice import Advice
from arraybridge.errors import MemoryConversionError
from tests.helpers import require

NAMES = ("torch", "tensorflow", "jax", "SimpleITK", "pandas", "polars", "pyarrow", "arraybridge")
TABLE = np.array([(1.5, 2), (2.5, 3)], [("a", "f4"), ("b", "i4")])


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def ml(name: str, values: Any = (0, 1, 1, 0)) -> np.ndarray:
    return np.array(values).astype(getattr(package("ml_dtypes"), name))


def in_torch(name: str) -> Any:
    torch = require("torch")
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no dtype {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "complex32":
            return torch.ones(3, dtype=torch.complex64).to(dtype)
        return (
            torch.arange(4, dtype=torch.uint8)
            .view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
            .view(dtype)
        )


def in_jax(name: str) -> Any:
    jnp = require("jax").numpy
    return jnp.asarray(ml(name))


def in_tensorflow(make: Callable[[Any], Any]) -> Any:
    return make(require("tensorflow"))


def xarray_over(values: Any) -> Any:
    return package("xarray").DataArray(values, dims=("x",))


def masked(values: Any = (0.0, 1.0, 2.0)) -> Any:
    return package("astropy.utils.masked").Masked(np.array(values), mask=[False, True, False])


def quantity() -> Any:
    return package("pint").UnitRegistry().Quantity(np.arange(3.0), "m")


def sparse_identity() -> Any:
    return package("sparse").COO.from_numpy(np.array([0.0, 1.0, 0.0]))


def image(mode: str) -> Any:
    return package("PIL.Image").fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).convert(mode)


def pydicom_dataset() -> Any:
    pydicom = package("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset = pydicom.dataset.Dataset()
    dataset.file_meta = meta
    dataset.Rows, dataset.Columns, dataset.BitsAllocated, dataset.BitsStored = 2, 3, 16, 16
    dataset.SamplesPerPixel, dataset.PixelRepresentation = 1, 0
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.PixelData = np.arange(6, dtype=np.uint16).tobytes()
    return dataset


def h5py_file(tmp_path: Path) -> Any:
    file = package("h5py").File(tmp_path / "a.h5", "w")
    file["texts"] = ["a", "b"]
    file["table"] = TABLE
    file["numbers"] = np.arange(4.0)
    return file


def zarr_group() -> Any:
    group = package("zarr").group()
    group.create_array("numbers", data=np.arange(4.0))
    return group


def zarr_array(values: np.ndarray[Any, Any]) -> Any:
    return package("zarr").array(values)


def ragged_dataset(file: Any) -> Any:
    return file.create_dataset("ragged", (2,), dtype=package("h5py").vlen_dtype(np.int32))


def with_empty_dataset(file: Any) -> Any:
    file.create_dataset("an empty dataset", data=package("h5py").Empty("f4"))
    return file


def packed_sequence() -> Any:
    torch = require("torch")
    return torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])


def async_tensor() -> Any:
    torch = require("torch")
    module = package("torch.distributed._functional_collectives")
    return module.AsyncCollectiveTensor(torch.ones(3))


def masked_tensor() -> Any:
    torch = require("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return package("torch.masked").masked_tensor(torch.arange(3.0), torch.tensor([True, False, True]))


def column_of_a_data_set(name: str) -> Any:
    datasets = package("datasets")
    float32 = datasets.Value("float32")
    features = {
        "number": float32,
        "vector": datasets.Sequence(float32, length=2),
        "lists": datasets.Sequence(datasets.Value("int64")),
        "image": datasets.Array2D((2, 2), "uint8"),
        "text": datasets.Value("string"),
        "fields": {"a": datasets.Value("int32")},
    }
    rows = {
        "number": [1.5, 2.5],
        "vector": [[1, 2], [3, 4]],
        "lists": [[1], [2, 3]],
        "image": [[[1, 2], [3, 4]]] * 2,
        "text": ["b", "a"],
        "fields": [{"a": 1}, {"a": 2}],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))[name]


def arrow(values: Any, kind: str | None = None, size: int = 0) -> Any:
    pyarrow = package("pyarrow")
    element = None if kind is None else pyarrow.type_for_alias(kind)
    return pyarrow.array(values, pyarrow.list_(element, size) if size else element)


def arrow_chunks(values: Any, kind: str | None = None, size: int = 0) -> Any:
    return package("pyarrow").chunked_array([arrow(values, kind, size)] * 2)


def arrow_table(**columns: Any) -> Any:
    return package("pyarrow").table(columns)


def arrow_batch(**columns: Any) -> Any:
    return package("pyarrow").record_batch(columns)


def arrow_map() -> Any:
    pyarrow = package("pyarrow")
    return pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int32()))


def arrow_tensors() -> Any:
    pyarrow = package("pyarrow")
    return pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2))


def nested_arrow(values: Any) -> Any:
    pyarrow = package("pyarrow")
    return pyarrow.array(values, pyarrow.list_(pyarrow.list_(pyarrow.int32(), 2), 2))


def polars_array(values: Any, *shape: int) -> Any:
    polars = package("polars")
    return polars.Series("v", values, dtype=polars.Array(polars.Int32, shape))


def decimals() -> Any:
    return package("polars").Series("d", ["1.5", "2"]).cast(package("polars").Decimal(10, 2))


ROWS_WITH_NULLS = [[[1, 2], None], [[5, 6], [7, 8]]]
ELEMENTS_WITH_NULLS = [[[1, 2], [3, None]], [[5, 6], [7, 8]]]

#: A rejected object → how to make it, and the number of expressions in its advice.
CORPUS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "np.ma": (lambda _: np.ma.masked_equal([0.0, 1.0], 0), 3),
    "astropy Masked": (lambda _: masked(), 3),
    "xarray over Masked": (lambda _: xarray_over(masked()), 3),
    "np.ma of a structured dtype": (lambda _: np.ma.array(TABLE, mask=[(True, False), (False, True)]), 3),
    "structured": (lambda _: TABLE, 1),
    "record array": (lambda _: TABLE.view(np.recarray), 1),
    "a scalar of a structured dtype": (lambda _: TABLE[0], 1),
    "void": (lambda _: np.zeros(3, "V4"), 1),
    "strings of numbers": (lambda _: np.array(["1.5", "2"]), 1),
    "strings": (lambda _: np.array(["b", "a"]), 1),
    "bytes": (lambda _: np.array([b"b", b"a"]), 1),
    "numeric objects": (lambda _: np.array([1, 2.5, None], object), 1),
    "objects": (lambda _: np.array([[1], [2, 3]], object), 0),
    "dates": (lambda _: np.array(["2020-01-01"], "M8[D]"), 1),
    "np.str_ of a number": (lambda _: np.str_("1.5"), 1),
    "np.str_": (lambda _: np.str_("abc"), 1),
    "np.bytes_": (lambda _: np.bytes_(b"abc"), 1),
    "np.datetime64": (lambda _: np.datetime64("2020-01-01"), 1),
    "list": (lambda _: [1, 2], 1),
    "dict": (lambda _: {"a": 1}, 0),
    "list of lists of other lengths": (lambda _: [[1], [2, 3]], 0),
    "int": (lambda _: 3, 1),
    "a large int": (lambda _: 2**70, 1),
    "memoryview of characters": (lambda _: memoryview(b"abc").cast("c"), 1),
    "memoryview without axes": (lambda _: memoryview(np.array(1.5)), 1),
    **{f"NumPy {name}": (lambda _, name=name: ml(name), 1) for name in ("int1", "uint1", "float6_e2m3fn")},
    **{f"JAX {name}": (lambda _, name=name: in_jax(name), 1) for name in ("int4", "uint4", "float4_e2m1fn")},
    "JAX key": (lambda _: require("jax").random.key(0), 1),
    **{
        f"PyTorch {name}": (lambda _, name=name: in_torch(name), 1)
        for name in ("int4", "uint1", "bits8", "bits16", "float4_e2m1fn_x2", "complex32")
    },
    "PyTorch quantized": (
        lambda _: require("torch").quantize_per_tensor(
            require("torch").ones(3), 0.1, 0, require("torch").qint8
        ),
        2,
    ),
    "MaskedTensor": (lambda _: masked_tensor(), 1),
    "AsyncCollectiveTensor": (lambda _: async_tensor(), 1),
    "TensorFlow strings of numbers": (lambda _: in_tensorflow(lambda tf: tf.constant(["1.5"])), 1),
    "TensorFlow strings": (lambda _: in_tensorflow(lambda tf: tf.constant(["a", "b"])), 1),
    "TensorFlow int4": (lambda _: in_tensorflow(lambda tf: tf.cast(tf.constant([1, 2]), "int4")), 1),
    "TensorFlow ragged": (lambda _: in_tensorflow(lambda tf: tf.ragged.constant([[1.0], [2.0, 3.0]])), 2),
    "TensorFlow slices": (
        lambda _: in_tensorflow(
            lambda tf: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([2, 2]))
        ),
        1,
    ),
    "an image of mode P": (lambda _: image("P"), 2),
    "pydicom": (lambda _: pydicom_dataset(), 1),
    "an empty pydicom dataset": (lambda _: package("pydicom").dataset.Dataset(), 0),
    "h5py file": (h5py_file, 1),
    "h5py table": (lambda tmp: h5py_file(tmp)["table"], 1),
    "h5py astype": (lambda tmp: h5py_file(tmp)["numbers"].astype("f4"), 1),
    "h5py field": (lambda tmp: h5py_file(tmp)["table"].fields("a"), 1),
    "h5py fields": (lambda tmp: h5py_file(tmp)["table"].fields(["a", "b"]), 1),
    "h5py asstr": (lambda tmp: h5py_file(tmp)["texts"].asstr(), 1),
    "h5py empty": (lambda tmp: h5py_file(tmp).create_dataset("e", data=package("h5py").Empty("f4")), 1),
    "h5py texts": (lambda tmp: h5py_file(tmp)["texts"], 1),
    "h5py bytes": (lambda tmp: h5py_file(tmp).create_dataset("b", data=np.array([b"b", b"a"])), 1),
    "h5py arrays of other lengths": (lambda tmp: ragged_dataset(h5py_file(tmp)), 0),
    "h5py file with an empty dataset": (lambda tmp: with_empty_dataset(h5py_file(tmp)), 1),
    "zarr texts": (lambda _: zarr_array(np.array(["b", "a"])), 1),
    "zarr dates": (lambda _: zarr_array(np.array(["2020-01-01"], "M8[s]")), 1),
    "zarr table": (lambda _: zarr_array(TABLE), 1),
    "Keras input": (lambda _: package("keras").Input((2,)), 0),
    "PackedSequence": (lambda _: packed_sequence(), 1),
    "zarr group": (lambda _: zarr_group(), 1),
    "xarray dataset": (lambda _: package("xarray").Dataset({"t": ("x", ["a"]), "a": ("x", [1.0])}), 1),
    "xarray over Int64": (lambda _: xarray_over(package("pandas").array([1, 2], dtype="Int64")), 1),
    "xarray over categories": (lambda _: xarray_over(package("pandas").Categorical(["a", "b"])), 1),
    "xarray over pint": (lambda _: xarray_over(quantity()), 1),
    "xarray over sparse": (lambda _: xarray_over(sparse_identity()), 1),
    "xarray over text": (lambda _: xarray_over(["a", "b"]), 1),
    "xarray over dates": (lambda _: xarray_over(np.array(["2020"], "M8[ns]")), 1),
    "xarray over Dask": (lambda _: xarray_over(package("dask.array").ones(3)), 1),
    "pint": (lambda _: quantity(), 1),
    "astropy table": (lambda _: package("astropy.table").Table({"t": ["a"], "a": [1.0]}), 1),
    "datasets": (lambda _: package("datasets").Dataset.from_dict({"t": ["a"], "a": [1.0]}), 1),
    "a column of datasets": (lambda _: package("datasets").Dataset.from_dict({"a": [1.0]})["a"], 1),
    "Series with nulls": (lambda _: package("pandas").Series([1, None], dtype="Int64"), 2),
    "Series of booleans with nulls": (lambda _: package("pandas").Series([True, None], dtype="boolean"), 2),
    "Series of text": (lambda _: package("pandas").Series(["a", "b"]), 1),
    "Series of texts of numbers": (lambda _: package("pandas").Series(["1", "2.5"]), 1),
    "Series of categories": (lambda _: package("pandas").Series(["a", "b"], dtype="category"), 1),
    "Index of categories": (lambda _: package("pandas").CategoricalIndex(["a", "b"]), 1),
    "Series of dates": (lambda _: package("pandas").Series(np.array(["2020"], "M8[ns]")), 1),
    "Index of dates": (lambda _: package("pandas").date_range("2020", periods=2, tz="UTC"), 1),
    "Index of text": (lambda _: package("pandas").Index(["a", "b"]), 1),
    "Index of levels": (lambda _: package("pandas").MultiIndex.from_product([[1, 2], [3]]), 1),
    "sparse Series": (
        lambda _: package("pandas").Series(package("pandas").arrays.SparseArray([0.0, 1.0])),
        1,
    ),
    "Series of intervals": (lambda _: package("pandas").Series(package("pandas").interval_range(0, 2)), 2),
    "array of pandas": (lambda _: package("pandas").array([1, 2], dtype="Int64"), 1),
    "array of pandas with nulls": (lambda _: package("pandas").array([1, None], dtype="Int64"), 1),
    "DataFrame of numbers": (lambda _: package("pandas").DataFrame({"a": [1], "b": [1.5]}), 1),
    "DataFrame of nulls": (
        lambda _: package("pandas").DataFrame({"a": package("pandas").array([1, None]), "b": [1.5, 2]}),
        1,
    ),
    "DataFrame with text": (lambda _: package("pandas").DataFrame({"t": ["a"], "a": [1]}), 1),
    "DataFrame without columns": (lambda _: package("pandas").DataFrame(index=[1]), 0),
    "DataFrame of dates": (lambda _: package("pandas").DataFrame({"{d}": np.array(["2020"], "M8[ns]")}), 1),
    "DataFrame of lists": (lambda _: package("pandas").DataFrame({"a": [[1], [2, 3]]}), 0),
    "DataFrame with nulls and text": (
        lambda _: package("pandas").DataFrame({"t": ["a", "b"], "a": package("pandas").array([1, None])}),
        1,
    ),
    "DataFrame of two columns of one name": (
        lambda _: package("pandas").DataFrame([["a", 1.5]], columns=["{x}", "{x}"]),
        1,
    ),
    "DataFrame with a column named NaN": (
        lambda _: package("pandas").DataFrame([["a", 1.5]], columns=["t", float("nan")]),
        1,
    ),
    "DataFrame with columns named by dates": (
        lambda _: package("pandas").DataFrame([["a", 1.5]], columns=np.array(["2020", "2021"], "M8[ns]")),
        1,
    ),
    "DataFrame of sparse integers": (lambda _: sparse_frame([0, 1]), 2),
    "DataFrame of sparse numbers and NaN": (lambda _: sparse_frame([float("nan"), 1.5]), 1),
    "Series of arrays": (lambda _: package("pandas").Series([np.ones(2), np.zeros(2)]), 1),
    "Series of lists": (lambda _: package("pandas").Series([[1], [2, 3]]), 0),
    "Index of tensors": (lambda _: package("pandas").Index([require("torch").ones(2)] * 2), 1),
    **{
        f"{kind} of Arrow's {name}": (lambda _, kind=kind, name=name: pandas_over_arrow(kind, name), 1)
        for kind in ("Series", "Index", "DataFrame", "array")
        for name in ("date32", "date64", "time32", "binary", "list", "struct", "dictionary", "vector")
    },
    "polars with nulls": (lambda _: package("polars").Series([1, None]), 2),
    "polars text": (lambda _: package("polars").Series(["a"]), 1),
    "polars dates": (lambda _: package("polars").Series([1]).cast(package("polars").Date), 1),
    "polars categories": (lambda _: package("polars").Series(["a"]).cast(package("polars").Categorical), 1),
    "polars structs": (lambda _: package("polars").Series([{"{a}": 1, "t": "x"}]), 1),
    "polars objects": (lambda _: package("polars").Series([{1}], dtype=package("polars").Object), 0),
    "polars lists": (lambda _: package("polars").Series([[1], [2, 3]]), 1),
    "polars lists with nulls": (lambda _: package("polars").Series([[1], [None, 3]]), 1),
    "polars lists of lists": (lambda _: package("polars").Series([[[1]], [[2, 3]]]), 1),
    "polars lists of text": (lambda _: package("polars").Series([["a"], ["b", "c"]]), 1),
    "polars text with nulls": (lambda _: package("polars").Series(["a", None]), 1),
    "polars bytes": (lambda _: package("polars").Series([b"a"]), 1),
    "polars nulls alone": (lambda _: package("polars").Series([None]), 0),
    "polars decimals": (lambda _: decimals(), 1),
    "polars 128 bits": (lambda _: package("polars").Series([1]).cast(package("polars").Int128), 1),
    "polars booleans with nulls": (lambda _: package("polars").Series([True, None]), 2),
    "polars arrays with null rows": (lambda _: polars_array([[1, 2], None], 2), 1),
    "polars arrays with nulls": (lambda _: polars_array([[1, None], [1, 2], None], 2), 2),
    "polars arrays with null arrays": (lambda _: polars_array(ROWS_WITH_NULLS, 2, 2), 1),
    "polars arrays with nulls in arrays": (lambda _: polars_array(ELEMENTS_WITH_NULLS, 2, 2), 2),
    "polars frame with nulls": (lambda _: package("polars").DataFrame({"a": [1, None], "b": [1, 2]}), 2),
    "polars frame of booleans with nulls": (lambda _: package("polars").DataFrame({"a": [True, None]}), 2),
    "polars frame of numbers": (lambda _: package("polars").DataFrame({"a": [1], "b": [1.5]}), 1),
    "polars frame with decimals": (lambda _: package("polars").DataFrame({"a": [1, 2], "d": decimals()}), 1),
    "polars frame with text": (lambda _: package("polars").DataFrame({"t": ["a"], "{a}": [None]}), 1),
    "polars frame of arrays": (
        lambda _: package("polars").DataFrame({"t": ["a"], "v": polars_array([[1, 2]], 2)}),
        1,
    ),
    "polars frame without columns": (lambda _: package("polars").DataFrame(), 0),
    "polars lazy frame": (lambda _: package("polars").LazyFrame({"a": [1], "b": [2]}), 1),
    "polars lazy frame with text": (lambda _: package("polars").LazyFrame({"t": ["a"], "b": [2.0]}), 1),
    **{
        f"Arrow {kind}{' in chunks' if make is arrow_chunks else ''}": (
            lambda _, make=make, values=values, kind=kind: make(values, kind),
            count,
        )
        for make in (arrow, arrow_chunks)
        for kind, values, count in (
            ("int16", [1, None], 2),
            ("bool", [True, None], 2),
            ("halffloat", [1.5, None], 2),
            ("string", ["b", "a", None], 1),
            ("large_binary", [b"b", b"a"], 1),
            ("timestamp[us]", [1, None], 1),
            ("date32", [1, 2], 1),
            ("time64[ns]", [1, 2], 1),
            ("duration[s]", [1, 2], 1),
            ("null", [None], 0),
        )
    },
    "Arrow decimals": (lambda _: arrow([package("decimal").Decimal("1.5"), None]), 1),
    "Arrow categories": (lambda _: arrow(["b", "a", None]).dictionary_encode(), 1),
    "Arrow lists": (lambda _: arrow([[1], [2, None]]), 1),
    "Arrow lists in chunks": (lambda _: arrow_chunks([[1], [2, 3]]), 1),
    "Arrow lists of lists": (lambda _: arrow([[[1]], [[2, 3]]]), 1),
    "Arrow lists of text": (lambda _: arrow([["a"], ["b", "c"]]), 1),
    "Arrow fixed-size lists of text": (lambda _: arrow([["a", "b"]], "string", 2), 1),
    "Arrow structs": (lambda _: arrow([{"n": None, "t": "x"}, None]), 1),
    "Arrow maps": (lambda _: arrow_map(), 0),
    "Arrow tensors": (lambda _: arrow_tensors(), 1),
    "Arrow scalar": (lambda _: package("pyarrow").scalar(1.5), 1),
    "Arrow schema": (lambda _: package("pyarrow").schema([]), 0),
    "Arrow fixed-size lists with null rows": (lambda _: arrow([[1, 2], None], "int32", 2), 1),
    "Arrow fixed-size lists with nulls": (lambda _: arrow([[1, None], [1, 2], None], "int32", 2), 2),
    "Arrow fixed-size lists with nulls, sliced": (
        lambda _: arrow([[1, 2], [1, None], [3, 4]], "int32", 2)[1:],
        2,
    ),
    "Arrow fixed-size lists with nulls, in chunks": (lambda _: arrow_chunks([[True, None]], "bool", 2), 2),
    "Arrow nested lists with null lists": (lambda _: nested_arrow(ROWS_WITH_NULLS), 1),
    "Arrow nested lists with nulls": (lambda _: nested_arrow(ELEMENTS_WITH_NULLS), 2),
    "Arrow table with nulls": (lambda _: arrow_table(a=[1, None], b=[1, 2]), 1),
    "Arrow batch with nulls": (lambda _: arrow_batch(a=[1, None], b=[1, 2]), 1),
    "Arrow table of numbers": (lambda _: arrow_table(a=[1, None], b=[1.5, 2]), 1),
    "Arrow batch of numbers": (lambda _: arrow_batch(a=[1, 2], b=[True, False]), 1),
    "Arrow table with text": (lambda _: arrow_table(t=["a", "b"], a=[1, None]), 1),
    "Arrow table of text": (lambda _: arrow_table(t=["a"]), 1),
    "Arrow table of vectors": (lambda _: arrow_table(t=["a"], v=arrow([[1, 2]], "int8", 2)), 1),
    "Arrow table of two columns of one name": (
        lambda _: package("pyarrow").table([arrow(["a"]), arrow([1])], names=["{x}", "{x}"]),
        1,
    ),
    "Arrow table without columns": (lambda _: arrow_table(), 0),
    **{
        f"a data set's column of {name}": (lambda _, name=name: column_of_a_data_set(name), 1)
        for name in ("number", "vector", "lists", "image", "text", "fields")
    },
    "SciPy": (lambda _: package("scipy.sparse").eye_array(3).todia(), 1),
    "sparse": (lambda _: sparse_identity(), 1),
    "Dask": (lambda _: package("dask.array").ones(3), 1),
}


def sparse_frame(values: list[Any]) -> Any:
    pandas = package("pandas")
    return pandas.DataFrame({"a": pandas.arrays.SparseArray(values)})


def pandas_over_arrow(kind: str, name: str) -> Any:
    """Return an object of pandas whose values are stored by Arrow, with a null."""
    pandas, pyarrow = package("pandas"), package("pyarrow")
    values: dict[str, tuple[Any, Any]] = {
        "date32": ([1, None], pyarrow.date32()),
        "date64": ([86_400_000, None], pyarrow.date64()),
        "time32": ([1, None], pyarrow.time32("s")),
        "binary": ([b"a", None], pyarrow.binary()),
        "list": ([[1, None], None], pyarrow.list_(pyarrow.int64())),
        "struct": ([{"{a}": 1}, None], pyarrow.struct([("{a}", pyarrow.int64())])),
        "dictionary": (["a", None], pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
        "vector": ([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)),
    }
    elements, arrow_type = values[name]
    dtype = pandas.ArrowDtype(arrow_type)
    column = pandas.Series(pandas.array(elements, dtype=dtype))
    if kind == "DataFrame":
        return column.to_frame("a")
    return column.array if kind == "array" else getattr(pandas, kind)(column)


def run(expression: str, x: Any) -> Any:
    """Evaluate an expression. The packages that it names are imported first."""
    space: dict[str, Any] = {"x": x, "np": np}
    for name in NAMES:
        if f"{name}." in expression or (name == "tensorflow" and "tf." in expression):
            space["tf" if name == "tensorflow" else name] = package(name)
    return eval(expression, space)  # noqa: S307  # the expressions of the library itself


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CORPUS)
def test_expressions_in_advice_run_and_their_results_convert(kind: str, tmp_path: Path) -> None:
    make, count = CORPUS[kind]
    x = make(tmp_path)
    target = "numpy" if type(x).__module__.startswith("torch") else "torch"
    require(target)
    with pytest.raises(MemoryConversionError) as caught:
        ab.convert_memory(x, target)
    error = caught.value
    assert error.advice
    assert str(error).endswith(error.advice)
    assert len(error.expressions) == count, str(error)
    for expression in error.expressions:
        assert expression in error.advice
        ab.convert_memory(run(expression, x), target)


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


def test_classes_whose_metaclass_raises_are_no_arrays() -> None:
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
        with pytest.raises(ab.ArrayNotSupportedError, match="open the file again"):
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


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (range(3), "range is not an array: convert it to an array with np.asarray(x)"),
        ([[1, 2], [3, 4]], "list is not an array: convert it to an array with np.asarray(x)"),
        (
            [np.ones(2), np.ones(2)],
            (
                "list is not an array: convert it to one array with np.asarray(x), or convert the arrays"
                " inside it with convert_tree(x, target)"
            ),
        ),
        ({3, 1}, "set is not an array: convert its elements to an array with np.asarray(sorted(x))"),
        ({1j, 2}, "set is not an array: convert its elements to an array with np.asarray(list(x))"),
        ({"a"}, "set is not an array: it holds no numbers; pass an object that does"),
        ("x.npy", "str is not an array: to convert a file, read it first, as in np.load(x)"),
        (Path("x.npy"), "PosixPath is not an array: to convert a file, read it first, as in np.load(x)"),
        (
            iter([1]),
            (
                "list_iterator is not an array: convert its arrays one at a time, or all of them with"
                " convert_tree(list(x), target); for numbers, pass np.array(list(x))"
            ),
        ),
        (None, "NoneType is not an array: pass an array; functions without a return statement return None"),
        (int, "type is not an array: it is a class; pass an instance of it"),
        (
            np.ones(2).copy,
            (
                "builtin_function_or_method is not an array: it is a function; call it, and pass the array"
                " that it returns"
            ),
        ),
    ],
)
def test_common_objects_that_are_not_arrays_get_advice_for_their_class(x: Any, text: str) -> None:
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_numpy(x)
    message = str(caught.value).removeprefix("an object of type ")
    # Python 3.13 defines the class in pathlib._local.
    assert message.removeprefix("pathlib.").removeprefix("_local.") == text


def test_models_and_data_loaders_get_advice_that_runs() -> None:
    torch = package("torch")
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ab.UnknownArrayError, match=r"convert_tree\(x\.state_dict\(\), target\)$"):
        ab.to_numpy(model)
    assert ab.convert_tree(model.state_dict(), "numpy")["weight"].shape == (3, 2)
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
    with pytest.raises(ab.UnknownArrayError, match=r"convert its batches with prefetch\(x, target\)$"):
        ab.to_numpy(loader)
    assert [x.tolist() for x in ab.prefetch(loader, "numpy")] == [[0, 1], [2, 3]]


def test_a_frame_of_one_unsupported_dtype_is_not_described_as_several_dtypes() -> None:
    polars = package("polars")
    frame = polars.DataFrame({"a": [1, 2], "b": [3, 4]}).cast(polars.Int128)
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_numpy(frame)
    assert caught.value.advice == (
        "NumPy has no dtype for its Int128 columns; pass x.cast(float).to_numpy(), which rounds them"
    )
    text = polars.DataFrame({"a": ["x"], "b": ["y"]})
    with pytest.raises(
        ab.UnknownArrayError, match=r"none of its columns converts as it is; pass one as numbers, x"
    ):
        ab.to_numpy(text)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("Date", "pass the integers that represent its values, x.to_physical()"),
        ("Datetime", "pass the integers that represent its values, x.to_physical()"),
        ("Int128", "pass x.cast(float), which rounds its numbers"),
    ],
)
def test_errors_for_polars_series_name_the_dtype_and_the_class(dtype: str, advice: str) -> None:
    polars = package("polars")
    series = polars.Series([1]).cast(getattr(polars, dtype))
    with pytest.raises(ab.UnknownArrayError) as caught:
        ab.to_torch(series)
    assert str(caught.value) == (
        "an object of type polars.Series is not an array: its dtype is"
        f" {dtype}, and no framework has arrays of that dtype; {advice}"
    )


def test_errors_for_arrays_of_third_party_classes_name_no_framework() -> None:
    class Producer:
        __array_interface__: ClassVar = {"shape": (2,)}

    with pytest.raises(ab.ArrayNotSupportedError, match=r"Producer cannot be converted: its memory cannot"):
        ab.to_numpy(Producer())


def test_groups_without_arrays_and_expressions_get_advice(tmp_path: Path) -> None:
    h5py, zarr, polars = (package(name) for name in ("h5py", "zarr", "polars"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"] = ["a", "b"]
        with pytest.raises(ab.UnknownArrayError, match="this group contains no array of numbers"):
            ab.to_numpy(file.create_group("empty"))
        with pytest.raises(ab.UnknownArrayError, match="this group contains no array of numbers"):
            ab.to_numpy(file)
    with pytest.raises(ab.UnknownArrayError, match="this group contains no array of numbers"):
        ab.to_numpy(zarr.open_group(tmp_path / "z", mode="w"))
    with pytest.raises(ab.UnknownArrayError, match="an expression holds no data; pass a column of a frame"):
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
