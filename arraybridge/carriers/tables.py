"""Carriers of tables and their columns: pandas and polars."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, is_of, unsupported_contents_error
from arraybridge.reasons import Cause, Reason


class Pandas(Carrier):
    """Series, indices, and tables of one numeric dtype."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if is_of(x, "pandas", "DataFrame"):
            first, *others = x.dtypes
            return _is_number(first) and all(dtype == first for dtype in others)
        return is_of(x, "pandas", "Series", "Index") and _is_number(x.dtype)

    def array(self, x: Any) -> Any:
        is_table = is_of(x, "pandas", "DataFrame")
        dtype = x.dtypes.iloc[0] if is_table else x.dtype
        if isinstance(dtype, np.dtype):
            values = x.to_numpy()
            apart = is_table and not np.shares_memory(values, x.iloc[:, 0].to_numpy())
            return (values, Cause(Reason.SEPARATE_COLUMNS)) if apart and values.size else values
        if np.any(x.isna()):
            what = f"values of pandas with nulls ({dtype})"
            fill = "{x}.fillna(False)" if dtype.kind == "b" else "{x}.fillna(0)"
            raise unsupported_contents_error(
                what, "pass {}, with a value of your choice, or {}", fill, "{x}.dropna()"
            )
        cause = Cause(Reason.MASKED_STORAGE, source="pandas", source_dtype=str(dtype))
        return x.to_numpy(dtype=dtype.numpy_dtype), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        pandas = sys.modules["pandas"]
        if array.dtype.isbuiltin == 2:  # of ml_dtypes, in which pandas sees no numbers
            return array
        if is_of(x, "pandas", "DataFrame"):
            table = _table(pandas, array, x)
            return table.__finalize__(x)
        values = _in_own_dtype(pandas, array, x.dtype)
        if is_of(x, "pandas", "Index"):
            try:
                return pandas.Index(values, name=x.name)
            except NotImplementedError:  # no index of this dtype, as float16
                return array
        return pandas.Series(values, index=x.index, name=x.name).__finalize__(x)


def _table(pandas: Any, array: np.ndarray, like: Any) -> Any:
    """Return a table of these values, in pandas' own dtype if the columns of ``like`` have it."""
    dtype = like.dtypes.iloc[0]
    if not _has_own(dtype, array):
        return pandas.DataFrame(array, index=like.index, columns=like.columns)
    columns = {i: _in_own_dtype(pandas, array[:, i], dtype) for i in range(array.shape[1])}
    table = pandas.DataFrame(columns, index=like.index)
    table.columns = like.columns
    return table


def _has_own(dtype: Any, array: np.ndarray) -> bool:
    """Return whether ``dtype`` is pandas' own (``Int64``), with numbers of the dtype of ``array``."""
    return not isinstance(dtype, np.dtype) and bool(dtype.numpy_dtype == array.dtype)


def _in_own_dtype(pandas: Any, array: np.ndarray, dtype: Any) -> Any:
    """Return the values in pandas' own dtype, if it is that of the numbers; without nulls, NaN stays NaN.

    ``astype`` and pandas' other constructors make a null of NaN.
    """
    if not _has_own(dtype, array):
        return array
    if hasattr(dtype, "pyarrow_dtype"):
        values = sys.modules["pyarrow"].array(array, type=dtype.pyarrow_dtype, from_pandas=False)
        return pandas.arrays.ArrowExtensionArray(values)
    values = np.ascontiguousarray(array)
    return dtype.construct_array_type()(values, np.zeros(values.shape, np.bool_))


def _is_number(dtype: Any) -> bool:
    """Not of categories, dates, text; of pandas' own dtypes those that have one of NumPy's."""
    own = not isinstance(dtype, np.dtype)
    return getattr(dtype, "kind", "O") in "biufc" and (not own or hasattr(dtype, "numpy_dtype"))


class Polars(Carrier):
    """Series of numbers."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if not is_of(x, "polars", "Series"):
            return False
        return bool(x.dtype.is_integer() or x.dtype.is_float() or x.dtype == sys.modules["polars"].Boolean)

    def array(self, x: Any) -> Any:
        if x.null_count():
            instead = "pass {}, with a value of your choice, or {}"
            raise unsupported_contents_error(
                "a series of polars with nulls", instead, "{x}.fill_null(0)", "{x}.drop_nulls()"
            )
        try:
            return x.to_numpy(allow_copy=False)
        except RuntimeError:
            return x.to_numpy(), Cause(Reason.CHUNKED_STORAGE, source="polars")

    def rebuild(self, x: Any, array: Any) -> Any:
        polars = sys.modules["polars"]
        like = polars.Series(x.name, array)
        return array if like.dtype == polars.Object else like
