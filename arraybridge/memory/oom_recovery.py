"""When memory runs out: tell it from other errors, clean up and try again, and go on in smaller parts.

An attempt that fails is left behind before the next one starts: outside the ``except`` block, with its
traceback dropped, so that nothing pins the arrays it had made.
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
from arraybridge.carriers.sources import source_of
from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError, first_line, note_on, text_of
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import refusals
from arraybridge.frameworks.registry import loaded
from arraybridge.memory.cleanup import release_caches
from arraybridge.memory.oom_recognition import chain, is_oom, is_oom_error
from arraybridge.settings import worker_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, kind_of, leaves_of
from arraybridge.types import new_cache, remember
from arraybridge.validation import whole_number

__all__ = [
    "faults",
    "is_oom_error",
    "let_go",
    "recovered",
    "run_with_oom_recovery",
    "split_and_retry",
    "watchers",
]

R = TypeVar("R")

#: Positional and keyword arguments.
Batch = tuple[tuple[Any, ...], dict[str, Any]]

#: Faults of `arraybridge.testing.inject_oom`: each is called with the rows of every attempt, and may raise.
faults: list[Callable[[int | None], None]] = []

#: Called with "retry" or "split" and a message whenever a recovery takes that step.
watchers: list[Callable[[str, str], None]] = []


# -- what users call ---------------------------------------------------------------------------------


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

    Between two attempts everything that the failed one had made is released, garbage is collected, and the
    caches of all loaded frameworks on that device are freed. Generators that are still suspended are left
    alone, and keep what they hold. Other errors pass untouched. ``fn`` must bear being called again: it
    should not change its arguments in place before it can fail, or ``before_retry`` should undo that. With an
    iterator among its arguments, from which the first attempt may have read, it is not called again.

    Args:
        fn: a function.
        *args: handed to it.
        **kwargs: handed to it; none of them may be called like the six below (bind such a one with
            ``functools.partial``).
        max_retries: attempts after the first; 0 only calls.
        gpu_id: the accelerator of which to free caches; None: all.
        split: when a retry fails too, go on in halves, as `split_and_retry` does. A call that has nothing to
            split just runs.
        split_axis: the axis to split along.
        min_split: the fewest rows of a part.
        before_retry: called without arguments after each failure, before the next attempt: a training step
            zeroes its gradients there. With ``split``, finished parts are not computed again.

    Raises:
        The error of the last attempt, with a note of what was tried, when every one ran out of memory.
        CannotSplitError: with ``split``: memory has run out and no argument has that axis, or the results
            cannot be joined.
        ValueError: ``max_retries`` or ``min_split`` is out of range.
        TypeError: ``before_retry`` cannot be called, or ``split`` is no bool.

    >>> import numpy as np
    >>> run_with_oom_recovery(np.add, np.ones(2), 1)
    array([2., 2.])
    """
    if max_retries.__class__ is not int or max_retries < 0:  # calling the validator takes 0.1 µs
        whole_number("max_retries", max_retries, least=0, type_error=ValueError)
    if before_retry is not None and not callable(before_retry):
        raise TypeError(f"before_retry={before_retry!r} must be a function without arguments")
    result: R
    if split is False:
        result = recovered(fn, args, kwargs, max_retries, gpu_id, before_retry)
        return result
    if split is not True:
        raise TypeError(f"split={split!r} must be True or False; mark what is not to be split as fixed(x)")
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
    """Call ``fn`` on a batch; when memory runs out, go on in parts and join their results.

    After a first clean-up and retry, the size is halved until a part fits. Parts that are finished are kept
    and never computed again; the size that fits is used for the rest. The result of each part is copied into
    one result that is made beforehand, so that ``fn`` may write to a buffer of its own at the next part.
    Arrays of JAX and TensorFlow are kept instead, and must not share such a buffer. The result equals that of
    the whole batch, bit for bit, if ``fn`` is row-wise: it treats each row (slice along ``axis``) by itself,
    and gives one back for each.

    Args:
        fn: called as ``fn(part)``.
        batch: an array; or a tuple of arguments, ``fn(*arguments)``; or a dict, ``fn(**arguments)``. The
            first array among them has the batch's length along ``axis``; every array of that length is
            split, also within containers, and so is every list of non-arrays with one entry per row.
            Everything else is passed whole to each part. Wrap an argument that has that length by chance in
            `fixed`. An exception raised in a part has a note that names the split arguments.
        axis: the axis to split along, of arguments and results; negative axes count from the end.
        min_split: the fewest rows of a part; fewer than twice as many are not halved.

    Returns:
        What ``fn`` returns. Of several parts, the arrays are joined along ``axis``, within containers as
        well, those of dicts by their keys. Lists with one entry per row, such as texts or dicts, are
        concatenated. Any other value has to be the very same object or an equal text in every part, or to be
        marked as `fixed`.

    Raises:
        The error, with a note, when a part of the smallest size does not fit.
        CannotSplitError: memory has run out, and no argument has that axis; or a result has not as many rows
            as its part, or is a number, of which nobody can say how to join it; or the parts gave results of
            different structures; or a list can be one entry per row or several results.
        ValueError: ``min_split`` is less than 1.

    >>> import numpy as np
    >>> split_and_retry(np.sqrt, np.array([1.0, 4.0, 9.0]))
    array([1., 2., 3.])
    """
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
    """The function, called without the marks of `fixed`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*batches.plain(args), **(kwargs and batches.plain(kwargs)))

    return call


# -- one attempt -------------------------------------------------------------------------------------


def let_go(error: BaseException) -> None:
    """Drop the tracebacks, and with them the frames that are finished and their variables."""
    for one in list(chain(error, sys.exception())):
        one.__traceback__ = None


def attempted(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], before: BaseException | None
) -> tuple[Any, Exception | None]:
    """What the function returns, and None; or None and its error, where that is about memory.

    ``before`` is the error that is being handled meanwhile, which is not this call's.
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
    except Exception as error:  # an unknown function's error: it is classified, and raised again
        if not is_oom(error, before):
            raise
        return None, error


# Type of a result → what waits for it, so that an allocation which failed behind the caller's back (JAX)
# shows itself; None where there is nothing to wait for.
_waits: dict[type, Callable[[Any], object] | None] = new_cache()


def _find_wait(result: Any) -> Callable[[Any], object] | None:
    # Not isinstance, which asks the object for its __class__: that of a proxy may raise.
    if issubclass(type(result), dict):
        return remember(_waits, type(result), _wait_for_values)
    if issubclass(type(result), (tuple, list)):
        return remember(_waits, type(result), _wait_for_all)
    try:
        owner = registry.find_owner(result)
    except FrameworkNotInstalledError:  # something else of a framework that does not work here
        owner = None
    wait = None if owner is None else owner.runtime.late_errors(type(result))
    return remember(_waits, type(result), wait)


def _wait_for_values(results: dict[Any, Any]) -> None:
    _wait_for_all(results.values())


def _wait_for_all(results: Iterable[Any]) -> None:
    # So many arrays settle the question; a list of a million numbers costs no time.
    for one in islice(results, 100):
        wait = _waits[type(one)] if type(one) in _waits else _find_wait(one)
        if wait is not None:
            wait(one)


# -- again, and in parts -----------------------------------------------------------------------------


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
    """Call the function; where memory runs out, again and in parts, as `run_with_oom_recovery` says.

    With ``split``, what is marked as `fixed` comes to the function as it is, and may be in its result.
    ``named`` is the function whose parameters name the arguments in notes. ``packed`` states that ``args`` is
    one tuple and one dict, its arguments.
    """
    failure: Any = None
    if not faults:  # the first attempt, which most calls need alone
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
    del failure  # whose traceback holds this frame
    try:
        return call.made(split)
    finally:
        call.failure = None


@dataclass(slots=True, eq=False)
class _Recovery:
    """A call that is made until it succeeds.

    Attributes:
        fn, batch: the function, and its arguments.
        failure: the error that `attempted` has returned of the last attempt, or None. It stands nowhere else,
            since its traceback holds the frames of these methods.
        retries, gpu_id, before_retry, axis, least: as for `run_with_oom_recovery`.
        named, packed: as for `recovered`.
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
        """The whole call, as often as is planned; then, with ``split``, in parts."""
        rows = batches.rows(self.batch, self.axis) if split or faults else None
        attempts = 1 + (min(self.retries, 1) if split else self.retries)
        what = f"{rows} rows" if split else f"one of {attempts} attempts"
        result = self._tried(partial(self._attempt, rows, 0, rows), attempts, what)
        if self.failure is None:
            return result
        if not split:
            self._give_up(
                f"out of memory in each of {attempts} attempts, with the caches of all loaded frameworks"
                " freed between them; process fewer rows at a time (oom_recovery='split'), or see"
                " memory_stats() for who holds the memory."
            )
        if rows is None:
            raise _nothing_to_split(self.batch, self.axis) from self.failure
        return self._in_parts(rows)

    def _in_parts(self, rows: int) -> Any:
        """Parts of half the size, until one fits, and of that size for the rest."""
        joined = Joined(rows, self.axis, self.batch)
        size = rows
        least = self.least
        while joined.done < rows:
            if self.failure is not None and size < 2 * least:
                self._give_up(_too_large_a_part(size, rows, least))
            if self.failure is not None:
                then = f"go on with {size // 2} rows at a time ({joined.done} of {rows} rows are done)"
                self._clean_up("split", f"{size} rows", then)
                size //= 2
            count = _portion(rows - joined.done, size, least)
            # Parts of the smallest size are tried twice, since nothing smaller is left to try.
            attempts = 2 if count < 2 * least else 1
            result = self._tried(partial(self._attempt, rows, joined.done, count), attempts, f"{count} rows")
            if self.failure is None:
                self._join(partial(joined.add, result, count))
            else:
                size = count
            del result
        return self._join(joined.result)

    def _attempt(self, rows: Any, start: int, count: Any) -> Any:
        """Call the function on ``count`` of the rows; both are None where nobody has counted them."""
        for fault in tuple(faults):  # another thread may end its rehearsal
            fault(count)
        if count == rows:
            args, kwargs = self.batch
            return self.fn(*args, **kwargs)
        args, kwargs = self._part(rows, start, count)
        try:
            return self.fn(*args, **kwargs)
        except Exception as error:  # of the user's function, which gets a note and is raised again
            self._note_part(error, rows, start, count)
            raise

    def _note_part(self, error: Exception, rows: int, start: int, count: int) -> None:
        """Add a note that names the split arguments: one may have as many rows as the batch by chance."""
        with suppress(Exception):  # shapes and containers of third parties; the user's error matters more
            batch = cast("Batch", self.batch[0]) if self.packed else self.batch
            names = _names_of_split(self.named or self.fn, batch, self.axis, rows)
            note = (
                f"arraybridge: raised for rows {start} to {start + count - 1} of a batch of {rows} rows,"
                f" split along axis {self.axis}. Split arguments: "
                + ", ".join(f"{name} ({count} of {rows} rows)" for name in names)
                + ". If one of them has that many rows only by chance, pass it as fixed(argument)."
            )
            if note not in getattr(error, "__notes__", ()):
                note_on(error, note)

    def _part(self, rows: int, start: int, count: int) -> Batch:
        """The arguments for these rows."""
        try:
            return cast("Batch", batches.part(self.batch, self.axis, rows, start, start + count))
        except refusals(*loaded()) as error:
            if is_oom_error(error):
                raise
            raise CannotSplitError(
                f"memory has run out, and the batch cannot be cut along axis {self.axis}:"
                f" {_described(error)}.",
                reason=f"the batch cannot be cut along axis {self.axis}",
                advice="Pass arrays that can be sliced, as x.to_dense() of a sparse one, or mark what every"
                " part is to get as fixed(array).",
            ) from error

    def _tried(self, run: Callable[[], Any], attempts: int, what: str) -> Any:
        """The result of the first of so many attempts that succeeds; None where `failure` is left."""
        while True:
            if self.failure is None:
                result, self.failure = attempted(run, (), {}, sys.exception())
                if self.failure is None:
                    return result
            attempts -= 1
            if attempts <= 0:
                return None
            self._clean_up("retry", what, "try again")

    def _join(self, step: Callable[[], Any]) -> Any:
        """Put results together, for which memory may run out as well."""
        result = self._tried(step, 2, "joining")
        if self.failure is not None:
            self._give_up("out of memory while the results of the parts were joined")
        return result

    def _give_up(self, note: str) -> NoReturn:
        _extend_message(self.failure, f"arraybridge: {note}")
        raise self.failure

    def _clean_up(self, step: str, what: str, then: str) -> None:
        """Let go of what the failed attempt has made, and say so."""
        hindrance = _read_once(self.batch)
        if hindrance:
            self._give_up(hindrance)
        reason = _described(self.failure)
        let_go(self.failure)
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
        message = f"{what} ran out of memory ({reason}); freed {freed} bytes of caches and {then}"
        import logging  # nothing that `import arraybridge` needs

        logging.getLogger("arraybridge.memory").info(message)
        for watch in watchers:
            watch(step, message)
        if open_logs:
            trace_log.note(step, message, device)
        if self.before_retry is not None:
            self.before_retry()


def _described(error: BaseException) -> str:
    words = first_line(text_of(error) or "")
    return f"{type(error).__module__}.{type(error).__qualname__}: {words}".removeprefix("builtins.")


# -- the arguments -----------------------------------------------------------------------------------


def _nothing_to_split(batch: Batch, axis: int) -> CannotSplitError:
    """The error for a call of which no argument has that axis."""
    leaves = [
        (type(x).__name__, source_of(x) if kind_of(x) is ARRAY else None) for x in leaves_of(batch)[:20]
    ]
    words = (name if array is None else f"{name} {array[0].shape(array[1])}" for name, array in leaves)
    shapes = ", ".join(words) or "none"
    return CannotSplitError(
        f"memory has run out, and no argument to split is an array with an axis {axis} (arguments:"
        f" {shapes}).",
        reason=f"no argument to split has an axis {axis}",
        advice="Pass the batch as an array, and another split axis if its rows lie elsewhere.",
    )


def _too_large_a_part(size: int, rows: int, least: int) -> str:
    """Return the message for a part of the smallest size that does not fit."""
    if size <= 1:
        return (
            "Out of memory even with a single row. Free GPU memory (see memory_stats()) or reduce the size of"
            " each row."
        )
    return (
        f"Out of memory with {size} of {rows} rows. Smaller parts are excluded by min_split={least}. Lower"
        " min_split, or free memory (see memory_stats())."
    )


def _names_of_split(fn: Callable[..., Any], batch: Batch, axis: int, rows: int) -> list[str]:
    """Return the names of the arguments that are split, with their places in containers."""
    args, kwargs = batch
    arguments = [*zip(_parameter_names(fn, len(args)), args, strict=True), *kwargs.items()]
    return [name + place for name, value in arguments for place in batches.split_places(value, axis, rows)]


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return names for positional arguments: of the parameters if the signature has them."""
    import inspect  # costs some ms, and only an error needs it

    names = [f"argument {i}" for i in range(count)]
    with suppress(TypeError, ValueError):  # a built-in function without a signature
        for i, parameter in enumerate([*inspect.signature(fn).parameters.values()][:count]):
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                break
            names[i] = parameter.name
    return names


def _portion(remaining: int, size: int, least: int) -> int:
    """Rows of the next part: at most ``size`` if it can be, in even parts, none smaller than ``least``."""
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)


def _read_once(batch: Batch) -> str:
    """Why a call cannot be made again: an argument from which the first attempt may have read; or ``""``."""
    with suppress(ValueError, RecursionError):  # it contains itself, or is too deep to be looked through
        for x in leaves_of(batch):
            cls = type(x)
            # A file is a log more often than the data.
            if hasattr(cls, "__next__") and hasattr(cls, "__iter__") and not issubclass(cls, IOBase):
                return (
                    "out of memory in the first attempt, and the function is not called again: one of its"
                    f" arguments is an iterator ({cls.__name__}), from which that may have read; pass a list."
                )
    return ""


def _extend_message(error: BaseException, sentence: str) -> None:
    """Say more in the message of an error of somebody else; in a note where its class makes its message."""
    message = text_of(error)
    with suppress(Exception):  # as in `note_on`
        if error.args in ((), (message,)):
            error.args = ("\n".join(filter(None, (message, sentence))),)
    if sentence not in (text_of(error) or ""):
        note_on(error, sentence)
