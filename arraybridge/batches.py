"""Batches: arrays in containers that have rows in common; cut into parts, and the results of parts joined.

Containers belong together as `trees.together` says: by type, by key and by length. What is no array is joined
only where it is the very same object in every part, and a number only where it came in with the batch: nobody
can say whether to add, average or list numbers.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from arraybridge.errors import CannotSplitError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.autodiff import Span, overlap
from arraybridge.frameworks.registry import find_owner
from arraybridge.structure import flattened
from arraybridge.trees import (
    ARRAY,
    LEAF,
    arrays_of,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
    source_of,
    together,
)

__all__ = ["check_parts", "extent", "fixed", "joined", "owned", "part", "plain", "rows"]


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
    if (kinds.get(type(tree)) or kind_of(tree)) == ARRAY:
        return extent(tree, axis)
    for x in leaves_of(tree):
        if (kinds.get(type(x)) or kind_of(x)) == ARRAY:
            found = extent(x, axis)
            if found is not None:
                return found
    return None


def plain(tree: Any) -> Any:
    """The tree with what was marked as `fixed` in its place; the very object where nothing was."""
    return tree if kinds.get(type(tree)) == ARRAY else map_arrays(tree, _value, also=fixed)


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
        if (kinds.get(type(column[0])) or kind_of(column[0])) != ARRAY:
            return _value(column[0])
        owner, _ = source_of(column[0])
        return owner.concatenate([source_of(x)[1] for x in column], axis)

    return together(parts, join, noun)


def owned(held: list[Any], *, unsure: bool = True, given: Any = None) -> Any:
    """What a list holds, its arrays copied where others may write to them later: a function's own buffer.

    Args:
        held: one value, which nobody else holds for the one who asks: it is taken out, and a container is
            taken apart, so that whoever still holds what was in there is somebody else.
        unsure: copy also where nobody can tell, as in memory that another framework lends.
        given: what the function was given: a view of that is no buffer of the function's own.
    """
    kind = kinds.get(type(held[0])) or kind_of(held[0])
    if kind == LEAF:
        return held[0]
    if kind == ARRAY:
        return _owned(held, unsure, given)
    leaves, structure = flattened(held.pop())
    for i in range(len(leaves)):
        if (kinds.get(type(leaves[i])) or kind_of(leaves[i])) == ARRAY:
            held.append(leaves[i])
            leaves[i] = None
            leaves[i] = _owned(held, unsure, given)
    return structure.filled(iter(leaves))


def _owned(held: list[Any], unsure: bool, given: Any) -> Any:
    x = held.pop()
    owner = find_owner(x)
    changes: bool | None = None  # of another library, or a framework that has no word for it
    if owner is not None and owner.running is not None:
        changes = owner.running.may_change(x)
    elif owner is not None and not owner.mutable:
        changes = False
    if not (unsure if changes is None else changes):
        return x
    if given is not None and overlap(_span(x), [_span(y) for y in arrays_of(given)]):
        return x
    if owner is None:
        owner, x = source_of(x)
    if owner.autodiff is not None:
        value = owner.autodiff.prepare(x)
        if value is not x:  # of a tf.Variable, as its tape follows it
            return value
    return owner.copy(x)


def _span(x: Any) -> Span | None:
    owner, data = source_of(x)
    if owner.name == "numpy":
        # np.byte_bounds has moved between NumPy 1 and 2.
        start = hostmemory.address(data)
        steps = (
            [(n - 1) * step for n, step in zip(data.shape, data.strides, strict=True)] if data.size else []
        )
        return start + sum(s for s in steps if s < 0), start + sum(s for s in steps if s > 0) + data.itemsize
    return None if owner.autodiff is None else owner.autodiff.span(data)


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
    check = partial(_check, axis=axis, count=count, given=given, noun="part")
    if (kinds.get(type(parts[-1])) or kind_of(parts[-1])) == ARRAY:
        check(parts, "")  # one of another kind among them is refused there as well
    else:
        together(parts, check)


def _check(column: Sequence[Any], where: str, axis: int, count: int | None, given: Any, noun: str) -> None:
    """Whether what stands at one place of all the parts can be joined."""
    place = f" at {where}" if where else ""
    first = column[0]
    arrays = 0
    for x in column:
        arrays += (kinds.get(type(x)) or kind_of(x)) == ARRAY
    if arrays == len(column):
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
        classes = ", ".join(dict.fromkeys(type(x).__name__ for x in column))
        raise CannotSplitError(
            f"the {noun}s gave different values{place} ({classes}), which are no arrays to join; return"
            " arrays with one row for each row of the batch, or fixed(value) for what is the same for all",
            reason=f"the {noun}s gave different values",
        )


def _check_arrays(column: Sequence[Any], place: str, axis: int, count: int | None, noun: str) -> None:
    facts = []
    owner, data = source_of(column[-1])
    shape = owner.shape(data)
    for x in column:
        owner, data = source_of(x)
        shape = owner.shape(data)
        if not -len(shape) <= axis < len(shape):
            raise CannotSplitError(
                f"the results{place} are arrays of shape {shape}, which have no axis {axis} to join along:"
                " only results with one row for each row of the batch can be joined",
                source_type=owner.name,
                reason=f"the results have no axis {axis}",
            )
        across = (*shape[: axis % len(shape)], None, *shape[axis % len(shape) + 1 :])
        facts.append((owner.name, owner.dtype_name(data), owner.device_of(data), across))
    if count is not None and shape[axis] != count:
        raise CannotSplitError(
            f"the function gave an array of shape {shape}{place} for {count} rows along axis {axis}:"
            " only results with one row for each row of the batch can be joined. Reduce over the batch"
            " afterwards, or pass the axis along which the rows lie.",
            source_type=owner.name,
            reason="the result has not as many rows as its part of the batch",
        )
    for one in facts:
        if one != facts[0]:
            kinds = zip(
                ("frameworks", "dtypes", "devices", f"shapes across axis {axis}"), facts[0], one, strict=True
            )
            what, here, there = next(kind for kind in kinds if kind[1] != kind[2])
            raise CannotSplitError(
                f"the {noun}s gave arrays of different {what}{place}: {here} and {there}; these cannot be"
                " joined to one array",
                source_type=facts[0][0],
                reason=f"the {noun}s gave different {what}",
            )
