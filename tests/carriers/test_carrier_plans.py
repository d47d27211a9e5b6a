"""Plans for carriers: conversions of objects of one class end like new decisions, whatever came before."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge.conversion import plan_cache
from tests.helpers import registry_kept, require

pandas: Any = pytest.importorskip("pandas", reason="pandas is not installed")
polars: Any = pytest.importorskip("polars", reason="polars is not installed")
pyarrow: Any = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
xarray: Any = pytest.importorskip("xarray", reason="xarray is not installed")

DTYPES = ("float64", "float32", "int64", "int32", "uint8", "int16", "bool", "complex64", "complex128", ">f4")
OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"copy": True}, {"copy": False}, {"dtype": "float32"}, {"device": "cpu"}),
    *({"grad": "detach"}, {"source_type": "numpy"}, {"source_type": "torch"}),
)


def make_values(rng: np.random.Generator, dtype: str, rank: int = 2) -> np.ndarray:
    """Return an array of any order, alignment and flags."""
    shape = tuple(rng.integers(0 if rng.random() < 0.1 else 1, 6, rank).tolist())
    plain = (rng.random(shape) * 50 - (0 if dtype[0] == "u" else 20)).astype(np.dtype(dtype))
    if rng.random() < 0.3:
        plain = np.asfortranarray(plain)
    if rng.random() < 0.2:
        plain = plain[::-1]
    if rng.random() < 0.2:
        aligned = ab.aligned(plain.shape, plain.dtype.newbyteorder("="))
        aligned[...] = plain
        plain = aligned
    if rng.random() < 0.2:
        plain.flags.writeable = False
    return plain


def make_frame(rng: np.random.Generator, dtype: str) -> Any:
    values = make_values(rng, dtype)
    frame = pandas.DataFrame(values.astype(values.dtype.newbyteorder("=")))
    choice = rng.integers(0, 9)
    if choice == 0:
        frame["more"] = frame.iloc[:, 0] if frame.shape[1] else 1
    elif choice == 1:
        frame["text"] = "x"
    elif choice == 2 and frame.shape[0] and frame.shape[1]:
        frame = frame.convert_dtypes() if dtype != ">f4" else frame
        if rng.random() < 0.5:
            frame.iloc[0, 0] = None
    elif choice == 3:
        frame["when"] = pandas.Timestamp("2026-01-01")
    elif choice == 4 and frame.shape[1]:
        frame = frame.astype({frame.columns[0]: "float32"} if dtype[:7] != "complex" else {})
    elif choice == 5:
        frame = frame.iloc[:, :1]
    elif choice == 6:
        frame = frame[frame.columns[::-1]].iloc[::2]
    elif choice == 7:
        frame = frame.astype("category") if frame.shape[1] else frame
    return frame


def make_series(rng: np.random.Generator, dtype: str) -> Any:
    values = make_values(rng, dtype, 1)
    series = pandas.Series(values.astype(values.dtype.newbyteorder("=")), name="s")
    choice = rng.integers(0, 5)
    if choice == 0:
        series = series.astype(object)
    elif choice == 1:
        series = series.convert_dtypes()
        if len(series) and rng.random() < 0.5:
            series.iloc[0] = None
    elif choice == 2:
        return pandas.Index(series)
    elif choice == 3:
        series = series[::2]
    return series


def make_labeled(rng: np.random.Generator, dtype: str) -> Any:
    data: Any = make_values(rng, dtype)
    if rng.random() < 0.2:
        data = require("jax").numpy.asarray(data.astype(data.dtype.newbyteorder("=")))
    elif rng.random() < 0.1:
        data = np.where(data > 2, "a", "b")
    cls = (xarray.DataArray, xarray.Variable)[rng.integers(0, 2)]
    if cls is xarray.DataArray:
        labeled = xarray.DataArray(data, dims=("a", "b"), attrs={"unit": "m"})
        if rng.random() < 0.1 and labeled.size:
            pytest.importorskip("dask", reason="Dask is not installed")
            labeled = labeled.chunk()
        return labeled
    return xarray.Variable(("a", "b"), data)


def make_polars(rng: np.random.Generator, dtype: str) -> Any:
    values = make_values(rng, "float64" if dtype[:7] == "complex" or dtype[0] == ">" else dtype)
    made = polars.DataFrame(np.array(values), schema=[f"c{i}" for i in range(values.shape[1])])
    choice = rng.integers(0, 8)
    if choice == 0 and made.width:
        made = polars.concat([made, made], rechunk=False)
    elif choice == 1 and made.width and made.height:
        made = made.with_columns(polars.when(polars.col("c0") > 3).then(polars.col("c0")).alias("c0"))
    elif choice == 2:
        made = made.with_columns(polars.lit("x").alias("text"))
    elif choice == 3 and made.width:
        made = made.select("c0")
    elif choice in (4, 5) and made.width:
        made = made["c0"]
        if choice == 5:
            made = polars.concat([made, made], rechunk=False)
    elif choice == 6:
        made = polars.Series("v", np.ascontiguousarray(values)) if values.size else made
        if rng.random() < 0.5 and len(made):
            made = made.shift(1)
    elif choice == 7 and made.width:
        made = made["c0"].shift(1)
    return made


def make_arrow(rng: np.random.Generator, dtype: str) -> Any:
    values = make_values(rng, "float64" if dtype[:7] == "complex" or dtype[0] == ">" else dtype)
    mask = rng.random(values.shape[0]) < 0.3 if rng.random() < 0.2 else None
    columns = [pyarrow.array(np.ascontiguousarray(values[:, i]), mask=mask) for i in range(values.shape[1])]
    choice = rng.integers(0, 8)
    made: Any = pyarrow.table(columns, names=[f"c{i}" for i in range(len(columns))])
    if choice == 0:
        return pyarrow.concat_tables([made, made])
    if choice == 1 and columns:
        return made.append_column("t", [pyarrow.array(["x"] * len(made))])
    if choice == 2 and columns:
        return made.column(0)
    if choice == 3 and columns:
        return pyarrow.chunked_array([columns[0], columns[0].slice(1)])
    if choice == 4 and values.size and values.dtype != bool:
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    if choice == 5 and columns:
        return pyarrow.record_batch(columns, names=list(made.column_names))
    if choice == 6:
        joined = pyarrow.array(np.ascontiguousarray(values.T).reshape(-1))
        step = len(values)
        return pyarrow.table(
            [joined.slice(i * step, step) for i in range(values.shape[1])], names=made.column_names
        )
    return made.slice(1)


def make_buffer(rng: np.random.Generator, dtype: str) -> Any:
    values = np.ascontiguousarray(make_values(rng, dtype)).astype(np.dtype(dtype).newbyteorder("="))
    choice = rng.integers(0, 4)
    if choice == 0:
        return array.array("dfiq"[rng.integers(0, 4)], range(5))
    if choice == 1:
        return bytes(range(6))
    return memoryview(values)


def make_image(rng: np.random.Generator, dtype: str) -> Any:
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    mode = ("L", "RGB", "1", "P", "F", "I", "RGBA", "I;16")[rng.integers(0, 8)]
    return images.new(mode, (3, 2), 1 if mode not in ("RGB", "RGBA") else (1, 2, 3))


MAKERS = {
    maker.__name__.removeprefix("make_"): maker
    for maker in (*(make_frame, make_series, make_labeled, make_polars, make_arrow, make_buffer, make_image),)
}


def attempt(x: Any, target: str, options: dict[str, Any]) -> Any:
    """Return the result of a conversion, or the class and the text of its error."""
    try:
        return (
            ab.convert_memory(x, target_type=target, **options) if options else ab.convert_memory(x, target)
        )
    except (ab.MemoryConversionError, ValueError, TypeError) as error:
        return type(error), str(error)


def decide_anew(x: Any, target: str, options: dict[str, Any]) -> Any:
    """Return the same without plans."""
    kept = dict(plan_cache.plans_by_signature)
    plan_cache.plans_by_signature.clear()
    try:
        return attempt(x, target, options)
    finally:
        plan_cache.plans_by_signature.clear()
        plan_cache.plans_by_signature.update(kept)


def describe(result: Any) -> Any:
    """Return comparable properties of a result: type, dtype, shape, bytes, and whether it is writable."""
    if isinstance(result, tuple):
        return result
    values = ab.to_numpy(result)
    flags = values.flags.writeable if isinstance(result, np.ndarray) else None
    return type(result), str(result.dtype), values.shape, values.tobytes(), flags


def place(result: Any) -> Any:
    """Return the address and the strides of a result."""
    values = ab.to_numpy(result)
    return values.ctypes.data, values.strides


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore")
def test_planned_conversions_equal_new_decisions(kind: str) -> None:
    """Objects of one class take turns, so that each meets the plans of all that came before."""
    targets = [name for name in ("numpy", "torch", "jax", "tensorflow") if _is_installed(name)]
    rng = np.random.default_rng(7)
    plan_cache.plans_by_signature.clear()
    for turn in range(400):
        x = MAKERS[kind](rng, DTYPES[rng.integers(0, len(DTYPES))])
        target = targets[rng.integers(0, len(targets))]
        options = OPTIONS[rng.integers(0, len(OPTIONS))]
        expected = decide_anew(x, target, options)
        planned = attempt(x, target, options)
        again = attempt(x, target, options)
        assert describe(planned) == describe(expected) == describe(again), (turn, x, target, options)
        if isinstance(expected, tuple) or 0 in expected.shape:
            continue
        route = ab.explain(x, target_type=target, **options)
        if route.shares_memory:
            assert place(planned) == place(expected), (turn, x, target, options)
        else:
            assert not np.shares_memory(ab.to_numpy(planned), ab.to_numpy(again)), (turn, x, target, options)


def _is_installed(name: str) -> bool:
    try:
        ab.framework(name)
    except ab.FrameworkNotInstalledError:
        return False
    return True


def _add_column(frame: Any) -> None:
    frame["c"] = 7.5


def _change_dtype(frame: Any) -> None:
    frame["a"] = frame["a"].astype("int32")


def _add_text(frame: Any) -> None:
    frame["c"] = "x"


def _set_null(frame: Any) -> None:
    frame["a"] = pandas.array([None, 2.0, 3.0], "Float64")
    frame["b"] = frame["a"]


def _set_values(frame: Any) -> None:
    frame.loc[0, "a"] = 99.0


@pytest.mark.parametrize("change", [_add_column, _change_dtype, _add_text, _set_null, _set_values])
def test_a_table_may_change_between_conversions(change: Callable[[Any], None]) -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    for _ in range(3):
        assert ab.to_numpy(frame).tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    change(frame)
    for _ in range(2):
        assert describe(attempt(frame, "numpy", {})) == describe(decide_anew(frame, "numpy", {}))
    if change is _set_values:
        assert ab.to_numpy(frame)[0, 0] == 99.0
    if change is _change_dtype:
        with pytest.raises(ab.UnknownArrayError):
            ab.to_numpy(frame)


def test_other_array_in_a_labeled_array() -> None:
    """The same object may carry another dtype, a read-only array, or an array of another framework."""
    torch = require("torch")
    x = xarray.DataArray(np.arange(4.0), dims="a")
    for _ in range(3):
        assert ab.to_torch(x).data_ptr() == x.data.ctypes.data
    for data in (np.arange(4, dtype=np.int16), np.broadcast_to(np.float32(2), 4), np.arange(8.0)[::-2]):
        x.data = data
        for _ in range(2):
            tensor = ab.to_torch(x)
            assert tensor.numpy().tolist() == data.tolist()
            assert str(data.dtype) in str(tensor.dtype)
            tensor.zero_()
            assert x.data is data
    x.data = np.array(["a", "b", "c", "d"])
    with pytest.raises(ab.DtypeNotSupportedError):
        ab.to_torch(x)
    assert torch.is_tensor(ab.to_torch(xarray.DataArray(np.ones(2))))


def test_registered_carriers_are_asked_in_every_conversion() -> None:
    class Box:
        def __init__(self, content: Any) -> None:
            self.content = content

    class Boxes(ab.Carrier):
        def carries(self, x: Any) -> bool:
            return isinstance(x, Box) and x.content is not None

        def array(self, x: Any) -> Any:
            if isinstance(x.content, Exception):
                raise x.content
            return x.content

    with registry_kept():
        ab.register_carrier(Boxes())
        values = np.arange(3.0)
        for _ in range(3):
            assert ab.to_torch(Box(values)).data_ptr() == values.ctypes.data
            assert ab.to_torch(Box((values, "it may change"))).data_ptr() != values.ctypes.data
            with pytest.raises(ab.UnknownArrayError):
                ab.to_torch(Box(None))
            with pytest.raises(ab.ArrayNotSupportedError, match="broken"):
                ab.to_torch(Box(KeyError("broken")))
            with pytest.raises(ab.ArrayNotSupportedError, match="masked"):
                ab.to_torch(Box((np.ma.masked_array([1.0, 2.0], [True, False]), "it may change")))


def test_separate_columns_are_copied_once() -> None:
    """The copy that pandas makes is the result; another conversion makes another copy."""
    frame = pandas.DataFrame({"a": [1.0, 2.0]})
    frame["b"] = [3.0, 4.0]
    results = [ab.to_numpy(frame) for _ in range(3)]
    for result in results:
        assert result.tolist() == [[1.0, 3.0], [2.0, 4.0]]
        assert result.flags.writeable
    assert not any(np.shares_memory(results[i], results[j]) for i in range(3) for j in range(i))
    assert ab.explain(frame, "numpy").copies == 1
