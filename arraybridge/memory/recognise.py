"""Which errors are about memory that ran out; and to let go of what they hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from arraybridge.errors import text_of
from arraybridge.frameworks.registry import loaded

__all__ = ["is_oom_error", "let_go"]


def is_oom_error(error: BaseException) -> bool:
    """Whether memory running out, of the host or of any framework's device, is what ``error`` is about.

    It is when the error itself, one that it was raised from or while handling, or one in its group is an
    out-of-memory error of a loaded framework, told by class and, where the class is a general one, by the
    message. What was hidden by ``raise … from None`` does not count. Imports no framework.

    >>> is_oom_error(MemoryError()), is_oom_error(ValueError("out of memory budget"))
    (True, False)
    """
    return is_oom(error, None)


def is_oom(error: BaseException, before: BaseException | None) -> bool:
    """`is_oom_error`, but for ``before``, an error that was being handled when the attempt began."""
    return any(isinstance(one, MemoryError) or _says_so(one) for one in chain(error, before))


def _says_so(error: BaseException) -> bool:
    """Whether a loaded framework knows the error as its own for memory that ran out."""
    for framework in loaded():
        try:
            if framework.is_oom(error):
                return True
        except Exception:  # its message, which the framework reads, cannot be read
            if text_of(error) is not None:
                raise
    return False


def chain(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """``error``, its causes, contexts and group members, each once; not ``before``, nor what led to that."""
    seen = {id(before)}
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if one.__context__ is not None and not one.__suppress_context__:
            waiting.append(one.__context__)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)


def let_go(error: BaseException) -> None:
    """Drop the tracebacks, and with them the frames that are finished and their variables."""
    for one in list(chain(error, sys.exception())):
        one.__traceback__ = None
