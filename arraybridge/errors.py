"""Every error that a user of arraybridge can meet.

Each message says what was asked, why it cannot be, and what to do instead. Each class also derives
from the built-in exception that a user of NumPy would expect, so that existing handlers go on working.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from arraybridge.types import hooks


def nearest(word: str, names: Iterable[str]) -> str:
    """``" (did you mean 'torch'?)"`` for a misspelt word, or nothing."""
    import difflib  # costs 5 ms, and only a mistake needs it

    close = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def text_of(error: BaseException) -> str | None:
    """The message of an error; None where asking for it raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # what stands in __str__ is unknown
        return None


def note_on(error: BaseException, note: str) -> None:
    """Add a note to an error of somebody else, where its class lets one: a frozen dataclass does not."""
    with suppress(Exception):  # what stands in its __setattr__ is unknown
        BaseException.add_note(error, note)


def told(error: BaseException) -> str:
    """``"ValueError: its message"``, or the class alone where there is no message to be had."""
    words = text_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


# File → what Python keeps of the warnings that it has shown for its lines.
_shown: dict[str, dict[Any, int]] = {}


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called this package, however deep inside it we stand."""
    file, line = hooks.user_line()
    warnings.warn_explicit(message, category, file, line, registry=_shown.setdefault(file, {}))


@dataclass(frozen=True)
class Advice:
    """A sentence that states what to do instead, with the expressions that it names.

    Attributes:
        text: the sentence, with ``{}`` in the place of each expression.
        expressions: Python expressions of ``x``, the rejected object. Each gives an object that converts.

    >>> print(Advice("pass {} or {}", ("x.filled(0)", "x.data")))
    pass x.filled(0) or x.data
    """

    text: str
    expressions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text.format(*self.expressions) if self.expressions else self.text

    def about(self, subject: str) -> Advice:
        """Return the same advice about another object, such as ``x.data`` instead of ``x``."""
        expressions = tuple(re.sub(r"\bx\b", subject, one) for one in self.expressions)
        return replace(self, expressions=expressions)


class MemoryConversionError(Exception):
    """An array could not be converted.

    Attributes:
        source_type: framework of the array, or ``""`` where it is not known.
        target_type: framework that was asked for, or ``""``.
        method: the route that was tried: ``"view"``, ``"dlpack"``, ``"device"``, ``"host"`` or ``""``.
        reason: why it cannot be, without the advice.
        advice: what to do instead, in words; ``""`` if there is nothing to advise.
        expressions: the expressions in the advice. Each is Python code about ``x``, the rejected object, and
            its value can be converted.
    """

    def __init__(
        self,
        message: str = "",
        *parts: str,
        source_type: str = "",
        target_type: str = "",
        method: str = "",
        reason: str = "",
        advice: Advice | str = "",
    ) -> None:
        # Built from its four parts, in a row or by keywords, as arraybridge 0.2 to 0.5 does it.
        if parts:
            source_type, target_type, method, reason = (message, *parts)
            message = ""
        if not message and reason:
            message = f"Cannot convert from {source_type} to {target_type} using {method}. Reason: {reason}"
        self._problem = message
        super().__init__(_with_advice(message, str(advice)))
        self.advise(Advice(advice) if isinstance(advice, str) else advice)
        self.source_type = source_type
        self.target_type = target_type
        self.method = method
        self.reason = reason or message

    def advise(self, advice: Advice) -> None:
        """Set the advice, which the message ends with."""
        self._advice = advice
        self.args = (_with_advice(self._problem, str(advice)),)

    def about(self, subject: str) -> Advice:
        """Return the advice about another object, such as ``x.data``; the same if ``subject`` is empty."""
        return self._advice.about(subject) if subject else self._advice

    @property
    def advice(self) -> str:
        return str(self._advice)

    @property
    def expressions(self) -> tuple[str, ...]:
        return self._advice.expressions


def _with_advice(problem: str, advice: str) -> str:
    if not advice:
        return problem
    return f"{problem} {advice}" if problem.endswith(".") else f"{problem}: {advice}"


class FrameworkNotInstalledError(MemoryConversionError, ImportError):
    """The framework asked for is not installed, or its import failed."""


class DeviceNotFoundError(MemoryConversionError, ValueError):
    """The device asked for is not there; the message lists those that are."""


class DtypeNotSupportedError(MemoryConversionError, TypeError):
    """The target has no such dtype; pass ``dtype=`` to ask for a cast."""


class ArrayNotSupportedError(MemoryConversionError, TypeError, ValueError):
    """A masked, sparse, ragged, meta or traced array, or a rank that the target does not have."""


class CannotSplitError(MemoryConversionError, ValueError):
    """The arguments have no batch to split, or the results of the parts cannot be joined."""


class CopyRequiredError(MemoryConversionError, ValueError):
    """``copy=False`` was asked for where the bytes cannot be shared."""


class GradientError(MemoryConversionError, RuntimeError):
    """The tensor requires grad and would lose its graph; pass ``grad="detach"`` to let it."""


class SourceMismatchError(MemoryConversionError, TypeError, ValueError):
    """The array is not of the framework that was declared as its source."""


class UnknownArrayError(MemoryConversionError, TypeError, ValueError):
    """The object is no array of any known framework."""


class UnknownFrameworkError(MemoryConversionError, ValueError):
    """No framework of that name is known; the message lists those that are, and the nearest."""


class MissingGpuWarning(UserWarning):
    """An array was placed on the host because the GPU asked for is missing (``missing_gpu="host"``)."""
