"""Every error that a user of arraybridge can meet.

Each message says what was asked, why it cannot be, and what to do instead. Each class also derives
from the built-in exception that a user of NumPy would expect, so that existing handlers go on working.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import ClassVar

__all__ = [
    "ArrayNotSupportedError",
    "CannotSplitError",
    "CopyRequiredError",
    "DeviceNotFoundError",
    "DtypeNotSupportedError",
    "FrameworkNotInstalledError",
    "GradientError",
    "MemoryConversionError",
    "MissingGpuWarning",
    "SourceMismatchError",
    "UnknownArrayError",
    "UnknownFrameworkError",
    "nearest",
    "outside",
    "page_of",
    "text_of",
    "told",
    "warn",
]


def nearest(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'torch'?)"`` for a misspelt word, or nothing."""
    import difflib  # costs 5 ms, and only a mistake needs it

    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def text_of(error: BaseException) -> str | None:
    """The message of an error; None where asking for it raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # what stands in __str__ is unknown
        return None


def told(error: BaseException) -> str:
    """``"ValueError: its message"``, or the class alone where there is no message to be had."""
    words = text_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def outside() -> tuple[FrameType, int]:
    """The innermost frame that is not of this package, and how many frames above the caller of this it is."""
    frame, level = sys._getframe(1), 1
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called this package, however deep inside it we stand."""
    _, level = outside()
    warnings.warn(message, category, stacklevel=level)


def page_of(cls: type[MemoryConversionError]) -> str:
    """Where the documentation explains errors of this class, ``""`` where it does not.

    >>> page_of(GradientError)
    'docs/troubleshooting.md#the-array-is-refused'
    """
    return f"docs/troubleshooting.md#{cls.section}" if cls.section else ""


class MemoryConversionError(Exception):
    """An array could not be converted. A note below the message names the page that explains it.

    Attributes:
        source_type: framework of the array, or ``""`` where it is not known.
        target_type: framework that was asked for, or ``""``.
        method: the route that was tried: ``"view"``, ``"dlpack"``, ``"device"``, ``"host"`` or ``""``.
        reason: why it cannot be, without the advice.
    """

    #: The section of the page on troubleshooting that explains errors of this class; "" where none does.
    section: ClassVar[str] = ""

    def __init__(
        self,
        message: str = "",
        *parts: str,
        source_type: str = "",
        target_type: str = "",
        method: str = "",
        reason: str = "",
    ) -> None:
        # Built from its four parts, in a row or by keywords, as arraybridge 0.2 to 0.5 does it.
        if parts:
            source_type, target_type, method, reason = (message, *parts)
            message = ""
        if not message and reason:
            message = f"Cannot convert from {source_type} to {target_type} using {method}. Reason: {reason}"
        super().__init__(message)
        self.source_type = source_type
        self.target_type = target_type
        self.method = method
        self.reason = reason or message
        if self.section:
            self.add_note(f"explained in {page_of(type(self))}")


class FrameworkNotInstalledError(MemoryConversionError, ImportError):
    """The framework asked for is not installed, or its import failed."""

    section = "something-is-missing"


class DeviceNotFoundError(MemoryConversionError, ValueError):
    """The device asked for is not there; the message lists those that are."""

    section = "something-is-missing"


class DtypeNotSupportedError(MemoryConversionError, TypeError):
    """The target has no such dtype; pass ``dtype=`` to ask for a cast."""

    section = "the-array-is-refused"


class ArrayNotSupportedError(MemoryConversionError, TypeError, ValueError):
    """A masked, sparse, ragged, meta or traced array, or a rank that the target does not have."""

    section = "the-array-is-refused"


class CannotSplitError(MemoryConversionError, ValueError):
    """The arguments have no batch to split, or the results of the parts cannot be joined."""

    section = "memory"


class CopyRequiredError(MemoryConversionError, ValueError):
    """``copy=False`` was asked for where the bytes cannot be shared."""

    section = "the-array-is-refused"


class GradientError(MemoryConversionError, RuntimeError):
    """The tensor requires grad and would lose its graph; pass ``grad="detach"`` to let it."""

    section = "the-array-is-refused"


class SourceMismatchError(MemoryConversionError, TypeError, ValueError):
    """The array is not of the framework that was declared as its source."""

    section = "the-array-is-refused"


class UnknownArrayError(MemoryConversionError, TypeError, ValueError):
    """The object is no array of any known framework."""

    section = "the-array-is-refused"


class UnknownFrameworkError(MemoryConversionError, ValueError):
    """No framework of that name is known.

    (Raised, with its list of names, by `arraybridge.frameworks.registry.framework_name`.)
    """

    section = "the-call-is-wrong"


class MissingGpuWarning(UserWarning):
    """An array was placed on the host because the GPU asked for is missing (``missing_gpu="host"``)."""
