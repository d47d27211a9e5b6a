"""Recovery from out-of-memory errors: free caches and retry, then continue in smaller parts.

Each retry runs outside the ``except`` block, after the traceback of the failed attempt was dropped, so that
no frame keeps the arrays of that attempt alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from arraybridge import batches
from arraybridge.batches import Joined
from arraybridge.caches import new_cache, remember
from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError, note_on
from arraybridge.formatting import format_count
from arraybridge.interface import registry
from arraybridge.interface.framework import native_errors
from arraybridge.interface.registry import list_loaded_cached
from arraybridge.memory.cleanup import gpu_number, release_caches
from arraybridge.memory.oom_recognition import chain, is_oom, is_oom_error
from arraybridge.memory.split_arguments import (
    Named,
    arguments_to_split,
    first_iterator,
    name_arguments,
    note_on_part,
    nothing_to_split_error,
    warn_about_coincidences,
)
from arraybridge.outcome import Outcome, ask
from arraybridge.settings import worker_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import arrays_of
from arraybridge.validation import add_hints, whole_number

if TYPE_CHECKING:
    import logging

__all__ = [
    "RecoveryOptions",
    "drop_tracebacks",
    "faults",
    "is_oom_error",
    "recover",
    "run_with_oom_recovery",
    "split_and_retry",
    "watchers",
]

R = TypeVar("R")

#: Functions that simulate errors for `arraybridge.testing.inject_oom`. Each is called before every attempt
#: with its number of rows (None if unknown), and may raise.
faults: list[Callable[[int | None], None]] = []

#: Functions that are called with "retry" or "split" and a message whenever a recovery takes that step.
watchers: list[Callable[[str, str], None]] = []


# -- public functions --------------------------------------------------------------------------------


@add_hints
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

    Before each retry, the objects of the failed attempt are released, and the caches of all loaded frameworks
    are freed. Before the first retry, garbage is collected as well. Suspended generators are not closed, and
    keep their objects alive. Other errors are not caught. ``fn`` must be safe to call again: it should not
    modify its arguments in place before a step that can fail, or ``before_retry`` should undo the
    modification. ``fn`` is not called again if one of its arguments is an iterator, because the first attempt
    may have read from it.

    Args:
        fn: The function.
        *args: The positional arguments of ``fn``.
        **kwargs: The keyword arguments of ``fn``. To pass one that has the name of an option below, use
            ``functools.partial``.
        max_retries: The number of attempts after the first one. Defaults to 2; with ``split``, at most 1
            attempt follows before the batch is split.
        gpu_id: The number of the accelerator whose caches are freed. Defaults to None: all accelerators.
        split: Whether to continue in parts if a retry fails as well, as `split_and_retry` does. Defaults to
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
        ValueError: If ``max_retries`` or ``min_split`` is not an int or is out of range, ``gpu_id`` is
            ``"auto"``, negative, a bool or a float, or an option of splitting is passed without ``split``.
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
    if max_retries.__class__ is not int or max_retries < 0:  # calling the validator takes longer
        max_retries = whole_number("max_retries", max_retries, least=0, type_error=ValueError)
    if gpu_id is not None:
        gpu_id = gpu_number("run_with_oom_recovery", gpu_id)
    if before_retry is not None and not callable(before_retry):
        raise TypeError(f"before_retry={before_retry!r} must be a function without arguments.")
    if split is False and (split_axis, min_split) == (0, 1):
        options = _DEFAULTS
        if max_retries != 2 or gpu_id is not None or before_retry is not None:
            options = RecoveryOptions(max_retries, gpu_id, before_retry)
        result: R = recover(fn, args, kwargs, options)
        return result
    _check_split(split, split_axis, min_split)
    split_axis = whole_number("split_axis", split_axis)
    min_split = whole_number("min_split", min_split, least=1, type_error=ValueError)
    options = RecoveryOptions(
        max_retries, gpu_id, before_retry, split=True, split_axis=split_axis, min_split=min_split
    )
    return cast("R", _recover_in_parts(fn, args, kwargs, options))


def _check_split(split: Any, split_axis: Any, min_split: Any) -> None:
    """Raise an error unless ``split`` is True; the other two are options of splitting."""
    if split is False:
        option = f"{split_axis=}" if split_axis != 0 else f"{min_split=}"
        raise ValueError(f"{option} has no effect without split=True. Pass both, or neither.")
    if split is not True:
        raise TypeError(
            f"split={split!r} must be True or False. To exclude an argument, wrap it in arraybridge.fixed(x)."
        )


@add_hints
def split_and_retry(fn: Callable[..., Any], batch: Any, *, axis: int = 0, min_split: int = 1) -> Any:
    """Call ``fn`` on a batch; when memory runs out, continue in parts and join their results.

    After a first cleanup and retry, the rows are divided evenly into as few parts as possible, each with at
    most half of the rows: 11 rows into 4, 4 and 3. If a part does not fit, the remaining rows are divided in
    the same way into parts of at most half its size. A part that cannot be divided further is tried twice.
    Finished parts are never computed again. The result of each part is copied into one preallocated result,
    so ``fn`` may reuse its own output buffer for the next part. JAX and TensorFlow results are not copied,
    and must not share such a buffer. The result equals that of the whole batch, bit for bit, if ``fn`` is
    row-wise: it processes each row (slice along ``axis``) independently, and returns one row for each.

    Args:
        fn: The function, called as ``fn(part)``.
        batch: An array; or a tuple of arguments, for ``fn(*arguments)``; or a dict, for ``fn(**arguments)``.
            The first array that has ``axis`` determines the number of rows. Every array with that number of
            rows is split, even inside containers, and so is every list of non-arrays with one entry per row.
            All other arguments are passed whole to every call. Wrap an argument that has that number of rows
            by chance in `fixed`. A warning names an array whose shape also fits the last axes of the batch.
            An exception raised in a part has a note that names the split arguments.
        axis: The axis of arguments and results to split along. Negative axes count from the end. Defaults
            to 0.
        min_split: The smallest number of rows in a part. A part with fewer than ``2 * min_split`` rows is not
            divided, and parts may have more than half of the rows to reach ``min_split``. Defaults to 1.

    Returns:
        The result of ``fn``. The arrays of several parts are joined along ``axis``, even inside containers;
        dicts are joined by key. Lists with one entry per row, such as strings or dicts, are concatenated.
        Any other value must be the same object or an equal string in every part, or wrapped in `fixed`.

    Raises:
        CannotSplitError: If memory runs out and no argument has that axis, or the results of the parts cannot
            be joined: their number of rows differs from that of their part, they are numbers, their
            structures differ, a list could be one entry per row or several results, or a list or tuple has
            attributes.
        TypeError: If ``fn`` is not callable, or ``axis`` is not an int.
        ValueError: If ``min_split`` is not an int or is less than 1.
        Exception: If a part does not fit and cannot be split further, or a batch has no rows: the error that
            it raised, with an explanation. Other exceptions raised by ``fn`` propagate, from a part with the
            note mentioned above.

    Example:
        >>> import numpy as np
        >>> split_and_retry(np.sqrt, np.array([1.0, 4.0, 9.0]))
        array([1., 2., 3.])
    """
    if not callable(fn):
        raise TypeError(f"split_and_retry expected a function, got {type(fn).__name__}.")
    options = _SPLIT_DEFAULTS
    if axis.__class__ is not int or axis != 0:
        options = options._replace(split_axis=whole_number("axis", axis))
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if type(batch) is dict:
        kwargs = batch
    elif type(batch) is tuple:
        args = batch
    else:
        args = (batch,)
    if min_split.__class__ is not int or min_split != 1:
        min_split = whole_number("min_split", min_split, least=1, type_error=ValueError)
        options = options._replace(min_split=min_split)
    return _recover_in_parts(fn, args, kwargs, options)


def _recover_in_parts(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: RecoveryOptions
) -> Any:
    """Call ``fn`` under recovery with ``split``, without `fixed` in its arguments and its result."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*batches.plain(args), **(kwargs and batches.plain(kwargs)))

    return batches.plain(recover(call, args, kwargs, options, partial(name_arguments, fn)))


# -- one attempt -------------------------------------------------------------------------------------


def drop_tracebacks(error: BaseException, before: BaseException | None = None) -> None:
    """Drop the tracebacks of an error and its chain, and with them the variables of finished frames.

    ``before`` is an error that was already being handled when the failed call began, or None.
    """
    for one in list(chain(error, before)):
        one.__traceback__ = None


# For each type of result, the function that waits for it, so that an asynchronous allocation error (JAX) is
# raised here; None if there is nothing to wait for.
_waits: dict[type, Callable[[Any], object] | None] = new_cache()


def _complete(result: Any) -> Any:
    """Wait for a result that is computed asynchronously, so that a late error is raised here; return it."""
    try:
        wait = _waits[type(result)]
    except (KeyError, TypeError):  # the second one if the class is unhashable
        wait = _find_wait(result)
    if wait is not None:
        wait(result)
    return result


def _find_wait(result: Any) -> Callable[[Any], object] | None:
    # Not isinstance, because it reads __class__, which may raise for a proxy.
    if issubclass(type(result), (dict, tuple, list)):
        return remember(_waits, type(result), _wait_for_all)
    try:
        owner = registry.find_owner(result)
    except FrameworkNotInstalledError:  # the framework of the object is broken in this environment
        owner = None
    wait = None if owner is None else owner.runtime.late_errors(type(result))
    return remember(_waits, type(result), wait)


def _wait_for_all(results: Any) -> None:
    # The first arrays are enough to raise a late error. The limit keeps this cheap for a list of a million
    # numbers.
    for one in islice(results.values() if issubclass(type(results), dict) else results, 100):
        _complete(one)


# -- retries and parts -------------------------------------------------------------------------------


class RecoveryOptions(NamedTuple):  # creating a frozen dataclass takes three times as long
    """The options of a recovery, as for `run_with_oom_recovery`."""

    max_retries: int = 2
    gpu_id: int | None = None
    before_retry: Callable[[], object] | None = None
    split: bool = False
    split_axis: int = 0
    min_split: int = 1


_DEFAULTS = RecoveryOptions()
_SPLIT_DEFAULTS = RecoveryOptions(max_retries=1, split=True)


def recover(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RecoveryOptions,
    arguments_of: Callable[..., Named] | None = None,
) -> Any:
    """Call ``fn``; when memory runs out, retry and split as described in `run_with_oom_recovery`.

    With ``split``, arguments wrapped in `fixed` reach the function still wrapped, and may be in its result.
    ``arguments_of`` is called like ``fn`` and returns the arguments with their names, for messages. By
    default, the names are those of the parameters of ``fn``.
    """
    if faults:
        return _Recovery(fn, args, kwargs, options, arguments_of).run(None)
    before = sys.exception()
    try:
        return _complete(fn(*args, **kwargs) if kwargs else fn(*args))  # most calls need only this attempt
    except Exception as error:  # the function may raise any error; all but OOM are raised again
        if not is_oom(error, before):
            raise
        recovery = _Recovery(fn, args, kwargs, options, arguments_of)
        step = recovery.step_after_whole(error, recovery.retries)
        if step is None:
            raise
        drop_tracebacks(error, before)
    return recovery.run(step)


class _Step(NamedTuple):
    """The step between two attempts, for logs and traces.

    Attributes:
        name: ``"retry"`` or ``"split"``.
        failure: The description of the attempt that failed.
        then: The description of the next attempt.
    """

    name: str
    failure: str
    then: str


class _Recovery:
    """A call that continues after an attempt ran out of memory.

    Between two attempts, no attribute or variable refers to an error, because an error may refer to arrays.

    Attributes:
        retries: The number of attempts with the whole batch after the first one.
        rows: The number of rows of the batch; None if no array has the axis, or they were not counted.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RecoveryOptions,
        arguments_of: Callable[..., Named] | None,
    ) -> None:
        self._fn = fn
        self._batch = (args, kwargs)
        self._options = options
        self._arguments_of = arguments_of or partial(name_arguments, fn)
        self.retries = min(options.max_retries, 1) if options.split else options.max_retries
        try:
            leaves = arrays_of([*args, *kwargs.values()], also=object)
        except ValueError:  # a container that contains itself cannot be split
            if options.split:
                raise
            leaves = []
        self.rows = batches.rows(leaves, options.split_axis) if options.split or faults else None
        #: The class name of an argument that can be read only once; "" if there is none.
        self._iterator = first_iterator(leaves)
        #: Whether the next clean-up collects garbage.
        self._collects = True
        #: The number of rows of the largest part that fitted.
        self._fitted = 0

    def run(self, first_step: _Step | None) -> Any:
        """Return the result of the call, from parts if necessary.

        ``first_step`` follows the first attempt, which has failed; None if it has not been made yet.
        """
        attempts = 1 + self.retries
        if first_step is not None:
            self._clean_up(first_step)
            attempts -= 1
        outcome = self._attempt(partial(self._call, 0, self.rows), attempts, self.step_after_whole)
        return self._run_in_parts(self.rows or 0) if outcome is None else outcome.value

    def _run_in_parts(self, rows: int) -> Any:
        """Halve the size of the parts until one fits, process the rest, and return the joined result."""
        options = self._options
        warn_about_coincidences(arguments_to_split(self._arguments(), options.split_axis, rows), rows)
        joined = Joined(rows, options.split_axis, self._batch)
        size = rows // 2
        while joined.done < rows:
            count = _portion(rows - joined.done, size, options.min_split)
            # Parts of the smallest size are tried twice, because they cannot be halved.
            attempts = 2 if count < 2 * options.min_split else 1
            step_after = partial(self._step_after_part, joined.done, count)
            outcome = self._attempt(partial(self._call, joined.done, count), attempts, step_after)
            if outcome is None:
                size = count // 2
                continue
            self._fitted = max(self._fitted, count)
            self._attempt(partial(joined.add, outcome.value, count), 2, self._step_after_joining)
            del outcome  # its value is not needed during the next attempt
        outcome = self._attempt(joined.result, 2, self._step_after_joining)
        return None if outcome is None else outcome.value

    def _attempt(
        self, call: Callable[[], Any], attempts: int, step_after: Callable[[Exception, int], _Step | None]
    ) -> Outcome | None:
        """Return the outcome of the first of several attempts that succeeds; None if all ran out of memory.

        ``step_after`` is called with the error and the number of attempts left. It returns the step to the
        next attempt, which may be one with fewer rows. If it returns None, the error is raised.
        """
        before = sys.exception()
        for left in reversed(range(attempts)):
            try:
                return Outcome(_complete(call()))
            except Exception as error:  # the function may raise any error; all but OOM are raised again
                step = step_after(error, left) if is_oom(error, before) else None
                if step is None:
                    raise
                drop_tracebacks(error, before)
            self._clean_up(step)
        return None

    def _call(self, start: int, count: int | None) -> Any:
        """Call the function on ``count`` rows from row ``start`` on, or on the whole batch."""
        for fault in tuple(faults):  # a copy, because another thread may remove its fault
            fault(count)
        if count is None or count == self.rows:
            args, kwargs = self._batch
            return self._fn(*args, **kwargs)
        args, kwargs = self._part(start, count)
        try:
            return self._fn(*args, **kwargs)
        except Exception as error:  # any error in the user's function gets a note and is raised again
            with suppress(Exception):  # third-party objects may raise; the user's error matters more
                note_on_part(
                    error,
                    self._arguments(),
                    axis=self._options.split_axis,
                    rows=self.rows or 0,
                    start=start,
                    count=count,
                )
            raise

    # -- the arguments -------------------------------------------------------------------------------

    def _arguments(self) -> Named:
        """Return the arguments of the call with their names."""
        args, kwargs = self._batch
        return self._arguments_of(*args, **kwargs)

    def _part(self, start: int, count: int) -> Any:
        """Return the arguments for ``count`` rows that begin at row ``start``."""
        axis = self._options.split_axis
        bounds = axis, self.rows or 0, start, start + count
        try:
            return batches.part(self._batch, *bounds)
        except CannotSplitError:
            self._name_unsplittable(*bounds)
            raise
        except native_errors(*list_loaded_cached()) as error:
            if is_oom_error(error):
                raise
            raise CannotSplitError(
                f"Memory ran out, and the batch cannot be split along axis {axis}: {_describe(error)}.",
                reason=f"the batch cannot be split along axis {axis}",
                advice="Pass arrays that can be sliced, or wrap arrays that every part needs whole in"
                " arraybridge.fixed(array).",
            ) from error

    def _name_unsplittable(self, *bounds: int) -> None:
        """Raise the error of the first argument that cannot be split, with the name of the argument."""
        for name, value in self._arguments():
            try:
                batches.part(value, *bounds)
            except CannotSplitError as error:
                error.add_call(name if name.startswith("argument ") else f"argument {name!r}")
                raise

    # -- steps between attempts ----------------------------------------------------------------------

    def step_after_whole(self, error: Exception, left: int) -> _Step | None:
        """Return the step after an attempt with the whole batch; None, with a note, if there is none.

        ``left`` is the number of further attempts with the whole batch.

        Raises:
            CannotSplitError: If the batch has to be split, and no argument has its axis.
        """
        options = self._options
        attempts = 1 + self.retries
        is_counted = options.split and self.rows is not None
        if left or self._iterator:
            what = format_count(self.rows or 0, "row") if is_counted else f"one of {attempts} attempts"
            return self._retry(error, what)
        if is_counted:
            return self._halve(error, self.rows or 0, 0)
        if options.split:
            raise nothing_to_split_error(self._batch, options.split_axis) from error
        tried = "Out of memory in the only attempt (max_retries=0)."
        if attempts > 1:
            tried = (
                f"Out of memory in each of {attempts} attempts. The caches of all loaded frameworks were"
                " freed between them."
            )
        _explain(
            error,
            f"{tried} Process fewer rows at a time with split=True (for a decorator:"
            " oom_recovery='split'), or call memory_stats() to see what uses the memory.",
        )
        return None

    def _step_after_part(self, start: int, count: int, error: Exception, left: int) -> _Step | None:
        if count <= self._fitted:  # more memory is in use than before
            self._collects = True
        return self._retry(error, format_count(count, "row")) if left else self._halve(error, count, start)

    def _step_after_joining(self, error: Exception, left: int) -> _Step | None:
        if left:
            return self._retry(error, "joining")
        _explain(
            error, "Out of memory while joining the results of the parts. Free memory (see memory_stats())."
        )
        return None

    def _retry(self, error: Exception, what: str) -> _Step | None:
        """Return the step to another attempt; None, with a note, if the arguments cannot be read again."""
        if not self._iterator:
            return _Step("retry", f"{what} ran out of memory ({_describe(error)})", "trying again")
        _explain(
            error,
            "Out of memory in the first attempt. The function is not called again because that attempt may"
            f" have read from an argument that is an iterator ({self._iterator}). Pass a list.",
        )
        return None

    def _halve(self, error: Exception, count: int, done: int) -> _Step | None:
        """Return the step to parts of half the size; None, with a note, if such parts would be too small."""
        least = self._options.min_split
        rows = self.rows or 0
        if count >= 2 * least:
            failure = f"{format_count(count, 'row')} ran out of memory ({_describe(error)})"
            smaller = format_count(count // 2, "row")
            then = f"continuing with {smaller} at a time ({done} of {rows} rows are done)"
            return _Step("split", failure, then)
        fix = "Free memory (see memory_stats())"
        if count == 0:
            _explain(error, f"Out of memory with a batch that has no rows. {fix}.")
        elif count == 1:
            _explain(error, f"Out of memory even with a single row. {fix} or reduce the size of each row.")
        else:
            _explain(
                error,
                f"Out of memory with {count} of {rows} rows. Smaller parts are excluded by min_split={least}."
                " Lower min_split, or free memory (see memory_stats()).",
            )
        return None

    def _clean_up(self, step: _Step) -> None:
        """Free caches, and report the step. Garbage is collected only if `_collects` is true."""
        gpu_id = self._options.gpu_id
        device = str(worker_device.get() or "") if gpu_id is None else f"gpu:{gpu_id}"
        span = trace_log.span("clean-up", "clean-up") if open_logs else None
        freed = release_caches(list_loaded_cached(), gpu_id, collect=self._collects)
        self._collects = False
        if span is not None:
            span.nbytes = freed
            span.device = device
            span.reason = "memory ran out"
            span.end()
        message = f"{step.failure}; freed {freed} bytes of caches, {step.then}"
        _logger().info(message)
        for watch in watchers:
            watch(step.name, message)
        if open_logs:
            trace_log.note(step.name, message, device)
        if self._options.before_retry is not None:
            self._options.before_retry()


def _explain(error: Exception, explanation: str) -> None:
    """Add a note to an error that is raised because no other attempt is possible."""
    note_on(error, f"arraybridge: {explanation}")


def _describe(error: BaseException) -> str:
    text = (ask(str, error) or "").partition("\n")[0]
    return f"{type(error).__module__}.{type(error).__qualname__}: {text}".removeprefix("builtins.")


@cache
def _logger() -> logging.Logger:
    import logging  # `import arraybridge` does not need it

    return logging.getLogger("arraybridge.memory")


def _portion(remaining: int, size: int, least: int) -> int:
    """Return the number of rows of the next part.

    The remaining rows are divided evenly into parts of at most ``size`` rows. A part may be larger if it
    would otherwise have fewer than ``least`` rows.
    """
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)
