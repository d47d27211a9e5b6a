"""Advice for polars objects that are not arrays of numbers."""

from __future__ import annotations

from typing import Any

from arraybridge.advice import Advice, literal
from arraybridge.frameworks.advice_checks import NO_NUMBERS, column_text

__all__ = ["advice_for_polars"]


def advice_for_polars(x: Any) -> Advice:
    """Return the advice for a frame, a lazy frame, a series or an expression."""
    if type(x).__name__ == "Expr":
        return Advice("an expression holds no data; pass a column of a frame, such as frame['name']")
    if hasattr(x, "collect"):
        frame = x.collect_schema().to_frame()  # a frame without rows
        if len(set(frame.dtypes)) == 1 and _is_number(frame.dtypes[0]):
            return Advice("pass {}", ("{x}.collect()",))
        return _of_frame(frame).about("{x}.collect()")
    return _of_frame(x) if hasattr(x, "columns") else _of_series(x)


def _of_frame(x: Any) -> Advice:
    if x.width and all(dtype.is_numeric() or str(dtype) == "Boolean" for dtype in x.dtypes):
        dtypes = list(dict.fromkeys(x.dtypes))
        if len(dtypes) == 1:
            dtype = literal(str(dtypes[0]))
            what = f"NumPy has no dtype for its {dtype} columns; pass {{}}, which rounds them"
        else:
            what = "its columns have several dtypes; pass {}, or another dtype that holds all of them"
        return Advice(what, ("{x}.cast(float).to_numpy()",))
    columns = sorted(
        x.iter_columns(), key=lambda column: (not _converts(column), not _is_number(column.dtype))
    )
    for column in columns:
        code = _code_for(column)
        if code is not None:
            expression = f"{{x}}[{literal(repr(column.name))}]{code}"
            return Advice(column_text(is_plain=not code), (expression,))
    return NO_NUMBERS


def _of_series(x: Any) -> Advice:
    kind = str(x.dtype).partition("(")[0]
    if kind == "Object":
        return Advice("it holds Python objects; convert them with convert_tree(x.to_list(), target)")
    code = _code_for(x)
    if code is None:
        return NO_NUMBERS
    dtype = f"its dtype is {kind}, and no framework has arrays of that dtype"
    texts = {
        "Struct": "its rows are structs; pass one of their fields, {}",
        "String": "it holds text; pass the rank of each string, {}",
        "Binary": "it holds bytes; pass the rank of each value, {}",
    }
    if kind in texts:
        text = texts[kind]
    elif x.dtype.is_nested():
        text = "its rows are lists; pass their elements in one array, {}"
    elif x.dtype.is_numeric():
        text = f"{dtype}; pass {{}}, which rounds its numbers"
    else:
        text = f"{dtype}; pass the integers that represent its values, {{}}"
    return Advice(text, (f"{{x}}{code}",))


def _is_number(dtype: Any) -> bool:
    """Return whether NumPy has this numeric or Boolean polars dtype; NumPy has no 128-bit integers."""
    name = str(dtype)
    return name == "Boolean" or ((dtype.is_integer() or dtype.is_float()) and "128" not in name)


def _converts(x: Any) -> bool:
    """Return whether a series can be converted: numbers without nulls, or arrays of such numbers."""
    while str(x.dtype).startswith("Array") and not x.null_count():
        x = x.explode()
    return _is_number(x.dtype) and not x.null_count()


def _code_for(x: Any) -> str | None:
    """Return the code that converts a series to numbers, to append to its expression; None if impossible."""
    code = ""
    while not _converts(x):
        if x.dtype.is_nested() and hasattr(x.dtype, "fields"):
            return _code_for_field(x, code)
        step = _next_step(x)
        if step is None:
            return None
        code += step[0]
        x = step[1]
    return code


def _code_for_field(x: Any, code: str) -> str | None:
    """Return the code for the first field of a struct series that can be converted; None if there is none."""
    for name in x.struct.fields:
        more = _code_for(x.struct.field(name))
        if more is not None:
            return f"{code}.struct.field({literal(repr(name))}){more}"
    return None


def _next_step(x: Any) -> tuple[str, Any] | None:
    """Return the code of the next step towards numbers, and its result; None if there is no step."""
    kind = str(x.dtype).partition("(")[0]
    if kind in ("Null", "Object", "Unknown"):
        return None
    if _is_number(x.dtype):
        return ".drop_nulls()", x.drop_nulls()
    if x.dtype.is_nested():
        return ".explode()", x.explode()
    if kind in ("String", "Binary"):
        return '.rank("dense")', x.rank("dense")
    if x.dtype.is_numeric():
        return ".cast(float)", x.cast(float)
    return ".to_physical()", x.to_physical()
