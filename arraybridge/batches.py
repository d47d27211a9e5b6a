"""Batches: arrays in containers that have rows in common; cut into parts, and the results of parts joined.

Containers are joined by type, by key and by length. A list with one entry per row in every part is
concatenated, unless all its entries are arrays batched along the axis. Any other value that is not an array
is joined only if it is the same object or an equal text in every part, and a number only if it is part of the
batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import source_of
from arraybridge.errors import CannotSplitError, MemoryConversionError
from arraybridge.frameworks.base import Framework
from arraybridge.trees import (
    ARRAY,
    TREE,
    arrays_of,
    children_of,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
    map_children,
    prefix,
    together,
)


class fixed:  # noqa: N801 - reads as a word in a call, like slice or property
    """Marks an argument that is handed whole to every part, though its length is that of the batch.

    Within containers too. A result that is marked so is the same for every part: that of the first counts.

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
    """Rows of the first array in there that has the axis; None where none has."""
    arrays = (x for x in leaves_of(tree) if (kinds.get(type(x)) or kind_of(x)) == ARRAY)
    shapes = (owner.shape(data) for owner, data in map(source_of, arrays))
    return next((shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)), None)


def plain(tree: Any) -> Any:
    """The tree with what was marked as `fixed` in its place; the very object where nothing was."""
    for x in tree if type(tree) is tuple else (tree,):
        if kinds.get(type(x)) != ARRAY:
            break
    else:
        return tree  # arrays alone, as most calls have them
    return map_arrays(tree, _value, also=fixed)


def _value(x: Any) -> Any:
    return x.value if type(x) is fixed else x


def part(tree: Any, axis: int, count: int, start: int, stop: int, place: str = "") -> Any:
    """Return rows ``start`` to ``stop`` of each array and row list of ``count`` rows, everything else whole.

    ``place`` is where the tree is in a larger one, for messages.
    """
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind == ARRAY:
        if not _has_rows(tree, axis, count):
            return tree
        owner, data = source_of(tree)
        try:
            return owner.part(data, axis, start, stop)
        except MemoryConversionError as error:
            if place:
                prefix(error, f"at {place}")
            raise
    if type(tree) is fixed:
        return tree.value
    if kind != TREE:
        return tree
    if _is_row_list(tree, axis, count):
        return tree[start:stop]
    return map_children(tree, lambda x, at: part(x, axis, count, start, stop, place + at))


def split_places(tree: Any, axis: int, count: int) -> list[str]:
    """Return the places of all that `part` splits in a container, such as ``["[0]", "['x'].image"]``."""
    kind = kinds.get(type(tree)) or kind_of(tree)
    if type(tree) is fixed:
        return []
    if kind == ARRAY:
        return [""] if _has_rows(tree, axis, count) else []
    if kind != TREE:
        return []
    if _is_row_list(tree, axis, count):
        return [""]
    places: list[str] = []

    def collect(child: Any, at: str) -> Any:
        places.extend(at + inner for inner in split_places(child, axis, count))
        return child

    map_children(tree, collect)
    return places


def _has_rows(array: Any, axis: int, count: int) -> bool:
    owner, data = source_of(array)
    shape = owner.shape(data)
    return bool(-len(shape) <= axis < len(shape) and shape[axis] == count)


def _is_row_list(tree: Any, axis: int, count: int) -> bool:
    """Return whether a container is a list of non-arrays with one entry per row of the batch.

    A list of containers with arrays of that many rows is a structure of the batch instead.
    """
    if not isinstance(tree, list) or len(tree) != count or count == 0:
        return False
    for entry in tree:
        kind = kinds.get(type(entry)) or kind_of(entry)
        if kind == ARRAY or type(entry) is fixed:
            return False
        if kind == TREE and any(_has_rows(x, axis, count) for x in arrays_of(entry)):
            return False
    return True


class Joined:
    """The results of the parts of a batch, each copied into one result that is made at the first.

    What a function writes to a buffer of its own at the next part does not matter then. Arrays of frameworks
    that nobody writes to, and those that are followed for a gradient, are kept, and concatenated at the end.

    Args:
        rows: of the whole batch.
        axis: where the rows of the results lie; negative axes count from the end.
        batch: what came in: numbers in there may come out again.
        noun: what a part is called in messages.
        row_by_row: refuse results that have not as many rows as their part.
    """

    def __init__(
        self, rows: int, axis: int, batch: Any, noun: str = "part", *, row_by_row: bool = True
    ) -> None:
        self.rows, self.axis, self.batch, self.noun = rows, axis, batch, noun
        self.row_by_row = row_by_row
        #: The rows that are done.
        self.done = 0
        # A container like the results, with a `_Column` per array, a `_ListColumn` per list that may hold one
        # entry per row, and the first part's value otherwise.
        self._joined: Any = None
        # Where these lists are, such as "['names']".
        self._list_places: set[str] = set()

    def add(self, result: Any, count: int) -> None:
        """Copy the result of the next ``count`` rows. May be called again where memory has run out.

        Raises:
            CannotSplitError: which is a `ValueError`: it cannot be joined to what came before.
        """
        if not self.done:
            self._list_places = _places_of_row_lists(result, count)
        marked = _with_list_parts(result, count, self._list_places)
        joined = self._joined if self.done else together([marked], self._begin)
        together([joined, marked], lambda pair, place: self._put(pair[0], pair[1], place, count), self.noun)
        self._joined = joined
        self.done += count

    def result(self) -> Any:
        return together([self._joined], self._end)

    def _begin(self, first: Sequence[Any], place: str) -> Any:
        if type(first[0]) is _ListPart:
            return _ListColumn()
        if kind_of(first[0]) != ARRAY:
            return first[0]
        owner, data, facts = self._facts_of(first[0], place)
        shape = list(owner.shape(data))
        shape[self.axis] = self.rows
        return _Column(facts, owner.room(data, tuple(shape)))

    def _put(self, joined: Any, x: Any, place: str, count: int) -> None:
        if isinstance(joined, _ListColumn):
            if type(x) is not _ListPart:
                raise self._refused("different values", place, "a list", type(x).__name__)
            entries = map_arrays(x.entries, kept)  # the function may write to its arrays at the next part
            joined.parts[self.done] = _ListPart(entries, count)
            return
        if not isinstance(joined, _Column):
            same = x is joined or (isinstance(x, str) and x == joined)
            if isinstance(joined, (numbers.Number, np.generic)):  # one of each part can be equal by chance
                same = same and any(x is y for y in leaves_of(self.batch))
            if not (same or type(x) is type(joined) is fixed):
                raise self._refused("different values", place, type(joined).__name__, type(x).__name__)
            return
        if (kinds.get(type(x)) or kind_of(x)) != ARRAY:
            raise self._refused("different values", place, "an array", type(x).__name__)
        owner, data, facts = self._facts_of(x, place)
        for what, fact in facts.items():
            if fact != joined.facts[what]:
                raise self._refused(f"different {what}", place, joined.facts[what], fact)
        rows = owner.shape(data)[self.axis]
        if rows != count and self.row_by_row:
            raise self._refused(f"{rows} rows along axis {self.axis} for {count} of the batch", place)
        if rows != count and joined.room is not None:  # nobody knows how many there will be
            joined.parts[0], joined.room = owner.part(joined.room, self.axis, 0, self.done), None
        if joined.room is None:
            joined.parts[self.done] = kept(x)
        else:
            along = (slice(None),) * (self.axis % len(owner.shape(data)))
            with owner.beside(joined.room):
                joined.room[*along, self.done : self.done + count] = data

    def _end(self, columns: Sequence[Any], place: str) -> Any:
        (column,) = columns
        if isinstance(column, _ListColumn):
            return self._joined_lists(list(column.parts.values()), place)
        if not isinstance(column, _Column):
            return _value(column)
        if column.room is not None:
            return column.room
        parts = list(column.parts.values())
        return source_of(parts[0])[0].concatenate(parts, self.axis)

    def _joined_lists(self, parts: list[_ListPart], place: str) -> Any:
        """Join lists that may hold one entry per row, when all parts are known."""
        if len(parts) == 1:
            return parts[0].entries
        if not all(part.fits for part in parts) or all(self._is_structure(part) for part in parts):
            return self._joined_structures(parts, place)
        if all(self._may_be_structure(part) for part in parts):
            reason = f"the function gave a list{place and ' at '}{place} with as many entries as rows"
            raise CannotSplitError(
                f"{reason}: it may be one entry per row or several batched results. For several results,"
                " return a tuple.",
                reason=reason,
            )
        return [entry for part in parts for entry in part.entries]

    def _is_structure(self, part: _ListPart) -> bool:
        """Return whether every entry is an array batched along the axis."""
        return all(
            kind_of(entry) == ARRAY and _has_rows(entry, self.axis, part.count) for entry in part.entries
        )

    def _may_be_structure(self, part: _ListPart) -> bool:
        """Return whether every entry could be a result of its own: has one row per row of the part."""
        return all(self._is_batched(entry, part.count) for entry in part.entries)

    def _is_batched(self, x: Any, count: int) -> bool:
        """Return whether a value is a batched array, a list of ``count`` entries, or a container of these."""
        kind = kind_of(x)
        if kind == ARRAY:
            return _has_rows(x, self.axis, count)
        if kind != TREE:
            return False
        if type(x) is list and len(x) == count:
            return True
        children = children_of(x)
        return bool(children) and all(self._is_batched(child, count) for child in children)

    def _joined_structures(self, parts: list[_ListPart], place: str) -> Any:
        """Join lists entry by entry."""
        lengths = {len(part.entries) for part in parts}
        if len(lengths) > 1:
            raise self._refused("lists of different lengths", place)
        columns = []
        for number in range(lengths.pop()):
            column = Joined(self.rows, self.axis, self.batch, self.noun, row_by_row=self.row_by_row)
            for part in parts:
                column.add(part.entries[number], part.count)
            columns.append(column.result())
        return columns

    def _facts_of(self, x: Any, place: str) -> tuple[Framework, Any, dict[str, Any]]:
        """The framework of an array, the array, and what those of all parts must have in common."""
        owner, data = source_of(x)
        shape, axis = owner.shape(data), self.axis
        if not -len(shape) <= axis < len(shape):
            raise self._refused(f"arrays of shape {shape}, which have no axis {axis} to join along", place)
        across = [extent for i, extent in enumerate(shape) if i != axis % len(shape)]
        dtype, device = owner.dtype_name(data), owner.device_of(data)
        return owner, data, {"frameworks": owner.name, "dtypes": dtype, "devices": device, "shapes": across}

    def _refused(self, what: str, place: str, *values: Any) -> CannotSplitError:
        reason = f"the function gave {what}{place and ' at '}{place}"
        if values:
            reason += f" from one {self.noun} to the next ({', '.join(map(str, values))})"
        return CannotSplitError(
            f"{reason}: they cannot be joined. Return arrays of one framework, dtype, device and shape, or a"
            " list, with one row per row of the batch. Mark a value that all rows share as fixed(value).",
            reason=reason,
        )


class _Column:
    """The arrays at one place of the results: in one room for all of them, or those that are kept, by row."""

    def __init__(self, facts: dict[str, Any], room: Any) -> None:
        self.facts, self.room = facts, room
        self.parts: dict[int, Any] = {}


class _ListPart:
    """A list in the result of one part, which may hold one entry per row."""

    __slots__ = ("count", "entries")

    def __init__(self, entries: list[Any], count: int) -> None:
        self.entries = entries
        #: The number of rows of the part.
        self.count = count

    @property
    def fits(self) -> bool:
        return len(self.entries) == self.count


class _ListColumn:
    """The lists at one place of the results, by their first row."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: dict[int, _ListPart] = {}


def _places_of_row_lists(tree: Any, count: int, place: str = "") -> set[str]:
    """Return the places of all lists with ``count`` entries, outermost only."""
    if type(tree) is list and len(tree) == count and count:
        return {place}
    if kind_of(tree) != TREE:
        return set()
    places: set[str] = set()

    def collect(child: Any, at: str) -> Any:
        places.update(_places_of_row_lists(child, count, place + at))
        return child

    map_children(tree, collect)
    return places


def _with_list_parts(tree: Any, count: int, places: set[str], place: str = "") -> Any:
    """Return a result with the lists at these places as `_ListPart`."""
    if not places:
        return tree
    if place in places and type(tree) is list:
        return _ListPart(tree, count)
    if kind_of(tree) != TREE:
        return tree
    return map_children(tree, lambda child, at: _with_list_parts(child, count, places, place + at))


def kept(x: Any) -> Any:
    """An array that nobody writes to any more: itself, where it is immutable or followed for a gradient."""
    owner, data = source_of(x)
    if owner.mutable:
        return data if owner.requires_grad(data) else owner.copy(data)
    # A tf.Variable, which may be assigned to, as its tape follows it.
    return owner.autodiff.prepare(data)
