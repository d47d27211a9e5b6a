"""Arrays with names for their axes or rows: xarray, and columns of one numeric dtype of pandas and polars."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, is_of, refused


class Xarray(Carrier):
    """Arrays with names for their axes. Datasets carry several arrays, and are none."""

    def carries(self, x: Any) -> bool:
        return is_of(x, "xarray", "DataArray", "Variable")

    def array(self, x: Any) -> Any:
        return x.data  # of any framework, which says what it has against Dask's and sparse ones

    def rebuild(self, x: Any, array: Any) -> Any:
        like = x.copy(deep=False, data=array)
        like.encoding = {}  # says how the old values lie in a file; xarray's own arithmetic drops it, too
        return like


class Pandas(Carrier):
    """Series, indices, and tables of one numeric dtype."""

    def carries(self, x: Any) -> bool:
        if is_of(x, "pandas", "DataFrame"):
            dtypes = set(x.dtypes)
            return len(dtypes) == 1 and _is_number(dtypes.pop())
        return is_of(x, "pandas", "Series", "Index") and _is_number(x.dtype)

    def array(self, x: Any) -> Any:
        is_table = is_of(x, "pandas", "DataFrame")
        dtype = x.dtypes.iloc[0] if is_table else x.dtype
        if isinstance(dtype, np.dtype):
            values = x.to_numpy()
            apart = is_table and not np.shares_memory(values, x.iloc[:, 0].to_numpy())
            return (values, "the columns of the table lie apart") if apart and values.size else values
        if np.any(x.isna()):
            raise refused(f"values of pandas with nulls ({dtype})", "pass x.fillna(value) or x.dropna()")
        return x.to_numpy(dtype=dtype.numpy_dtype), f"pandas keeps {dtype} with a mask"

    def rebuild(self, x: Any, array: Any) -> Any:
        pandas = sys.modules["pandas"]
        if is_of(x, "pandas", "DataFrame"):
            table = pandas.DataFrame(array, index=x.index, columns=x.columns)
            return _in_own_dtypes(table, x.dtypes.iloc[0]).__finalize__(x)
        if is_of(x, "pandas", "Index"):
            try:
                return _in_own_dtypes(pandas.Index(array, name=x.name), x.dtype)
            except NotImplementedError:  # no index of this dtype, as float16
                return array
        series = pandas.Series(array, index=x.index, name=x.name)
        return _in_own_dtypes(series, x.dtype).__finalize__(x)


def _in_own_dtypes(values: Any, dtype: Any) -> Any:
    """In pandas' own dtype (``Int64``), if it is that of the numbers."""
    if isinstance(dtype, np.dtype):
        return values
    numbers = values.dtypes.iloc[0] if values.ndim == 2 else values.dtype
    return values.astype(dtype) if dtype.numpy_dtype == numbers else values


def _is_number(dtype: Any) -> bool:
    """Not of categories, dates, text; of pandas' own dtypes those that have one of NumPy's."""
    own = not isinstance(dtype, np.dtype)
    return dtype.kind in "biufc" and (not own or hasattr(dtype, "numpy_dtype"))


class Polars(Carrier):
    """Series of numbers."""

    def carries(self, x: Any) -> bool:
        if not is_of(x, "polars", "Series"):
            return False
        return bool(x.dtype.is_integer() or x.dtype.is_float() or x.dtype == sys.modules["polars"].Boolean)

    def array(self, x: Any) -> Any:
        if x.null_count():
            raise refused("a series of polars with nulls", "pass x.fill_null(value) or x.drop_nulls()")
        try:
            return x.to_numpy(allow_copy=False)
        except RuntimeError:
            return x.to_numpy(), "polars keeps it in pieces or bits"

    def rebuild(self, x: Any, array: Any) -> Any:
        polars = sys.modules["polars"]
        like = polars.Series(x.name, array)
        return array if like.dtype == polars.Object else like
