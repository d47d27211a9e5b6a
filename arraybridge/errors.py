"""Every error that a user of arraybridge can meet.

Each message says what was asked, why it cannot be, and what to do instead. Each class also derives
from the built-in exception that a user of NumPy would expect, so that existing handlers go on working.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from arraybridge.reasons import Reason
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


def first_line(text: str) -> str:
    """Return the first line of a message, for a table or a log."""
    return text.partition("\n")[0]


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


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence that states what to do instead, with the expressions that it names.

    Attributes:
        text: The sentence, with ``{}`` in the place of each expression.
        expressions: Python expressions, with ``{x}`` in the place of the rejected object. Each gives an
            object that converts. Braces of the expression itself are doubled, see `literal`.
        subject: The rejected object as an expression of ``{x}``, the object that the user passed.

    >>> advice = Advice("pass {} or {}", ("{x}.filled(0)", "{x}.data"))
    >>> print(advice)
    pass x.filled(0) or x.data
    >>> print(advice.about("image.pixels"))
    pass image.pixels.filled(0) or image.pixels.data
    """

    text: str
    expressions: tuple[str, ...] = ()
    subject: str = "{x}"

    def __str__(self) -> str:
        return self.text.format(*self.code()) if self.expressions else self.text

    def code(self) -> tuple[str, ...]:
        """Return the expressions as Python code about ``x``."""
        subject = self.subject.format(x="x")
        return tuple(one.format(x=subject) for one in self.expressions)

    def about(self, subject: str) -> Advice:
        """Return the same advice about another object, such as ``{x}.data`` instead of ``{x}``."""
        return replace(self, subject=self.subject.format(x=subject))


def literal(text: str) -> str:
    """Return text, such as the name of a column, for an expression of an `Advice`.

    >>> Advice("pass {}", ("{x}[" + literal(repr("{a}")) + "]",)).code()
    ("x['{a}']",)
    """
    return text.replace("{", "{{").replace("}", "}}")


class Cast(NamedTuple):
    """A cast with which a conversion succeeds, and how to ask for it.

    Attributes:
        dtype: The dtype that is closest.
        others: Other dtypes of the same kind.
        keeps_values: Whether ``dtype`` holds every value of the array.
    """

    dtype: str
    others: tuple[str, ...] = ()
    keeps_values: bool = False

    @property
    def _others(self) -> str:
        return f" (or one of {', '.join(self.others)})" if self.others else ""

    @property
    def _loss(self) -> str:
        return ", which keeps every value" if self.keeps_values else ""

    def by_option(self) -> Advice:
        """Return the advice for a conversion."""
        return Advice(f'Pass dtype="{self.dtype}"{self._others} to ask for a cast{self._loss}.')

    def by_decorator(self, name: str) -> Advice:
        """Return the advice for an argument of a function that is decorated with the decorator ``name``."""
        option = f'@{name}(dtype="{self.dtype}")'
        return Advice(f"Pass dtype= to the decorator to ask for a cast: {option}{self._others}{self._loss}.")

    def in_function(self) -> Advice:
        """Return the advice for the result of a decorated function."""
        return Advice(f'Cast it to "{self.dtype}"{self._others} in the function{self._loss}.')


class MemoryConversionError(Exception):
    """An array could not be converted.

    ``str(error)`` is made of ``place``, ``problem`` and ``advice``.

    Attributes:
        source_type: framework of the array, or ``""`` where it is not known.
        target_type: framework that was asked for, or ``""``.
        method: the route that was tried: ``"view"``, ``"dlpack"``, ``"device"``, ``"host"`` or ``""``.
        problem: the message without the place and the advice.
        reason: why it cannot be, without the advice.
        code: the reason as a `Reason`, or None.
        advice: what to do instead, in words; ``""`` if there is nothing to advise.
        expressions: the expressions in the advice. Each is Python code about ``x``, the rejected object, and
            its value can be converted.
        place: the argument or result that holds the array, such as ``"f(), argument 'x'[0]"``, or its path in
            a container, such as ``"['batch'][0]"``; ``""`` if there is neither.
        cast: a cast with which the conversion succeeds, or None.
    """

    def __init__(
        self,
        problem: str = "",
        *parts: str,
        source_type: str = "",
        target_type: str = "",
        method: str = "",
        reason: str = "",
        code: Reason | None = None,
        advice: Advice | str = "",
        cast: Cast | None = None,
        place: str = "",
    ) -> None:
        # Built from its four parts, in a row or by keywords, as arraybridge 0.2 to 0.5 does it.
        if parts:
            source_type, target_type, method, reason = (problem, *parts)
            problem = ""
        if not problem and reason:
            problem = f"Cannot convert from {source_type} to {target_type} using {method}. Reason: {reason}"
        super().__init__(problem)
        self.problem = problem
        self.source_type = source_type
        self.target_type = target_type
        self.method = method
        self.reason = reason or problem
        self.code = code
        self.cast = cast
        self._advice = Advice(advice) if isinstance(advice, str) else advice
        # The function calls around the array, outermost first, and the path in the container below them.
        self._calls: tuple[str, ...] = (place,) if place else ()
        self._path = ""

    def __str__(self) -> str:
        """Return the whole message; nothing else puts the parts together."""
        message = _sentences(self.problem, self.advice)
        if not self.place:
            return message
        place = self.place if self._calls else f"at {self.place}"
        return f"{place}: {message or type(self).__name__}"

    @property
    def advice(self) -> str:
        return str(self._advice)

    @property
    def expressions(self) -> tuple[str, ...]:
        return self._advice.code()

    @property
    def place(self) -> str:
        return ": ".join(self._calls) + self._path

    def advise(self, advice: Advice) -> None:
        """Replace the advice."""
        self._advice = advice

    def advise_about(self, subject: str) -> None:
        """Let the advice be about another object, such as ``{x}.data``, unless ``subject`` is empty."""
        if subject:
            self._advice = self._advice.about(subject)

    def add_path(self, path: str) -> None:
        """Add the path of the array in a container, such as ``['batch'][0]``, to the place."""
        if self._calls:
            self._calls = (f"at {path}", *self._calls)
        else:
            self._path = path + self._path

    def add_call(self, call: str) -> None:
        """Add the function call that the array belongs to, such as ``f(), argument 'x'``, to the place."""
        self._calls = (call, *self._calls)

    def is_in(self, call: str) -> bool:
        """Return whether the outermost function call of the place is this one."""
        return self._calls[:1] == (call,)


def _sentences(problem: str, advice: str) -> str:
    """Join a problem and its advice. A problem without a period goes on with the advice in one sentence."""
    if not advice:
        return problem
    return f"{problem} {advice}" if problem.endswith(".") else f"{problem}: {advice}"


class FrameworkNotInstalledError(MemoryConversionError, ImportError):
    """The framework asked for is not installed, or its import failed."""

    def add_path(self, path: str) -> None:
        """Do nothing, since the framework is missing for every array."""


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
