"""Recognition of out-of-memory errors, including those in messages of libraries that wrap other errors.

Each framework recognizes its own messages (`Memory.is_oom`, `Memory.is_oom_text`). This module follows
causes, contexts and groups, and removes wrappers: Keras layers, TorchScript, DataLoader workers,
DataParallel replicas, JAX callbacks, ``tf.py_function`` and Ray tasks.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import NamedTuple

from arraybridge.compilers import run_eagerly
from arraybridge.errors import text_of
from arraybridge.interface.registry import list_loaded_cached
from arraybridge.outcome import ask

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Keras 3 (utils/traceback_utils.py): "Exception encountered when calling Big.call().", Keras 2: "… calling
# layer 'big' (type Big).".
_KERAS = re.compile(r"\s*Exception encountered when calling [^\n]*\n\s*")
_TRACEBACK_WRAPPERS = re.compile(
    r"The following operation failed in the TorchScript interpreter\."
    r"|Caught (?P<kind>[\w.]+) in (?:DataLoader worker|replica|pin memory thread)"
    r"|(?:[A-Z_]+: )?(?:[^\n]*: )?CpuCallback error"
    # `tf.py_function` prints the error before its traceback.
    r"|(?:\{\{[^\n]*?\}\} ?)?[A-Za-z_][\w.]*(?:Error|Exception): "
    r"(?=[^\n]*\nTraceback \(most recent call last\))"
)
_CALLBACK_OR_FUNCTION = re.compile(
    r"(?:(?:[A-Z_]+: )?(?:[^\n]*: )?CpuCallback error[^:\n]*: |(?:\{\{[^\n]*?\}\} ?)?)"
    r"(?P<kind>(?!Traceback)[A-Za-z_][\w.]*): (?P<text>.*)",
    re.DOTALL,
)
_TRACEBACK = re.compile(r"Traceback [^\n:]*: *")
_EXCEPTION_LINE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>(?s:.*))|$)", re.MULTILINE)

# Class names in printed tracebacks that mean out of memory, regardless of the message. NumPy's is private
# (numpy/numpy#13225).
_MEMORY_ERRORS = frozenset({"MemoryError", "_ArrayMemoryError", "ArrayMemoryError", "OutOfMemoryError"})
# Class names of errors that mean out of memory only if the message matches.
_GENERAL_ERRORS = frozenset(
    {
        *("RuntimeError", "AcceleratorError", "JaxRuntimeError", "XlaRuntimeError"),
        *("ResourceExhaustedError", "InternalError", "UnknownError"),
        *("CUDARuntimeError", "CUDADriverError", "CUBLASError", "CUSOLVERError", "CuDNNError"),
    }
)


class _Report(NamedTuple):
    """An error that a wrapper's message quotes."""

    #: The name of its class without the module; None if it is the class of the wrapper.
    kind: str | None
    text: str


@run_eagerly
def is_oom_error(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the host or on a device of any framework.

    The error itself counts, and so do its cause, the error that was being handled when it was raised, and the
    members of an exception group. Wrappers are removed first: Keras layers, TorchScript, DataLoader workers,
    DataParallel, JAX callbacks, ``tf.py_function`` and Ray task errors. An error hidden by
    ``raise … from None`` does not count. The message of a ValueError, KeyError or AssertionError is ignored.
    Only frameworks that the process has imported are checked; this function imports none.

    Args:
        error: Any exception.

    Returns:
        True if the error, or one that it wraps, is an out-of-memory error.

    Raises:
        TypeError: If ``error`` is not an exception.

    Example:
        >>> is_oom_error(MemoryError()), is_oom_error(ValueError("out of memory budget"))
        (True, False)
    """
    if not isinstance(error, BaseException):
        got = f"the class {error.__name__}" if isinstance(error, type) else type(error).__name__
        raise TypeError(
            f"is_oom_error() expected an exception, got {got}. Pass the exception that was caught."
        )
    return is_oom(error, None)


def is_oom(error: BaseException, before: BaseException | None) -> bool:
    """Return whether an error means that memory ran out, like `is_oom_error`, but ignoring ``before``.

    ``before`` is an error that was already being handled when the failed call began, or None.
    """
    return any(map(_is_oom_itself, chain(error, before)))


def chain(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """Yield ``error`` and its causes, contexts and group members, each once, except ``before``."""
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
        cause = _ray_cause(one)
        if cause is not None:
            waiting.append(cause)


def _ray_cause(error: BaseException) -> BaseException | None:
    """Return the original error of a Ray task error, recognized without importing Ray."""
    for cls in type(error).__mro__:
        if cls.__name__.startswith("RayTaskError"):
            cause = ask(getattr, error, "cause", None)
            return cause if isinstance(cause, BaseException) else None
    return None


def _is_oom_itself(error: BaseException) -> bool:
    """Return whether this error itself means that memory ran out, regardless of its chain."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = text_of(error)
    if text is not None and _may_wrap(error):
        reports = _unwrap(text)
        if reports:
            return any(_is_oom_report(report, error) for report in reports)
    # A framework calls str(error), which raises for some third-party classes.
    return any(ask(framework.memory.is_oom, error) for framework in list_loaded_cached())


def _may_wrap(error: BaseException) -> bool:
    """Return whether wrappers raise this class of error: RuntimeError or a class of a loaded framework."""
    if isinstance(error, (ValueError, KeyError, AssertionError)):
        return False
    return isinstance(error, RuntimeError) or any(
        isinstance(error, one.errors) for one in list_loaded_cached()
    )


def _is_oom_report(report: _Report, error: BaseException) -> bool:
    """Return whether an error that a wrapper quotes means that memory ran out."""
    kind = type(error).__name__ if report.kind is None else report.kind
    if kind in _MEMORY_ERRORS:
        return True
    if kind == "OSError":
        return report.text.startswith(f"[Errno {errno.ENOMEM}]")
    # The class of the wrapper itself has been checked by `_may_wrap`.
    if report.kind is not None and kind not in _GENERAL_ERRORS:
        return False
    return any(framework.memory.is_oom_text(report.text) for framework in list_loaded_cached())


def _unwrap(text: str) -> list[_Report]:
    """Return the errors that a wrapper's message quotes; an empty list if no wrapper wrote it."""
    reports: list[_Report] = []
    waiting = [_Report(None, text)]
    while waiting:
        one = waiting.pop()
        inner = _inner(one)
        # Wrappers may be nested, such as a Keras layer in a DataLoader worker.
        waiting.extend(inner)
        if not inner and one.text is not text:
            reports.append(one)
    return reports


def _inner(report: _Report) -> list[_Report]:
    """Return the errors that the outermost wrapper of a message quotes; ``[]`` if there is no wrapper."""
    keras = _KERAS.match(report.text)
    if keras:
        return [_Report(report.kind, _ANSI.sub("", report.text[keras.end() :]))]
    wrapper = _TRACEBACK_WRAPPERS.match(report.text)
    if wrapper is None:
        return []
    reports = [_report(line) for line in _exception_lines(report.text)]
    direct = _CALLBACK_OR_FUNCTION.match(report.text)
    if direct:
        reports.append(_report(direct))
    kind = (wrapper["kind"] or "").rpartition(".")[2]
    if kind in _MEMORY_ERRORS:
        reports.append(_Report(kind, ""))
    # If the wrapper quotes no readable error, its own text is not matched either.
    return reports or [_Report("", "")]


def _exception_lines(text: str) -> Iterator[re.Match[str]]:
    """Yield the exception line of each printed traceback: the first unindented ``Class: message``."""
    for header in _TRACEBACK.finditer(text):
        line = _EXCEPTION_LINE.search(text[header.end() :])
        if line:
            yield line


def _report(match: re.Match[str]) -> _Report:
    return _Report(match["kind"].rpartition(".")[2], match["text"] or "")
