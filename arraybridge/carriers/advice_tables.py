"""The steps from tables and columns to arrays of numbers: pandas, polars, pyarrow and datasets.

`non_array_advice` makes the advice of these steps, and has those of all other objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.advice import literal
from arraybridge.carriers.advice_steps import Step, columns, step
from arraybridge.carriers.arrow import is_numeric
from arraybridge.host.dtype_names import NUMERIC_KINDS

__all__ = ["STEPS_OF_TABLES"]

_SEVERAL = "Its columns have several dtypes. Pass {}, or another dtype that holds all of them."
_NULLS = "Arrays cannot hold nulls. Pass {}, without its nulls."
_TIMES = "It holds dates, times or durations. Pass {}, which counts time units."
_LISTS = "Its rows are lists. Pass their elements in one array, {}."
_STRUCTS = "Its rows are structs. Pass one of their fields, {}."
_EXTENSION = "No array has its extension type. Pass its storage array, {}."

# -- pandas -------------------------------------------------------------------------------------------

#: The class of a dtype → the text, and the paths for a series and for an index or an extension array.
_OF_PANDAS = {
    "GeometryDtype": ("It holds geometries. Pass their coordinates, {}.", "get_coordinates()", ""),
    "CategoricalDtype": ("It holds categories. Pass their codes, {}.", "cat.codes", "codes"),
    "SparseDtype": ("It is sparse. Pass all of its values, {}.", "sparse.to_dense()", "to_dense()"),
    "IntervalDtype": ("It holds intervals. Pass one of their ends, such as {}.", "array.left", "left"),
}


def _pandas(x: Any) -> Iterator[Step]:
    """Yield the steps for a frame, a series, an index or an extension array."""
    if hasattr(x, "columns"):
        yield from _pandas_frame(x)
    elif type(x).__name__ == "MultiIndex":
        yield step(x, "It has several levels. Pass one, {}.", "get_level_values", 0)
    else:
        yield from _pandas_values(x)


def _pandas_frame(x: Any) -> Iterator[Step]:
    dtypes = list(x.dtypes)
    numbers = list(map(_is_number, dtypes))
    if not dtypes or not all(numbers):
        yield from columns(x.columns, numbers, "{x}.iloc[:, {i}]", lambda i: x.iloc[:, i])
        return
    if all(type(dtype).__name__ == "SparseDtype" for dtype in dtypes):
        yield step(x, "Its columns are sparse. Pass {}.", "sparse.to_coo()")
    common = "complex128" if any(dtype.kind == "c" for dtype in dtypes) else "float64"
    options = {"na_value": np.nan} if bool(x.isna().to_numpy().any()) else {}
    yield step(x, _SEVERAL, "to_numpy", common, **options)


def _pandas_values(x: Any) -> Iterator[Step]:
    """Yield the steps for a series, an index or an extension array."""
    family = type(x.dtype).__name__
    is_series = hasattr(x, "iloc")
    if family in _OF_PANDAS:
        text, *paths = _OF_PANDAS[family]
        yield step(x, text, paths[0 if is_series else 1])
    if x.dtype.kind in "Mm" or family == "PeriodDtype":
        yield step(x, _TIMES, "astype", "int64")
    if is_series and _is_number(x.dtype):
        yield step(x, _NULLS, "dropna()")
    elif hasattr(x.dtype, "numpy_dtype") and not np.any(x.isna()):
        code = "{x}.to_numpy({x}.dtype.numpy_dtype)"
        yield Step("Pass {}.", code, x.to_numpy(x.dtype.numpy_dtype))
    text = "Pass {}, which converts nulls to NaN and rounds integers above 2**53."
    yield step(x, text, "to_numpy", "float64", na_value=np.nan)
    yield from _pandas_objects(
        x, is_arrow=family == "ArrowDtype", codes="cat.codes" if is_series else "codes"
    )


def _pandas_objects(x: Any, *, is_arrow: bool, codes: str) -> Iterator[Step]:
    if is_arrow:
        yield Step("", "pyarrow.array({x})", sys.modules["pyarrow"].array(x))
        return
    one = step(
        x, "It holds text or objects. Pass the codes of its distinct values, {}.", "astype", "category"
    )
    yield one._replace(code=f"{one.code}.{codes}", value=step(one.value, "", codes).value)
    text = "It holds Python objects. Convert them with convert_tree(list(x), target), or pass {}."
    yield Step(text, "np.stack(list({x}))", np.stack(list(x)))


def _is_number(dtype: Any) -> bool:
    return getattr(dtype, "kind", "O") in NUMERIC_KINDS


# -- polars -------------------------------------------------------------------------------------------


def _polars(x: Any) -> Iterator[Step]:
    """Yield the steps for a frame, a lazy frame or a series."""
    if hasattr(x, "collect"):  # the next steps are found for a frame without rows
        yield Step("Pass {}.", "{x}.collect()", x.collect_schema().to_frame(), indirect="")
    elif hasattr(x, "columns"):
        yield from _polars_frame(x)
    elif hasattr(x, "dtype"):
        yield from _polars_series(x)


def _polars_frame(x: Any) -> Iterator[Step]:
    dtypes = x.dtypes
    if not dtypes or not all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in dtypes):
        yield from columns(x.columns, list(map(_in_numpy, dtypes)), "", x.to_series)
        return
    text = f"NumPy has no dtype for its {literal(str(dtypes[0]))} columns. Pass {{}}, which rounds them."
    code = "{x}.cast(float).to_numpy()"
    yield Step(text if len(set(dtypes)) == 1 else _SEVERAL, code, x.cast(float).to_numpy())


def _polars_series(x: Any) -> Iterator[Step]:
    kind = str(x.dtype).partition("(")[0]
    text = f"Its dtype is {kind}, and no framework has arrays of that dtype."
    if _in_numpy(x.dtype):
        yield step(x, _NULLS, "drop_nulls()")
    elif kind == "Struct":
        yield from (step(x, _STRUCTS, "struct.field", field) for field in x.struct.fields)
    elif x.dtype.is_nested():
        yield step(x, _LISTS, "explode()")
    elif kind in ("String", "Binary"):
        yield step(x, "It holds text or bytes. Pass the rank of each value, {}.", "rank", "dense")
    elif x.dtype.is_numeric():
        yield step(x, f"{text} Pass {{}}, which rounds its numbers.", "cast", float)
    elif kind not in ("Null", "Object", "Unknown"):
        yield step(x, f"{text} Pass the integers that represent its values, {{}}.", "to_physical()")


def _in_numpy(dtype: Any) -> bool:
    """Return whether NumPy has this numeric or Boolean polars dtype; NumPy has no 128-bit integers."""
    name = str(dtype)
    return name == "Boolean" or ((dtype.is_integer() or dtype.is_float()) and "128" not in name)


# -- pyarrow ------------------------------------------------------------------------------------------


def _pyarrow(x: Any) -> Iterator[Step]:
    """Yield the steps for a table, a record batch, an array, a chunked array or a scalar."""
    if hasattr(x, "as_py"):
        yield Step("Pass {}.", "np.asarray({x}.as_py())", np.asarray(x.as_py()))
    elif hasattr(x, "schema"):
        yield from _arrow_table(x)
    elif hasattr(x, "type"):
        one = "combine_chunks()." if hasattr(x, "combine_chunks") else ""
        yield from _arrow_extension(x, one) if hasattr(x.type, "storage_type") else _arrow_values(x, one)


def _arrow_table(x: Any) -> Iterator[Step]:
    kinds = x.schema.types
    if kinds and all(map(is_numeric, kinds)):
        one = "column.to_numpy()" if hasattr(x, "to_batches") else "column.to_numpy(zero_copy_only=False)"
        text = "Its columns have several types. Pass {}, in the dtype that NumPy chooses for all of them."
        code = f"np.column_stack([{one} for column in {{x}}.columns])"
        yield Step(text, code, np.column_stack([np.asarray(column) for column in x.columns]))
    # Extension types are usually tensors of numbers.
    numbers = [is_numeric(kind) or hasattr(kind, "storage_type") for kind in kinds]
    yield from columns(x.schema.names, numbers, "{x}.column({i})", x.column)


def _arrow_extension(x: Any, one: str) -> Iterator[Step]:
    yield step(x, "Pass its tensors in one array, {}.", f"{one}to_numpy_ndarray()")
    yield step(x, "Pass {}.", f"{one}to_numpy", zero_copy_only=False)
    yield step(x, _EXTENSION, f"{one}storage")


def _arrow_values(x: Any, one: str) -> Iterator[Step]:
    types = sys.modules["pyarrow"].types
    kind = x.type
    if is_numeric(kind):
        yield step(x, _NULLS, "drop_null()")
    elif types.is_temporal(kind):
        yield step(x, _TIMES, "cast", "int32" if kind.bit_width == 32 else "int64")
    elif types.is_decimal(kind):
        yield step(x, "No array has its decimal type. Pass {}, which rounds its decimals.", "cast", "float64")
    elif types.is_dictionary(kind):
        yield step(x, "It holds categories. Pass their indices, {}.", f"{one}indices")
    elif types.is_struct(kind):
        yield from (Step(_STRUCTS, f"{{x}}.flatten()[{i}]", one) for i, one in enumerate(x.flatten()))
    elif types.is_nested(kind):
        yield step(x, _LISTS, f"{one}flatten()" if hasattr(kind, "value_type") else "")
    elif not types.is_null(kind):
        yield step(
            x, "It holds text or bytes. Pass the index of each distinct value, {}.", "dictionary_encode()"
        )


# -- datasets -----------------------------------------------------------------------------------------


def _datasets(x: Any) -> Iterator[Step]:
    """Yield the steps for a data set of Hugging Face, or for one of its columns."""
    if hasattr(x, "column_name"):
        code = '{x}.source.with_format("arrow")[{x}.column_name][:]'
        yield Step("", code, x.source.with_format("arrow")[x.column_name][:])
        yield Step("Pass {}.", "np.array({x}[:])", np.array(x[:]))
    elif hasattr(x, "num_rows"):
        kinds = [str(getattr(feature, "dtype", "")) for feature in x.features.values()]
        numbers = [kind.startswith(("int", "uint", "float", "bool")) for kind in kinds]
        arrow = x.with_format("arrow")
        for one in columns(x.features, numbers, "", lambda i: arrow[list(x.features)[i]][:]):
            yield one._replace(code=one.code.replace("{x}", '{x}.with_format("arrow")') + "[:]")


#: The functions that yield the steps for the objects of a package.
STEPS_OF_TABLES = {"pandas": _pandas, "polars": _polars, "pyarrow": _pyarrow, "datasets": _datasets}
