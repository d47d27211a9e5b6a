"""Validation of the options of `map_overlap`.

Dask ignores some invalid values, and raises unclear errors for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any

import numpy as np

from arraybridge.errors import nearest
from arraybridge.formatting import format_count
from arraybridge.validation import whole_number

_BOUNDARIES = ("none", "reflect", "periodic", "nearest")
_PER_AXIS_AND_ARRAY = "a tuple or dict with one per axis, or a list of these with one per array."
_DEPTH_ADVICE = f"Pass an int of at least 0, {_PER_AXIS_AND_ARRAY}"
_BOUNDARY_ADVICE = f"Pass 'none', 'reflect', 'periodic', 'nearest' or a number, {_PER_AXIS_AND_ARRAY}"


def check_depth(depth: Any, ranks: Sequence[int]) -> None:
    """Raise for a ``depth`` that is not valid for arrays with these numbers of axes.

    Raises:
        TypeError: If a margin is not an int.
        ValueError: If a margin is negative, or the entries do not match the arrays and their axes.
    """
    for margin in _entries(depth, ranks, f"depth={depth!r}", _DEPTH_ADVICE):
        # A tuple of two numbers has different margins before and after a block.
        both = margin if isinstance(margin, tuple) and len(margin) == 2 else (margin,)
        for n in both:
            whole_number("depth", n, least=0, advice=_DEPTH_ADVICE)


def check_boundary(boundary: Any, ranks: Sequence[int]) -> None:
    """Raise for a ``boundary`` that is not valid for arrays with these numbers of axes.

    Raises:
        ValueError: If a value is neither a number nor a known name, or the entries do not match the arrays
            and their axes.
    """
    for value in _entries(boundary, ranks, f"boundary={boundary!r}", _BOUNDARY_ADVICE):
        is_name = isinstance(value, str) and value in _BOUNDARIES
        if not is_name and not isinstance(value, (Number, np.bool_)):
            hint = nearest(value, _BOUNDARIES) if isinstance(value, str) else ""
            raise ValueError(
                f"boundary={boundary!r} has the unknown value {value!r}{hint}. {_BOUNDARY_ADVICE}"
            )


def _entries(option: Any, ranks: Sequence[int], text: str, advice: str) -> Iterator[Any]:
    """Yield the values of an option for all arrays and axes, except for values that are None.

    An option that is not a list applies to all arrays, so it has one entry per axis of the array with the
    most axes.
    """
    options = option if isinstance(option, list) else [option]
    if isinstance(option, list):
        _check_count(option, len(ranks), text, "array", advice)
    else:
        ranks = [max(ranks)]
    for one, rank in zip(options, ranks, strict=True):
        if isinstance(one, tuple):
            _check_count(one, rank, text, "axis", advice)
            yield from one
        elif isinstance(one, dict):
            for axis in one:
                if axis not in range(rank):
                    raise ValueError(
                        f"{text} names the axis {axis!r}, but the number of axes is {rank}. {advice}"
                    )
            yield from one.values()
        elif one is not None:
            yield one


def _check_count(entries: Sequence[Any], count: int, text: str, what: str, advice: str) -> None:
    if len(entries) != count:
        raise ValueError(
            f"{text} has {format_count(len(entries), 'entry')} for {format_count(count, what)}. {advice}"
        )
