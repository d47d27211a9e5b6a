"""The arguments of a call that may be cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from io import IOBase
from typing import Any

from arraybridge import batches
from arraybridge.arrays import ARRAY, kind_of, source_of
from arraybridge.errors import CannotSplitError
from arraybridge.trees import leaves_of

__all__ = ["named"]

Split = bool | str | int | tuple[str | int, ...] | list[str | int] | None

#: Positional and keyword arguments.
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def named(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], split: Split, axis: int
) -> Batch:
    """The arguments, of which all but those that ``split`` names are marked as `fixed`.

    Raises:
        CannotSplitError: the call does not have one of them, or they differ in length.
    """
    names = split if isinstance(split, (tuple, list)) else (split,)
    keys = [_key(fn, args, kwargs, name) for name in names]
    lengths = {key: batches.rows(args[key] if isinstance(key, int) else kwargs[key], axis) for key in keys}
    if len(set(lengths.values())) > 1:
        (first, rows), *remaining_lengths = lengths.items()
        key, other = next((key, other) for key, other in remaining_lengths if other != rows)
        raise CannotSplitError(
            f"argument {key!r} has {other} rows along axis {axis}, and argument {first!r} has {rows}; split"
            " arguments of one length only",
            reason="the arguments to split differ in length",
        )
    marked = {key: batches.fixed(batches.plain(x)) for key, x in kwargs.items() if key not in keys}
    return (
        tuple(x if i in keys else batches.fixed(batches.plain(x)) for i, x in enumerate(args)),
        {**kwargs, **marked},
    )


def _key(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: Any) -> str | int:
    """The position or keyword of the argument that is called so."""
    import inspect  # nothing that `import arraybridge` needs

    if isinstance(name, str):
        if name in kwargs:
            return name
        with suppress(TypeError, ValueError):  # a built-in without a signature; no such parameter
            name = list(inspect.signature(fn).parameters).index(name)
    if isinstance(name, int) and 0 <= name < len(args):
        return name
    raise CannotSplitError(
        f"split= names an argument {name!r} that the call does not have; pass its name, its position, or"
        " True",
        reason=f"there is no argument {name!r}",
    )


def nothing_to_split(batch: Batch, axis: int) -> CannotSplitError:
    """The error for a call of which no argument has that axis."""
    args, kwargs = batch
    shapes = ", ".join(f"{key}: {_outline(x)}" for key, x in [*enumerate(args), *kwargs.items()]) or "none"
    return CannotSplitError(
        f"memory has run out, and no argument to split is an array with an axis {axis} (arguments: {shapes});"
        " pass the batch as an array, and another split axis if its rows lie elsewhere",
        reason=f"no argument to split has an axis {axis}",
    )


def _outline(x: Any) -> str:
    if kind_of(x) != ARRAY:
        return type(x).__name__
    owner, data = source_of(x)
    return f"{type(x).__name__} {owner.shape(data)}"


def portion(remaining: int, size: int, least: int) -> int:
    """Rows of the next part: at most ``size`` if it can be, in even parts, none smaller than ``least``."""
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)


def read_once(batch: Batch) -> str:
    """Why a call cannot be made again: an argument from which the first attempt may have read; or ``""``."""
    with suppress(ValueError, RecursionError):  # it contains itself, or is too deep to be looked through
        for x in leaves_of(batch):
            cls = type(x)
            # A file is a log more often than the data.
            if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
                return (
                    "in the first attempt, and the function is not called again: one of its arguments is an"
                    f" iterator ({cls.__name__}), from which that may have read; pass a list."
                )
    return ""
