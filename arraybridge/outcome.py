"""The outcome of a call that another part of the program inspects: its result, or the exception it raised.

`ask` is for calls whose exceptions do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Outcome:
    """The result or exception of a function call.

    Attributes:
        value: The result, or None if the call raised.
        error: The exception, or None if the call returned.
    """

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Return the value, or raise the exception.

        The caller should not keep this object in a variable. The traceback of the exception refers to the
        frame of the caller, so the exception would otherwise be in a reference cycle, which keeps the
        variables of all frames in the traceback alive until garbage is collected.
        """
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            del self


def attempt(work: Callable[..., Any], *args: Any) -> Outcome:
    """Call a function and return the outcome, so that another thread or process can raise the exception."""
    try:
        return Outcome(work(*args))
    except BaseException as error:  # noqa: BLE001  # also Ctrl-C and SystemExit
        return Outcome(error=error)


def ask(question: Callable[..., T], *args: Any) -> T | None:
    """Return ``question(*args)``; None if the code of another library that it runs raises an exception."""
    try:
        return question(*args)
    except Exception:  # noqa: BLE001  # properties, methods and metaclasses of third parties may raise anything
        return None
