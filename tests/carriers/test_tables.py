"""Tables of Arrow and polars, and columns of fixed-size lists: shared or copied once, and restored."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import ArrayNotSupportedError, CopyRequiredError, convert_memory, explain, trace
from arraybridge.reasons import Reason
from arraybridge.testing import inject_oom
from tests import matrix_data as data
from tests.helpers import output_of, require

torch = require("torch")
polars = pytest.importorskip("polars")
pyarrow = pytest.importorskip("pyarrow")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def arrow(values: np.ndarray) -> Any:
    """Return an Arrow array over NumPy's memory, with fixed-size lists for the axes after the first."""
    result = pyarrow.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        result = pyarrow.FixedSizeListArray.from_arrays(result, size)
    return result


def table(values: np.ndarray) -> Any:
    """Return a table over NumPy's memory, whose columns are adjacent if those of the array are."""
    names = [f"c{i}" for i in range(values.shape[1])]
    return pyarrow.table([pyarrow.array(values[:, i]) for i in range(values.shape[1])], names=names)


def address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def equal(x: Any, expected: np.ndarray) -> bool:
    x = ab.to_numpy(x)
    return x.dtype == expected.dtype and x.shape == expected.shape and x.tobytes() == expected.tobytes()


@ab.torch(output_type="input")
def same(x: Any) -> Any:
    assert isinstance(x, torch.Tensor)
    return x.clone()


COLUMNS = np.arange(12, dtype=np.float64).reshape(3, 4).T  # three columns, adjacent in memory
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)
ROW = np.arange(6, dtype=np.int32)

#: Kind → how to make it of NumPy's memory, which it shares.
SHARED: dict[str, tuple[Callable[[np.ndarray], Any], np.ndarray]] = {
    "Table of one column": (table, VECTORS[:, :1].copy()),
    "Table of adjacent columns": (table, COLUMNS),
    "RecordBatch of adjacent columns": (lambda x: table(x).to_batches()[0], COLUMNS),
    "ChunkedArray": (lambda x: pyarrow.chunked_array([arrow(x)]), ROW),
    "ChunkedArray with empty chunks": (
        lambda x: pyarrow.chunked_array([arrow(x[:0]), arrow(x), arrow(x[:0])]),
        ROW,
    ),
    "ChunkedArray of lists": (lambda x: pyarrow.chunked_array([arrow(x)]), VECTORS),
    "FixedSizeListArray": (arrow, VECTORS),
    "FixedSizeListArray of lists": (arrow, VECTORS.reshape(2, 2, 3)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_one_chunk_of_arrow_is_shared_and_read_only(kind: str) -> None:
    make, values = SHARED[kind]
    x = make(values)
    assert ab.detect_memory_type(x) == "numpy"
    result = ab.to_numpy(x)
    assert equal(result, values)
    assert address(result) == address(values)
    assert not result.flags.writeable
    copied = explain(x, "torch")
    assert (copied.code, copied.copies) == (Reason.READ_ONLY, 1)
    tensor = convert_memory(x, "torch", copy=False)
    assert tensor.data_ptr() == address(values)
    assert ab.to_torch(x).data_ptr() != address(values)
    for target in ("jax", "tensorflow"):
        require(target)
        assert explain(x, target).shares_memory == (
            address(values) % 64 == 0 and (target == "jax" or result.flags.c_contiguous)
        )
        assert data.bits(convert_memory(x, target)) == values.tobytes()


def test_shared_memory_outlives_the_table() -> None:
    for _ in range(20):
        x = table(np.arange(4000.0).reshape(4, 1000).T)
        result = ab.to_numpy(x)
        del x
        assert result[:, 3].tolist() == list(range(3000, 4000))


#: Slices of this array in another order are never adjacent in memory, regardless of the allocator.
APART = pyarrow.array([3.0, 4.0, 0.0, 1.0, 2.0])

#: Kind → a copied table, its values, and the reason.
COPIED: dict[str, tuple[Callable[[], Any], np.ndarray, Reason]] = {
    "Table of separate columns": (
        lambda: pyarrow.table({"a": APART[3:], "b": APART[:2]}),
        np.array([[1.0, 3.0], [2.0, 4.0]]),
        Reason.SEPARATE_COLUMNS,
    ),
    "Table of columns in another order": (
        lambda: table(COLUMNS).select(["c1", "c0"]),
        COLUMNS[:, [1, 0]],
        Reason.SEPARATE_COLUMNS,
    ),
    "Table of sliced columns": (lambda: table(COLUMNS)[1:], COLUMNS[1:], Reason.SEPARATE_COLUMNS),
    "Table of several chunks": (
        lambda: pyarrow.concat_tables([table(COLUMNS), table(COLUMNS + 1)]),
        np.concatenate([COLUMNS, COLUMNS + 1]),
        Reason.CHUNKED_STORAGE,
    ),
    "ChunkedArray": (
        lambda: pyarrow.chunked_array([[1, 2], [3]]),
        np.array([1, 2, 3]),
        Reason.CHUNKED_STORAGE,
    ),
    "ChunkedArray of lists": (
        lambda: pyarrow.chunked_array([arrow(VECTORS), arrow(VECTORS)[1:]]),
        np.concatenate([VECTORS, VECTORS[1:]]),
        Reason.CHUNKED_STORAGE,
    ),
    "BooleanArray": (lambda: pyarrow.array([True, False]), np.array([True, False]), Reason.PACKED_BITS),
    "Table of booleans": (
        lambda: pyarrow.table({"a": [True, False]}),
        np.array([[True], [False]]),
        Reason.PACKED_BITS,
    ),
    "FixedSizeListArray of booleans": (
        lambda: arrow(VECTORS > 4)[1:],
        VECTORS[1:] > 4,
        Reason.PACKED_BITS,
    ),
    "polars DataFrame": (
        lambda: polars.DataFrame({"a": polars.Series(APART)[3:], "b": polars.Series(APART)[:2]}),
        np.array([[1.0, 3.0], [2.0, 4.0]]),
        Reason.SEPARATE_COLUMNS,
    ),
    "polars DataFrame of several chunks": (
        lambda: polars.concat([polars.DataFrame({"a": [1, 2]}), polars.DataFrame({"a": [3]})], rechunk=False),
        np.array([[1], [2], [3]]),
        Reason.CHUNKED_STORAGE,
    ),
    "polars DataFrame of booleans": (
        lambda: polars.DataFrame({"a": [True], "b": [False]}),
        np.array([[True, False]]),
        Reason.PACKED_BITS,
    ),
    "polars Array of several chunks": (
        lambda: polars.concat([polars.Series(VECTORS), polars.Series(VECTORS)], rechunk=False),
        np.concatenate([VECTORS, VECTORS]),
        Reason.CHUNKED_STORAGE,
    ),
    "polars Array of booleans": (
        lambda: polars.Series(VECTORS > 4),
        VECTORS > 4,
        Reason.PACKED_BITS,
    ),
}


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_other_tables_are_copied_once(kind: str, target: str) -> None:
    require(target)
    make, values, reason = COPIED[kind]
    x = make()
    route = explain(x, target)
    assert (route.code, route.copies, route.nbytes) == (reason, 1, values.nbytes)
    with trace() as log:
        result = convert_memory(x, target)
    assert log.records == [route]
    assert (data.bits(result), data.dtype_name(result)) == (values.tobytes(), values.dtype.name)
    for call in (convert_memory, explain):
        with pytest.raises(CopyRequiredError):
            call(x, target, copy=False)
    if target in ("numpy", "torch"):  # no other object references the copy
        result[...] = 0
        assert equal(x, values)


def test_the_memory_of_a_joined_table_is_allocated_once() -> None:
    """The table is read into the memory of the result, and not copied again."""
    lines = (
        "import tracemalloc, numpy as np, pyarrow as pa, arraybridge as ab",
        "x = pa.table({name: np.ones(2**20) for name in 'abcd'})",
        "ab.to_numpy(x[:1])",
        "tracemalloc.start()",
        "result = ab.to_numpy(x)",
        "print(tracemalloc.get_traced_memory()[1] / result.nbytes)",
    )
    assert 1 <= float(output_of(*lines)) < 1.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("height", "width"), [(0, 3), (5, 2), (5, 6), (5, 7), (10_000, 2), (10_001, 2)])
def test_polars_tables_of_any_size_have_the_layout_of_polars(dtype: str, height: int, width: int) -> None:
    values = (np.arange(height * width).reshape(height, width) % 120).astype(dtype)
    whole = polars.DataFrame({f"c{i}": values[:, i].copy() for i in range(width)})
    for x in (whole, polars.concat([whole, whole], rechunk=False), whole[1:], whole[::2]):
        expected = x.to_numpy()
        for _ in range(2):
            result = ab.to_numpy(x)
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            assert result.tobytes() == expected.tobytes()
            assert 0 in result.shape or result.strides == expected.strides
            assert ab.to_torch(x).numpy().tobytes() == expected.tobytes()


def test_polars_tables_share_one_column_and_adjacent_columns() -> None:
    one = polars.DataFrame({"a": ROW})
    adjacent = polars.DataFrame(COLUMNS, schema=["a", "b", "c"])
    vectors = polars.Series("v", VECTORS)
    for x, values in ((one, ROW[:, None]), (adjacent, COLUMNS), (vectors, VECTORS)):
        result = ab.to_numpy(x)
        assert equal(result, values)
        assert not result.flags.writeable
        if x is not adjacent:  # polars chooses how it stores the columns of an array
            assert np.shares_memory(result, x.to_numpy())
            assert convert_memory(x, "torch", copy=False).data_ptr() == address(result)
    assert equal(vectors[1:3], VECTORS[1:3])


# ---- restored tables ---------------------------------------------------------------------------------


def schema_of(kind: Any, *, nullable: bool = False) -> Any:
    fields = [
        pyarrow.field("a", kind, nullable, {"unit": "mV"}),
        pyarrow.field("b", kind, True),
        pyarrow.field("a", kind, nullable),
    ]
    return pyarrow.schema(fields, metadata={"source": "camera"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrow_schemas_are_restored(dtype: str) -> None:
    values = np.arange(12).reshape(4, 3).astype(dtype)
    kind = pyarrow.from_numpy_dtype(np.dtype(dtype))
    columns = [pyarrow.array(np.ascontiguousarray(values[:, i])) for i in range(3)]
    for cls in (pyarrow.Table, pyarrow.RecordBatch):
        x = cls.from_arrays(columns, schema=schema_of(kind))
        result = same(x)
        assert type(result) is cls
        assert result.schema.equals(x.schema, check_metadata=True)
        assert result.equals(x)
        half = ab.torch(output_type="input")(lambda tensor: tensor.to(torch.float16))(x)
        assert half.schema.equals(schema_of(pyarrow.float16()), check_metadata=True)
        assert equal(half, values.astype("float16"))
    lists = pyarrow.list_(pyarrow.field("element", kind, False, {"unit": "mV"}), 3)
    x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), type=lists)
    for each in (x, pyarrow.chunked_array([x, x])):
        result = same(each)
        assert type(result) is type(each)
        assert result.type.equals(each.type, check_metadata=True)
        assert result.to_pylist() == each.to_pylist()
    flat = pyarrow.chunked_array([columns[0], columns[1]])
    assert same(flat).equals(flat)


@pytest.mark.parametrize("dtype", DTYPES)
def test_polars_schemas_are_restored(dtype: str) -> None:
    values = np.arange(12).reshape(4, 3).astype(dtype)
    frame = polars.DataFrame({name: values[:, i].copy() for i, name in enumerate("bca")})
    arrays = polars.Series("v", values)
    deep = polars.Series("d", values.reshape(2, 2, 3))
    for x in (frame, arrays, deep):
        result = same(x)
        assert type(result) is type(x)
        assert result.equals(x)
        if x is frame:
            assert result.schema == frame.schema
        else:
            assert (result.name, result.dtype) == (x.name, x.dtype)
    half = ab.torch(output_type="input")(lambda tensor: tensor.to(torch.float16))
    assert half(frame).columns == ["b", "c", "a"]
    assert set(half(frame).dtypes) == {polars.Float16}
    assert half(arrays).dtype == polars.Array(polars.Float16, 3)


def test_nan_is_not_converted_to_null() -> None:
    values = np.array([[np.nan, 1.0], [-0.0, np.inf]])
    for x in (table(values), table(values).to_batches()[0], arrow(values), polars.DataFrame(values)):
        result = same(x)
        assert equal(result, values)
        assert equal(same(result), values)


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16"])
def test_dtypes_without_a_column_type_return_an_array(dtype: str) -> None:
    cast = ab.torch(output_type="input")(lambda tensor: tensor.to(getattr(torch, dtype)))
    for x in (table(COLUMNS), arrow(VECTORS), polars.DataFrame({"a": [1.0]}), polars.Series(VECTORS)):
        result = cast(x)
        assert isinstance(result, np.ndarray)
        assert result.dtype.name == dtype


def test_a_result_of_another_shape_is_an_array() -> None:
    mean = ab.torch(output_type="input")(lambda tensor: tensor.mean(0))
    for x in (table(COLUMNS), polars.DataFrame({"a": [1.0], "b": [2.0]})):
        assert isinstance(mean(x), np.ndarray)


def test_a_table_that_was_restored_converts_to_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [3, 4]})
    x = pyarrow.Table.from_pandas(frame)
    pandas.testing.assert_frame_equal(same(x).to_pandas(), frame)
    half = ab.torch(output_type="input")(lambda tensor: tensor / 2)(x)
    pandas.testing.assert_frame_equal(half.to_pandas(), (frame / 2).astype("float32"))


def test_a_table_is_split_and_joined() -> None:
    halved = ab.torch(output_type="input", oom_recovery="split")(lambda tensor: tensor / 2)
    values = np.arange(40.0).reshape(20, 2)
    for x in (table(values), polars.DataFrame({"a": values[:, 0], "b": values[:, 1]}), arrow(values)):
        with inject_oom("torch", above_rows=6):
            result = halved(x)
        assert type(result) is type(x)
        assert equal(result, values / 2)


# ---- other tables --------------------------------------------------------------------------------------

BYSTANDERS: dict[str, Callable[[], Any]] = {
    "Table of several types": lambda: pyarrow.table({"a": [1], "b": [1.5]}),
    "RecordBatch of several types": lambda: pyarrow.record_batch({"a": [1], "b": ["x"]}),
    "Table without columns": lambda: pyarrow.table({}),
    "ChunkedArray of text": lambda: pyarrow.chunked_array([["a"]]),
    "StringArray": lambda: pyarrow.array(["a"]),
    "TimestampArray": lambda: pyarrow.array([1], pyarrow.timestamp("s")),
    "FixedSizeListArray of text": lambda: pyarrow.array([["a"]], pyarrow.list_(pyarrow.string(), 1)),
    "ListArray": lambda: pyarrow.array([[1], [2, 3]]),
    "DictionaryArray": lambda: pyarrow.array(["a"]).dictionary_encode(),
    "polars DataFrame of several dtypes": lambda: polars.DataFrame({"a": [1], "b": ["x"]}),
    "polars DataFrame without columns": polars.DataFrame,
    "polars DataFrame of arrays": lambda: polars.DataFrame({"v": polars.Series(VECTORS)}),
    "polars Series of lists": lambda: polars.Series([[1], [2, 3]]),
    "polars Array of text": lambda: polars.Series([["a"]], dtype=polars.Array(polars.String, 1)),
}


@pytest.mark.parametrize("kind", BYSTANDERS)
def test_other_tables_pass_through_and_raise_as_the_array(kind: str) -> None:
    x = BYSTANDERS[kind]()
    assert ab.convert_tree({"x": x, "y": np.ones(2)}, "torch")["x"] is x
    second = ab.torch(lambda array, other: (type(array), other))
    assert second(np.ones(2), x)[1] is x
    assert second(np.ones(2), other=x)[1] is x
    for call in (ab.to_torch, ab.detect_memory_type, lambda x: explain(x, "torch"), ab.device_of):
        with pytest.raises(ab.UnknownArrayError) as caught:
            call(x)
        assert caught.value.advice


def test_a_number_array_of_arrow_is_still_read_through_dlpack() -> None:
    x = arrow(ROW)
    for _ in range(2):
        result = ab.to_numpy(x)
        assert address(result) == address(ROW)
        assert not result.flags.writeable
    with pytest.raises(ArrayNotSupportedError, match=r"x\.fill_null"):
        ab.to_numpy(pyarrow.array([1, None], pyarrow.int32()))


def tensors(values: np.ndarray, shape: tuple[int, ...], **options: Any) -> Any:
    """Return an Arrow array of tensors that have this shape in memory."""
    kind = pyarrow.fixed_shape_tensor(pyarrow.from_numpy_dtype(values.dtype), shape, **options)
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), int(np.prod(shape)))
    return pyarrow.ExtensionArray.from_storage(kind, lists)


@pytest.mark.parametrize("order", [None, [0, 1, 2], [2, 1, 0], [2, 0, 1]])
def test_arrays_of_tensors_are_one_array(order: Any) -> None:
    values = np.arange(72, dtype="f4").reshape(3, 2, 3, 4)
    whole = tensors(values, (2, 3, 4), permutation=order, dim_names=["c", "h", "w"])
    expected = values.transpose(0, *[1 + axis for axis in order or (0, 1, 2)])[1:]
    x = whole[1:]
    assert explain(x, "numpy").shares_memory
    seen = ab.to_numpy(x)
    assert np.array_equal(seen, expected)
    assert not seen.flags.writeable
    several = pyarrow.chunked_array([x, whole[:0], x])
    assert explain(several, "torch").code is Reason.CHUNKED_STORAGE
    assert np.array_equal(ab.to_torch(several), np.concatenate([expected, expected]))
    assert np.array_equal(ab.convert_tree([x], "torch")[0], expected)
    double = ab.torch(output_type="input")(lambda y: y * 2)
    for array in (x, several):
        doubled = double(array)
        assert (type(doubled), doubled.type) == (type(array), array.type)
        assert np.array_equal(ab.to_numpy(doubled), 2 * ab.to_numpy(array))
    to_int = ab.torch(output_type="input")(lambda y: y.int())(x)
    assert (to_int.type.value_type, to_int.type.permutation) == (pyarrow.int32(), x.type.permutation)


def test_nulls_in_arrays_of_tensors_raise() -> None:
    kind = pyarrow.fixed_shape_tensor(pyarrow.int32(), (2,))
    lists = pyarrow.list_(pyarrow.int32(), 2)
    for rows, options in (
        ([[1, 2], None, [3, 4]], [[[1, 2], [3, 4]]]),
        ([[1, None], [3, 4]], [[[1, 0], [3, 4]], [[3, 4]]]),
    ):
        array = pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(rows, lists))
        for x in (array, pyarrow.chunked_array([array])):
            with pytest.raises(ArrayNotSupportedError, match="nulls") as caught:
                ab.to_torch(x)
            code = caught.value.expressions
            made = [ab.to_torch(eval(one, {"x": x, "pyarrow": pyarrow})).tolist() for one in code]  # noqa: S307
            assert made == options


def test_lists_without_elements() -> None:
    for x in (
        pyarrow.array([[], []], pyarrow.list_(pyarrow.int32(), 0)),
        pyarrow.chunked_array([[[]], [[]]], pyarrow.list_(pyarrow.int32(), 0)),
        polars.Series([[], []], dtype=polars.Array(polars.Int32, 0)),
    ):
        assert ab.to_numpy(x).shape == (2, 0)
        assert ab.to_numpy(x).dtype == np.int32
        restored = same(x)
        assert type(restored) is type(x)
        assert ab.to_numpy(restored).shape == (2, 0)
    for x in (
        pyarrow.array([[], None], pyarrow.list_(pyarrow.int32(), 0)),
        polars.Series([[], None], dtype=polars.Array(polars.Int32, 0)),
    ):
        with pytest.raises(ArrayNotSupportedError) as caught:
            ab.to_numpy(x)
        (expression,) = caught.value.expressions
        assert ab.to_numpy(eval(expression, {"x": x})).shape == (1, 0)  # noqa: S307


@pytest.mark.parametrize("sizes", [(3, 0), (3, 2, 0), (0, 3), (2, 0, 3)])
def test_nested_lists_without_elements_are_restored(sizes: tuple[int, ...]) -> None:
    kind: Any = pyarrow.int16()
    row: Any = 1
    for size in reversed(sizes):
        kind = pyarrow.list_(kind, size)
        row = [row] * size
    for x in (pyarrow.array([row, row], kind), pyarrow.chunked_array([[row], [row]], kind)):
        assert ab.to_numpy(x).shape == (2, *sizes)
        restored = same(x)
        assert restored.type == kind
        assert restored.to_pylist() == [row, row]


# ---- fuzz --------------------------------------------------------------------------------------------

SHAPES = ((0,), (1,), (7,), (0, 2), (5, 3), (4, 1), (3, 2, 2), (9, 3))


def cut(rng: np.random.Generator, x: Any) -> list[Any]:
    """Return the parts of a column or a table, some of which are empty."""
    cuts = np.sort(rng.integers(0, len(x) + 1, rng.integers(0, 4)))
    return [x[start:stop] for start, stop in itertools.pairwise([0, *map(int, cuts), len(x)])]


def sliced(rng: np.random.Generator, x: Any, values: np.ndarray) -> tuple[Any, np.ndarray]:
    start, stop = sorted(int(i) for i in rng.integers(0, len(values) + 1, 2))
    return x[start:stop], values[start:stop]


def put_nulls(rng: np.random.Generator, rows: list[Any], depth: int) -> bool:
    """Replace one row, inner list or element with a null; return whether there was one to replace."""
    for _ in range(depth):
        if not rows:
            return False
        rows = rows[int(rng.integers(len(rows)))]
    if not rows:
        return False
    rows[int(rng.integers(len(rows)))] = None
    return True


def arrow_cases(rng: np.random.Generator, values: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    column = arrow(values)
    cases = [(pyarrow.chunked_array(cut(rng, column), column.type), values)]
    if values.ndim > 1 or values.dtype == bool:
        cases.append((column, values))
    if values.ndim == 2:
        whole = table(values)
        cases.append((whole, values))
        cases.append((pyarrow.concat_tables(cut(rng, whole)), values))
        cases.append((whole.combine_chunks().to_batches()[0] if len(values) else whole, values))
    return cases


def polars_cases(rng: np.random.Generator, values: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    column = polars.Series("v", values)
    cases = [(column, values), (polars.concat(cut(rng, column), rechunk=False), values)]
    if values.ndim == 2:
        frame = polars.DataFrame({f"c{i}": values[:, i].copy() for i in range(values.shape[1])})
        cases += [(frame, values), (polars.concat(cut(rng, frame), rechunk=False), values)]
    return cases


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [arrow_cases, polars_cases])
def test_fuzz_of_chunks_slices_and_dtypes(make: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        noise = rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        values = (noise & 1 if dtype == "bool" else noise).view(dtype).reshape(shape)
        if rng.integers(2):
            values = np.asfortranarray(values)
        for x, expected in make(rng, values):
            for each, part in ((x, expected), sliced(rng, x, expected)):
                about = f"{type(each)} {dtype} {part.shape}"
                with trace() as log:
                    result = ab.to_numpy(each)
                assert equal(result, part), about
                assert log.records == [explain(each, "numpy")], about
                assert data.bits(ab.to_torch(each)) == part.tobytes(), about
                restored = same(each)
                assert type(restored) is type(each), about
                assert equal(restored, part), about
                assert len(restored) == len(each), about


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_of_nulls(seed: int) -> None:
    """A null raises an error whose expressions convert the table; a slice without the null converts."""
    rng = np.random.default_rng(seed)
    names = {"np": np, "pyarrow": pyarrow, "polars": polars}
    for dtype, shape in itertools.product(("bool", "int16", "uint64", "float32"), SHAPES):
        for depth in range(len(shape)):
            rows = np.zeros(shape, dtype).tolist()
            if not put_nulls(rng, rows, depth):
                continue
            kind = pyarrow.from_numpy_dtype(np.dtype(dtype))
            for size in shape[:0:-1]:
                kind = pyarrow.list_(kind, size)
            column = pyarrow.array(rows, kind)
            inner = polars.Series(np.zeros(1, dtype)).dtype
            own = polars.Array(inner, shape[1:]) if len(shape) > 1 else inner
            cases = [column, pyarrow.chunked_array([column, column]), polars.Series("v", rows, dtype=own)]
            if len(shape) == 2 and depth == 1:
                columns = [pyarrow.array([row[i] for row in rows], kind.value_type) for i in range(shape[1])]
                frame = pyarrow.table(columns, names=[f"c{i}" for i in range(shape[1])])
                cases += [frame, frame.combine_chunks().to_batches()[0], polars.from_arrow(frame)]
            for x in cases:
                with pytest.raises(ArrayNotSupportedError, match="nulls") as caught:
                    ab.to_torch(x)
                assert caught.value.expressions
                for expression in caught.value.expressions:
                    result = ab.to_numpy(eval(expression, {"x": x, **names}))  # noqa: S307
                    assert result.dtype == dtype, expression
                    assert result.shape[1:] == shape[1:], expression
                nulls = [i for i, row in enumerate(rows) if "None" in str(row)]
                assert len(ab.to_numpy(x[: nulls[0]])) == nulls[0]
