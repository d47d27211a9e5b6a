"""Which errors are about memory that ran out; and to let go of what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from arraybridge.errors import text_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.registry import loaded

__all__ = ["chain", "is_oom", "is_oom_error", "let_go"]


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
    if isinstance(error, MemoryError) and error is not before:
        return True
    for one in chain(error, before):
        if isinstance(one, MemoryError):
            return True
        for framework in loaded():
            try:
                if framework.is_oom(one):
                    return True
            except Exception:  # its message, which the framework reads, cannot be read
                if text_of(one) is not None:
                    raise
        if registry.is_oom_of_a_library(one):
            return True
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


def let_go(error: BaseException, before: BaseException | None = None) -> None:
    """Clear the variables of every finished frame in the tracebacks, which keep their lines.

    As `traceback.clear_frames`, but that closes generators which are suspended.
    """
    suspended: set[int] | None = None
    for one in chain(error, before):
        entry = one.__traceback__
        while entry is not None:
            frame = entry.tb_frame
            entry = entry.tb_next
            if frame.f_code.co_flags & _RESUMABLE:
                if suspended is None:
                    suspended = _suspended_frames()
                if id(frame) in suspended:
                    continue  # to clear its frame would close the generator
            with suppress(RuntimeError):  # it is still running
                frame.clear()


# inspect.CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_RESUMABLE = 0x20 | 0x80 | 0x200


def _suspended_frames() -> set[int]:
    """The ids of the frames of all generators and coroutines that wait to be resumed."""
    import gc
    from types import AsyncGeneratorType, CoroutineType, GeneratorType

    found: set[int] = set()
    for one in gc.get_objects():
        cls = type(one)
        if cls is GeneratorType:
            found.add(id(one.gi_frame))
        elif cls is CoroutineType:
            found.add(id(one.cr_frame))
        elif cls is AsyncGeneratorType:
            found.add(id(one.ag_frame))
    return found
