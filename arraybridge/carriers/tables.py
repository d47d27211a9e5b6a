"""Carriers for tables and their columns: pandas and polars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import NULLS, Carrier, Unread, contents_error, is_of
from arraybridge.host.dtype_names import NUMERIC_KINDS
from arraybridge.reasons import Cause, Reason

_SEPARATE_COLUMNS = Cause(Reason.SEPARATE_COLUMNS)


class Pandas(Carrier):
    """A carrier for pandas series, indices, and tables of one numeric dtype."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if isinstance(x, sys.modules["pandas"].DataFrame):  # faster than `is_of`
            return _is_number(_open_table(x)[0])
        return is_of(x, "pandas", "Series", "Index") and _is_number(x.dtype)

    def array(self, x: Any) -> Any:
        is_table = isinstance(x, sys.modules["pandas"].DataFrame)
        dtype, blocks = _open_table(x) if is_table else (x.dtype, None)
        if isinstance(dtype, np.dtype):
            if not is_table or _is_one_block(x, blocks):
                return x.to_numpy()
            return Unread(x.shape, dtype, x.to_numpy), _SEPARATE_COLUMNS
        if np.any(x.isna()):
            what = f"a pandas {type(x).__name__} with nulls ({dtype})"
            fill = "{x}.fillna(False)" if dtype.kind == "b" else "{x}.fillna(0)"
            raise contents_error(
                what, NULLS, "Pass {}, with a value of your choice, or {}.", fill, "{x}.dropna()"
            )
        cause = Cause(Reason.MASKED_STORAGE, source="pandas", source_dtype=str(dtype))
        return x.to_numpy(dtype=dtype.numpy_dtype), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        pandas = sys.modules["pandas"]
        if array.dtype.isbuiltin == 2:  # an ml_dtypes dtype, not numeric in pandas (pandas-dev/pandas#37969)
            return array
        if isinstance(x, pandas.DataFrame):
            table = _table(pandas, array, x)
            return table.__finalize__(x)
        values = _in_own_dtype(pandas, array, x.dtype)
        if is_of(x, "pandas", "Index"):
            try:
                return pandas.Index(values, name=x.name)
            except NotImplementedError:  # pandas has no index of dtype float16, pandas-dev/pandas#49535
                return array
        return pandas.Series(values, index=x.index, name=x.name).__finalize__(x)


def _open_table(x: Any) -> tuple[Any, Any]:
    """Return the dtype of all columns of a pandas table and its blocks; None for each if there is none.

    The blocks are the private attribute ``_mgr.blocks``. The columns of each have the same dtype. The public
    ``dtypes`` makes a series, which takes longer than all other steps of a conversion (pandas 3.0, no issue
    found). It is used for subclasses, which may override it.
    """
    blocks = None
    if type(x) is sys.modules["pandas"].DataFrame:
        try:
            blocks = x._mgr.blocks  # noqa: SLF001
            if len(blocks) == 1:
                return blocks[0].dtype, blocks
        except AttributeError:
            pass
    dtypes = x.dtypes.tolist() if blocks is None else [block.dtype for block in blocks]
    return dtypes[0] if dtypes.count(dtypes[0]) == len(dtypes) else None, blocks


def _is_one_block(x: Any, blocks: Any) -> bool:
    """Return whether ``to_numpy`` shares the memory of a table, instead of joining several blocks."""
    if blocks is None:
        return not x.size or np.shares_memory(x.to_numpy(), x.iloc[:, 0].to_numpy())
    return len(blocks) <= 1 or not len(x)  # `x.size` takes as long as the rest of the conversion


def _table(pandas: Any, array: np.ndarray, like: Any) -> Any:
    """Return the values as a table like ``like``, with the extension dtype of ``like`` if it matches."""
    dtype, _ = _open_table(like)
    if not _has_own(dtype, array):
        return pandas.DataFrame(array, index=like.index, columns=like.columns)
    columns = {i: _in_own_dtype(pandas, array[:, i], dtype) for i in range(array.shape[1])}
    table = pandas.DataFrame(columns, index=like.index)
    table.columns = like.columns
    return table


def _has_own(dtype: Any, array: np.ndarray) -> bool:
    """Return whether ``dtype`` is a pandas extension dtype (such as ``Int64``) that matches ``array``."""
    own = getattr(dtype, "numpy_dtype", None)
    return own is not None and bool(own == array.dtype)


def _in_own_dtype(pandas: Any, array: np.ndarray, dtype: Any) -> Any:
    """Return the values as a pandas extension array if ``dtype`` matches their dtype; NaN stays NaN.

    ``astype`` and the pandas functions that create such arrays would convert NaN to nulls
    (pandas-dev/pandas#55668).
    """
    if not _has_own(dtype, array):
        return array
    if hasattr(dtype, "pyarrow_dtype"):
        values = sys.modules["pyarrow"].array(array, type=dtype.pyarrow_dtype, from_pandas=False)
        return pandas.arrays.ArrowExtensionArray(values)
    values = np.ascontiguousarray(array)
    return dtype.construct_array_type()(values, np.zeros(values.shape, np.bool_))


def _is_number(dtype: Any) -> bool:
    """Return whether a dtype is numeric; pandas extension dtypes must have a NumPy equivalent."""
    has_equivalent = isinstance(dtype, np.dtype) or hasattr(dtype, "numpy_dtype")
    return has_equivalent and dtype.kind in NUMERIC_KINDS


#: The NumPy dtypes of polars' numeric dtypes. NumPy does not have 128-bit integers.
_NUMBERS = {
    "Boolean": np.dtype("bool"),
    **{
        f"{kind}{bits}": np.dtype(f"{kind}{bits}".lower())
        for kind in ("Int", "UInt")
        for bits in (8, 16, 32, 64)
    },
    **{f"Float{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}


class Polars(Carrier):
    """A carrier for polars series of numbers or of arrays of numbers, and for tables of one numeric dtype."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if isinstance(x, sys.modules["polars"].DataFrame):  # faster than `is_of`
            # Numeric dtypes have no parameters, and classes are faster to compare.
            kinds = set(map(type, x.dtypes))
            return len(kinds) == 1 and kinds.pop().__name__ in _NUMBERS
        return is_of(x, "polars", "Series") and type(_element_dtype(x.dtype)).__name__ in _NUMBERS

    def array(self, x: Any) -> Any:
        is_table = isinstance(x, sys.modules["polars"].DataFrame)
        dtype = x.dtypes[0] if is_table else x.dtype
        numbers = _NUMBERS[type(dtype if is_table else _element_dtype(dtype)).__name__]
        is_bool = numbers.kind == "b"
        if not is_bool:
            try:
                return x.to_numpy(allow_copy=False)
            except RuntimeError:  # there are nulls, several chunks, or separate columns
                pass
        read = x.to_numpy
        may_have_nulls = True
        if is_table:
            read, may_have_nulls = _open_columns(x, numbers)
        if may_have_nulls:
            _check_nulls(x)
        if is_bool:
            cause = Cause(Reason.PACKED_BITS, source="polars")
        elif x.n_chunks() > 1:  # of the first column; the others are also stored separately
            cause = Cause(Reason.CHUNKED_STORAGE, source="polars")
        else:
            cause = _SEPARATE_COLUMNS
        shape = x.shape if is_table else (len(x), *_array_shape(dtype))
        return Unread(shape, numbers, read), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        polars = sys.modules["polars"]
        if array.dtype.isbuiltin == 2:  # an ml_dtypes dtype, which polars treats as an object
            return array
        if is_of(x, "polars", "DataFrame"):
            columns = [polars.Series(name, array[:, i]) for i, name in enumerate(x.columns)]
            return array if columns[0].dtype == polars.Object else polars.DataFrame(columns)
        like = polars.Series(x.name, array)
        return array if _element_dtype(like.dtype) == polars.Object else like


#: The maximum size of a table for which reading one column after the other is faster.
_FEW_COLUMNS = 6
_FEW_ROWS = 10_000


def _open_columns(x: Any, dtype: np.dtype[Any]) -> tuple[Callable[[], np.ndarray], bool]:
    """Return a function that reads the values of a table, and whether the table has nulls."""
    if x.width > _FEW_COLUMNS or x.height > _FEW_ROWS:
        return x.to_numpy, any(x.null_count().rows()[0])
    columns = x.get_columns()
    return partial(_read_columns, columns, dtype), any([column.null_count() for column in columns])  # noqa: C419  # faster


def _read_columns(columns: list[Any], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the values of a small table without nulls, in the memory layout of its method ``to_numpy``.

    That method starts threads, which takes 14 µs, as long as reading seven columns (polars 2.1, no issue
    found).
    """
    return np.array([column.to_numpy() for column in columns], dtype).T


def _element_dtype(dtype: Any) -> Any:
    """Return the element dtype of an ``Array`` dtype, and any other dtype unchanged."""
    while isinstance(dtype, sys.modules["polars"].Array):
        dtype = dtype.inner
    return dtype


def _array_shape(dtype: Any) -> tuple[int, ...]:
    """Return the shape of each row of an ``Array`` column; ``()`` for a column of numbers."""
    return dtype.shape if isinstance(dtype, sys.modules["polars"].Array) else ()


def _check_nulls(x: Any) -> None:
    """Raise `ArrayNotSupportedError` for nulls, with code that removes them at the right levels."""
    is_table = is_of(x, "polars", "DataFrame")
    has_null_rows = any(x.null_count().row(0)) if is_table else x.null_count() > 0
    dtype = x.dtypes[0] if is_table else x.dtype
    if _array_shape(dtype):
        _check_arrays(x, has_null_rows=has_null_rows)
    elif has_null_rows:
        what = f"a polars {'DataFrame' if is_table else 'Series'} with nulls"
        advice = "Pass {}, with a value of your choice, or {}."
        raise contents_error(what, NULLS, advice, f"{{x}}{_fill(dtype)}", "{x}.drop_nulls()")


def _check_arrays(x: Any, *, has_null_rows: bool) -> None:
    """Raise `ArrayNotSupportedError` for null rows in an ``Array`` column, and for nulls inside its rows."""
    shape = _array_shape(x.dtype)
    has_elements = len(x) > 0 and all(shape)
    if not has_null_rows and not (has_elements and x.reshape((-1,)).null_count()):
        return
    what = "a polars Series with nulls"
    depth = _depth_of_nulls(x.drop_nulls()) if has_elements else None
    if depth is None:
        raise contents_error(what, NULLS, "Pass {}.", "{x}.drop_nulls()")
    what = f"{what} inside its arrays"
    rows = '[row for row in {x}.to_list() if "None" not in str(row)]'
    complete = f"polars.Series({rows}, dtype={{x}}.dtype)"
    if depth < len(shape):
        advice = "Pass {}, without the rows that have nulls."
        raise contents_error(what, NULLS, advice, complete)
    dropped = ".drop_nulls()" if has_null_rows else ""
    elements = f"{{x}}{dropped}{'.explode()' * len(shape)}"
    advice = "Pass {}, with a value of your choice; or {}, without the rows that have nulls."
    raise contents_error(what, NULLS, advice, f"{elements}{_fill(x.dtype)}.reshape({(-1, *shape)})", complete)


def _fill(dtype: Any) -> str:
    """Return code that replaces nulls in data of a dtype, such as ``".fill_null(0)"``."""
    return f".fill_null({False if str(_element_dtype(dtype)) == 'Boolean' else 0})"


def _depth_of_nulls(x: Any) -> int | None:
    """Return the level of the outermost nulls inside the arrays of a series, starting at 1, or None."""
    for depth in range(1, len(_array_shape(x.dtype)) + 1):
        if not len(x):
            return None
        x = x.explode()
        if x.null_count():
            return depth
    return None
