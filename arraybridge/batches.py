"""Batches: arrays in containers that have rows in common; cut into parts, and the results of parts joined.

Containers belong together as `trees.together` says: by type, by key and by length. What is no array is joined
only where it is the very same object in every part, and a number only where it came in with the batch: nobody
can say whether to add, average or list numbers.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arraybridge.errors import CannotSplitError
from arraybridge.trees import ARRAY, arrays_of, kind_of, leaves_of, map_arrays, source_of, together

__all__ = ["check_parts", "extents", "fixed", "joined", "part", "plain", "rows"]


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


def _extent(x: Any, axis: int) -> int | None:
    owner, data = source_of(x)
    shape = owner.shape(data)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def extents(tree: Any, axis: int) -> Iterator[int | None]:
    """Rows along the axis of each array in there; None for one that has no such axis."""
    return (_extent(x, axis) for x in arrays_of(tree))


def rows(tree: Any, axis: int) -> int | None:
    """Rows of the first array in there that has the axis; None where none has."""
    for extent in extents(tree, axis):
        if extent is not None:
            return extent
    return None


def plain(tree: Any) -> Any:
    """The tree with what was marked as `fixed` in its place; the very object where nothing was."""
    return map_arrays(tree, _value, also=fixed)


def _value(x: Any) -> Any:
    return x.value if type(x) is fixed else x


def part(tree: Any, axis: int, count: int, start: int, stop: int) -> Any:
    """The tree with rows ``start`` to ``stop`` of each array of ``count`` rows, and all else whole."""

    def cut(x: Any) -> Any:
        if type(x) is fixed:
            return x.value
        owner, data = source_of(x)
        return owner.part(data, axis, start, stop) if _extent(x, axis) == count else x

    return map_arrays(tree, cut, also=fixed)


def joined(parts: Sequence[Any], axis: int, *, given: Any = None, noun: str = "part") -> Any:
    """The results of the parts of a batch as one, their arrays joined along the axis.

    Args:
        parts: results of one structure.
        axis: where their rows lie; negative axes count from the end.
        given: what came in: numbers in there may come out again.
        noun: what a part is called in messages.

    Raises:
        CannotSplitError: which is a `ValueError`: they cannot be joined.
    """

    def join(column: Sequence[Any], where: str) -> Any:
        _check(column, where, axis, None, given, noun)
        if kind_of(column[0]) != ARRAY:
            return _value(column[0])
        sources = [source_of(x) for x in column]
        return sources[0][0].concatenate([data for _, data in sources], axis)

    return together(parts, join, noun)


def check_parts(parts: Sequence[Any], axis: int, count: int, given: Any) -> None:
    """Refuse, after the first parts and not after the last, what cannot be joined.

    Args:
        parts: results so far that are to be joined.
        axis: where their rows lie.
        count: rows of the last of these parts.
        given: what came in.

    Raises:
        CannotSplitError: as `joined`; or an array of the last part has not as many rows as that.
    """
    together(parts, lambda column, where: _check(column, where, axis, count, given, "part"))


def _check(column: Sequence[Any], where: str, axis: int, count: int | None, given: Any, noun: str) -> None:
    """Whether what stands at one place of all the parts can be joined."""
    place = f" at {where}" if where else ""
    first = column[0]
    sorts = {kind_of(x) for x in column}
    if sorts == {ARRAY}:
        _check_arrays(column, place, axis, count, noun)
    elif isinstance(first, (numbers.Number, np.generic)):
        if not (all(x is first for x in column) and any(x is first for x in leaves_of(given))):
            raise CannotSplitError(
                f"a result of type {type(first).__name__}{place} cannot be joined: numbers are no arrays to"
                f" join, and nobody can say whether to add, average or list one for each {noun}. Return"
                " arrays with one row for each row of the batch, and reduce them afterwards; or"
                " fixed(number), where it is the same for all.",
                reason=f"a {type(first).__name__} cannot be joined",
            )
    elif not all(x is first or (type(x) is type(first) is fixed) for x in column):
        kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in column))
        raise CannotSplitError(
            f"the {noun}s gave different values{place} ({kinds}), which are no arrays to join; return arrays"
            " with one row for each row of the batch, or fixed(value) for what is the same for all",
            reason=f"the {noun}s gave different values",
        )


def _check_arrays(column: Sequence[Any], place: str, axis: int, count: int | None, noun: str) -> None:
    sources = [source_of(x) for x in column]
    owner, last = sources[-1]
    shapes = [one.shape(data) for one, data in sources]
    if count is not None and _extent(last, axis) != count:
        raise CannotSplitError(
            f"the function gave an array of shape {shapes[-1]}{place} for {count} rows along axis {axis}:"
            " only results with one row for each row of the batch can be joined. Reduce over the batch"
            " afterwards, or pass the axis along which the rows lie.",
            source_type=owner.name,
            reason="the result has not as many rows as its part of the batch",
        )
    for shape in shapes:
        if not -len(shape) <= axis < len(shape):
            raise CannotSplitError(
                f"the results{place} are arrays of shape {shape}, which have no axis {axis} to join along;"
                " return one row for each row of the batch",
                source_type=owner.name,
                reason=f"the results have no axis {axis}",
            )
    across = [(*shape[: axis % len(shape)], None, *shape[axis % len(shape) + 1 :]) for shape in shapes]
    for what, values in (
        ("frameworks", [one.name for one, _ in sources]),
        ("dtypes", [one.dtype_name(data) for one, data in sources]),
        ("devices", [one.device_of(data) for one, data in sources]),
        (f"shapes across axis {axis}", across),
    ):
        if any(value != values[0] for value in values):
            other = next(value for value in values if value != values[0])
            raise CannotSplitError(
                f"the {noun}s gave arrays of different {what}{place}: {values[0]} and {other}; these cannot"
                " be joined to one array",
                source_type=owner.name,
                reason=f"the {noun}s gave different {what}",
            )
