"""The carrier for Arrow tables, record batches, chunked arrays, fixed-size lists and tensors."""

from __future__ import annotations

import math
import sys
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import NULLS, Carrier, Unread, contents_error, is_of
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError
from arraybridge.host import buffers
from arraybridge.host.protocols import Exported
from arraybridge.reasons import Cause, Reason

_SEPARATE_COLUMNS = Cause(Reason.SEPARATE_COLUMNS)


class Arrow(Carrier):
    """A carrier for tables and record batches of one type, chunked arrays, fixed-size lists and tensors.

    The elements are numbers or booleans. Plain arrays of numbers without nulls are not carriers if they
    export DLPack. Arrays of booleans are carriers, because Arrow stores them as bits (apache/arrow#38472).
    Objects with nulls are carriers only so that `array` can raise an error that suggests code to remove the
    nulls.
    """

    expression = "arraybridge.to_numpy({x})"

    def carries(self, x: Any) -> bool:
        if _is_table(x):
            kinds = x.schema.types
            return bool(kinds) and is_numeric(kinds[0]) and kinds.count(kinds[0]) == len(kinds)
        pyarrow = sys.modules["pyarrow"]
        if not isinstance(x, (pyarrow.Array, pyarrow.ChunkedArray)):  # faster than `is_of`
            return False
        kind = x.type
        element = _element_type(kind)
        if not is_numeric(element):
            return False
        is_plain = element is kind and hasattr(x, "__dlpack__")
        return not is_plain or _is_boolean(kind) or x.null_count > 0

    def array(self, x: Any) -> Any:
        if _is_table(x):
            columns = x.columns
            shared = _join_columns(x, columns, columns[0].type)
            return self._array_of_rows(x) if shared is None else shared
        kind = x.type
        if _is_tensor(kind):
            return self._array_of_tensors(x)
        is_list = isinstance(kind, sys.modules["pyarrow"].FixedSizeListType)
        shared = _view_lists(x) if is_list else _join_columns(x, [x], kind)
        return self._array_of_rows(x) if shared is None else shared

    def _array_of_rows(self, x: Any) -> Any:
        """Return the result of `array` for a table, numbers, or fixed-size lists of numbers."""
        if _is_table(x):
            columns = [_chunks_by_level(column) for column in x.columns]
            element = _element_type(x.schema.types[0])
            shape: tuple[int, ...] = (len(x), len(columns))
        else:
            columns = [_chunks_by_level(x)]
            element = _element_type(x.type)
            shape = (len(x), *_list_sizes(x.type))
        if any(level.null_count for chunks in columns for levels in chunks for level in levels):
            raise _nulls_error(x, columns)
        dtype = np.dtype(element.to_pandas_dtype())
        if not math.prod(shape):
            return np.empty(shape, dtype)
        parts = [[levels[-1] for levels in chunks] for chunks in columns]
        opened = _view_columns(element, parts, shape)
        if isinstance(opened, Cause):
            return Unread(shape, dtype, partial(_join, parts, shape, dtype)), opened
        return opened

    def _array_of_tensors(self, x: Any) -> Any:
        """Return the result of `array` for an array of tensors, which Arrow stores as fixed-size lists."""
        is_chunked = is_of(x, "pyarrow", "ChunkedArray")
        storage = "{x}.cast({x}.type.storage_type)" if is_chunked else "{x}.storage"
        try:
            opened = self._array_of_rows(x.cast(x.type.storage_type) if is_chunked else x.storage)
        except MemoryConversionError as error:
            error.advise_about(storage)
            raise
        if not isinstance(opened, tuple):
            return _shape_tensors(opened, x.type)
        rows, cause = opened
        shape = _shape_tensors(np.empty((0, rows.shape[1])), x.type).shape[1:]
        return Unread((len(x), *shape), rows.dtype, lambda: _shape_tensors(rows[...], x.type)), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        pyarrow = sys.modules["pyarrow"]
        try:
            kind = pyarrow.from_numpy_dtype(array.dtype)
        except pyarrow.ArrowNotImplementedError:
            # Arrow has no complex or ml_dtypes dtypes (apache/arrow#39753).
            return array
        if not is_numeric(kind):
            return array
        if _is_table(x):
            fields = [field.with_type(kind) for field in x.schema]
            columns = [pyarrow.array(np.ascontiguousarray(array[:, i])) for i in range(len(fields))]
            schema = pyarrow.schema(fields, metadata=x.schema.metadata)
            return type(x).from_arrays(columns, schema=schema)
        if _is_tensor(x.type):
            like = _tensors(array, x.type)
        else:
            like = _nest(pyarrow.array(np.ascontiguousarray(array).reshape(-1)), x.type, len(x))
        return pyarrow.chunked_array([like]) if is_of(x, "pyarrow", "ChunkedArray") else like


def _is_table(x: Any) -> bool:
    pyarrow = sys.modules["pyarrow"]
    return isinstance(x, (pyarrow.Table, pyarrow.RecordBatch))


# The functions of pyarrow take longer.
@lru_cache(maxsize=256)
def is_numeric(kind: Any) -> bool:
    """Return whether elements of this type are numbers or booleans."""
    types = sys.modules["pyarrow"].types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_boolean(kind: Any) -> bool:
    return bool(kind.bit_width == 1)  # a third of the time of `pyarrow.types.is_boolean`


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, getattr(sys.modules["pyarrow"], "FixedShapeTensorType", ()))


def _list_types(kind: Any) -> list[Any]:
    """Return the nested types of fixed-size lists in a type, from the outermost to the innermost."""
    types = []
    list_type = sys.modules["pyarrow"].FixedSizeListType
    kind = kind.storage_type if _is_tensor(kind) else kind
    while isinstance(kind, list_type):
        types.append(kind)
        kind = kind.value_type
    return types


def _list_sizes(kind: Any) -> tuple[int, ...]:
    return tuple(each.list_size for each in _list_types(kind))


def _element_type(kind: Any) -> Any:
    lists = _list_types(kind)
    return lists[-1].value_type if lists else kind


# -- read ---------------------------------------------------------------------------------------------


def _view_lists(x: Any) -> np.ndarray | None:
    """Return a view of fixed-size lists; None if they are empty, chunked or booleans, or have nulls."""
    sizes = _list_sizes(x.type)
    if not len(x) or not all(sizes) or hasattr(x, "num_chunks"):
        return None
    levels = _levels(x)
    element = levels[-1]
    if _is_boolean(element.type) or any([level.null_count for level in levels]):  # noqa: C419  # faster
        return None
    view: np.ndarray = element.to_numpy().reshape(len(x), *sizes)
    return view


def _join_columns(x: Any, columns: list[Any], kind: Any) -> Any:
    """Return the result of `Arrow.array` for columns of one chunk of numbers each; None for other columns.

    ``kind`` is the type of all columns.
    """
    if not len(x) or _is_boolean(kind):
        return None
    views = []
    for column in columns:
        if column.null_count or getattr(column, "num_chunks", 1) != 1:
            return None
        views.append(column.to_numpy())
    if len(views) == 1:
        return views[0] if columns[0] is x else views[0].reshape(x.shape)
    shared = _join_adjacent(views)
    if shared is not None:
        return shared
    dtype = views[0].dtype
    return Unread(x.shape, dtype, partial(_stack, views, dtype)), _SEPARATE_COLUMNS


def _stack(columns: list[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    """Return columns as a matrix in new memory, with contiguous columns."""
    memory = buffers.allocate_aligned((len(columns), len(columns[0])), dtype)
    memory[...] = columns
    return memory.T


def _view_columns(element: Any, parts: list[list[Any]], shape: tuple[int, ...]) -> np.ndarray | Cause:
    """Return a view of the chunks of columns, or the reason why they must be copied."""
    if _is_boolean(element):
        return Cause(Reason.PACKED_BITS, source="Arrow")
    if any(len(chunks) != 1 for chunks in parts):
        return Cause(Reason.CHUNKED_STORAGE, source="Arrow")
    views = [chunks[0].to_numpy() for chunks in parts]
    shared = views[0].reshape(shape) if len(views) == 1 else _join_adjacent(views)
    return _SEPARATE_COLUMNS if shared is None else shared


def _chunks_by_level(column: Any) -> list[list[Any]]:
    """Return the arrays at all levels of nested lists for each chunk that is not empty; see `_levels`."""
    return [_levels(chunk) for chunk in getattr(column, "chunks", [column]) if len(chunk)]


def _levels(array: Any) -> list[Any]:
    """Return an array, then the elements of its lists, then the elements of nested lists, and so on.

    ``flatten`` respects a slice of the array and omits its null lists. ``values`` does neither
    (apache/arrow#41672) but is faster. If there are no null lists, ``values`` is therefore used, with the
    same slice.
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
    memory = buffers.allocate_aligned((len(parts), math.prod(shape) // len(parts)), dtype)
    for column, arrays in zip(memory, parts, strict=True):
        start = 0
        for array in arrays:
            column[start : start + len(array)] = array.to_numpy(zero_copy_only=False)
            start += len(array)
    return memory.reshape(shape) if len(parts) == 1 else memory.T


def _join_adjacent(columns: list[np.ndarray]) -> np.ndarray | None:
    """Return one array that shares the memory of adjacent columns; None if they are not adjacent."""
    nbytes = columns[0].nbytes
    for before, after in pairwise(columns):
        if buffers.address(after) - buffers.address(before) != nbytes:
            return None
    first = columns[0].__array_interface__
    interface = {**first, "shape": (len(columns), len(columns[0])), "strides": None}
    return np.asarray(Exported(columns, __array_interface__=interface)).T


def _shape_tensors(rows: np.ndarray, kind: Any) -> np.ndarray:
    """Return rows of elements as tensors, with axis ``i`` at ``permutation[i]`` in memory.

    ``to_numpy_ndarray`` computes wrong strides for some permutations of three axes (pyarrow 26, no issue
    found).
    """
    tensors = rows.reshape(len(rows), *kind.shape)
    order = kind.permutation
    return tensors if order is None else tensors.transpose(0, *[1 + axis for axis in order])


# -- restore ------------------------------------------------------------------------------------------


def _tensors(array: np.ndarray, kind: Any) -> Any:
    """Return an array of tensors with the axes, names and order of the axes of a tensor type."""
    pyarrow = sys.modules["pyarrow"]
    order = kind.permutation
    if order is not None:
        array = array.transpose(0, *[1 + order.index(axis) for axis in range(len(order))])
    elements = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
    own = pyarrow.fixed_shape_tensor(elements.type, kind.shape, kind.dim_names, order)
    lists = pyarrow.FixedSizeListArray.from_arrays(elements, math.prod(kind.shape))
    return pyarrow.ExtensionArray.from_storage(own, lists)


def _nest(elements: Any, kind: Any, rows: int) -> Any:
    """Return the elements in nested lists, with the sizes, names, nullability and metadata of a list type."""
    pyarrow = sys.modules["pyarrow"]
    lists = _list_types(kind)
    for depth in reversed(range(len(lists))):
        each = lists[depth]
        own = pyarrow.list_(each.value_field.with_type(elements.type), each.list_size)
        if each.list_size:
            elements = pyarrow.FixedSizeListArray.from_arrays(elements, type=own)
        else:  # the number of empty lists cannot be derived from the elements (apache/arrow#5906)
            count = rows * math.prod(outer.list_size for outer in lists[:depth])
            elements = pyarrow.array([[]] * count, own)
    return elements


# -- errors -------------------------------------------------------------------------------------------


def _nulls_error(x: Any, columns: list[list[list[Any]]]) -> ArrayNotSupportedError:
    """Return the error for nulls, with code that removes them at the right levels."""
    what = f"an Arrow {type(x).__name__} with nulls"
    rows, lists, elements = _null_counts(columns)
    if _is_table(x):
        return contents_error(what, NULLS, "Pass {}, without the rows that have nulls.", "{x}.drop_null()")
    sizes = _list_sizes(x.type)
    fill = f".fill_null({0 if not _is_boolean(_element_type(x.type)) else False})"
    if not sizes:
        advice = "Pass {}, with a value of your choice, or {}."
        return contents_error(what, NULLS, advice, f"{{x}}{fill}", "{x}.drop_null()")
    if not lists and not elements:
        return contents_error(what, NULLS, "Pass {}.", "{x}.drop_null()")
    what = f"{what} inside its lists"
    complete = 'pyarrow.array([row for row in {x}.to_pylist() if "None" not in str(row)], {x}.type)'
    if lists:
        advice = "Pass {}, without the rows that have nulls."
        return contents_error(what, NULLS, advice, complete)
    one = ".combine_chunks()" if is_of(x, "pyarrow", "ChunkedArray") else ""
    shape = ", ".join(map(str, (-1, *sizes)))
    numbers = f"{{x}}{one}.flatten(recursive=True){fill}.to_numpy(zero_copy_only=False).reshape({shape})"
    without = f" but without its {rows} null rows" if rows else ""
    advice = f"Pass {{}}, with a value of your choice{without}; or {{}}, without the rows that have nulls."
    return contents_error(what, NULLS, advice, numbers, complete)
