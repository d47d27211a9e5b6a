"""Recovery from out-of-memory errors: free caches and retry, then continue in smaller parts.

Each retry runs outside the ``except`` block, after the traceback of the failed attempt was dropped, so that
no frame keeps the arrays of that attempt alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import IOBase
from itertools import islice
from typing import Any, NoReturn, TypeVar, cast

from arraybridge import batches
from arraybridge.batches import Joined
from arraybridge.caches import new_cache, remember
from arraybridge.carriers.sources import source_of
from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError, first_line, note_on, text_of
from arraybridge.formatting import counted
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import conversion_errors
from arraybridge.frameworks.registry import loaded
from arraybridge.memory.cleanup import gpu_number, release_caches
from arraybridge.memory.oom_recognition import chain, is_oom, is_oom_error
from arraybridge.settings import worker_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, kind_of, leaves_of
from arraybridge.validation import whole_number

__all__ = [
    "drop_tracebacks",
    "faults",
    "is_oom_error",
    "recovered",
    "run_with_oom_recovery",
    "split_and_retry",
    "watchers",
]

R = TypeVar("R")

#: Positional and keyword arguments.
Batch = tuple[tuple[Any, ...], dict[str, Any]]

#: Functions that simulate errors for `arraybridge.testing.inject_oom`. Each is called before every attempt
#: with its number of rows (None if unknown), and may raise.
faults: list[Callable[[int | None], None]] = []

#: Functions that are called with "retry" or "split" and a message whenever a recovery takes that step.
watchers: list[Callable[[str, str], None]] = []


# -- public functions --------------------------------------------------------------------------------


def run_with_oom_recovery(
    fn: Callable[..., R],
    *args: Any,
    max_retries: int = 2,
    gpu_id: int | None = None,
    split: bool = False,
    split_axis: int = 0,
    min_split: int = 1,
    before_retry: Callable[[], object] | None = None,
    **kwargs: Any,
) -> R:
    """Call ``fn(*args, **kwargs)``; when memory runs out, free all caches and call it again.

    Before each retry, the objects of the failed attempt are released, garbage is collected, and the caches of
    all loaded frameworks are freed. Suspended generators are not closed, and keep their objects alive. Other
    errors are not caught. ``fn`` must be safe to call again: it should not modify its arguments in place
    before a step that can fail, or ``before_retry`` should undo the modification. ``fn`` is not called again
    if one of its arguments is an iterator, because the first attempt may have read from it.

    Args:
        fn: The function.
        *args: The positional arguments of ``fn``.
        **kwargs: The keyword arguments of ``fn``. To pass one that has the name of an option below, use
            ``functools.partial``.
        max_retries: The number of attempts after the first one. Defaults to 2.
        gpu_id: The number of the accelerator whose caches are freed. Defaults to None: all accelerators.
        split: Whether to continue in halves if a retry fails as well, as `split_and_retry` does. Defaults to
            False.
        split_axis: The axis to split along. Defaults to 0.
        min_split: The smallest number of rows in a part. Defaults to 1.
        before_retry: A function that is called without arguments after each failure, before the next attempt.
            A training step can zero its gradients there. With ``split``, finished parts are not computed
            again. Defaults to None.

    Returns:
        The result of ``fn``.

    Raises:
        CannotSplitError: If memory runs out with ``split=True`` and no argument has the axis ``split_axis``,
            or the results cannot be joined.
        ValueError: If ``max_retries`` or ``min_split`` is not an int or is out of range, or ``gpu_id`` is
            ``"auto"``, negative, a bool or a float.
        TypeError: If ``fn`` or ``before_retry`` is not callable, ``split`` is not a bool, or ``split_axis``
            is not an int.
        Exception: If every attempt runs out of memory: the error from the last attempt, with a description of
            the attempts. Other exceptions raised by ``fn`` propagate unchanged.

    Example:
        >>> import numpy as np
        >>> run_with_oom_recovery(np.add, np.ones(2), 1)
        array([2., 2.])
    """
    if not callable(fn):
        raise TypeError(f"run_with_oom_recovery expected a function, got {type(fn).__name__}.")
    if max_retries.__class__ is not int or max_retries < 0:  # calling the validator takes 0.1 µs
        whole_number("max_retries", max_retries, least=0, type_error=ValueError)
    if gpu_id is not None:
        gpu_id = gpu_number("run_with_oom_recovery", gpu_id)
    if before_retry is not None and not callable(before_retry):
        raise TypeError(f"before_retry={before_retry!r} must be a function without arguments.")
    result: R
    if split is False:
        result = recovered(fn, args, kwargs, max_retries, gpu_id, before_retry)
        return result
    if split is not True:
        raise TypeError(
            f"split={split!r} must be True or False. To exclude an argument, wrap it in arraybridge.fixed(x)."
        )
    whole_number("split_axis", split_axis)
    _check_min_split(min_split)
    result = recovered(
        _without_fixed(fn),
        args,
        kwargs,
        retries=max_retries,
        gpu_id=gpu_id,
        before_retry=before_retry,
        split=True,
        axis=split_axis,
        least=min_split,
        named=fn,
    )
    return cast("R", batches.plain(result))


def split_and_retry(fn: Callable[..., Any], batch: Any, *, axis: int = 0, min_split: int = 1) -> Any:
    """Call ``fn`` on a batch; when memory runs out, continue in parts and join their results.

    After a first cleanup and retry, the size is halved until a part fits, and that size is used for the rest.
    Finished parts are never computed again. The result of each part is copied into one preallocated result,
    so ``fn`` may reuse its own output buffer for the next part. JAX and TensorFlow results are not copied,
    and must not share such a buffer. The result equals that of the whole batch, bit for bit, if
    ``fn`` is row-wise: it processes each row (slice along ``axis``) independently, and returns one row for
    each.

    Args:
        fn: The function, called as ``fn(part)``.
        batch: An array; or a tuple of arguments, for ``fn(*arguments)``; or a dict, for ``fn(**arguments)``.
            The first array that has ``axis`` determines the number of rows. Every array with that number of
            rows is split, even inside containers, and so is every list of non-arrays with one entry per row.
            All other arguments are passed whole to every call. Wrap an argument that has that number of rows
            by chance in `fixed`. An exception raised in a part has a note that names the split arguments.
        axis: The axis of arguments and results to split along. Negative axes count from the end. Defaults
            to 0.
        min_split: The smallest number of rows in a part. A part with fewer than twice as many rows is not
            halved. Defaults to 1.

    Returns:
        The result of ``fn``. The arrays of several parts are joined along ``axis``, even inside containers;
        dicts are joined by key. Lists with one entry per row, such as strings or dicts, are concatenated.
        Any other value must be the same object or an equal string in every part, or wrapped in `fixed`.

    Raises:
        CannotSplitError: If memory runs out and no argument has that axis, or the results of the parts cannot
            be joined: their number of rows differs from that of their part, they are numbers, their
            structures differ, or a list could be one entry per row or several results.
        TypeError: If ``fn`` is not callable, or ``axis`` is not an int.
        ValueError: If ``min_split`` is not an int or is less than 1.
        Exception: If a part does not fit and cannot be split further: the error that it raised, with an
            explanation. Other exceptions raised by ``fn`` propagate unchanged.

    Example:
        >>> import numpy as np
        >>> split_and_retry(np.sqrt, np.array([1.0, 4.0, 9.0]))
        array([1., 2., 3.])
    """
    if not callable(fn):
        raise TypeError(f"split_and_retry expected a function, got {type(fn).__name__}.")
    whole_number("axis", axis)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if type(batch) is dict:
        kwargs = batch
    elif type(batch) is tuple:
        args = batch
    else:
        args = (batch,)
    _check_min_split(min_split)
    result = recovered(
        _without_fixed(fn),
        args,
        kwargs,
        retries=1,
        gpu_id=None,
        split=True,
        axis=axis,
        least=min_split,
        named=fn,
    )
    return batches.plain(result)


def _check_min_split(rows: Any) -> None:
    if rows.__class__ is not int or rows < 1:  # calling the validator takes 0.1 µs
        whole_number("min_split", rows, least=1, type_error=ValueError)


def _without_fixed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that unwraps its arguments from `fixed` before it calls ``fn``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*batches.plain(args), **(kwargs and batches.plain(kwargs)))

    return call


# -- one attempt -------------------------------------------------------------------------------------


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and its chain, and with them the variables of finished frames."""
    for one in list(chain(error, sys.exception())):
        one.__traceback__ = None


def attempted(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], before: BaseException | None
) -> tuple[Any, Exception | None]:
    """Return ``(result, None)``, or ``(None, error)`` if the call ran out of memory.

    ``before`` is the error that is already being handled. This call did not raise it.
    """
    try:
        result = fn(*args, **kwargs) if kwargs else fn(*args)
        try:
            wait = _waits[type(result)]
        except KeyError:
            wait = _find_wait(result)
        if wait is not None:
            wait(result)
        return result, None
    except Exception as error:  # the user's function may raise any error; all but OOM are raised again
        if not is_oom(error, before):
            raise
        return None, error


# For each type of result, the function that waits for it, so that an asynchronous allocation error (JAX) is
# raised here; None if there is nothing to wait for.
_waits: dict[type, Callable[[Any], object] | None] = new_cache()


def _find_wait(result: Any) -> Callable[[Any], object] | None:
    # Not isinstance, because it reads __class__, which may raise for a proxy.
    if issubclass(type(result), dict):
        return remember(_waits, type(result), _wait_for_values)
    if issubclass(type(result), (tuple, list)):
        return remember(_waits, type(result), _wait_for_all)
    try:
        owner = registry.find_owner(result)
    except FrameworkNotInstalledError:  # the framework of the object is broken in this environment
        owner = None
    wait = None if owner is None else owner.runtime.late_errors(type(result))
    return remember(_waits, type(result), wait)


def _wait_for_values(results: dict[Any, Any]) -> None:
    _wait_for_all(results.values())


def _wait_for_all(results: Iterable[Any]) -> None:
    # The first arrays are enough to raise a late error. The limit keeps this cheap for a list of a million
    # numbers.
    for one in islice(results, 100):
        wait = _waits[type(one)] if type(one) in _waits else _find_wait(one)
        if wait is not None:
            wait(one)


# -- retries and parts -------------------------------------------------------------------------------


def recovered(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    retries: int,
    gpu_id: int | None,
    before_retry: Callable[[], object] | None = None,
    split: bool = False,
    axis: int = 0,
    least: int = 1,
    named: Callable[..., Any] | None = None,
    packed: bool = False,
) -> Any:
    """Call ``fn``; when memory runs out, retry and split as described in `run_with_oom_recovery`.

    With ``split``, arguments wrapped in `fixed` reach the function still wrapped, and may be in its result.
    ``named`` is the function whose parameters name the arguments in notes. ``packed`` states that ``args``
    consists of one tuple and one dict, which are the arguments of ``named``.
    """
    failure: Any = None
    if not faults:  # most calls need only this attempt
        result, failure = attempted(fn, args, kwargs, sys.exception())
        if failure is None:
            return result
    call = _Recovery(
        fn=fn,
        batch=(args, kwargs),
        failure=failure,
        retries=retries,
        gpu_id=gpu_id,
        before_retry=before_retry,
        axis=axis,
        least=least,
        named=named,
        packed=packed,
    )
    del failure  # its traceback refers to this frame
    try:
        return call.made(split)
    finally:
        call.failure = None


@dataclass(slots=True, eq=False)
class _Recovery:
    """A call with the state and the options of its retries.

    Attributes:
        fn: The function.
        batch: Its arguments.
        failure: The error that `attempted` returned for the last attempt, or None. No other variable refers
            to it, because its traceback refers to the frames of these methods.
        retries: As ``max_retries`` of `run_with_oom_recovery`.
        gpu_id: As for `run_with_oom_recovery`.
        before_retry: As for `run_with_oom_recovery`.
        axis: As ``split_axis`` of `run_with_oom_recovery`.
        least: As ``min_split`` of `run_with_oom_recovery`.
        named: As for `recovered`.
        packed: As for `recovered`.
    """

    fn: Callable[..., Any]
    batch: Batch
    failure: Any
    retries: int
    gpu_id: int | None
    before_retry: Callable[[], object] | None
    axis: int
    least: int
    named: Callable[..., Any] | None
    packed: bool

    def made(self, split: bool) -> Any:
        """Return the result of the whole call, after retries; with ``split``, continue in parts."""
        rows = batches.rows(self.batch, self.axis) if split or faults else None
        attempts = 1 + (min(self.retries, 1) if split else self.retries)
        what = f"one of {attempts} attempts" if rows is None or not split else counted(rows, "row")
        result = self._tried(partial(self._attempt, rows, 0, rows), attempts, what)
        if self.failure is None:
            return result
        if not split:
            tried = "Out of memory in the only attempt (max_retries=0)."
            if attempts > 1:
                tried = (
                    f"Out of memory in each of {attempts} attempts. The caches of all loaded frameworks were"
                    " freed between them."
                )
            self._give_up(
                f"{tried} Process fewer rows at a time with split=True (for a decorator:"
                " oom_recovery='split'), or call memory_stats() to see what uses the memory."
            )
        if rows is None:
            raise _nothing_to_split(self.batch, self.axis) from self.failure
        return self._in_parts(rows)

    def _in_parts(self, rows: int) -> Any:
        """Halve the size of the parts until one fits, process the rest, and return the joined result."""
        joined = Joined(rows, self.axis, self.batch)
        size = rows
        least = self.least
        while joined.done < rows:
            if self.failure is not None and size < 2 * least:
                self._give_up(_too_large_a_part(size, rows, least))
            if self.failure is not None:
                done = f"{joined.done} of {rows} rows are done"
                then = f"continuing with {counted(size // 2, 'row')} at a time ({done})"
                self._clean_up("split", counted(size, "row"), then)
                size //= 2
            count = _portion(rows - joined.done, size, least)
            # Parts of the smallest size are tried twice, because they cannot be halved.
            attempts = 2 if count < 2 * least else 1
            result = self._tried(
                partial(self._attempt, rows, joined.done, count), attempts, counted(count, "row")
            )
            if self.failure is None:
                self._join(partial(joined.add, result, count))
            else:
                size = count
            del result
        return self._join(joined.result)

    def _attempt(self, rows: Any, start: int, count: Any) -> Any:
        """Call the function on ``count`` of ``rows`` rows; both are None if the rows were not counted."""
        for fault in tuple(faults):  # a copy, because another thread may remove its fault
            fault(count)
        if count == rows:
            args, kwargs = self.batch
            return self.fn(*args, **kwargs)
        args, kwargs = self._part(rows, start, count)
        try:
            return self.fn(*args, **kwargs)
        except Exception as error:  # any error in the user's function gets a note and is raised again
            self._note_part(error, rows, start, count)
            raise

    def _note_part(self, error: Exception, rows: int, start: int, count: int) -> None:
        """Add a note that names the split arguments, because one of them may have been split by mistake."""
        with suppress(Exception):  # third-party objects may raise; the user's error matters more
            batch = cast("Batch", self.batch[0]) if self.packed else self.batch
            names = _names_of_split(self.named or self.fn, batch, self.axis, rows)
            part = f"row {start}" if count == 1 else f"rows {start} to {start + count - 1}"
            note = (
                f"arraybridge: raised for {part} of a batch of {rows} rows,"
                f" split along axis {self.axis}. Split arguments: "
                + ", ".join(f"{name} ({count} of {rows} rows)" for name in names)
                + ". If one of them has that many rows only by chance, pass arraybridge.fixed(argument)."
            )
            note_on(error, note)

    def _part(self, rows: int, start: int, count: int) -> Batch:
        """Return the arguments for ``count`` rows that begin at row ``start``."""
        try:
            return cast("Batch", batches.part(self.batch, self.axis, rows, start, start + count))
        except conversion_errors(*loaded()) as error:
            if isinstance(error, CannotSplitError):
                self._check_parts(rows, start, count)  # raises the same error with the name of the argument
            if isinstance(error, CannotSplitError) or is_oom_error(error):
                raise
            raise CannotSplitError(
                f"Memory ran out, and the batch cannot be split along axis {self.axis}: {_described(error)}.",
                reason=f"the batch cannot be split along axis {self.axis}",
                advice="Pass arrays that can be sliced, or wrap arrays that every part needs whole in"
                " arraybridge.fixed(array).",
            ) from error

    def _check_parts(self, rows: int, start: int, count: int) -> None:
        """Raise the error of the first argument that cannot be split, with the name of the argument."""
        batch = cast("Batch", self.batch[0]) if self.packed else self.batch
        for name, value in _named_arguments(self.named or self.fn, batch):
            try:
                batches.part(value, self.axis, rows, start, start + count)
            except CannotSplitError as error:
                error.add_call(name if name.startswith("argument ") else f"argument {name!r}")
                raise

    def _tried(self, run: Callable[[], Any], attempts: int, what: str) -> Any:
        """Return the result of the first attempt that succeeds; None, with `failure` set, if none does."""
        while True:
            if self.failure is None:
                result, self.failure = attempted(run, (), {}, sys.exception())
                if self.failure is None:
                    return result
            attempts -= 1
            if attempts <= 0:
                return None
            self._clean_up("retry", what, "trying again")

    def _join(self, step: Callable[[], Any]) -> Any:
        """Run a step that joins results, with one retry if memory runs out, and return its result."""
        result = self._tried(step, 2, "joining")
        if self.failure is not None:
            self._give_up(
                "Out of memory while joining the results of the parts. Free memory (see memory_stats())."
            )
        return result

    def _give_up(self, explanation: str) -> NoReturn:
        note_on(self.failure, f"arraybridge: {explanation}")
        raise self.failure

    def _clean_up(self, step: str, what: str, then: str) -> None:
        """Release the objects of the failed attempt, free caches, and report the step."""
        obstacle = _read_once(self.batch)
        if obstacle:
            self._give_up(obstacle)
        reason = _described(self.failure)
        drop_tracebacks(self.failure)
        self.failure = None
        gpu_id = self.gpu_id
        device = str(worker_device.get() or "") if gpu_id is None else f"gpu:{gpu_id}"
        span = trace_log.span("clean-up", "clean-up") if open_logs else None
        freed = release_caches(loaded(), gpu_id)
        if span is not None:
            span.nbytes = freed
            span.device = device
            span.reason = "memory ran out"
            span.end()
        message = f"{what} ran out of memory ({reason}); freed {freed} bytes of caches, {then}"
        import logging  # `import arraybridge` does not need it

        logging.getLogger("arraybridge.memory").info(message)
        for watch in watchers:
            watch(step, message)
        if open_logs:
            trace_log.note(step, message, device)
        if self.before_retry is not None:
            self.before_retry()


def _described(error: BaseException) -> str:
    text = first_line(text_of(error) or "")
    return f"{type(error).__module__}.{type(error).__qualname__}: {text}".removeprefix("builtins.")


# -- the arguments -----------------------------------------------------------------------------------


def _nothing_to_split(batch: Batch, axis: int) -> CannotSplitError:
    """Return the error for a call in which no argument to split is an array that has ``axis``."""
    leaves = [
        (type(x).__name__, source_of(x) if kind_of(x) is ARRAY else None) for x in leaves_of(batch)[:20]
    ]
    texts = (name if array is None else f"{name} {array[0].shape(array[1])}" for name, array in leaves)
    shapes = ", ".join(texts) or "none"
    return CannotSplitError(
        f"Memory ran out, and no argument to split is an array that has axis {axis} (arguments: {shapes}).",
        reason=f"no argument to split has axis {axis}",
        advice="Pass the batch as an array. If its rows are along another axis, pass that axis.",
    )


def _too_large_a_part(size: int, rows: int, least: int) -> str:
    """Return the message for a part that does not fit and cannot be split further."""
    if size <= 1:
        return (
            "Out of memory even with a single row. Free memory (see memory_stats()) or reduce the size of"
            " each row."
        )
    return (
        f"Out of memory with {size} of {rows} rows. Smaller parts are excluded by min_split={least}. Lower"
        " min_split, or free memory (see memory_stats())."
    )


def _names_of_split(fn: Callable[..., Any], batch: Batch, axis: int, rows: int) -> list[str]:
    """Return the names of the split arguments, with their positions in containers."""
    arguments = _named_arguments(fn, batch)
    return [name + place for name, value in arguments for place in batches.split_places(value, axis, rows)]


def _named_arguments(fn: Callable[..., Any], batch: Batch) -> list[tuple[str, Any]]:
    """Return the arguments of a call, each with its name."""
    args, kwargs = batch
    return [*zip(_parameter_names(fn, len(args)), args, strict=True), *kwargs.items()]


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return names for positional arguments, from the signature if possible."""
    import inspect  # takes a few ms, and only errors need it

    names = [f"argument {i}" for i in range(count)]
    with suppress(TypeError, ValueError):  # a built-in function without a signature
        for i, parameter in enumerate([*inspect.signature(fn).parameters.values()][:count]):
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                break
            names[i] = parameter.name
    return names


def _portion(remaining: int, size: int, least: int) -> int:
    """Return the number of rows of the next part.

    The remaining rows are divided evenly into parts of at most ``size`` rows. A part may be larger if it
    would otherwise have fewer than ``least`` rows.
    """
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)


def _read_once(batch: Batch) -> str:
    """Return the reason why a call cannot be repeated (an iterator argument); ``""`` if there is none."""
    with suppress(ValueError, RecursionError):  # a container that contains itself, or is nested too deeply
        for x in leaves_of(batch):
            cls = type(x)
            # Files are allowed: they are logs more often than input.
            if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
                return (
                    "Out of memory in the first attempt. The function is not called again because that"
                    f" attempt may have read from an argument that is an iterator ({cls.__name__}). Pass a"
                    " list."
                )
    return ""
