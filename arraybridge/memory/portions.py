"""What a call that ran out of memory can be cut into, and why it cannot be made again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from io import IOBase
from typing import Any

from arraybridge.errors import CannotSplitError
from arraybridge.trees import ARRAY, kind_of, leaves_of, source_of

__all__ = ["Split", "chosen_by", "nothing_to_split", "portion", "read_once"]

Split = bool | str | int | tuple[str | int, ...] | list[str | int] | None


def portion(remaining: int, size: int, least: int) -> int:
    """Rows of the next part: at most ``size`` if it can be, in even parts, none smaller than ``least``."""
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)


def chosen_by(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], split: Split
) -> frozenset[str | int]:
    """Positions and keywords of the arguments that ``split`` names."""
    named = split if isinstance(split, (tuple, list)) else (split,)
    keys: set[str | int] = set()
    for one in named:
        if isinstance(one, str) and one not in kwargs:
            import inspect

            try:
                names = list(inspect.signature(fn).parameters)
            except (TypeError, ValueError):  # a built-in without a signature
                names = []
            one = names.index(one) if one in names else one  # noqa: PLW2901
        if one not in kwargs and not (isinstance(one, int) and 0 <= one < len(args)):
            raise CannotSplitError(
                f"split={split!r} names an argument {one!r} that the call does not have; pass its name, its"
                " position, or True",
                reason=f"there is no argument {one!r}",
            )
        keys.add(one)
    return frozenset(keys)


def nothing_to_split(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> CannotSplitError:
    """The error for a call of which no argument has that axis."""
    shapes = []
    for key, x in (*enumerate(args), *kwargs.items()):
        shape = ""
        if kind_of(x) == ARRAY:
            owner, data = source_of(x)
            shape = f" {owner.shape(data)}"
        shapes.append(f"{key}: {type(x).__name__}{shape}")
    return CannotSplitError(
        f"memory has run out, and no argument to split is an array with an axis {axis} (arguments:"
        f" {', '.join(shapes) or 'none'}); pass the batch as an array, and another split axis if"
        " its rows lie elsewhere",
        reason=f"no argument to split has an axis {axis}",
    )


def read_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call cannot be made again: an argument from which the first attempt may have read; or ""."""
    for key, x in (*enumerate(args), *kwargs.items()):
        with suppress(ValueError, RecursionError):  # it contains itself, or is too deep to be looked through
            for leaf in leaves_of(x):
                cls = type(leaf)
                # A file is a log more often than the data.
                if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
                    place = f"argument {key!r}" if leaf is x else f"what is in argument {key!r}"
                    return (
                        f"in the first attempt, and the function is not called again: {place} is an iterator"
                        f" ({cls.__name__}), from which that may have read; pass a list."
                    )
    return ""
