"""The carrier for Arrow tables, record batches, chunked arrays, and arrays of fixed-size lists."""

from __future__ import annotations

import math
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, Unread, is_of, unsupported_contents_error
from arraybridge.errors import ArrayNotSupportedError
from arraybridge.frameworks import host_memory
from arraybridge.frameworks.protocols import Exported
from arraybridge.reasons import Cause, Reason


class Arrow(Carrier):
    """A carrier for tables and record batches of one type, chunked arrays, and fixed-size lists.

    The elements are numbers or booleans. Plain arrays of numbers without nulls are not carriers if they
    export DLPack. Arrays of booleans are carriers, because Arrow stores them as bits. Objects with nulls are
    carriers only so that `array` can raise an error that suggests code to remove the nulls.
    """

    expression = "arraybridge.to_numpy({x})"

    def carries(self, x: Any) -> bool:
        if _is_table(x):
            kinds = x.schema.types
            return len(kinds) > 0 and _is_numeric(kinds[0]) and all(kind == kinds[0] for kind in kinds)
        if not is_of(x, "pyarrow", "Array", "ChunkedArray") or not _is_numeric(_element_type(x.type)):
            return False
        exports_dlpack = hasattr(x, "__dlpack__") and _is_numeric(x.type)
        return not exports_dlpack or _is_boolean(x.type) or x.null_count > 0

    def array(self, x: Any) -> Any:
        if _is_table(x):
            columns = [_read_levels(column) for column in x.columns]
            element = _element_type(x.schema.types[0])
            shape: tuple[int, ...] = (len(x), len(columns))
        else:
            columns = [_read_levels(x)]
            element = _element_type(x.type)
            shape = (len(x), *_list_sizes(x.type))
        if any(level.null_count for chunks in columns for levels in chunks for level in levels):
            raise _nulls_error(x, columns)
        dtype = np.dtype(element.to_pandas_dtype())
        if not math.prod(shape):
            return np.empty(shape, dtype)
        parts = [[levels[-1] for levels in chunks] for chunks in columns]
        cause = _copy_cause(element, parts)
        if cause is None:
            shared = _shared_view(parts, shape)
            if shared is not None:
                return shared
            cause = Cause(Reason.SEPARATE_COLUMNS)
        return Unread(shape, dtype, partial(_join, parts, shape, dtype)), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        pyarrow = sys.modules["pyarrow"]
        try:
            kind = pyarrow.from_numpy_dtype(array.dtype)
        except pyarrow.ArrowNotImplementedError:  # Arrow has no complex or ml_dtypes dtypes
            return array
        if not _is_numeric(kind):
            return array
        if _is_table(x):
            fields = [field.with_type(kind) for field in x.schema]
            columns = [pyarrow.array(np.ascontiguousarray(array[:, i])) for i in range(len(fields))]
            schema = pyarrow.schema(fields, metadata=x.schema.metadata)
            return type(x).from_arrays(columns, schema=schema)
        like = _nested(pyarrow.array(np.ascontiguousarray(array).reshape(-1)), x.type, len(x))
        return pyarrow.chunked_array([like]) if is_of(x, "pyarrow", "ChunkedArray") else like


def _is_table(x: Any) -> bool:
    return is_of(x, "pyarrow", "Table", "RecordBatch")


def _is_numeric(kind: Any) -> bool:
    """Return whether elements of this type are numbers or booleans."""
    types = sys.modules["pyarrow"].types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_boolean(kind: Any) -> bool:
    return bool(sys.modules["pyarrow"].types.is_boolean(kind))


def _list_types(kind: Any) -> list[Any]:
    """Return the nested types of fixed-size lists in a type, from the outermost to the innermost."""
    found = []
    while sys.modules["pyarrow"].types.is_fixed_size_list(kind):
        found.append(kind)
        kind = kind.value_type
    return found


def _list_sizes(kind: Any) -> tuple[int, ...]:
    return tuple(each.list_size for each in _list_types(kind))


def _element_type(kind: Any) -> Any:
    lists = _list_types(kind)
    return lists[-1].value_type if lists else kind


# -- read ---------------------------------------------------------------------------------------------


def _read_levels(column: Any) -> list[list[Any]]:
    """Return the arrays at all levels of nested lists, for each chunk of a column; see `_levels`."""
    return [_levels(chunk) for chunk in _chunks(column)]


def _copy_cause(element: Any, parts: list[list[Any]]) -> Cause | None:
    """Return the reason why the chunks of the columns must be copied; None if each column is one array."""
    if _is_boolean(element):
        return Cause(Reason.PACKED_BITS, source="Arrow")
    if any(len(chunks) != 1 for chunks in parts):
        return Cause(Reason.CHUNKED_STORAGE, source="Arrow")
    return None


def _shared_view(parts: list[list[Any]], shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a view of columns with one chunk each; None if their memory is not adjacent."""
    views = [chunks[0].to_numpy() for chunks in parts]
    return views[0].reshape(shape) if len(views) == 1 else _adjacent(views)


def _chunks(column: Any) -> list[Any]:
    """Return the chunks of a column that are not empty."""
    return [chunk for chunk in getattr(column, "chunks", [column]) if len(chunk)]


def _levels(array: Any) -> list[Any]:
    """Return an array, then the elements of its lists, then the elements of nested lists, and so on.

    ``flatten`` respects a slice of the array and omits its null lists. ``values`` does neither but is faster.
    If there are no null lists, ``values`` is therefore used, with the same slice.
    """
    found = [array]
    for size in _list_sizes(array.type):
        if array.null_count:
            array = array.flatten()
        else:
            array = array.values.slice(array.offset * size, len(array) * size)
        found.append(array)
    return found


def _null_counts(columns: list[list[list[Any]]]) -> tuple[int, int, int]:
    """Return the numbers of nulls among the rows, among lists inside rows, and among the elements."""
    rows = lists = elements = 0
    for levels in (levels for chunks in columns for levels in chunks):
        first, *others = (level.null_count for level in levels)
        rows += first
        lists += sum(others[:-1])
        elements += sum(others[-1:])
    return rows, lists, elements


def _join(parts: list[list[Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return the values of all columns in new memory, with contiguous columns."""
    if dtype.kind == "b" and len(parts) == 1:  # takes two thirds of the time of the general path
        values: np.ndarray = sys.modules["pyarrow"].chunked_array(parts[0]).to_numpy()
        return values.reshape(shape)
    memory = host_memory.aligned_empty((len(parts), math.prod(shape) // len(parts)), dtype)
    for column, arrays in zip(memory, parts, strict=True):
        start = 0
        for array in arrays:
            column[start : start + len(array)] = array.to_numpy(zero_copy_only=False)
            start += len(array)
    return memory.reshape(shape) if len(parts) == 1 else memory.T


def _adjacent(columns: list[np.ndarray]) -> np.ndarray | None:
    """Return one array that shares the memory of adjacent columns; None if they are not adjacent."""
    addresses = [host_memory.address(column) for column in columns]
    nbytes = columns[0].nbytes
    if any(after - before != nbytes for before, after in pairwise(addresses)):
        return None
    first = columns[0].__array_interface__
    interface = {**first, "shape": (len(columns), len(columns[0])), "strides": None}
    return np.asarray(Exported(columns, __array_interface__=interface)).T


# -- restore ------------------------------------------------------------------------------------------


def _nested(elements: Any, kind: Any, rows: int) -> Any:
    """Return the elements in nested lists, with the sizes, names, nullability and metadata of a list type."""
    pyarrow = sys.modules["pyarrow"]
    lists = _list_types(kind)
    for depth in reversed(range(len(lists))):
        each = lists[depth]
        own = pyarrow.list_(each.value_field.with_type(elements.type), each.list_size)
        if each.list_size:
            elements = pyarrow.FixedSizeListArray.from_arrays(elements, type=own)
        else:  # the number of empty lists cannot be derived from the elements
            count = rows * math.prod(outer.list_size for outer in lists[:depth])
            elements = pyarrow.array([[]] * count, own)
    return elements


# -- errors -------------------------------------------------------------------------------------------


def _nulls_error(x: Any, columns: list[list[list[Any]]]) -> ArrayNotSupportedError:
    """Return the error for nulls, with code that removes them at the right levels."""
    what = f"an Arrow {type(x).__name__} with nulls"
    rows, lists, elements = _null_counts(columns)
    if _is_table(x):
        return unsupported_contents_error(
            what, "pass {}, without the rows that have nulls", "{x}.drop_null()"
        )
    sizes = _list_sizes(x.type)
    fill = f".fill_null({0 if not _is_boolean(_element_type(x.type)) else False})"
    if not sizes:
        instead = "pass {}, with a value of your choice, or {}"
        return unsupported_contents_error(what, instead, f"{{x}}{fill}", "{x}.drop_null()")
    if not lists and not elements:
        return unsupported_contents_error(what, "pass {}", "{x}.drop_null()")
    what = f"{what} inside its lists"
    complete = 'pyarrow.array([row for row in {x}.to_pylist() if "None" not in str(row)], {x}.type)'
    if lists:
        return unsupported_contents_error(what, "pass {}, without the rows that have nulls", complete)
    one = ".combine_chunks()" if is_of(x, "pyarrow", "ChunkedArray") else ""
    shape = ", ".join(map(str, (-1, *sizes)))
    numbers = f"{{x}}{one}.flatten(recursive=True){fill}.to_numpy(zero_copy_only=False).reshape({shape})"
    without = f" but without its {rows} null rows" if rows else ""
    instead = f"pass {{}}, with a value of your choice{without}; or {{}}, without the rows that have nulls"
    return unsupported_contents_error(what, instead, numbers, complete)
