"""The arguments of a call under recovery: their names, those that are split, and messages about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from io import IOBase
from typing import Any

from arraybridge import batches
from arraybridge.carriers.sources import source_of
from arraybridge.errors import CannotSplitError, note_on, warn
from arraybridge.trees import ARRAY, kind_of, leaves_of

#: Arguments with their names.
Named = list[tuple[str, Any]]


def name_arguments(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Named:
    """Return the arguments of a call, each with its name."""
    return [*zip(_parameter_names(fn, len(args)), args, strict=True), *kwargs.items()]


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return names for positional arguments, from the signature if possible."""
    import inspect  # takes a few ms, and only messages need it

    names = [f"argument {i}" for i in range(count)]
    with suppress(TypeError, ValueError):  # a built-in function without a signature
        for i, parameter in enumerate([*inspect.signature(fn).parameters.values()][:count]):
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                break
            names[i] = parameter.name
    return names


def first_iterator(leaves: Iterable[Any]) -> str:
    """Return the class name of the first argument that can be read only once; ``""`` if there is none."""
    for x in leaves:
        cls = type(x)
        # Files are allowed: they are logs more often than input.
        if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
            return cls.__name__
    return ""


def arguments_to_split(arguments: Named, axis: int, rows: int) -> Named:
    """Return the split arguments. Their names include places in containers, such as ``"batch['x']"``."""
    return [
        (name + place, x) for name, value in arguments for place, x in batches.split_places(value, axis, rows)
    ]


def warn_about_coincidences(split: Iterable[tuple[str, Any]], rows: int) -> None:
    """Warn if some of the split arguments may have the number of rows of the batch only by chance."""
    names = batches.coincidences(split)
    if not names:
        return
    is_one = len(names) == 1
    warn(
        f"A batch of {rows} rows is split, and {' and '.join(names)} {'is' if is_one else 'are'} split with"
        f" it because of the same number of rows. {'Its shape' if is_one else 'Their shapes'} also"
        f" {'fits' if is_one else 'fit'} the last axes of the batch. If every part needs the whole array,"
        f" pass arraybridge.fixed({names[0]}).",
        UserWarning,
    )


def note_on_part(error: Exception, arguments: Named, *, axis: int, rows: int, start: int, count: int) -> None:
    """Add a note to an error of a part that names the split arguments: one may be split by mistake."""
    split = ", ".join(
        f"{name} ({count} of {rows} rows)" for name, _ in arguments_to_split(arguments, axis, rows)
    )
    part = f"row {start}" if count == 1 else f"rows {start} to {start + count - 1}"
    note_on(
        error,
        f"arraybridge: raised for {part} of a batch of {rows} rows, split along axis {axis}. Split"
        f" arguments: {split}. If one of them has that many rows only by chance, pass"
        " arraybridge.fixed(argument).",
    )


def nothing_to_split_error(batch: Any, axis: int) -> CannotSplitError:
    """Return the error for a call in which no argument to split is an array that has ``axis``."""
    texts = []
    for x in leaves_of(batch)[:20]:
        name = type(x).__name__
        if kind_of(x) is ARRAY:
            owner, data = source_of(x)
            name = f"{name} {owner.shape(data)}"
        texts.append(name)
    return CannotSplitError(
        f"Memory ran out, and no argument to split is an array that has axis {axis} (arguments:"
        f" {', '.join(texts) or 'none'}).",
        reason=f"no argument to split has axis {axis}",
        advice="Pass the batch as an array. If its rows are along another axis, pass that axis.",
    )
