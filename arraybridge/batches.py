"""Split nested arrays with a common row axis into parts, and join the results of the parts.

Containers of the same type, keys and length are joined entry by entry. A list with one entry per row in every
part is a row list: its parts are concatenated. The exception is a list of arrays that each have one row per
row of their part. Such lists are joined entry by entry; see `_RowList`. Any other value that is not an array
must be the same object or an equal string in every part. A number in a result must be one of the numbers in
the batch. Other numbers raise an error, because only the function's author knows whether to add, average or
list them.
"""

from __future__ import annotations

import copy
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.errors import CannotSplitError, MemoryConversionError
from arraybridge.formatting import counted
from arraybridge.frameworks import registry, sparse_rows
from arraybridge.frameworks.base import Framework
from arraybridge.trees import (
    ARRAY,
    TREE,
    Container,
    additional_attributes,
    aliases,
    arrays_of,
    difference,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
    map_children,
    open_container,
    outline,
)


class fixed:  # noqa: N801 - lowercase because it is used like a function, as slice is
    """A wrapper for an argument that every part receives unsplit, even if its length is the number of rows.

    It also works inside containers. If a function returns `fixed`, the value of the first part is used.

    >>> import numpy as np
    >>> from arraybridge import split_and_retry
    >>> x, weights = np.ones((4, 4)), np.eye(4)
    >>> split_and_retry(np.matmul, (x, fixed(weights))).shape
    (4, 4)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"fixed({self.value!r})"


def rows(tree: Any, axis: int) -> int | None:
    """Return the size of ``axis`` in the first array that has this axis; None if no array has it."""
    arrays = (x for x in leaves_of(tree) if (kinds.get(type(x)) or kind_of(x)) is ARRAY)
    shapes = (owner.shape(data) for owner, data in map(source_of, arrays))
    return next((shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)), None)


def plain(tree: Any) -> Any:
    """Return the tree with each `fixed` replaced by its value; the same object if it contains none."""
    for x in tree if type(tree) is tuple else (tree,):
        if kinds.get(type(x)) is not ARRAY:
            break
    else:
        return tree  # the common case: the tree contains only arrays
    return map_arrays(tree, _value, also=fixed)


def _value(x: Any) -> Any:
    return x.value if type(x) is fixed else x


def part(tree: Any, axis: int, count: int, start: int, stop: int, place: str = "") -> Any:
    """Return the tree with rows ``start`` to ``stop`` of each array and row list that has ``count`` rows.

    Everything else is returned whole, and values marked with `fixed` are unwrapped. ``place`` is the path of
    the tree in a larger one, for messages.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind is ARRAY:
        if not _has_rows(tree, axis, count):
            return tree
        try:
            return _slice_array(tree, axis, start, stop)
        except MemoryConversionError as error:
            if place:
                error.add_path(place)
            raise
    if type(tree) is fixed:
        return tree.value
    if kind is not TREE:
        return tree

    def part_of_child(child: Any, at: str) -> Any:
        return part(child, axis, count, start, stop, place + at)

    if _is_row_list(tree, axis, count):
        items = list(list.__iter__(tree))[start:stop]
        if type(tree) is list:
            return items
        opened = open_container(tree)
        return opened.with_items(items, [part_of_child(value, at) for at, value in opened.fields().items()])
    return map_children(tree, part_of_child)


def _slice_array(array: Any, axis: int, start: int, stop: int) -> Any:
    owner, data = source_of(array)
    if owner.sparse.layout(data):
        return sparse_rows.slice_axis(owner, data, axis, start, stop)
    return owner.batching.slice_axis(data, axis, start, stop)


def split_places(tree: Any, axis: int, count: int) -> list[str]:
    """Return the paths of the arrays and row lists that `part` splits, such as ``"['x'].image"``."""
    kind = kinds.get(type(tree)) or kind_of(tree)
    if type(tree) is fixed:
        return []
    if kind is ARRAY:
        return [""] if _has_rows(tree, axis, count) else []
    if kind is not TREE:
        return []
    is_row_list = _is_row_list(tree, axis, count)
    places = [""] if is_row_list else []

    def collect(child: Any, at: str) -> Any:
        places.extend(at + inner for inner in split_places(child, axis, count))
        return child

    if is_row_list:
        for at, value in open_container(tree).fields().items():
            collect(value, at)
    else:
        map_children(tree, collect)
    return places


def _has_rows(array: Any, axis: int, count: int) -> bool:
    owner, data = source_of(array)
    shape = owner.shape(data)
    return bool(-len(shape) <= axis < len(shape) and shape[axis] == count)


def _is_row_list(tree: Any, axis: int, count: int) -> bool:
    """Return whether a container is a list of non-arrays with one entry per row of the batch.

    If a list of containers contains arrays with that many rows, the arrays are split instead of the list.
    """
    if not issubclass(type(tree), list) or len(tree) != count or count == 0:
        return False
    for entry in tree:
        kind = kinds.get(type(entry)) or kind_of(entry)
        if kind is ARRAY or type(entry) is fixed:
            return False
        if kind is TREE and any(_has_rows(x, axis, count) for x in arrays_of(entry)):
            return False
    return True


class Joined:
    """The results of the parts of a batch, joined into one result.

    Arrays are copied into one output array, which is allocated when the first part is added. A function may
    therefore return the same buffer for every part. Immutable and sparse arrays, instances of subclasses, and
    arrays that require gradients are stored per part and concatenated at the end.

    Whether a list is a row list is decided at the end, from the structure of the results and the numbers of
    rows of all parts: see `_RowList`.

    Args:
        rows: The number of rows of the whole batch.
        axis: The axis of the rows in the results; negative axes count from the end.
        batch: The input. Its numbers and lists may be part of the result.
        noun: The name of a part in messages.
        row_by_row: Whether to reject arrays that do not have one row per row of their part.
    """

    def __init__(
        self, rows: int, axis: int, batch: Any, noun: str = "part", *, row_by_row: bool = True
    ) -> None:
        self.rows = rows
        self.axis = axis
        self.batch = batch
        self.noun = noun
        self.row_by_row = row_by_row
        #: The number of input rows whose results have been joined.
        self.done = 0
        self._root: _Node = _Value(self, None, "")

    def add(self, result: Any, count: int) -> None:
        """Join the result of the next ``count`` rows. It can be called again after an out-of-memory error.

        Raises:
            CannotSplitError: If the result cannot be joined to the previous results.
        """
        root = self._root if self.done else self.node(result, count, "")
        root.put(result, self.done, count)
        self._root = root
        self.done += count

    def result(self) -> Any:
        """Return the joined result.

        Raises:
            CannotSplitError: If a list could be either a list of rows or a list of results.
        """
        return self._root.result()

    def node(self, first: Any, count: int, place: str, *, as_rows: bool = True) -> _Node:
        """Return a node for the values at one position in the results; ``first`` is the first value.

        With ``as_rows=False``, ``first`` is joined entry by entry even if it has one entry per row.
        """
        kind = kind_of(first)
        if kind is ARRAY:
            self._check_is_array(first, place)
            return _Column(self, first, place)
        if kind is not TREE or self._is_input_list(first):
            return _Value(self, first, place)
        if as_rows and _has_entry_per_row(first, count):
            return _RowList(self, first, count, place)
        return _Structure(self, first, count, place)

    def metadata(self, x: Any, place: str) -> tuple[Framework, Any, dict[str, Any]]:
        """Return the framework of ``x``, its array, and the properties that must be equal in all parts."""
        owner, data = source_of(x)
        shape = owner.shape(data)
        axis = self.axis
        if not -len(shape) <= axis < len(shape):
            fix = "" if shape else _REDUCE_ROWS
            raise self.error(place, f"an array of shape {shape} does not have axis {axis}", fix)
        across = [extent for i, extent in enumerate(shape) if i != axis % len(shape)]
        return (
            owner,
            data,
            {
                "frameworks": owner.name,
                # A masked array would lose its mask if it were joined with a plain array.
                "classes": type(data).__name__,
                "layouts": owner.sparse.layout(data),
                "dtypes": owner.dtype_name(data),
                "devices": owner.devices.device_of(data),
                "shapes": across,
            },
        )

    def error(self, place: str, cause: str, fix: str = "") -> CannotSplitError:
        """Return the error for results that cannot be joined."""
        at = f" at {place}" if place else ""
        fix = fix or (
            "Return one row per input row, or arraybridge.fixed(value) for a value that all parts share."
        )
        parts = "microbatches" if self.noun == "microbatch" else f"{self.noun}s"
        return CannotSplitError(
            f"the results of the {parts} cannot be joined{at}: {cause}.",
            reason=f"results cannot be joined{at}: {cause}",
            advice=fix,
        )

    def _check_is_array(self, x: Any, place: str) -> None:
        if carrier_of(x) is not None:
            name = type(x).__qualname__
            raise self.error(
                place, f"a {name} contains more than an array", "Return the array, such as x.values."
            )

    def _is_input_list(self, x: Any) -> bool:
        """Return whether ``x`` is a list object of the batch, which every part received unsplit."""
        return issubclass(type(x), list) and _contains(self.batch, x)


#: The advice if the result of a part is a number, such as a mean.
_REDUCE_ROWS = (
    "Return one row per input row and reduce the joined rows, or return arraybridge.fixed(value) if all"
    " values are equal."
)
#: The advice if the results of the parts differ in more than their rows.
_SAME_STRUCTURE = "Return the same structure for every part, such as a dict with the same keys."


def _has_entry_per_row(x: Any, count: int) -> bool:
    return issubclass(type(x), list) and len(x) == count and kind_of(x) is TREE


def _contains(tree: Any, wanted: Any) -> bool:
    """Return whether ``wanted`` is one of the containers in ``tree``."""
    if tree is wanted:
        return True
    return kind_of(tree) is TREE and any(_contains(child, wanted) for child in open_container(tree).children)


class _Node:
    """The values at the same position in the results of all parts."""

    __slots__ = ("of", "place")

    def __init__(self, of: Joined, place: str) -> None:
        self.of = of
        self.place = place

    def put(self, x: Any, start: int, count: int) -> None:
        """Add the value of the part with rows ``start`` to ``start + count``."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the joined value."""
        raise NotImplementedError


class _Value(_Node):
    """A value that is not an array and must be the same in every part."""

    __slots__ = ("value",)

    def __init__(self, of: Joined, first: Any, place: str) -> None:
        super().__init__(of, place)
        self.value = first

    def put(self, x: Any, start: int, count: int) -> None:
        value = self.value
        same = x is value or (type(x) is type(value) and issubclass(type(x), str) and x == value)
        if _is_number(value):  # `is` is not enough, because Python caches small integers
            same = same and any(x is y for y in leaves_of(self.of.batch))
        if not (same or type(x) is type(value) is fixed):
            if _is_number(value) and _is_number(x):
                cause = f"a separate number in each part, such as {reprlib.repr(x)}"
                raise self.of.error(self.place, cause, _REDUCE_ROWS)
            raise self.of.error(self.place, f"different values ({_named(value)} and {_named(x)})")

    def result(self) -> Any:
        return _value(self.value)


def _is_number(x: Any) -> bool:
    return issubclass(type(x), (numbers.Number, np.generic))


class _Column(_Node):
    """The arrays at one position, in one output array or in a dict keyed by the first row of each part."""

    __slots__ = ("buffer", "parts", "properties")

    def __init__(self, of: Joined, first: Any, place: str) -> None:
        super().__init__(of, place)
        owner, data, self.properties = of.metadata(first, place)
        shape = list(owner.shape(data))
        shape[of.axis] = of.rows
        is_sparse = bool(self.properties["layouts"])
        self.buffer = None if is_sparse else owner.batching.output_buffer(data, tuple(shape))
        self.parts: dict[int, Any] = {}

    def put(self, x: Any, start: int, count: int) -> None:
        of = self.of
        if (kinds.get(type(x)) or kind_of(x)) is not ARRAY:
            cause = f"different values (an array and {_named(x)})"
            raise of.error(self.place, cause, _SAME_STRUCTURE)
        owner, data, properties = of.metadata(x, self.place)
        for what, value in properties.items():
            if value != self.properties[what]:
                cause = f"different {what} ({self.properties[what]} and {value})"
                raise of.error(self.place, cause, f"Return arrays of the same {what} for every part.")
        rows = owner.shape(data)[of.axis]
        if rows != count and of.row_by_row:
            raise of.error(
                self.place, f"an array has {counted(rows, 'row')} for {counted(count, 'input row')}"
            )
        if rows != count and self.buffer is not None:  # the final number of rows is unknown
            self.parts[0] = owner.batching.slice_axis(self.buffer, of.axis, 0, start)
            self.buffer = None
        if self.buffer is None:
            self.parts[start] = snapshot(x)
            return
        along = (slice(None),) * (of.axis % len(owner.shape(data)))
        with owner.runtime.device_guard(self.buffer):
            self.buffer[*along, start : start + count] = data

    def result(self) -> Any:
        if self.buffer is not None:
            return self.buffer
        parts = list(self.parts.values())
        owner, data = source_of(parts[0])
        if owner.sparse.layout(data):
            return sparse_rows.concatenate(owner, parts, self.of.axis)
        return owner.batching.concatenate(parts, self.of.axis)


class _Attributes:
    """The attributes of a container other than its children. They must be the same in every part.

    Attributes that refer to a child are an exception: in the result, they refer to the joined child. If the
    children are rows, which differ between parts, these attributes are compared like the others.
    """

    __slots__ = ("aliases", "are_rows", "of", "place", "values")

    def __init__(
        self, of: Joined, first: Any, opened: Container, place: str, *, are_rows: bool = False
    ) -> None:
        self.of = of
        self.place = place
        self.are_rows = are_rows
        self.aliases = {} if are_rows else aliases(first, opened)
        self.values = {
            name: _Value(of, value, f"{place}.{name}")
            for name, value in additional_attributes(first, opened, with_aliases=are_rows).items()
        }

    def put(self, x: Any, opened: Container) -> None:
        """Compare the attributes with those of another part's container; raise an error if they differ."""
        if not self.are_rows and aliases(x, opened) != self.aliases:
            raise self.of.error(self.place, "attributes that refer to different items", _SAME_STRUCTURE)
        values = additional_attributes(x, opened, with_aliases=self.are_rows)
        different = sorted(map(str, values.keys() ^ self.values.keys()))
        if different:
            raise self.of.error(self.place, f"only some parts have the attribute {', '.join(different)}")
        for name, value in values.items():
            self.values[name].put(value, 0, 0)


class _Structure(_Node):
    """Containers of the same structure, which are joined by key."""

    __slots__ = ("extra_attributes", "first", "nodes", "opened")

    def __init__(self, of: Joined, first: Any, count: int, place: str) -> None:
        super().__init__(of, place)
        self.first = first
        self.opened = open_container(first)
        self.extra_attributes = _Attributes(of, first, self.opened, place)
        pairs = zip(self.opened.names, self.opened.children, strict=True)
        self.nodes = {
            name: of.node(child, count, place + self.opened.place(i)) for i, (name, child) in enumerate(pairs)
        }

    def put(self, x: Any, start: int, count: int) -> None:
        opened = open_container(x) if kind_of(x) is TREE else None
        if opened is None or _common_properties(x, opened) != _common_properties(self.first, self.opened):
            cause = f"different structures ({difference(self.first, x)})"
            raise self.of.error(self.place, cause, _SAME_STRUCTURE)
        self.extra_attributes.put(x, opened)
        for name, child in zip(opened.names, opened.children, strict=True):
            self.nodes[name].put(child, start, count)

    def result(self) -> Any:
        return self.opened.rebuild([node.result() for node in self.nodes.values()])


class _RowList(_Node):
    """Lists that have had one entry per row in every part so far.

    As soon as the list of a part does not have one entry per row, or has another type or other fields, all
    lists are joined entry by entry instead of being concatenated. Lists of arrays that each have one row per
    row of their part are also joined entry by entry. Any other lists that could be joined in both ways are
    rejected at the end. The choice depends only on structures and row counts, never on values.

    The fields of the lists are joined, and their attributes are compared, like those of a `_Structure`.
    """

    __slots__ = ("extra_attributes", "fields", "parts", "structure")

    def __init__(self, of: Joined, first: Any, count: int, place: str) -> None:
        super().__init__(of, place)
        opened = open_container(first)
        self.extra_attributes = _Attributes(of, first, opened, place, are_rows=True)
        self.fields = {at: of.node(value, count, place + at) for at, value in opened.fields().items()}
        #: The list of each part and its number of rows, keyed by the first row of the part.
        self.parts: dict[int, tuple[Any, int]] = {}
        self.structure: _Node | None = None

    def put(self, x: Any, start: int, count: int) -> None:
        if self.structure is None and _has_entry_per_row(x, count) and self._has_type(x):
            opened = open_container(x)
            fields = opened.fields()
            if fields.keys() == self.fields.keys():
                self.extra_attributes.put(x, opened)
                for at, value in fields.items():
                    self.fields[at].put(value, start, count)
                self.parts[start] = map_arrays(x, _snapshot_entry), count
                return
        if self.structure is None:
            self.structure = self._by_entry()
        self.structure.put(x, start, count)

    def _has_type(self, x: Any) -> bool:
        return all(type(before) is type(x) for before, _ in self.parts.values())

    def _by_entry(self) -> _Node:
        """Return a node that joins the lists so far entry by entry."""
        first, count = next(iter(self.parts.values()))
        structure = self.of.node(first, count, self.place, as_rows=False)
        for start, (x, rows) in self.parts.items():
            structure.put(x, start, rows)
        self.parts = {}
        return structure

    def result(self) -> Any:
        if self.structure is not None:
            return self.structure.result()
        lists, counts = zip(*self.parts.values(), strict=True)
        if _joins_by_entry(lists, counts, self.of.axis):
            if all(kind_of(entry) is ARRAY for entry in lists[0]):
                return self._by_entry().result()
            raise self.of.error(
                self.place,
                f"a list of length {len(lists[0])} may contain one entry per row or several results",
                "For several results, return a tuple.",
            )
        items = [plain(entry) for one in lists for entry in one]
        fields = [node.result() for node in self.fields.values()]
        return open_container(lists[0]).with_items(items, fields)


def _joins_by_entry(lists: Sequence[Any], counts: Sequence[int], axis: int) -> bool:
    """Return whether lists with one entry per row can also be joined entry by entry."""
    if len(set(counts)) > 1:  # lists of different lengths cannot be joined entry by entry
        return False
    return _batched(lists, counts, axis, top=True) is True


def _batched(values: Sequence[Any], counts: Sequence[int], axis: int, *, top: bool = False) -> bool | None:
    """Return whether all arrays and lists in the values of the parts have one row per row of their part.

    None means that the values contain neither arrays nor lists of rows, so the answer is unknown. With
    ``top``, only the entries of the values count, because the values themselves are known row lists.
    """
    of_kind = {kind_of(x) for x in values}
    if of_kind.isdisjoint((ARRAY, TREE)):
        return None
    if len(of_kind) > 1:
        return False
    if ARRAY in of_kind:
        return _are_batched(values, counts, axis)
    if not top and all(map(_has_entry_per_row, values, counts)):
        return True
    return _have_batched_children(values, counts, axis, without_fields=top)


def _have_batched_children(
    values: Sequence[Any], counts: Sequence[int], axis: int, *, without_fields: bool
) -> bool | None:
    """Return the result of `_batched` for containers, by comparing their children of the same name."""
    opened = [open_container(x) for x in values]
    sorts = list(map(_common_properties, values, opened))
    if any(sort != sorts[0] for sort in sorts):
        return False
    by_name = [dict(zip(one.names, one.children, strict=True)) for one in opened]
    names = list(opened[0].names)
    if without_fields:  # the fields of a list are joined in both cases
        del names[len(names) - len(opened[0].fields()) :]
    found = {_batched([one[name] for one in by_name], counts, axis) for name in names}
    if False in found:
        return False
    return True if True in found else None


def _are_batched(arrays: Sequence[Any], counts: Sequence[int], axis: int) -> bool:
    """Return whether each array has one row per row of its part, and all can be concatenated."""
    first: Any = None
    for x, count in zip(arrays, counts, strict=True):
        owner, data = source_of(x)
        shape = owner.shape(data)
        if not -len(shape) <= axis < len(shape) or shape[axis] != count:
            return False
        one = owner.name, owner.dtype_name(data), shape
        first = first or one
        if one != first:
            return False
    return True


def _common_properties(tree: Any, opened: Any) -> tuple[Any, ...]:
    """Return the properties of a container that must be equal in all parts."""
    return type(tree), set(opened.names), opened.extra


def _named(x: Any) -> str:
    if kind_of(x) is ARRAY:
        return "an array"
    is_short = issubclass(type(x), (str, bytes)) or _is_number(x)
    return f"{outline(x)}, {reprlib.repr(x)}" if is_short else outline(x)


def _snapshot_entry(x: Any) -> Any:
    """Return an entry of a row list, copied if later writes to its buffers could change it."""
    _, data = source_of(x)
    if carrier_of(x) is None:
        return snapshot(x) if data is x else x
    if registry.find_owner(data) is None:  # such as an image or a file, whose values are read later
        return x
    try:
        return copy.deepcopy(x)
    except Exception:  # noqa: BLE001  # __deepcopy__ may raise anything; memoryview cannot be copied
        return x


def snapshot(x: Any) -> Any:
    """Return the array if it is immutable or requires gradients, otherwise a copy."""
    owner, data = source_of(x)
    if owner.mutable:
        return data if owner.autodiff.requires_grad(data) else owner.copy(data)
    # This returns the current value of a tf.Variable, as recorded by the gradient tape.
    return owner.autodiff.prepare(data)
