"""Objects that cannot be converted, for the tests of errors and their advice."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

TABLE = np.array([(1.5, 2), (2.5, 3)], [("a", "f4"), ("b", "i4")])


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def ml(name: str, values: Any = (0, 1, 1, 0)) -> np.ndarray:
    dtype = getattr(package("ml_dtypes"), name, None)
    if dtype is None:
        pytest.skip(f"this ml_dtypes has no dtype {name}")
    return np.array(values).astype(dtype)


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


def masked_column() -> Any:
    return package("astropy.table").MaskedColumn([0.0, 1.0], mask=[False, True], unit="m")


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
    lists = pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int32(), 2))
    return pyarrow.ExtensionArray.from_storage(pyarrow.fixed_shape_tensor(pyarrow.int32(), (2,)), lists)


def nested_arrow(values: Any) -> Any:
    pyarrow = package("pyarrow")
    return pyarrow.array(values, pyarrow.list_(pyarrow.list_(pyarrow.int32(), 2), 2))


def polars_array(values: Any, *shape: int) -> Any:
    polars = package("polars")
    return polars.Series("v", values, dtype=polars.Array(polars.Int32, shape))


def decimals() -> Any:
    return package("polars").Series("d", ["1.5", "2"]).cast(package("polars").Decimal(10, 2))


def of_fields(*fields: Any) -> np.ndarray:
    """Return a structured array whose first field is text, nested or empty."""
    return np.zeros(2, list(fields))


def masked_numpy(values: Any, dtype: Any = None) -> Any:
    return np.ma.array(np.asarray(values, dtype), mask=[False, True])


def in_scipy(layout: str, dtype: Any) -> Any:
    matrix = package("scipy.sparse").csr_array(np.eye(4))
    if layout in ("lil", "dok"):
        return matrix.asformat(layout).astype(dtype)
    x = matrix.tobsr((2, 2)) if layout == "bsr" else matrix.asformat(layout)
    x.data = x.data.astype(dtype)  # SciPy stores dtypes that it does not compute with
    return x


def float_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(package("ml_dtypes"), name, name))


def in_sparse_torch(layout: str, dtype: str, dense: tuple[int, ...] = ()) -> Any:
    torch = require("torch")
    blocks = (2, 2) if layout in ("bsr", "bsc") else ()
    values = torch.ones(2, *blocks, *dense).to(getattr(torch, dtype))
    size = (4, 4) if blocks else (2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if layout == "coo":
            indices = torch.tensor([[0, 1], [1, 0]])
            return torch.sparse_coo_tensor(indices, values, (*size, *dense), check_invariants=False)
        return torch.sparse_compressed_tensor(
            torch.tensor([0, 1, 2]),
            torch.tensor([0, 1]),
            values,
            (*size, *dense),
            layout=getattr(torch, f"sparse_{layout}"),
            check_invariants=False,
        )


def in_sparse_jax(kind: str, dtype: str) -> Any:
    """Return an array that only JAX accepts: with padding, negative indices, batches or dense axes."""
    jnp = require("jax").numpy
    from jax.experimental import sparse

    values = jnp.ones(2).astype(getattr(package("ml_dtypes"), dtype, dtype))
    more = jnp.ones((2, 3)).astype(values.dtype)
    pairs = jnp.array([[0, 1], [1, 0]])
    pointers = jnp.array([0, 1, 2])
    makers: dict[str, Callable[[], Any]] = {
        "COO": lambda: sparse.BCOO((values, pairs), shape=(2, 2)),
        "COO with padding": lambda: sparse.BCOO((values, pairs * 5), shape=(2, 2)),
        "COO with negative indices": lambda: sparse.BCOO((values, -pairs), shape=(2, 2)),
        "COO with dense axes": lambda: sparse.BCOO((more, pairs), shape=(2, 2, 3)),
        "COO with dense axes and padding": lambda: sparse.BCOO((more, pairs * 5), shape=(2, 2, 3)),
        "batch of COO": lambda: sparse.BCOO((more[:, :2], pairs[..., None] * 5), shape=(2, 2)),
        "CSR": lambda: sparse.BCSR((values, pairs[0], pointers), shape=(2, 2)),
        "CSR with padding": lambda: sparse.BCSR((values, pairs[0] * 5, pointers), shape=(2, 2)),
        "CSR with negative indices": lambda: sparse.BCSR((values, -pairs[0], pointers), shape=(2, 2)),
        "CSR with pointers beyond its entries": lambda: sparse.BCSR(
            (values, pairs[0], pointers * 9), shape=(2, 2)
        ),
        "CSR with dense axes": lambda: sparse.BCSR((more, pairs[0], pointers), shape=(2, 2, 3)),
        "batch of CSR": lambda: sparse.BCSR(
            (more[:, :2], pairs, jnp.stack([pointers, pointers])), shape=(2, 2, 2)
        ),
        "old CSR": lambda: sparse.CSR((values, pairs[0], pointers), shape=(2, 2)),
        "old CSC": lambda: sparse.CSC((values, pairs[0], pointers), shape=(2, 2)),
        "old COO": lambda: sparse.COO((values, pairs[0], pairs[1]), shape=(2, 2)),
    }
    return makers[kind]()


def npz_file(tmp_path: Path) -> Any:
    np.savez(tmp_path / "a.npz", texts=np.array(["a"]), numbers=np.arange(4.0))
    return np.load(tmp_path / "a.npz")


def fits_file(table: bool) -> Any:
    fits = package("astropy.io.fits")
    unit = fits.BinTableHDU(TABLE) if table else fits.ImageHDU(np.arange(4.0))
    return fits.HDUList([fits.PrimaryHDU(), unit])


def netcdf_file(tmp_path: Path) -> Any:
    file = package("netCDF4").Dataset(tmp_path / "a.nc", "w")
    file.createDimension("x", 2)
    file.createVariable("texts", str, ("x",))
    file.createVariable("numbers", "f8", ("x",))[:] = np.ma.array([1.0, 2.0], mask=[False, True])
    file.createVariable("counts", "i4", ("x",))[:1] = 3
    return file


def geometries() -> Any:
    points = package("shapely").points([0, 2], [1, 3])
    return package("geopandas").GeoSeries(points)


def torchio_image() -> Any:
    return package("torchio").ScalarImage(tensor=require("torch").ones(1, 2, 3, 4))


def warp_structs() -> Any:
    warp = package("warp")
    pair = type("Pair", (), {"__annotations__": {"a": warp.float32, "b": warp.int32}})
    return warp.zeros(3, dtype=warp.struct(pair))


def ray_tensors() -> Any:
    package("ray")
    extensions = package("ray.data.extensions")
    return extensions.ArrowTensorArray.from_numpy(np.arange(12.0).reshape(3, 2, 2))


def structured_blosc2() -> Any:
    return package("blosc2").asarray(TABLE)


def numba_list() -> Any:
    return package("numba.typed").List([1, 2])


class WithMask(np.ndarray):
    """An array whose class has a mask."""

    mask = None


class Producer:
    """An array that other libraries read through DLPack only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def vector_image() -> Any:
    return package("SimpleITK").GetImageFromArray(np.zeros((2, 2, 2, 3)), isVector=True)


def label_map() -> Any:
    sitk = package("SimpleITK")
    return sitk.LabelImageToLabelMap(sitk.GetImageFromArray(np.arange(4, dtype=np.uint8).reshape(2, 2)))


class Scan:
    """An object with a method that returns its array."""

    def to_numpy(self) -> np.ndarray:
        return np.arange(4.0)


class Lazy:
    """An object that is read by ``__array__``."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.arange(4.0)


class Sequence:
    """An object that NumPy reads as a sequence."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> float:
        return [1.0, 2.0, 3.0][i]


ROWS_WITH_NULLS = [[[1, 2], None], [[5, 6], [7, 8]]]
ELEMENTS_WITH_NULLS = [[[1, 2], [3, None]], [[5, 6], [7, 8]]]


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


#: A refused object → a function of a folder that makes it, and the number of expressions in the advice of its
#: conversion to PyTorch, or to NumPy if it is from PyTorch.
REFUSED: dict[str, tuple[Callable[..., Any], int | None]] = {
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
    "a number of pint": (lambda _: package("pint").UnitRegistry().Quantity(3.0, "m"), 1),
    "astropy with a mask and a unit": (lambda _: masked_column(), 1),
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
    "Index of one level": (lambda _: package("pandas").MultiIndex.from_arrays([[1, 2]]), 1),
    "sparse Series": (
        lambda _: package("pandas").Series(package("pandas").arrays.SparseArray([0.0, 1.0])),
        1,
    ),
    "Series of intervals": (lambda _: package("pandas").Series(package("pandas").interval_range(0, 2)), 1),
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
    "DataFrame of sparse integers": (lambda _: sparse_frame([0, 1]), 1),
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
    "Arrow tensors with nulls": (lambda _: arrow_tensors(), 1),
    "chunked Arrow tensors with nulls": (lambda _: package("pyarrow").chunked_array([arrow_tensors()]), 1),
    "Arrow scalar": (lambda _: package("pyarrow").scalar(1.5), 1),
    "Arrow schema": (lambda _: package("pyarrow").schema([]), 0),
    "Arrow fixed-size lists with null rows": (lambda _: arrow([[1, 2], None], "int32", 2), 1),
    "Arrow fixed-size lists with nulls": (lambda _: arrow([[1, None], [1, 2], None], "int32", 2), 2),
    "Arrow fixed-size lists with nulls, sliced": (
        lambda _: arrow([[1, 2], [1, None], [3, 4]], "int32", 2)[1:],
        2,
    ),
    "Arrow fixed-size lists with nulls, in chunks": (
        lambda _: arrow_chunks([[True, None], [True, False]], "bool", 2),
        2,
    ),
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
    "np.ma of numbers with more axes": (lambda _: np.ma.masked_equal(np.zeros((1, 2, 1, 2)), 0), 3),
    "np.ma without axes": (lambda _: np.ma.array(1.5, mask=False), 3),
    "np.ma of small integers": (lambda _: np.ma.array(np.ones((2, 3), "uint8"), mask=False), 3),
    "np.ma of small integers without axes": (lambda _: np.ma.array(np.uint8(3), mask=False), 3),
    "np.ma of text": (lambda _: masked_numpy(["a", "b"]), 2),
    "np.ma of texts of numbers": (lambda _: masked_numpy(["1.5", "2"]), 2),
    "np.ma of dates": (lambda _: masked_numpy(["2020", "2021"], "M8[D]"), 2),
    "np.ma of numeric objects": (lambda _: masked_numpy([1, None], object), 2),
    "np.ma of long double": (lambda _: masked_numpy([1, 2], "longdouble"), 3),
    "np.ma of fields of text": (lambda _: np.ma.array(of_fields(("a", "U2"), ("b", "f4"))), 3),
    "np.ma of fields of fields": (lambda _: np.ma.array(of_fields(("a", [("b", "U2"), ("c", "f4")]))), 3),
    "astropy Masked of fields": (lambda _: masked(np.zeros(3, [("a", "f4")])), 3),
    "fields of text and numbers": (lambda _: of_fields(("a", "U2"), ("b", "f4")), 1),
    "fields of text": (lambda _: of_fields(("a", "U2")), 1),
    "fields of fields": (lambda _: of_fields(("a", [("b", "M8[D]")])), 1),
    "fields of arrays": (lambda _: of_fields(("a", "U2", 3)), 1),
    "fields of long double": (lambda _: of_fields(("a", "longdouble")), 1),
    "float0": (lambda _: np.zeros(3, require("jax").dtypes.float0), 1),
    "nested tensor": (lambda _: require("torch").nested.nested_tensor([require("torch").ones(2)]), 2),
    "mkldnn": (lambda _: require("torch").ones(2, 2).to_mkldnn(), 1),
    "uninitialized parameter": (lambda _: require("torch").nn.UninitializedParameter(), 0),
    "lazy module": (lambda _: require("torch").nn.LazyLinear(3), 0),
    "TensorFlow ragged strings": (lambda _: in_tensorflow(lambda tf: tf.ragged.constant([["a"], []])), 1),
    "TensorFlow ragged strings of numbers": (
        lambda _: in_tensorflow(lambda tf: tf.ragged.constant([["1.5"], []])),
        1,
    ),
    "h5py compound of text": (
        lambda tmp: h5py_file(tmp).create_dataset("c", data=of_fields(("a", "S2"), ("b", "S3"))),
        1,
    ),
    "h5py fields of text": (
        lambda tmp: h5py_file(tmp).create_dataset("c", data=of_fields(("a", "S2"))).fields("a"),
        1,
    ),
    "npz file": (npz_file, 1),
    "FITS file": (lambda _: fits_file(table=False), 1),
    "FITS table": (lambda _: fits_file(table=True), 1),
    "FITS unit": (lambda _: fits_file(table=False)[1], 1),
    "netCDF4 file": (netcdf_file, 1),
    "netCDF4 variable": (lambda tmp: netcdf_file(tmp)["numbers"], 1),
    "netCDF4 variable of integers": (lambda tmp: netcdf_file(tmp)["counts"], 1),
    "netCDF4 variable of text": (lambda tmp: netcdf_file(tmp)["texts"], 0),
    "GeoSeries": (lambda _: geometries(), 1),
    "torchio image": (lambda _: torchio_image(), 1),
    "torchio subject": (lambda _: package("torchio").Subject(a=torchio_image()), 1),
    "Warp structs": (lambda _: warp_structs(), 1),
    "Ray tensors": (lambda _: ray_tensors(), 1),
    "Ray tensors in a table": (lambda _: arrow_table(t=["a", "b", "c"], v=ray_tensors()), 1),
    "blosc2 fields": (lambda _: structured_blosc2(), 1),
    "numba list": (lambda _: numba_list(), 1),
    "ctypes array of characters": (lambda _: (ctypes.c_char * 3)(), 1),
    "set": (lambda _: {1, 2}, 1),
    "object with to_numpy": (lambda _: Scan(), 1),
    "object with __array__": (lambda _: Lazy(), 1),
    "sequence": (lambda _: Sequence(), 1),
    "sparse with more axes": (lambda _: package("sparse").COO.from_numpy(np.ones((2, 2, 2))), 1),
    "array with a mask": (lambda _: np.arange(3.0).view(WithMask), 1),
    "SimpleITK label map": (lambda _: label_map(), 1),
    "TensorFlow quantized": (lambda _: in_tensorflow(lambda tf: tf.cast([1, 2], tf.qint8)), 1),
    "TensorFlow sparse strings": (
        lambda _: in_tensorflow(lambda tf: tf.SparseTensor([[0, 1], [1, 0]], ["a", "b"], [2, 2])),
        1,
    ),
    "TensorFlow sparse": (lambda _: in_tensorflow(lambda tf: tf.sparse.from_dense(tf.eye(2))), 0),
    "pyclesperanto: DLPack": (lambda _: Producer(np.zeros((2, 1, 2, 3))), 0),
    "pyclesperanto: SimpleITK": (lambda _: vector_image(), 0),
    "pyclesperanto: float64 of TensorFlow": (
        lambda _: in_tensorflow(lambda tf: tf.constant(1.5, tf.float64)),
        0,
    ),
    "pyclesperanto: no axes": (lambda _: np.array(1.5), 0),
    "pyclesperanto: no axes, bool": (lambda _: np.array(True), 0),
    "pyclesperanto: four axes": (lambda _: np.zeros((2, 1, 2, 3)), 0),
    "pyclesperanto: four axes of a tensor": (lambda _: require("torch").zeros(2, 1, 2, 3).double(), 0),
    "pyclesperanto: no axes of TensorFlow": (lambda _: in_tensorflow(lambda tf: tf.constant(1.5)), 0),
    "pyclesperanto: four axes in xarray": (
        lambda _: package("xarray").DataArray(np.zeros((2, 1, 2, 3)), dims=tuple("abcd")),
        0,
    ),
    **{
        f"scipy.sparse {layout} of {dtype}": (
            lambda _, layout=layout, dtype=dtype: in_scipy(layout, dtype),
            None,
        )
        for layout in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")
        for dtype in ("bool", "uint16", "float32", "complex64", "longdouble")
    },
    **{
        f"scipy.sparse {layout} of {dtype}": (
            lambda _, layout=layout, dtype=dtype: in_scipy(layout, float_dtype(dtype)),
            None,
        )
        for layout in ("csr", "csc", "coo")
        for dtype in ("float16", "bfloat16", "float8_e5m2")
    },
    **{
        f"PyTorch {layout} of {dtype}": (
            lambda _, layout=layout, dtype=dtype: in_sparse_torch(layout, dtype),
            None,
        )
        for layout in ("csr", "csc", "coo", "bsr", "bsc")
        for dtype in ("bool", "uint16", "uint32", "uint64", "bfloat16", "float32", "complex64", "float8_e5m2")
    },
    **{
        f"PyTorch {layout} with dense axes": (
            lambda _, layout=layout: in_sparse_torch(layout, "float32", (3,)),
            None,
        )
        for layout in ("csr", "csc", "coo", "bsr", "bsc")
    },
    "PyTorch coo without axes": (lambda _: require("torch").tensor(1.5).to_sparse(), 1),
    **{
        f"JAX {kind} of {dtype}": (lambda _, kind=kind, dtype=dtype: in_sparse_jax(kind, dtype), None)
        for kind in (
            *("COO", "COO with padding", "COO with negative indices", "COO with dense axes"),
            *("COO with dense axes and padding", "batch of COO", "CSR", "CSR with padding"),
            *("CSR with negative indices", "CSR with pointers beyond its entries", "CSR with dense axes"),
            *("batch of CSR", "old CSR", "old CSC", "old COO"),
        )
        for dtype in ("bool", "float32", "bfloat16", "complex64", "int4")
    },
}

#: A conversion with options that is refused → a function that makes the array, the target, and the options.
REFUSED_WITH_OPTIONS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "cast of float8 in TensorFlow": (
        lambda: in_tensorflow(lambda tf: tf.cast([1.0, 2.0], "float8_e5m2")),
        "tensorflow",
        {"dtype": "int8"},
    ),
    "cast of bits in PyTorch": (lambda: in_torch("bits8"), "torch", {"dtype": "float32"}),
    "cast of a SciPy kind": (lambda: in_scipy("lil", "float32"), "numpy", {"dtype": "float16"}),
}
