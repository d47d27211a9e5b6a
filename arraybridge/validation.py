"""Validation of options, and hints for misspelled options and swapped arguments."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from arraybridge.compilers import run_eagerly
from arraybridge.errors import nearest

if TYPE_CHECKING:
    from pathlib import Path

F = TypeVar("F", bound=Callable[..., Any])


def whole_number(
    option: str,
    value: Any,
    *,
    least: int | None = None,
    advice: str = "",
    type_error: type[Exception] = TypeError,
) -> int:
    """Check that the value of an option is an integer of Python, NumPy or a framework, and return it as int.

    Args:
        option: The name of the option, for messages.
        value: The value that the caller passed. Bools and floats are not valid.
        least: The smallest valid value. Defaults to None, which allows every integer.
        advice: A sentence for the end of messages. Defaults to no advice.
        type_error: The exception for values that are not integers. Functions that document `ValueError` for
            every invalid value pass ``ValueError``.

    Raises:
        TypeError: The value is not an integer (or the exception ``type_error``, if it is passed).
        ValueError: The value is less than ``least``.

    >>> whole_number("depth", np.int64(2), least=1)
    2
    """
    if value.__class__ is int and (least is None or value >= least):  # in most calls
        return value
    number: int | None = None
    # Bools of frameworks have ``__index__`` as well, and numpy < 2 warns if one of its bools is an index
    # (numpy/numpy#9685).
    if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
        with suppress(TypeError):
            number = operator.index(value)
    advice = advice and f" {advice}"
    if number is None:
        bound = "" if least is None else f", at least {least}"
        raise type_error(f"{option}={value!r} must be an int{bound}.{advice}")
    if least is not None and number < least:
        raise ValueError(f"{option}={value!r} must be at least {least}.{advice}")
    return number


def bool_option(option: str, value: Any, *, optional: bool = False) -> Any:
    """Check that the value of an option is a Python or NumPy bool, and return it as a Python bool.

    Args:
        option: The name of the option, for messages.
        value: The value that the caller passed.
        optional: Whether None is also valid, and returned unchanged. Defaults to False.

    Raises:
        TypeError: The value is not a bool.

    >>> bool_option("ordered", True)
    True
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if optional and value is None:
        return None
    raise TypeError(f"{option}={value!r} must be {'None, ' if optional else ''}True or False.")


def file_path(option: str, value: Any) -> Path:
    """Check that the value of an option is the name of a file, and return it as a path.

    Args:
        option: The name of the option, for messages.
        value: The value that the caller passed.

    Raises:
        TypeError: The value is neither a string nor a path.

    >>> file_path("path", "run.json").suffix
    '.json'
    """
    from pathlib import Path  # takes 3 ms, imported here to keep `import arraybridge` fast

    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{option}={value!r} must be the name of a file, as a string or pathlib.Path.")
    return Path(value)


# -- misspelled options and swapped arguments ----------------------------------------------------------


def add_hints(fn: F) -> F:
    """Return ``fn``, whose errors name the nearest option for an unknown one and hint at swapped arguments.

    Other errors, and calls without an error, are those of ``fn``. As with `run_eagerly`, no
    compiler traces the function.

    >>> @add_hints
    ... def read(path, *, depth=2):
    ...     pass
    >>> read("a", dept=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: read() got an unexpected keyword argument 'dept' (did you mean 'depth'?). ...
    """
    return run_eagerly(fn, _check_call)


def raise_unknown_option(
    problem: str, option: str, options: Iterable[str], positional: Iterable[str] = ()
) -> NoReturn:
    """Raise the error for an option that does not exist, with the nearest one.

    Args:
        problem: The start of the message, such as ``"@torch has no option"``.
        option: The option that the caller passed.
        options: The options that exist.
        positional: Other parameters that the caller may have misspelled.
    """
    names = list(options)
    listed = f"Its options are {', '.join(names)}." if names else "It has no options."
    raise TypeError(f"{problem} {option!r}{nearest(option, [*positional, *names])}. {listed}") from None


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `TypeError` if a call that failed has an unknown option or swapped arguments."""
    name = fn.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(fn).parameters.values()
    options = [one.name for one in parameters if one.default is not one.empty]
    unknown = [option for option in kwargs if option not in {one.name for one in parameters}]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):  # the others are for a function, args[0]
        similar = [option for option in unknown if nearest(option, options)]
        unknown = [option for option in similar if not _accepts(args[:1], option)]
    if unknown:
        raise_unknown_option(f"{name}() got an unexpected keyword argument", unknown[0], options)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [one.name for one in parameters if one.kind in kinds]
    _check_order(name, dict(zip(places, args, strict=False)))


def _check_order(name: str, given: dict[str, Any]) -> None:
    """Raise `TypeError` if two positional arguments, by the names of their parameters, are swapped."""
    for place, value in given.items():
        others = [other for other in given if other != place and _fits(place, given[other])]
        if not _fits(place, value) and any(_fits(other, value) for other in others):
            raise TypeError(
                f"{name}() expected {_EXPECTED[place]} as {place!r}, got {type(value).__name__}. Did you swap"
                f" the arguments? Use {name}({', '.join(given)})."
            ) from None


def _accepts(function: tuple[Any, ...], option: str) -> bool:
    """Return whether a function, in a tuple of at most one, has a parameter of this name."""
    try:
        parameters = inspect.signature(*function).parameters
    except (TypeError, ValueError):  # not a function, or one without a signature
        return True
    return option in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


#: The parameters whose values are of a certain kind in every public function → that kind.
_EXPECTED = {
    "fn": "a function",
    "target": "a framework name",
    "framework": "a framework name",
    "memory_type": "a framework name",
    "gpu_id": "a GPU number",
    "shape": "a shape",
    "dtype": "a dtype",
}


def _fits(place: str, value: Any) -> bool:
    """Return whether a value is of the kind that the parameter ``place`` has in every public function."""
    match _EXPECTED.get(place):
        case "a function":
            return callable(value)
        case "a framework name":
            return value is None or isinstance(value, str)
        case "a GPU number":
            return value is None or isinstance(value, (int, float, str, np.number))
        case "a dtype":
            return not isinstance(value, (tuple, list))
        case "a shape":
            extents = value if isinstance(value, (tuple, list)) else (value,)
            return all(isinstance(extent, int) for extent in extents)
    return True
