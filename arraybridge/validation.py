"""Validation of options that are numbers, bools or file names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


def whole_number(
    option: str, value: Any, *, least: int | None = None, type_error: type[Exception] = TypeError
) -> int:
    """Check that the value of an option is an int and not a bool, and return it.

    Args:
        option: The name of the option, for messages.
        value: The value that the caller passed.
        least: The smallest valid value. Defaults to None, which allows every int.
        type_error: The exception for values that are not ints. Functions that document `ValueError` for every
            invalid value pass ``ValueError``.

    Raises:
        TypeError: The value is not an int (or the exception ``type_error``, if it is passed).
        ValueError: The value is less than ``least``.

    >>> whole_number("depth", 2, least=1)
    2
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(f"{option}={value!r} must be an int{_bound(least)}.")
    if least is not None and value < least:
        raise ValueError(f"{option}={value!r} must be at least {least}.")
    return value


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


def _bound(least: int | None) -> str:
    return "" if least is None else f", at least {least}"
