"""Batches: arrays in containers that have rows in common; cut into parts, and the results of parts joined.

Containers belong together as `trees.together` says: by type, by key and by length. What is no array is joined
only where it is the same object or an equal text in every part, and a number only where it came in with the
batch: nobody can say whether to add, average or list numbers.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from arraybridge.errors import CannotSplitError
from arraybridge.trees import ARRAY, LEAF, kind_of, kinds, leaves_of, map_arrays, source_of, together

__all__ = ["Joined", "extent", "fixed", "kept", "part", "plain", "rows"]


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


def extent(x: Any, axis: int) -> int | None:
    """Rows of an array along the axis; None where it has no such axis."""
    owner, data = source_of(x)
    shape = owner.shape(data)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def rows(tree: Any, axis: int) -> int | None:
    """Rows of the first array in there that has the axis; None where none has."""
    extents = (extent(x, axis) for x in leaves_of(tree) if (kinds.get(type(x)) or kind_of(x)) == ARRAY)
    return next((count for count in extents if count is not None), None)


def plain(tree: Any) -> Any:
    """The tree with what was marked as `fixed` in its place; the very object where nothing was."""
    cls = type(tree)
    for x in tree if cls is tuple else tree.values() if cls is dict else (tree,):
        if kinds.get(type(x)) != ARRAY:
            return map_arrays(tree, _value, also=fixed)
    return tree  # arrays alone, as most calls have them


def _value(x: Any) -> Any:
    return x.value if type(x) is fixed else x


def part(tree: Any, axis: int, count: int, start: int, stop: int) -> Any:
    """The tree with rows ``start`` to ``stop`` of each array of ``count`` rows, and all else whole."""
    if (kinds.get(type(tree)) or kind_of(tree)) == ARRAY:
        owner, data = source_of(tree)
        shape = owner.shape(data)
        fits = -len(shape) <= axis < len(shape) and shape[axis] == count
        return owner.part(data, axis, start, stop) if fits else tree
    if type(tree) is fixed:
        return tree.value
    return map_arrays(tree, lambda x: part(x, axis, count, start, stop), also=fixed)


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
        #: The results as they are put together: a container of columns, or one.
        self._columns: Any = None

    def add(self, result: Any, count: int) -> None:
        """Copy the result of the next ``count`` rows. May be called again where memory has run out.

        Raises:
            CannotSplitError: which is a `ValueError`: it cannot be joined to what came before.
        """
        columns = self._columns
        if columns is None:
            columns = together(
                [result], lambda leaves, place: self._column(leaves[0], place, count), self.noun
            )
        together([columns, result], lambda pair, _: pair[0].add(pair[1], count, self), self.noun)
        self._columns = columns
        self.done += count

    def _column(self, first: Any, place: str, count: int) -> Any:
        if kind_of(first) == ARRAY:
            return _ArrayColumn(first, place, self, count)
        return _OtherColumn(first, place)

    def result(self) -> Any:
        return together([self._columns], lambda columns, _: columns[0].whole(), self.noun)


class _OtherColumn:
    """What is no array, at one place of the results: the same in all of them."""

    def __init__(self, first: Any, place: str) -> None:
        self.first = first
        self.place = f" at {place}" if place else ""

    def add(self, x: Any, count: int, joined: Joined) -> None:
        same = x is self.first or (isinstance(x, str) and x == self.first)
        if isinstance(self.first, (numbers.Number, np.generic)):
            if not (same and any(x is y for y in leaves_of(joined.batch))):
                raise self._number_refused(joined.noun)
        elif not (same or (type(x) is type(self.first) is fixed)):
            raise CannotSplitError(
                f"different values{self.place} from one {joined.noun} to the next"
                f" ({type(self.first).__name__}, {type(x).__name__}), which are no arrays to join; return"
                " arrays with one row for each row of the batch, or fixed(value) for what all share",
                reason=f"different values from one {joined.noun} to the next",
            )

    def _number_refused(self, noun: str) -> CannotSplitError:
        name = type(self.first).__name__
        return CannotSplitError(
            f"a result of type {name}{self.place} cannot be joined: numbers are no arrays to join, and nobody"
            f" can say whether to add, average or list one for each {noun}. Return arrays with one"
            " row for each row of the batch, and reduce them afterwards; or fixed(number), where it is the"
            " same for all.",
            reason=f"a {name} cannot be joined",
        )

    def whole(self) -> Any:
        return _value(self.first)


class _ArrayColumn:
    """The arrays at one place of the results."""

    def __init__(self, first: Any, place: str, joined: Joined, count: int) -> None:
        self.axis = joined.axis
        self.place = f" at {place}" if place else ""
        self.owner, data, self.facts = self._facts_of(first)
        fits = joined.row_by_row or self.owner.shape(data)[self.axis] == count
        self.room = self.owner.room(data, self.axis, joined.rows) if fits else None
        self.kept: dict[int, Any] = {}

    def _facts_of(self, x: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """The framework of an array, the array, and what those of all parts must have in common."""
        owner, data = source_of(x)
        shape = owner.shape(data)
        if not -len(shape) <= self.axis < len(shape):
            raise CannotSplitError(
                f"the results{self.place} are arrays of shape {shape}, which have no axis {self.axis} to join"
                " along: only results with one row for each row of the batch can be joined",
                source_type=owner.name,
                reason=f"the results have no axis {self.axis}",
            )
        along = self.axis % len(shape)
        across = (*shape[:along], None, *shape[along + 1 :])
        return owner, data, (owner.name, owner.dtype_name(data), owner.device_of(data), across)

    def add(self, x: Any, count: int, joined: Joined) -> None:
        if (kinds.get(type(x)) or kind_of(x)) != ARRAY:
            raise CannotSplitError(
                f"different values{self.place} from one {joined.noun} to the next (an array and a"
                f" {type(x).__name__}); return arrays with one row for each row of the batch",
                reason=f"different values from one {joined.noun} to the next",
            )
        owner, data, facts = self._facts_of(x)
        if facts != self.facts:
            raise self._different(facts, joined.noun)
        start, fits = joined.done, owner.shape(data)[self.axis] == count
        if not fits and (self.room is not None or joined.row_by_row):
            raise CannotSplitError(
                f"the function gave an array of shape {owner.shape(data)}{self.place} for {count} rows along"
                f" axis {self.axis}: only results with one row for each row of the batch can be joined."
                " Reduce over the batch afterwards, or pass the axis along which the rows lie.",
                source_type=owner.name,
                reason="the result has not as many rows as its part of the batch",
            )
        if self.room is None:
            self.kept[start] = kept(x)
        else:
            owner.write(self.room, data, self.axis, start)

    def _different(self, facts: tuple[Any, ...], noun: str) -> CannotSplitError:
        names = ("frameworks", "dtypes", "devices", f"shapes across axis {self.axis}")
        what, first, other = next(
            row for row in zip(names, self.facts, facts, strict=True) if row[1] != row[2]
        )
        return CannotSplitError(
            f"the arrays{self.place} have different {what} from one {noun} to the next: {first} and {other};"
            " these cannot be joined to one array",
            source_type=self.facts[0],
            reason=f"different {what} from one {noun} to the next",
        )

    def whole(self) -> Any:
        if self.room is None:
            return self.owner.concatenate(list(self.kept.values()), self.axis)
        return self.owner.filled(self.room, self.facts[2])


for _column in (_OtherColumn, _ArrayColumn):
    kinds.keep(_column, LEAF)  # so that nobody looks into one each time


def kept(x: Any) -> Any:
    """An array that nobody writes to any more: itself, where it is immutable or followed for a gradient."""
    owner, data = source_of(x)
    if owner.mutable:
        return data if owner.requires_grad(data) else owner.copy(data)
    # A tf.Variable, which may be assigned to, as its tape follows it.
    return owner.autodiff.prepare(data)
