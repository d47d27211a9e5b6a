"""Objects that carry one array are converted exactly and restored with their metadata. Uses real packages."""

from __future__ import annotations

import array
import json
import mmap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import Carrier, convert_memory, explain, register_carrier, trace
from arraybridge.carriers.registry import carrier_of
from arraybridge.errors import MemoryConversionError
from arraybridge.testing import inject_oom
from tests.helpers import output_of, registry_kept, require

torch = require("torch")
xarray = pytest.importorskip("xarray")
pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
sitk = pytest.importorskip("SimpleITK")
zarr = pytest.importorskip("zarr")
h5py = pytest.importorskip("h5py")
pillow = pytest.importorskip("PIL.Image")

VALUES = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)


def data_array(values: Any = VALUES) -> Any:
    coords = {"z": [0.5, 1.5], "y": ["a", "b", "c"]}
    return xarray.DataArray(values, dims=("z", "y", "x"), coords=coords, name="scan", attrs={"unit": "mm"})


def image(values: Any = VALUES, *, vector: bool = False) -> Any:
    result = sitk.GetImageFromArray(values, isVector=vector)
    dimension = result.GetDimension()
    result.SetSpacing([0.5, 0.75, 2.0][:dimension])
    result.SetOrigin([1.0, 2.0, 3.0][:dimension])
    result.SetMetaData("patient", "Ada")
    return result


def dataset(tmp_path: Path, values: Any = VALUES, **options: Any) -> Any:
    tmp_path.mkdir(exist_ok=True)
    return h5py.File(tmp_path / "scan.h5", "w").create_dataset("scan", data=values, **options)


def zarr_array(values: Any = VALUES, **options: Any) -> Any:
    return zarr.array(values, chunks=options.pop("chunks", (1, 3, 4)), **options)


#: Kind → the carrier of `VALUES`, or of its first plane or row; the carried values; and whether PyTorch
#: shares them.
KINDS: dict[str, tuple[Callable[[Path], Any], Any, bool]] = {
    "DataArray": (lambda _: data_array(VALUES.copy()), VALUES, True),
    "Variable": (lambda _: xarray.Variable(("z", "y", "x"), VALUES.copy()), VALUES, True),
    "zarr": (lambda _: zarr_array(), VALUES, False),
    "h5py": (dataset, VALUES, False),
    "SimpleITK": (lambda _: image(), VALUES, False),
    "vector image": (lambda _: image(VALUES, vector=True), VALUES, False),
    "Image F": (lambda _: pillow.fromarray(VALUES[0]), VALUES[0], False),
    "Image RGB": (lambda _: pillow.fromarray(np.uint8(VALUES[:, :, :3])), np.uint8(VALUES[:, :, :3]), False),
    "Image 1": (lambda _: pillow.fromarray(VALUES[0] > 3), VALUES[0] > 3, False),
    "Series": (lambda _: pandas.Series(VALUES[0, 0], name="a"), VALUES[0, 0], False),
    "Series Int64": (lambda _: pandas.Series([1, 2], dtype="Int64"), np.array([1, 2]), False),
    "DataFrame": (lambda _: pandas.DataFrame(VALUES[0], columns=list("abcd")), VALUES[0], False),
    "columns apart": (
        lambda _: pandas.DataFrame({"a": VALUES[0, 0].copy()}).assign(b=VALUES[0, 1].copy()),
        VALUES[0, :2].T,
        False,
    ),
    "Index": (lambda _: pandas.Index([1.5, 2.5], name="t"), np.array([1.5, 2.5]), False),
    "polars": (lambda _: polars.Series("a", VALUES[0, 0]), VALUES[0, 0], False),
    "polars bool": (lambda _: polars.Series("a", [True, False, True]), np.array([True, False, True]), False),
    "memoryview": (lambda _: memoryview(VALUES.copy()), VALUES, True),
    "array.array": (lambda _: array.array("d", [1.0, 2.0]), np.array([1.0, 2.0]), True),
    "bytes": (lambda _: b"\x00\x01\xff", np.array([0, 1, 255], np.uint8), False),
    "bytearray": (lambda _: bytearray(b"\x00\x01\xff"), np.array([0, 1, 255], np.uint8), True),
}


def equal(x: Any, expected: Any) -> bool:
    """Compare bit for bit, including dtype and shape."""
    x, expected = np.asarray(x), np.asarray(expected)
    return x.dtype == expected.dtype and x.shape == expected.shape and x.tobytes() == expected.tobytes()


# ---- conversion of carriers --------------------------------------------------------------------------


#: Arrays that PyTorch shares on request, because only their read-only flag prevents it.
READ_ONLY = ("Series", "DataFrame", "Index", "polars", "bytes")


@pytest.mark.parametrize("kind", KINDS)
def test_carriers_share_memory_as_explain_predicts(kind: str, tmp_path: Path) -> None:
    make, expected, shares = KINDS[kind]
    x = make(tmp_path)
    route = explain(x, "torch")
    with trace() as log:
        tensor = convert_memory(x, "torch")
    assert equal(tensor.numpy(), expected)
    assert log.records == [route]
    assert (route.source, route.shares_memory) == ("numpy", shares), str(route)
    assert equal(ab.to_numpy(x), expected)
    assert equal(convert_memory(x, "numpy", copy=True), expected)
    assert ab.detect_memory_type(x) == "numpy"
    assert str(ab.device_of(x)) == "cpu"
    with pytest.raises(MemoryConversionError) if not shares and kind not in READ_ONLY else nullcontext():
        convert_memory(x, "torch", copy=False)
    tensor.zero_() if tensor.dtype != torch.bool else tensor.logical_not_()
    assert equal(ab.to_numpy(x), expected) != shares


def test_memory_outlives_its_carrier() -> None:
    for make in (lambda: data_array(VALUES.copy()), lambda: memoryview(VALUES.copy()), image):
        tensors = [convert_memory(make(), "torch") for _ in range(20)]
        assert all(equal(tensor.numpy(), VALUES) for tensor in tensors)


def test_conversion_does_not_change_the_image() -> None:
    x = image()
    twin = sitk.Image(x)
    assert [ab.explain(x, name).copies for name in ("numpy", "torch")] == [1, 1]
    convert_memory(x, "torch").zero_()
    for one in (x, twin):
        assert one.GetMetaData("patient") == "Ada"
        assert equal(sitk.GetArrayFromImage(one), VALUES)


def test_an_xarray_of_other_frameworks() -> None:
    jax = require("jax")
    x = xarray.DataArray(jax.numpy.ones((2, 3)), dims=("a", "b"))
    assert ab.detect_memory_type(x) == "jax"
    assert convert_memory(x, "jax") is x.data
    assert explain(x, "torch").shares_memory


def test_files_are_not_read_to_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, key: Any) -> Any:
        raise AssertionError("the file was read")

    files = zarr_array(), dataset(tmp_path)
    with monkeypatch.context() as patch:
        for cls in (zarr.Array, h5py.Dataset):
            patch.setattr(cls, "__getitem__", read)
        routes = [explain(file, "torch") for file in files]
        with pytest.raises((AssertionError, MemoryConversionError), match="the file was read"):
            convert_memory(files[0], "torch")
    assert "because it is read from a zarr array" in str(routes[0])
    assert "because it is read from an h5py dataset" in str(routes[1])
    assert [route.nbytes for route in routes] == [VALUES.nbytes] * 2


def test_trees_and_bytes_in_them() -> None:
    tree = {
        "image": data_array(),
        "table": pandas.Series([1.0, 2.0]),
        "raw": b"ab",
        "buffer": bytearray(b"c"),
    }
    result = ab.convert_tree(tree, "torch")
    assert equal(result["image"].numpy(), VALUES)
    assert result["table"].tolist() == [1, 2]
    assert result["raw"] == b"ab"
    assert result["buffer"] is tree["buffer"]
    mixed = pandas.DataFrame({"a": [1], "b": ["x"]})
    assert ab.convert_tree([mixed, np.ones(1)], "torch")[0] is mixed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pandas.Series([1, None], dtype="Int64"), r"x\.fillna"),
        (lambda: pandas.Series(["a", "b"], dtype="category"), r"x\.cat\.codes"),
        (lambda: pandas.Series(["a", "b"]), r"x\.astype\(\"category\"\)\.cat\.codes"),
        (lambda: pandas.DataFrame({"a": [1], "b": [1.5]}), r"x\.to_numpy\(\"float64\"\)"),
        (lambda: polars.Series([1, None]), r"x\.fill_null"),
        (lambda: polars.Series(["a"]), r"x\.rank"),
        (lambda: xarray.Dataset({"a": ("x", [1.0])}), r"one of its variables"),
        (lambda: pillow.fromarray(np.zeros((2, 2), np.uint8)).convert("P"), r"x\.convert\(\"RGB\"\)"),
        (lambda: data_array(VALUES).chunk(1), r"arraybridge\.dask"),
        (lambda: memoryview(b"abc").cast("c"), r"np\.asarray|np\.frombuffer"),
        (lambda: [1, 2], r"np\.asarray\(x\)"),
        (lambda: [VALUES], r"convert_tree"),
    ],
)
def test_rejected_carriers_raise_with_advice(make: Any, words: str) -> None:
    if "arraybridge" in words:
        pytest.importorskip("dask")
    with pytest.raises(MemoryConversionError, match=words):
        convert_memory(make(), "torch")


def test_label_maps_raise() -> None:
    """SimpleITK crashes the process if the pixels of a label map are read."""
    lines = (
        "import SimpleITK as sitk, arraybridge as ab",
        "try: ab.to_numpy(sitk.Image([4, 3], sitk.sitkLabelUInt8))",
        "except ab.MemoryConversionError as error: print(error)",
    )
    assert "SimpleITK.LabelMapToLabel(x)" in output_of(*lines, env={"PYTHONWARNINGS": ""})


def test_closed_files_raise(tmp_path: Path) -> None:
    x = dataset(tmp_path)
    x.file.close()
    with pytest.raises(MemoryConversionError, match="Open the file again"):
        convert_memory(x, "torch")


# ---- decorated functions and restored carriers ---------------------------------------------------------


@ab.torch(output_type="input")
def doubled(x: Any) -> Any:
    assert isinstance(x, torch.Tensor)
    return x * 2


@ab.torch(output_type="input")
def summed(x: Any) -> Any:
    return x.sum(0)


#: Dtypes for which SimpleITK has pixel types.
PIXELS = ("uint8", "int16", "uint16", "int32", "int64", "uint64", "float32", "float64", "complex64")
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda x: x,
    "Fortran": np.asfortranarray,
    "reversed": lambda x: x[::-1],
    "steps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bool", "float16", *PIXELS])
def test_any_bits_are_restored_with_their_metadata(dtype: str, layout: str) -> None:
    """Use random bits, which include NaN payloads and negative zeros."""
    same = ab.torch(output_type="input")(lambda tensor: tensor.clone())
    bits = np.random.default_rng(3).integers(0, 256, 24 * np.dtype(dtype).itemsize, np.uint8)
    x = LAYOUTS[layout]((bits & 1 if dtype == "bool" else bits).view(dtype).reshape(2, 3, 4))
    labelled = data_array(x)
    result = same(labelled)
    assert equal(result.data, x)
    assert (result.dims, result.name, result.attrs) == (labelled.dims, "scan", {"unit": "mm"})
    assert result.coords.equals(labelled.coords)
    if dtype in PIXELS:
        for vector in {False, dtype == "int16"}:
            picture = image(np.ascontiguousarray(x), vector=vector)
            result = same(picture)
            assert equal(sitk.GetArrayFromImage(result), x)
            for name in ("GetPixelID", "GetSpacing", "GetOrigin", "GetDirection", "GetMetaDataKeys"):
                assert getattr(result, name)() == getattr(picture, name)()
            assert result.GetMetaData("patient") == "Ada"
    if dtype != "complex64":
        series = pandas.Series(x[0, 0], index=list("dbca"), name="s")
        pandas.testing.assert_series_equal(same(series), series, check_exact=True)
        table = pandas.DataFrame(x[0], index=list("cab"), columns=list("wxyz"))
        pandas.testing.assert_frame_equal(same(table), table, check_exact=True)
        assert equal(same(table).to_numpy(), x[0])
    if dtype not in ("complex64", "float16"):
        column = polars.Series("s", np.ascontiguousarray(x[0, 0]))
        assert (same(column).name, same(column).dtype) == ("s", column.dtype)
        assert equal(same(column).to_numpy(), x[0, 0])


def test_xarray_results_have_no_encoding() -> None:
    x = data_array()
    x.encoding = {"scale_factor": 0.1}
    assert doubled(x).encoding == {}
    assert isinstance(summed(x), np.ndarray)


def test_pandas_dtypes_and_indexes_are_restored() -> None:
    whole = pandas.Series([1, 2], index=["a", "b"], dtype="Int64")
    pandas.testing.assert_series_equal(doubled(whole), whole * 2)
    index = pandas.Index([1.5, 2.5], name="t")
    pandas.testing.assert_index_equal(doubled(index), index * 2)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "F", "I", "1", "YCbCr", "LA", "HSV"])
def test_image_modes_are_restored(mode: str) -> None:
    x = pillow.fromarray(np.uint8(VALUES[0] * 7)).convert("RGB").convert(mode)
    x.info = {"dpi": (300, 300)}

    @ab.torch(output_type="input")
    def same(tensor: Any) -> Any:
        return tensor.clone()

    result = same(x)
    assert (result.mode, result.size, result.info) == (mode, x.size, x.info)
    assert result.tobytes() == x.tobytes()


def test_big_endian_images_keep_their_mode() -> None:
    x = pillow.frombytes("I;16B", (2, 1), bytes([1, 2, 3, 4]))
    result = ab.torch(output_type="input")(lambda tensor: tensor.clone())(x)
    assert (result.mode, result.tobytes()) == ("I;16B", bytes([1, 2, 3, 4]))


def test_files_and_buffers_return_numpy_arrays(tmp_path: Path) -> None:
    for x in (zarr_array(), dataset(tmp_path), memoryview(VALUES)):
        assert equal(doubled(x), VALUES * 2)
        assert type(doubled(x)) is np.ndarray


def test_files_match_a_declared_numpy_source(tmp_path: Path) -> None:
    for strict in (True, False):
        double = ab.torch(input_type="numpy", output_type="numpy", strict=strict)(lambda x: x * 2)
        for x in (zarr_array(), dataset(tmp_path / str(strict))):
            assert equal(double(x), VALUES * 2)
    with pytest.raises(MemoryConversionError, match=r"from numpy .*strict=True"):
        ab.torch(input_type="jax", strict=True)(lambda x: x)(zarr_array())


def test_unsupported_result_dtypes_return_arrays() -> None:
    @ab.torch(output_type="input")
    def as_complex(x: Any) -> Any:
        return torch.complex(x.double(), x.double())

    assert isinstance(as_complex(image()), (np.ndarray, sitk.Image))
    assert isinstance(as_complex(pillow.fromarray(VALUES[0])), np.ndarray)
    assert isinstance(as_complex(polars.Series("a", [1.0])), np.ndarray)
    assert as_complex(data_array()).dtype == np.complex128
    as_half = ab.torch(output_type="input")(lambda x: x.half())
    assert isinstance(as_half(pandas.Index([1.0, 2.0])), np.ndarray)
    assert as_half(polars.Series("a", [1.0])).dtype == polars.Float16


def test_results_in_containers_and_new_carriers() -> None:
    @ab.torch(output_type="input")
    def both(x: Any) -> Any:
        return {"twice": x * 2, "mean": x.mean()}

    @ab.numpy(output_type="torch")
    def labelled(x: Any) -> Any:
        return {"labelled": xarray.DataArray(x, dims=("x",)), "plain": x}

    result = both(data_array()) | labelled(np.ones(2))
    types = {"twice": xarray.DataArray, "mean": np.ndarray, "labelled": xarray.DataArray}
    for name, cls in (types | {"plain": torch.Tensor}).items():
        assert isinstance(result[name], cls)


def test_scaled_results_are_restored() -> None:
    """Check that results are scaled by `dtype_conversion` before they are restored to the carrier."""

    @ab.torch(output_type="input", dtype_conversion=ab.DtypeConversion.UINT16)
    def unit(x: Any) -> Any:
        return (x - x.min()) / (x.max() - x.min())

    for carrier in (data_array(), image(), pandas.DataFrame(VALUES[0])):
        result = unit(carrier)
        assert type(result) is type(carrier)
        values = ab.to_numpy(result)
        assert (values.dtype, values.min(), values.max()) == (np.uint16, 0, 65535)


@pytest.mark.parametrize(
    "dtype", ["float64", "uint32", "int8", "int16", "float16", "int64", "bool", "bfloat16"]
)
def test_carriers_do_not_change_the_dtype_of_a_result(dtype: str) -> None:
    """Pillow would convert float64 to float32, and pandas rejects bfloat16: an array is returned instead."""
    numbers = ab.aligned((2, 3), dtype)
    numbers[...] = [[0, 1, 2], [3, 4, 7]]
    same = ab.numpy(output_type="input")(lambda x: numbers.reshape(x.shape))
    table = pandas.DataFrame(np.zeros((2, 3)))
    picture = pillow.fromarray(np.zeros((2, 3), np.uint8))
    flat = [pandas.Series(np.zeros(6)), pandas.Index(np.zeros(6)), polars.Series(np.zeros(6))]
    for carrier in (picture, table, *flat, sitk.GetImageFromArray(np.zeros((2, 3)))):
        values = ab.to_numpy(same(carrier))
        assert (values.dtype, values.tobytes()) == (numbers.dtype, numbers.tobytes()), type(carrier)


def test_gpu_restores_carriers() -> None:
    @ab.gpu
    def plus_one(x: Any) -> Any:
        return x + 1

    result = plus_one(data_array())
    assert isinstance(result, xarray.DataArray)
    assert equal(result.values, VALUES + 1)


def test_numpy_scalars_and_lists_are_not_arrays() -> None:
    @ab.torch
    def kinds_of(x: Any, *others: Any) -> Any:
        return [type(other) for other in others]

    assert kinds_of(data_array(), b"a", bytearray(b"b"), [1, 2], 3.0) == [bytes, bytearray, list, float]


def test_file_maps_are_converted_only_if_declared(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(16)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
        assert ab.convert_tree([raw], "torch")[0] is raw
        copied = convert_memory(raw, "torch", copy=True)
        assert copied.tolist() == list(range(16))


# ---- many and large carriers -------------------------------------------------------------------------


def test_split_recovery_splits_and_joins_carriers() -> None:
    @ab.torch(output_type="input", oom_recovery="split")
    def halved(x: Any) -> Any:
        return x / 2

    x = data_array()
    with inject_oom("torch", above_rows=1) as simulation:
        result = halved(x)
    assert simulation.attempts[-2:] == [1, 1]
    assert isinstance(result, xarray.DataArray)
    assert result.coords.equals(x.coords)
    assert equal(result.values, VALUES / 2)


def test_data_of_an_xarray_subclass_may_differ_from_its_stored_values() -> None:
    class Doubled(xarray.Variable):
        __slots__ = ()

        @property
        def data(self) -> Any:
            return self._data * 2

    for _ in range(2):  # decided, then planned
        assert equal(ab.to_numpy(Doubled(("z", "y", "x"), VALUES)), VALUES * 2)


def test_split_recovery_reads_the_rows_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    x, read = zarr_array(), []
    original = zarr.Array.__getitem__
    monkeypatch.setattr(
        zarr.Array, "__getitem__", lambda self, key: (read.append(key), original(self, key))[1]
    )

    @ab.torch(oom_recovery="split", output_type="numpy")
    def halved(tensor: Any) -> Any:
        return tensor / 2

    with inject_oom("torch", above_rows=1):
        assert equal(halved(x), VALUES / 2)
    assert [key[0] if isinstance(key, tuple) else key for key in read][-2:] == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize(
    ("options", "rows"), [({}, [1] * 5), ({"chunks": (2, 4)}, [2, 2, 1]), ({"chunks": (1, 4)}, [1] * 5)]
)
def test_files_are_read_into_arrays_in_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], rows: list[int]
) -> None:
    values, read = np.arange(20.0).reshape(5, 4), []
    x, out = dataset(tmp_path, values, **options), np.empty((5, 4))
    original = h5py.Dataset.__getitem__
    monkeypatch.setattr(
        h5py.Dataset,
        "__getitem__",
        lambda self, key: (part := original(self, key), read.append(len(part)))[0],
    )
    monkeypatch.setattr("arraybridge.carriers.sources.PART_NBYTES", 40)  # a row has 32 bytes
    assert convert_memory(x, out=out) is out
    assert equal(out, values)
    assert read == rows


def test_slice_by_slice_pipeline_and_maps() -> None:
    @ab.torch(slice_by_slice=True, output_type="input")
    def planes(x: Any) -> Any:
        assert x.ndim == 2
        return x + 1

    assert equal(planes(data_array()).values, VALUES + 1)
    items = [data_array(), data_array(VALUES + 1)]
    assert [equal(r.values, i.values * 2) for r, i in zip(ab.device_map(doubled, items), items, strict=True)]
    assert equal(list(ab.prefetch(items, "torch"))[1].numpy(), VALUES + 1)
    assert equal(next(iter(ab.Pipeline(doubled, doubled).map(items))).values, VALUES * 4)


def test_chunks_of_files(tmp_path: Path) -> None:
    tall = np.arange(70.0).reshape(10, 7)
    for file, rows in (
        (zarr.array(tall, chunks=(4, 7)), [4, 4, 2]),
        (zarr.create_array(store={}, data=tall, chunks=(2, 7), shards=(4, 7)), [4, 4, 2]),
        (dataset(tmp_path, tall, chunks=(3, 7)), [3, 3, 3, 1]),
    ):
        parts = list(ab.chunks(file))
        assert [len(part) for part in parts] == rows
        assert equal(np.concatenate(parts), tall)
    assert sum(float(t.sum()) for t in ab.prefetch(ab.chunks(zarr_array()), "torch")) == VALUES.sum()
    (tmp_path / "b").mkdir()
    without_chunks = dataset(tmp_path / "b", np.zeros((33, 2**17)))  # rows of 1 MiB
    assert [len(part) for part in ab.chunks(without_chunks)] == [16, 16, 1]
    with pytest.raises(TypeError, match="chunks"):
        ab.chunks(tall)
    with pytest.raises(TypeError, match=r"got ndarray\. Slice an array in memory instead, as in x\[i :"):
        ab.chunks(np.ones(3))


# ---- carriers of other packages ------------------------------------------------------------------------


class Scan:
    """A user's class."""

    def __init__(self, pixels: Any, patient: str) -> None:
        self.pixels, self.patient = pixels, patient


class Scans(Carrier):
    def carries(self, x: Any) -> bool:
        return isinstance(x, Scan)

    def array(self, x: Any) -> Any:
        return x.pixels

    def rebuild(self, x: Any, values: Any) -> Any:
        return Scan(values, x.patient)


def test_custom_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    from arraybridge.caches import empty_caches
    from arraybridge.carriers import registry as buffer

    monkeypatch.setattr(buffer, "_registered", [])
    scan = Scan(np.ones(3), "Ada")
    with pytest.raises(MemoryConversionError):
        convert_memory(scan, "torch")
    register_carrier(Scans())
    assert isinstance(carrier_of(scan), Scans)
    result = doubled(scan)
    assert (result.patient, result.pixels.tolist()) == ("Ada", [2, 2, 2])
    with pytest.raises(TypeError, match="register_carrier"):
        register_carrier(Scans)  # type: ignore[arg-type]
    monkeypatch.undo()
    empty_caches()


def test_entry_points_load_when_their_objects_appear(tmp_path: Path) -> None:
    bridge = (
        "import arraybridge",
        "class Scans(arraybridge.Carrier):",
        "    def carries(self, x): return hasattr(x, 'pixels')",
        "    def array(self, x): return x.pixels",
    )
    info = tmp_path / "scanner_bridge-1.0.dist-info"
    info.mkdir()
    for file, text in {
        tmp_path / "scanner.py": "class Scan:\n    def __init__(self, pixels): self.pixels = pixels\n",
        tmp_path / "scanner_bridge.py": "\n".join(bridge),
        info / "METADATA": "Metadata-Version: 2.1\nName: scanner-bridge\nVersion: 1.0\n",
        info / "entry_points.txt": "[arraybridge.carriers]\nscanner = scanner_bridge:Scans\n",
    }.items():
        file.write_text(text, encoding="utf-8")
    lines = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "import json, numpy as np, arraybridge as ab, scanner",
        "ab.to_torch(memoryview(np.ones(3))); ab.convert_tree({'a': np.ones(2), 'b': object()}, 'torch')",
        "values = ab.to_torch(scanner.Scan(np.ones(2))).tolist()",
        "packages = ('xarray', 'zarr', 'h5py', 'SimpleITK', 'PIL', 'pandas', 'polars', 'pyarrow', 'scipy')",
        "print(json.dumps([values, [name for name in packages if name in sys.modules]]))",
    )
    assert json.loads(output_of(*lines, env={"PYTHONWARNINGS": ""})) == [[1, 1], []]


class Nosy(Carrier):
    """A carrier that fails the test if it is queried about an array of a framework."""

    def carries(self, x: Any) -> bool:
        assert not isinstance(x, np.ndarray | torch.Tensor)
        return False


def test_carriers_are_not_queried_for_framework_arrays() -> None:
    with registry_kept():
        register_carrier(Nosy())
        for x in (VALUES, torch.ones(2)):
            convert_memory(x, "torch")
            ab.convert_tree({"a": x, "b": [x, 3, "word", None]}, "torch")
            doubled(x)


def test_incomplete_kinds_raise() -> None:
    with pytest.raises(NotImplementedError):
        Carrier().carries(1)
    assert Carrier().rebuild(1, 2) == 2
