"""The arguments of a call that may be cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from io import IOBase
from typing import Any

from arraybridge import batches
from arraybridge.errors import CannotSplitError
from arraybridge.trees import ARRAY, kind_of, leaves_of, source_of

__all__ = ["Arguments", "Split", "portion", "read_once"]

Split = bool | str | int | tuple[str | int, ...] | list[str | int] | None


class Arguments:
    """Positional and keyword arguments, of which some are the arrays of a batch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> None:
        self.args, self.kwargs, self.axis = args, kwargs, axis
        #: Positions and keywords of the arguments to split, and the arguments.
        self.batch: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}

    def rows(self) -> int | None:
        """Rows of the first array to split, or None."""
        for x in self.batch.values():
            found = batches.rows(x, self.axis)
            if found is not None:
                return found
        return None

    def cut(
        self, start: int, take: int | None, marked: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every array of the batch cut down to these rows; None: whole.

        ``marked``: whether some may be marked as `fixed`.
        """
        if take is None:
            args, kwargs = self.args, self.kwargs
            return (batches.plain(args), batches.plain(kwargs)) if marked else (args, kwargs)
        rows = self.rows()
        args, kwargs = list(self.args), dict(self.kwargs)
        for into, keys in ((args, range(len(args))), (kwargs, list(kwargs))):
            for key in keys:
                x, splits = into[key], key in self.batch
                into[key] = (
                    batches.part(x, self.axis, rows, start, start + take) if splits else batches.plain(x)
                )
        return tuple(args), kwargs

    def choose(self, fn: Callable[..., Any], split: Split) -> None:
        """Split the arguments that ``split`` names, and no others.

        Raises:
            CannotSplitError: the call does not have one of them, or they differ in length.
        """
        named = split if isinstance(split, (tuple, list)) else (split,)
        keys = {self._key(fn, one) for one in named}
        self.batch = {key: x for key, x in self.batch.items() if key in keys}
        rows = self.rows()
        for key, x in self.batch.items():
            found = batches.rows(x, self.axis)
            if rows is not None and found != rows:
                raise CannotSplitError(
                    f"argument {key!r} has {found} rows along axis {self.axis}, the batch has {rows};"
                    " split arguments of one length only",
                    reason="the arguments to split differ in length",
                )

    def _key(self, fn: Callable[..., Any], name: Any) -> str | int:
        """The position or keyword of the argument that is called so."""
        import inspect  # nothing that `import arraybridge` needs

        key = name
        if isinstance(name, str) and name not in self.kwargs:
            with suppress(TypeError, ValueError):  # a built-in without a signature; no such parameter
                key = list(inspect.signature(fn).parameters).index(name)
        if key in self.kwargs or (isinstance(key, int) and 0 <= key < len(self.args)):
            return key
        raise CannotSplitError(
            f"split= names an argument {name!r} that the call does not have; pass its name, its position, or True",
            reason=f"there is no argument {name!r}",
        )

    def nothing_to_split(self) -> CannotSplitError:
        """The error for a call of which no argument has that axis."""
        shapes = ", ".join(f"{key}: {_outline(x)}" for key, x in self.batch.items()) or "none"
        return CannotSplitError(
            f"memory has run out, and no argument to split is an array with an axis {self.axis} (arguments:"
            f" {shapes}); pass the batch as an array, and another split axis if its rows lie elsewhere",
            reason=f"no argument to split has an axis {self.axis}",
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


def read_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call cannot be made again: an argument from which the first attempt may have read; or ""."""
    with suppress(ValueError, RecursionError):  # it contains itself, or is too deep to be looked through
        for x in leaves_of((args, kwargs)):
            cls = type(x)
            # A file is a log more often than the data.
            if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
                return (
                    f"in the first attempt, and the function is not called again: one of its arguments is an"
                    f" iterator ({cls.__name__}), from which that may have read; pass a list."
                )
    return ""
