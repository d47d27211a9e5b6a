"""Split nested arrays with a common row axis into parts, and join the results of the parts.

Containers of the same type, keys and length are joined entry by entry. A list with one entry per row in every
part is a row list: its parts are concatenated. A list that could be joined in both ways raises an error. Any
other value that is not an array must be the same object or an equal string in every part. A number in a
result must be one of the numbers in the batch. Other numbers raise an error, because only the function's
author knows whether to add, average or list them.
"""

from __future__ import annotations

import copy
import numbers
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.errors import CannotSplitError
from arraybridge.formatting import format_count
from arraybridge.interface import registry, sparse_rows
from arraybridge.interface.framework import Framework
from arraybridge.outcome import ask
from arraybridge.trees import (
    ARRAY,
    LEAF,
    TREE,
    Container,
    arrays_of,
    difference,
    is_registered,
    kind_of,
    kinds,
    map_arrays,
    open_container,
    outline,
    own_attributes,
)


class fixed:  # noqa: N801  # lowercase because it is used like a function, as slice is
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


def plain(tree: Any) -> Any:
    """Return the tree with each `fixed` replaced by its value; the same object if it contains none."""
    try:
        for x in tree if type(tree) is tuple else (tree,):
            if kinds.get(type(x)) is not ARRAY:
                break
        else:
            return tree  # the common case: the tree contains only arrays
    except TypeError:  # a class is unhashable
        pass
    return map_arrays(tree, _value, also=fixed)


def _value(x: Any) -> Any:
    return x.value if type(x) is fixed else x


# -- splitting ---------------------------------------------------------------------------------------


def rows(leaves: Sequence[Any], axis: int) -> int | None:
    """Return the size of ``axis`` in the first array that has this axis; None if no array has it."""
    for x in leaves:
        if kind_of(x) is ARRAY:
            shape = _shape(x)
            if -len(shape) <= axis < len(shape):
                return shape[axis]
    return None


def part(tree: Any, axis: int, count: int, start: int, stop: int) -> Any:
    """Return the tree with rows ``start`` to ``stop`` of each array and row list that has ``count`` rows.

    Everything else is returned whole, and values marked with `fixed` are unwrapped.
    """

    def is_row_list(x: Any) -> bool:
        return issubclass(type(x), list) and _is_row_list(x, axis, count)

    def cut(x: Any) -> Any:
        if type(x) is fixed:
            return x.value
        if kind_of(x) is TREE:
            return _part_of_row_list(x, axis, count, start, stop)
        owner, data = source_of(x)
        if not _has_rows(owner.shape(data), axis, count):
            return x
        if owner.sparse.layout(data):
            return sparse_rows.slice_axis(owner, data, axis, start, stop)
        return owner.batching.slice_axis(data, axis, start, stop)

    return map_arrays(tree, cut, also=fixed, is_whole=is_row_list)


def _part_of_row_list(x: Any, axis: int, count: int, start: int, stop: int) -> Any:
    items = list(list.__iter__(x))[start:stop]
    if type(x) is list:
        return items
    opened = open_container(x)
    fields = [part(field, axis, count, start, stop) for field in opened.children[count:]]
    return opened.rebuild([*items, *fields])


def split_places(tree: Any, axis: int, count: int, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each array and row list that `part` splits, with its place, such as ``"['x'].image"``."""
    kind = kind_of(tree)
    if kind is ARRAY:
        if _has_rows(_shape(tree), axis, count):
            yield place, tree
    elif kind is TREE:
        opened = open_container(tree)
        skip = 0
        if issubclass(type(tree), list) and _is_row_list(tree, axis, count):
            yield place, tree
            skip = count
        for i, child in enumerate(opened.children):
            if i >= skip:
                yield from split_places(child, axis, count, place + opened.place(i))


def coincidences(split: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the places of those arrays and lists of numbers that may be split only by chance.

    The shape of such an array also fits the last axes of a split array with more axes: three channel means
    have as many rows as a batch of three images. ``split`` has the places and values of `split_places`.
    """
    shapes = []
    for place, x in split:
        if kind_of(x) is ARRAY:
            shapes.append((place, _shape(x)))
        elif all(isinstance(entry, numbers.Number) for entry in x):
            shapes.append((place, (len(x),)))
    largest = max((shape for _, shape in shapes), key=len, default=())
    return [place for place, shape in shapes if _fits_last_axes(shape, largest)]


def _fits_last_axes(shape: tuple[int, ...], larger: tuple[int, ...]) -> bool:
    """Return whether an array can be broadcast to the last axes of an array that has more axes."""
    last = larger[len(larger) - len(shape) :]
    return len(shape) < len(larger) and all(a in (1, b) for a, b in zip(shape, last, strict=True))


def _shape(array: Any) -> tuple[int, ...]:
    owner, data = source_of(array)
    return owner.shape(data)


def _has_rows(shape: tuple[int, ...], axis: int, count: int) -> bool:
    return -len(shape) <= axis < len(shape) and shape[axis] == count


def _is_row_list(x: list[Any], axis: int, count: int) -> bool:
    """Return whether a list of the batch has one entry per row, and no entry is an array.

    If a list of containers contains arrays with that many rows, the arrays are split instead of the list.
    """
    if len(x) != count or count == 0:
        return False
    for entry in x:
        kind = kind_of(entry)
        if kind is ARRAY or type(entry) is fixed:
            return False
        if kind is TREE and any(_has_rows(_shape(inner), axis, count) for inner in arrays_of(entry)):
            return False
    return True


# -- joining -----------------------------------------------------------------------------------------


class Joined:
    """The results of the parts of a batch, joined into one result.

    Arrays are copied into one output array, which is allocated when the first part is added. A function may
    therefore return the same buffer for every part. Immutable and sparse arrays, arrays of text, instances of
    subclasses, and arrays that require gradients are stored per part and concatenated at the end.

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
        #: The number of input rows whose results have been joined.
        self.done = 0
        self._joining = _Joining(rows, axis, batch, noun, row_by_row)
        self._root: _Node | None = None

    def add(self, result: Any, count: int) -> None:
        """Join the result of the next ``count`` rows. It can be called again after an out-of-memory error.

        Raises:
            CannotSplitError: If the result cannot be joined to the previous results.
        """
        root = self._root or self._joining.node(result, count, "")
        root.put(result, self.done, count)
        self._root = root
        self.done += count

    def result(self) -> Any:
        """Return the joined result.

        Raises:
            CannotSplitError: If a list could be either a list of rows or a list of results.
        """
        return self._root and self._root.result()


@dataclass(frozen=True, slots=True, eq=False)
class _Joining:
    """The arguments of a `Joined`, for its nodes. It refers to no node, so there is no reference cycle."""

    rows: int
    axis: int
    batch: Any
    noun: str
    row_by_row: bool

    def node(self, first: Any, count: int, place: str) -> _Node:
        """Return a node for the values at one position in the results; ``first`` is the first value."""
        kind = kind_of(first)
        if kind is ARRAY:
            return _Column(self, place)
        if kind is LEAF or self._is_input_list(first):
            return _Value(self, place, first)
        if _has_entry_per_row(first, count):
            return _RowList(self, place, type(first))
        return _Structure(self, first, count, place)

    def open(self, x: Any, place: str) -> Container:
        """Return one level of a container in a result.

        Raises:
            CannotSplitError: If it is a list or tuple with attributes, because the attributes of the parts
                may differ.
        """
        opened = open_container(x)
        is_subclass = issubclass(type(x), (list, tuple)) and type(x) not in (list, tuple)
        if is_subclass and not is_registered(x):  # named tuples count as registered
            fields = [str(name) for name in opened.names if type(name) is not int]
            for name in (*fields, *own_attributes(opened)):
                cause = f"a {type(x).__qualname__} has items and the attribute {name}"
                raise self.error(place, cause, "Return a dict or a dataclass.")
        return opened

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
    """Return whether a result may be a row list. A list with a value that all parts share is not one."""
    is_list = issubclass(type(x), list) and len(x) == count and kind_of(x) is TREE
    return is_list and fixed not in map(type, x)


def _contains(tree: Any, wanted: Any) -> bool:
    """Return whether ``wanted`` is one of the containers or leaves in ``tree``."""
    tree = _value(tree)
    if tree is wanted:
        return True
    return kind_of(tree) is TREE and any(_contains(child, wanted) for child in open_container(tree).children)


@dataclass(slots=True, eq=False)
class _Node:
    """The values at the same position in the results of all parts."""

    of: _Joining
    place: str

    def put(self, x: Any, start: int, count: int) -> None:
        """Add the value of the part with rows ``start`` to ``start + count``."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the joined value."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Value(_Node):
    """A value that is not an array and must be the same in every part."""

    value: Any

    def put(self, x: Any, start: int, count: int) -> None:
        value = self.value
        same = x is value or (type(x) is type(value) and issubclass(type(x), str) and x == value)
        if _is_number(value):  # `is` is not enough, because Python caches small integers
            same = same and _contains(self.of.batch, x)
        if not (same or type(x) is type(value) is fixed):
            if _is_number(value) and _is_number(x):
                cause = f"a separate number in each part, such as {reprlib.repr(x)}"
                raise self.of.error(self.place, cause, _REDUCE_ROWS)
            raise self.of.error(self.place, f"different values ({_outline_of(value)} and {_outline_of(x)})")

    def result(self) -> Any:
        return _value(self.value)


def _is_number(x: Any) -> bool:
    return issubclass(type(x), (numbers.Number, np.generic))


@dataclass(slots=True, eq=False)
class _Column(_Node):
    """The arrays at one position, in one output array or in a dict keyed by the first row of each part."""

    properties: dict[str, Any] | None = None
    buffer: Any = None
    parts: dict[int, Any] = field(default_factory=dict)

    def put(self, x: Any, start: int, count: int) -> None:
        of = self.of
        owner, data, shape = self._open(x)
        properties = _common_properties(owner, data, shape, of.axis)
        rows = shape[of.axis]
        if rows != count and of.row_by_row:
            raise of.error(
                self.place, f"an array has {format_count(rows, 'row')} for {format_count(count, 'input row')}"
            )
        if self.properties is None:
            if rows == count and not properties["layouts"]:
                whole = list(shape)
                whole[of.axis] = of.rows
                self.buffer = owner.batching.output_buffer(data, tuple(whole))
            self.properties = properties
        elif properties != self.properties:
            self._raise_difference(properties)
        if rows != count and self.buffer is not None:  # the final number of rows is unknown
            self.parts[0] = owner.batching.slice_axis(self.buffer, of.axis, 0, start)
            self.buffer = None
        if self.buffer is None:
            self.parts[start] = snapshot(x)
            return
        along = (slice(None),) * (of.axis % len(shape))
        with owner.runtime.device_guard(self.buffer):
            self.buffer[*along, start : start + count] = data

    def _open(self, x: Any) -> tuple[Framework, Any, tuple[int, ...]]:
        """Return the framework of ``x``, its array and its shape, which has the axis of the rows."""
        of = self.of
        if kind_of(x) is not ARRAY:
            raise of.error(self.place, f"different values (an array and {_outline_of(x)})", _SAME_STRUCTURE)
        if carrier_of(x) is not None:
            cause = f"a {type(x).__qualname__} contains more than an array"
            raise of.error(self.place, cause, "Return the array, such as x.values.")
        owner, data = source_of(x)
        shape = owner.shape(data)
        if not -len(shape) <= of.axis < len(shape):
            fix = "" if shape else _REDUCE_ROWS
            raise of.error(self.place, f"an array of shape {shape} does not have axis {of.axis}", fix)
        return owner, data, shape

    def _raise_difference(self, properties: dict[str, Any]) -> None:
        for what, before in (self.properties or {}).items():
            if properties[what] != before:
                cause = f"different {what} ({before} and {properties[what]})"
                raise self.of.error(self.place, cause, f"Return arrays of the same {what} for every part.")

    def result(self) -> Any:
        if self.buffer is not None:
            return self.buffer
        parts = list(self.parts.values())
        owner, data = source_of(parts[0])
        if owner.sparse.layout(data):
            return sparse_rows.concatenate(owner, parts, self.of.axis)
        return owner.batching.concatenate(parts, self.of.axis)


def _common_properties(owner: Framework, data: Any, shape: tuple[int, ...], axis: int) -> dict[str, Any]:
    """Return the properties of an array that must be equal in all parts."""
    across = list(shape)
    del across[axis]
    return {
        "frameworks": owner.name,
        # A masked array would lose its mask if it were joined with a plain array (numpy/numpy#18675).
        "classes": type(data).__name__,
        "layouts": owner.sparse.layout(data),
        "dtypes": owner.batching.common_dtype(data),
        "devices": owner.devices.device_of(data),
        "shapes": across,
    }


class _Structure(_Node):
    """Containers of the same structure, which are joined by key. Their attributes are compared."""

    __slots__ = ("attributes", "nodes", "opened")

    def __init__(self, of: _Joining, first: Any, count: int, place: str) -> None:
        super().__init__(of, place)
        self.opened = of.open(first, place)
        self.nodes = {
            name: of.node(child, count, place + self.opened.place(i))
            for i, (name, child) in enumerate(zip(self.opened.names, self.opened.children, strict=True))
        }
        self.attributes = own_attributes(self.opened)

    def put(self, x: Any, start: int, count: int) -> None:
        opened = self.of.open(x, self.place) if kind_of(x) is TREE else None
        if opened is None or opened.structure() != self.opened.structure():
            cause = f"different structures ({difference(self.opened.tree, x)})"
            raise self.of.error(self.place, cause, _SAME_STRUCTURE)
        for name, child in zip(opened.names, opened.children, strict=True):
            self.nodes[name].put(child, start, count)
        attributes = own_attributes(opened)
        different = sorted(map(str, attributes.keys() ^ self.attributes.keys()))
        if different:
            cause = f"only some parts have the attribute {', '.join(different)}"
            raise self.of.error(self.place, cause)
        for name, value in attributes.items():
            _Value(self.of, f"{self.place}.{name}", self.attributes[name]).put(value, start, count)

    def result(self) -> Any:
        return self.opened.rebuild([node.result() for node in self.nodes.values()])


@dataclass(slots=True, eq=False)
class _RowList(_Node):
    """Lists that have had one entry per row in every part so far.

    As soon as the list of a part does not have one entry per row, or has another type, all lists are joined
    entry by entry. If all lists have one entry per row, they are concatenated at the end, unless they could
    be joined entry by entry as well. Then they are joined entry by entry if the entries are arrays of
    different dtypes or shapes, and rejected otherwise. The choice depends only on structures and row counts,
    never on values.
    """

    cls: type
    #: The list of each part and its number of rows, keyed by the first row of the part.
    parts: dict[int, tuple[Any, int]] = field(default_factory=dict)
    structure: _Structure | None = None

    def put(self, x: Any, start: int, count: int) -> None:
        if self.structure is None and type(x) is self.cls and _has_entry_per_row(x, count):
            self.of.open(x, self.place)
            self.parts[start] = map_arrays(x, _snapshot_entry), count
            return
        if self.structure is None:
            self.structure = self._join_by_entry()
            self.parts = {}
        self.structure.put(x, start, count)

    def _join_by_entry(self) -> _Structure:
        """Return a node with the lists so far, which are joined entry by entry."""
        first, rows = next(iter(self.parts.values()))
        structure = _Structure(self.of, first, rows, self.place)
        for start, (x, count) in self.parts.items():
            structure.put(x, start, count)
        return structure

    def result(self) -> Any:
        if self.structure is not None:
            return self.structure.result()
        lists, counts = zip(*self.parts.values(), strict=True)
        first = lists[0]
        axis = self.of.axis
        if len(set(counts)) == 1 and _are_results(lists, counts, axis):
            if all(kind_of(entry) is ARRAY for entry in first) and not _are_alike(first, axis):
                return self._join_by_entry().result()
            raise self.of.error(
                self.place,
                f"a list of length {len(first)} may contain one entry per row or several results",
                "For several results, return a tuple; for one row each, a stacked array.",
            )
        items = [plain(entry) for one in lists for entry in one]
        return items if self.cls is list else open_container(first).rebuild(items)


def _are_results(values: Sequence[Any], counts: Sequence[int], axis: int) -> bool | None:
    """Return whether the values of the parts, containers of one type, could be joined entry by entry.

    All arrays and lists in them have one row per row of their part. None means that the values contain
    neither, so the answer is unknown.
    """
    opened = [open_container(x) for x in values]
    if any(one.structure() != opened[0].structure() for one in opened):
        return False
    by_name = [dict(zip(one.names, one.children, strict=True)) for one in opened]
    answers = {_is_result([one[name] for one in by_name], counts, axis) for name in opened[0].names}
    return None if answers <= {None} else False not in answers


def _is_result(values: Sequence[Any], counts: Sequence[int], axis: int) -> bool | None:
    """Return the answer of `_are_results` for the entries at one position."""
    kinds_of_values = {kind_of(x) for x in values}
    if kinds_of_values == {LEAF}:
        return None
    if kinds_of_values == {ARRAY}:
        return all(map(_has_rows, map(_shape, values), repeat(axis), counts)) and _are_alike(values, axis)
    if kinds_of_values != {TREE}:
        return False
    return all(map(_has_entry_per_row, values, counts)) or _are_results(values, counts, axis)


def _are_alike(arrays: Sequence[Any], axis: int) -> bool:
    """Return whether arrays differ only in their values and in their numbers of rows."""
    opened = (source_of(x) for x in arrays)
    properties = [_common_properties(owner, data, owner.shape(data), axis) for owner, data in opened]
    return all(one == properties[0] for one in properties)


def _outline_of(x: Any) -> str:
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
    copied = ask(copy.deepcopy, x)  # memoryview cannot be copied
    return x if copied is None else copied


def snapshot(x: Any) -> Any:
    """Return the array if it is immutable or requires gradients, otherwise a copy."""
    owner, data = source_of(x)
    if owner.mutable:
        return data if owner.autodiff.requires_grad(data) else owner.copy(data)
    # This returns the current value of a tf.Variable, as recorded by the gradient tape.
    return owner.autodiff.prepare(data)
