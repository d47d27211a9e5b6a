"""Batches: arrays in containers that have rows in common; cut into parts, and the results of parts joined.

Containers belong together as `trees.together` says: by type, by key and by length. What is no array is joined
only where it is the same object or an equal text in every part, and a number only where it came in with the
batch: nobody can say whether to add, average or list numbers.
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
        # A container like the results, with a `_Column` for each array, and the first of what is no array.
        self._joined: Any = None

    def add(self, result: Any, count: int) -> None:
        """Copy the result of the next ``count`` rows. May be called again where memory has run out.

        Raises:
            CannotSplitError: which is a `ValueError`: it cannot be joined to what came before.
        """
        joined = self._joined if self.done else together([result], self._begin)
        together([joined, result], lambda pair, place: self._put(pair[0], pair[1], place, count), self.noun)
        self._joined = joined
        self.done += count

    def result(self) -> Any:
        return together([self._joined], self._end)

    def _begin(self, first: Sequence[Any], place: str) -> Any:
        if kind_of(first[0]) != ARRAY:
            return first[0]
        owner, data, facts = self._facts_of(first[0], place)
        shape = list(owner.shape(data))
        shape[self.axis] = self.rows
        return _Column(facts, owner.room(data, tuple(shape)))

    def _put(self, joined: Any, x: Any, place: str, count: int) -> None:
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
        if not isinstance(column, _Column):
            return _value(column)
        if column.room is not None:
            return column.room
        parts = list(column.parts.values())
        return source_of(parts[0])[0].concatenate(parts, self.axis)

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
            f"{reason}: they cannot be joined. Of what are no arrays to join, nobody can say whether to add,"
            " average or list it. Return arrays of one framework, dtype, device and shape, with one row for"
            " each row of the batch along the axis that is split, and reduce them afterwards; or fixed(value)"
            " for what all share.",
            reason=reason,
        )


class _Column:
    """The arrays at one place of the results: in one room for all of them, or those that are kept, by row."""

    def __init__(self, facts: dict[str, Any], room: Any) -> None:
        self.facts, self.room = facts, room
        self.parts: dict[int, Any] = {}


def kept(x: Any) -> Any:
    """An array that nobody writes to any more: itself, where it is immutable or followed for a gradient."""
    owner, data = source_of(x)
    if owner.mutable:
        return data if owner.requires_grad(data) else owner.copy(data)
    # A tf.Variable, which may be assigned to, as its tape follows it.
    return owner.autodiff.prepare(data)
