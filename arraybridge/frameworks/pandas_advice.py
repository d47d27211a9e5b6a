"""Advice for pandas objects that are not arrays of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from arraybridge.advice import Advice, literal
from arraybridge.frameworks.advice_checks import (
    NO_NUMBERS,
    NUMBER_KINDS,
    can_evaluate,
    column_text,
    gives_numbers,
)

__all__ = ["advice_for_pandas"]

_NUMBER_TEXT = Advice("its text represents numbers: pass {}", ('{x}.astype("float64")',))


def advice_for_pandas(x: Any) -> Advice:
    """Return the advice for a frame, a series, an index or an extension array."""
    if type(x).__name__ == "MultiIndex":
        return Advice("it has several levels; pass one, {}", ("{x}.get_level_values(0)",))
    return _of_frame(x) if hasattr(x, "dtypes") and hasattr(x, "columns") else _of_values(x)


# -- frames -------------------------------------------------------------------------------------------


def _of_frame(x: Any) -> Advice:
    dtypes = list(x.dtypes)
    if dtypes and all(_is_number(dtype) for dtype in dtypes):
        if all(type(dtype).__name__ == "SparseDtype" for dtype in dtypes):
            return _of_sparse_frame(x)
        what = "its columns have several dtypes; pass {}, or another dtype that holds all of them"
        return Advice(what, (_dense(x),))
    for column, subject in _columns(x):
        advice = _of_column(column).about(subject)
        if advice.expressions:
            text = column_text(is_plain=not _is_unsupported(column))
            return advice._replace(text=text, expressions=advice.expressions[:1])
    return NO_NUMBERS


def _of_column(column: Any) -> Advice:
    """Return the advice for a column of a frame. If the column can be converted, the advice is to pass it."""
    if not _is_unsupported(column):
        return Advice("pass {}", ("{x}",))
    if _is_number(column.dtype) and hasattr(column.dtype, "numpy_dtype"):
        return Advice("pass {}, without its nulls", ("{x}.dropna()",))
    return _of_values(column)


def _dense(x: Any) -> str:
    """Return an expression for an array of all values of a frame, in one common dtype."""
    common = "complex128" if any(dtype.kind == "c" for dtype in x.dtypes) else "float64"
    nan = ', na_value=float("nan")' if bool(x.isna().to_numpy().any()) else ""
    return f'{{x}}.to_numpy("{common}"{nan})'


def _of_sparse_frame(x: Any) -> Advice:
    """Return the advice for a frame of sparse columns."""
    dense = _dense(x)
    if can_evaluate(x.sparse.to_coo):
        return Advice(
            "its columns are sparse; pass {}, or all of their values, {}", ("{x}.sparse.to_coo()", dense)
        )
    return Advice("its columns are sparse; pass all of their values, {}", (dense,))


def _columns(x: Any) -> Iterator[tuple[Any, str]]:
    """Yield columns of a frame and their expressions: convertible columns first, then other numeric ones."""
    places = range(len(x.columns))
    columns = [x.iloc[:, i] for i in places]
    for i in sorted(places, key=lambda i: (_is_unsupported(columns[i]), not _is_number(columns[i].dtype))):
        yield columns[i], _column(x, i)


def _column(x: Any, i: int) -> str:
    """Return an expression for a column, by name if the name is unique and can be written as a literal."""
    name = x.columns[i]
    parts = name if type(name) is tuple else (name,)
    is_plain = all(type(part) in (str, int) for part in parts)
    if is_plain and list(x.columns).count(name) == 1:
        return f"{{x}}[{literal(repr(name))}]"
    return f"{{x}}.iloc[:, {i}]"


def _is_number(dtype: Any) -> bool:
    return getattr(dtype, "kind", "O") in NUMBER_KINDS


def _is_unsupported(column: Any) -> bool:
    """Return whether a column cannot be converted without changes."""
    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        return dtype.kind not in NUMBER_KINDS
    return not (_is_number(dtype) and hasattr(dtype, "numpy_dtype")) or bool(np.any(column.isna()))


# -- columns, indices and extension arrays ------------------------------------------------------------


_CATEGORIES = "it holds categories; pass their codes, {}"
_SPARSE = "it is sparse; pass all of its values, {}"
_INTERVALS = "it holds intervals; pass their two ends, {} and {}"
#: The advice for a series, by the class of its dtype.
_BY_COLUMN_DTYPE = {
    "CategoricalDtype": Advice(_CATEGORIES, ("{x}.cat.codes",)),
    "SparseDtype": Advice(_SPARSE, ("{x}.sparse.to_dense()",)),
    "IntervalDtype": Advice(_INTERVALS, ("{x}.array.left", "{x}.array.right")),
}
#: The advice for an extension array or an index, by the class of its dtype.
_BY_ARRAY_DTYPE = {
    "CategoricalDtype": Advice(_CATEGORIES, ("{x}.codes",)),
    "SparseDtype": Advice(_SPARSE, ("np.asarray({x})",)),
    "IntervalDtype": Advice(_INTERVALS, ("{x}.left", "{x}.right")),
}


def _of_values(x: Any) -> Advice:
    dtype = x.dtype
    family = type(dtype).__name__
    by_family = _BY_COLUMN_DTYPE if hasattr(x, "iloc") else _BY_ARRAY_DTYPE
    if family in by_family:
        return by_family[family]
    is_time = dtype.kind in "Mm" or family == "PeriodDtype"
    if is_time and gives_numbers(lambda: x.astype("int64")):
        return Advice(
            "it holds dates or durations, not numbers; pass {}, which counts time units",
            ('{x}.astype("int64")',),
        )
    if hasattr(dtype, "numpy_dtype") and _is_number(dtype) and not np.any(x.isna()):
        return Advice("pass {}", ("{x}.to_numpy({x}.dtype.numpy_dtype)",))
    return _of_elements(x)


def _of_elements(x: Any) -> Advice:
    """Return the advice for numbers with nulls, for text, and for objects."""
    family = type(x.dtype).__name__
    if gives_numbers(lambda: x.to_numpy("float64", na_value=float("nan"))):
        text = (
            "it does not store its values as an array of numbers; pass {}, which converts nulls to NaN and"
            " rounds integers above 2**53"
        )
        return Advice(text, ('{x}.to_numpy("float64", na_value=float("nan"))',))
    if gives_numbers(lambda: x.astype("float64")):
        return _NUMBER_TEXT
    if family == "ArrowDtype":
        from arraybridge.frameworks.arrow_advice import advice_for_values

        return advice_for_values(sys.modules["pyarrow"].array(x)).about("pyarrow.array({x})")
    codes = '{x}.astype("category").cat.codes' if hasattr(x, "iloc") else '{x}.astype("category").codes'
    if family == "StringDtype" or can_evaluate(lambda: x.astype("category")):
        return Advice("it holds text or objects; pass the codes of its distinct values, {}", (codes,))
    by_item = "it holds Python objects; convert them with convert_tree(list(x), target)"
    if gives_numbers(lambda: np.stack(list(x))):
        return Advice(f"{by_item}, or pass all of them in one array, {{}}", ("np.stack(list({x}))",))
    return Advice(by_item)
