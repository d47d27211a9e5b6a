"""Advice for pyarrow objects that are not arrays of numbers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from arraybridge.advice import Advice, literal
from arraybridge.frameworks.advice_checks import NO_NUMBERS, column_text

__all__ = ["advice_for_table", "advice_for_values", "converts"]


class _Step(NamedTuple):
    """A step that converts Arrow values to numbers, or to values that are closer to numbers.

    Attributes:
        text: The advice, with ``{}`` in place of the expression.
        code: The code of the step, which is appended to the expression for the values.
        values: The result of the step.
    """

    text: str
    code: str
    values: Any


def advice_for_table(x: Any) -> Advice:
    """Return the advice for a pyarrow table or record batch."""
    types = x.schema.types
    has_booleans_with_nulls = any(_is_boolean(one.type) and one.null_count for one in x.columns)
    if types and all(map(_is_number, types)) and not has_booleans_with_nulls:
        one = "column.to_numpy()" if hasattr(x, "to_batches") else "column.to_numpy(zero_copy_only=False)"
        what = "its columns have several types; pass {}, in the dtype that NumPy chooses for all of them"
        return Advice(what, (f"np.column_stack([{one} for column in {{x}}.columns])",))
    for i in range(len(types)):
        if converts(x.column(i)):
            return Advice(column_text(is_plain=True), (_column(x, i),))
    for i in sorted(range(len(types)), key=lambda i: not _is_number(types[i])):
        column = advice_for_values(x.column(i))
        if column.expressions:
            expression = column.expressions[0].replace("{x}", _column(x, i))
            return Advice(column_text(is_plain=False), (expression,))
    return NO_NUMBERS


def advice_for_values(x: Any) -> Advice:
    """Return the advice for a pyarrow array or chunked array."""
    steps = []
    while not converts(x):
        step = _next_step(x)
        if step is None:
            return NO_NUMBERS
        steps.append(step)
        x = step.values
    if not steps:
        return Advice("pass {}", ("arraybridge.to_numpy({x})",))
    return Advice(steps[0].text, ("{x}" + "".join(step.code for step in steps),))


def _column(x: Any, i: int) -> str:
    name = x.schema.names[i]
    is_unique = Counter(x.schema.names)[name] == 1
    return f"{{x}}[{literal(repr(name))}]" if is_unique else f"{{x}}.column({i})"


def _is_number(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_boolean(kind: Any) -> bool:
    return bool(sys.modules["pyarrow"].types.is_boolean(kind))


def converts(x: Any) -> bool:
    """Return whether values are a NumPy array, or numbers without nulls, possibly in fixed-size lists."""
    if isinstance(x, np.ndarray):
        return True
    types = sys.modules["pyarrow"].types
    while types.is_fixed_size_list(x.type) and not x.null_count:
        x = _in_one_chunk(x).flatten()
    return _is_number(x.type) and not x.null_count


def _in_one_chunk(x: Any) -> Any:
    return x.combine_chunks() if hasattr(x, "combine_chunks") else x


def _next_step(x: Any) -> _Step | None:
    """Return the next step that brings Arrow values closer to numbers; None if there is none."""
    types = sys.modules["pyarrow"].types
    kind = x.type
    one = ".combine_chunks()" if hasattr(x, "combine_chunks") else ""
    if _is_number(kind):
        return _Step("arrays cannot hold nulls; pass {}, without its nulls", ".drop_null()", x.drop_null())
    if types.is_temporal(kind):
        return _step_from_time(x)
    if types.is_decimal(kind):
        return _Step(
            "no array has its decimal type; pass {}, which rounds its decimals",
            '.cast("float64")',
            x.cast("float64"),
        )
    if types.is_dictionary(kind):
        code = f"{one}.indices"
        return _Step("it holds categories; pass their indices, {}", code, _in_one_chunk(x).indices)
    if _is_text(kind):
        text = "it holds text or bytes; pass the index of each distinct value, {}"
        return _Step(text, ".dictionary_encode()", x.dictionary_encode())
    if types.is_nested(kind):
        return _step_into(x, one)
    return _step_from_extension(x, one)


def _step_from_time(x: Any) -> _Step | None:
    """Return the step from times and durations to integers; None for intervals of more than 64 bits."""
    if x.type.bit_width > 64:
        return None
    dtype = "int32" if x.type.bit_width == 32 else "int64"
    return _Step(
        "it holds dates, times or durations, not numbers; pass {}, which counts time units",
        f'.cast("{dtype}")',
        x.cast(dtype),
    )


def _step_from_extension(x: Any, one: str) -> _Step | None:
    """Return the step from an extension type to its values; None if it is not an extension type."""
    if not hasattr(x.type, "storage_type"):
        return None
    values = _in_one_chunk(x)
    if x.type.extension_name != "arrow.fixed_shape_tensor":
        return _Step(
            "no array has its extension type; pass its storage array, {}", f"{one}.storage", values.storage
        )
    if values.null_count:
        return _Step(
            "arrays cannot hold nulls; pass the elements of its tensors, {}", f"{one}.storage", values.storage
        )
    return _Step("pass its tensors in one array, {}", f"{one}.to_numpy_ndarray()", values.to_numpy_ndarray())


def _is_text(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(is_string or is_binary or types.is_fixed_size_binary(kind))


def _step_into(x: Any, one: str) -> _Step | None:
    """Return the step from lists or structs to their elements; None if there is none."""
    types = sys.modules["pyarrow"].types
    if types.is_struct(x.type):
        for i, field in enumerate(x.flatten()):
            if converts(field) or advice_for_values(field).expressions:
                return _Step("its rows are structs; pass one of their fields, {}", f".flatten()[{i}]", field)
        return None
    if types.is_map(x.type) or types.is_union(x.type):
        return None
    text = "its rows are lists; pass their elements in one array, {}"
    return _Step(text, f"{one}.flatten()", _in_one_chunk(x).flatten())
