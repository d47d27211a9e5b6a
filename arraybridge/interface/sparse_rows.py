"""Functions that split sparse arrays by rows (CSR) or columns (CSC) and join the parts without densifying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arraybridge.advice import Advice
from arraybridge.errors import CannotSplitError
from arraybridge.interface.framework import Framework
from arraybridge.interface.sparse import Layout, SparseParts

__all__ = ["concatenate", "slice_axis"]

#: Compressed layouts without blocks → the axis of their pointers.
_AXES = {Layout.CSR: 0, Layout.CSC: 1}
_MOST_INT32 = 2**31 - 1


def slice_axis(framework: Framework, x: Any, axis: int, start: int, stop: int) -> Any:
    """Return ``x[start:stop]`` along ``axis``, with shared values and indices if the framework has views.

    Raises:
        CannotSplitError: If the layout is not compressed along that axis.
    """
    parts = _open_compressed(framework, x, axis)
    indices, pointers = parts.indices
    batching = framework.batching
    rows = batching.slice_axis(pointers, 0, start, stop + 1)
    with framework.runtime.device_guard(rows):
        first = int(rows[0])
        last = int(rows[-1])
        rows = rows - first
    shape = list(parts.shape)
    shape[axis % len(shape)] = stop - start
    cut = replace(
        parts,
        shape=tuple(shape),
        values=batching.slice_axis(parts.values, 0, first, last),
        indices=(batching.slice_axis(indices, 0, first, last), rows),
        count=None,
    )
    return framework.sparse.put_together(cut, x)


def concatenate(framework: Framework, arrays: Sequence[Any], axis: int) -> Any:
    """Return a new sparse array that joins arrays of the same layout along ``axis``.

    Raises:
        CannotSplitError: If the layout is not compressed along that axis.
    """
    opened = [_open_compressed(framework, x, axis) for x in arrays]
    values: list[Any] = []
    indices: list[Any] = []
    pointers: list[Any] = []
    with framework.runtime.device_guard(opened[0].indices[1]):
        counts = [int(parts.indices[1][-1]) for parts in opened]
    is_wide = sum(counts) > _MOST_INT32
    done = 0
    for parts, count in zip(opened, counts, strict=True):
        own_indices, own_pointers = parts.indices
        if is_wide:
            own_indices = framework.cast(own_indices, "int64")
            own_pointers = framework.cast(own_pointers, "int64")
        values.append(framework.batching.slice_axis(parts.values, 0, 0, count))
        indices.append(framework.batching.slice_axis(own_indices, 0, 0, count))
        if pointers:  # the offset makes the first pointer equal to the last one of the previous part
            own_pointers = framework.batching.slice_axis(own_pointers, 0, 1, framework.shape(own_pointers)[0])
        with framework.runtime.device_guard(own_pointers):
            pointers.append(own_pointers + done)
        done += count
    first = opened[0]
    shape = list(first.shape)
    shape[axis % len(shape)] = sum(parts.shape[axis] for parts in opened)
    batching = framework.batching
    joined = replace(
        first,
        shape=tuple(shape),
        values=batching.concatenate(values, 0),
        indices=(batching.concatenate(indices, 0), batching.concatenate(pointers, 0)),
        is_sorted=all(parts.is_sorted for parts in opened),
        is_unique=all(parts.is_unique for parts in opened),
        count=None,
    )
    return framework.sparse.put_together(joined, arrays[0])


def _open_compressed(framework: Framework, x: Any, axis: int) -> SparseParts:
    sparse = framework.sparse
    parts = sparse.take_apart(x)
    axes = len(framework.shape(x))
    if parts is not None and not parts.batch_axes and axes >= 2 and _AXES.get(parts.layout) == axis % axes:
        return parts
    name = sparse.layout(x).upper()
    wanted = Layout.CSR if axis % axes == 0 else Layout.CSC
    expression = sparse.expressions(x).layouts.get(wanted)
    advice = Advice("Pass arraybridge.fixed({}) if every part needs the whole array.", ("{x}",))
    if expression is not None:
        advice = Advice(
            "Pass {}, or arraybridge.fixed(x) if every part needs the whole array.", (expression,)
        )
    raise CannotSplitError(
        f"A sparse {name} array of {sparse.title} cannot be split or joined along axis {axis}.",
        source_type=framework.name,
        reason=f"{name} is not compressed along axis {axis}",
        advice=advice,
    )
