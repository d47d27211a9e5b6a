"""When memory runs out: clean up and try again, and go on in smaller parts.

An attempt that fails is left behind before the next one starts: outside the ``except`` block, with the
variables of its frames cleared, so that nothing pins the arrays it had made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from arraybridge import batches
from arraybridge.batches import fixed
from arraybridge.conversion import trace
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import CannotSplitError, note_on, text_of
from arraybridge.frameworks.base import refusals
from arraybridge.frameworks.registry import loaded
from arraybridge.memory.cleanup import release_caches
from arraybridge.memory.late import find_wait, waits
from arraybridge.memory.portions import Split, chosen_by, nothing_to_split, portion, read_once
from arraybridge.memory.recognise import is_oom, let_go
from arraybridge.placement import worker_device
from arraybridge.trees import TREE, kind_of, kinds

__all__ = ["attempted", "faults", "recovered", "run_with_oom_recovery", "split_and_retry", "watchers"]

R = TypeVar("R")

#: After so many parts in a row that fit, twice the size is tried; each failure doubles the wait.
GROW_AFTER = 4

#: Faults of `arraybridge.testing.inject_oom`, each asked before every attempt.
faults: list[Any] = []  # Rehearsal, which stands in a layer above

#: Called with "retry", "split" or "grow" and a message whenever a recovery takes that step.
watchers: list[Callable[[str, str], None]] = []


# -- what users call ---------------------------------------------------------------------------------


def run_with_oom_recovery(
    fn: Callable[..., R],
    *args: Any,
    max_retries: int = 2,
    gpu_id: int | None = None,
    split: Split = False,
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
        split: True: when a retry fails too, go on in halves, as `split_and_retry` does. Names or positions of
            arguments split these and no others. A call that has nothing to split just runs.
        split_axis: the axis to split along.
        min_split: the fewest rows of a part.
        before_retry: called without arguments after each failure, before the next attempt: a training step
            zeroes its gradients there. With ``split``, finished parts are not computed again.

    Raises:
        The original error, with a note of what was tried, when every attempt ran out of memory.
        CannotSplitError: with ``split``: memory has run out and no argument has that axis, or the results
            cannot be joined; or ``split`` names what is not there.
        ValueError: ``max_retries`` or ``min_split`` is out of range.
        TypeError: ``before_retry`` cannot be called.

    >>> import numpy as np
    >>> run_with_oom_recovery(np.add, np.ones(2), 1)
    array([2., 2.])
    """
    if max_retries.__class__ is not int or max_retries < 0:
        raise ValueError(f"max_retries={max_retries!r} is no number of retries; pass 0, 1, 2, …")
    if before_retry is not None and not callable(before_retry):
        raise TypeError(f"before_retry={before_retry!r} must be a function without arguments")
    failure: Exception | None = None
    if not faults and (split is False or split is None):  # the usual call, by the shortest way
        result, failure = attempted(fn, args, kwargs, sys.exception())
        if failure is None:
            return cast("R", result)
    try:
        found = recovered(
            fn, args, kwargs, max_retries, gpu_id, split, split_axis, min_split, before_retry, failure
        )
    finally:
        del failure  # whose traceback holds this frame
    return cast("R", found)


def recovered(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_retries: int,
    gpu_id: int | None = None,
    split: Split = False,
    split_axis: int = 0,
    min_split: int = 1,
    before_retry: Callable[[], object] | None = None,
    failure: Exception | None = None,
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Any:
    """`run_with_oom_recovery` with the arguments in a tuple and a dict, which may hold any name.

    ``failure`` is what `attempted` has returned of a first attempt, where somebody has made one. ``given``:
    the arguments as the user knows them, where these are others.
    """
    before = sys.exception()
    splits = split is not False and split is not None
    whole = (args, kwargs)
    if splits:
        if min_split.__class__ is not int or min_split < 1:
            raise ValueError(f"min_split={min_split!r} is no number of rows; pass 1 or more")
        for x in (*args, *kwargs.values()):
            if type(x) is fixed or (kinds.get(type(x)) or kind_of(x)) == TREE:
                whole = (batches.plain(args), batches.plain(kwargs))
                break
    call: _Call | None = None
    if faults or (splits and split is not True):
        call = _Call(
            fn, args, kwargs, before, gpu_id, before_retry, split, split_axis, min_split, whole, given
        )
    if failure is None:
        tried = _rehearsed(fn, call.rows()) if call is not None and faults else fn
        result, failure = attempted(tried, *whole, before)
        if failure is None:
            return batches.plain(result) if splits else result
    if call is None:
        call = _Call(
            fn, args, kwargs, before, gpu_id, before_retry, split, split_axis, min_split, whole, given
        )
    try:
        result = call.recover(failure, min(max_retries, 1) if splits else max_retries)
    finally:
        del failure  # whose traceback holds this frame
    return batches.plain(result) if splits else result


def split_and_retry(fn: Callable[..., Any], batch: Any, *, axis: int = 0, min_split: int = 1) -> Any:
    """Call ``fn`` on a batch; when memory runs out, go on in parts and join their results.

    After a first clean-up and retry, the size is halved until a part fits. Parts that are finished are kept
    and never computed again; the size that fits is used for the rest, and a larger one is tried again later.
    The result equals that of the whole batch, bit for bit, if ``fn`` is row-wise: it treats each row
    (slice along ``axis``) by itself, and gives one back for each.

    Args:
        fn: called as ``fn(part)``.
        batch: an array; or a tuple of arguments, ``fn(*arguments)``; or a dict, ``fn(**arguments)``. The
            first array among them has the batch's length along ``axis``; every array of that length is
            split, also within containers, and everything else is handed whole to each part. Wrap an argument
            that has that length by chance in `fixed`.
        axis: the axis to split along, of arguments and results; negative axes count from the end.
        min_split: the fewest rows of a part; fewer than twice as many are not halved.

    Returns:
        What ``fn`` returns. Of several parts, the arrays are joined along ``axis``, within containers as
        well, those of dicts by their keys. What is no array has to be the very same object in every part, or
        to be marked as `fixed`.

    Raises:
        The original error, with a note, when a part of the smallest size does not fit.
        CannotSplitError: memory has run out, and no argument has that axis; or a result has not as many rows
            as its part, or is a number, of which nobody can say how to join it; or the parts gave results of
            different structures.
        ValueError: ``min_split`` is less than 1.

    >>> import numpy as np
    >>> split_and_retry(np.sqrt, np.array([1.0, 4.0, 9.0]))
    array([1., 2., 3.])
    """
    args: tuple[Any, ...] = (batch,)
    kwargs: dict[str, Any] = {}
    if type(batch) is tuple:
        args = batch
    elif type(batch) is dict:
        args, kwargs = (), batch
    return recovered(fn, args, kwargs, 1, split=True, split_axis=axis, min_split=min_split)


# -- one attempt -------------------------------------------------------------------------------------


def attempted(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], before: BaseException | None
) -> tuple[Any, Exception | None]:
    """What the function returns, and None; or None and its error, where that is about memory."""
    try:
        result = fn(*args, **kwargs)
        try:
            wait = waits[type(result)]
        except KeyError:
            wait = find_wait(result)
        if wait is not None:
            wait(result)
        return result, None
    except Exception as error:  # an unknown function's error: it is classified, and raised again
        if not is_oom(error, before):
            raise
        return None, error


def _rehearsed(fn: Callable[..., Any], rows: int | None) -> Callable[..., Any]:
    """The function, but that it fails where a rehearsal wants an attempt on so many rows to fail."""

    def attempt(*args: Any, **kwargs: Any) -> Any:
        for fault in tuple(faults):  # another thread may end its rehearsal
            error = fault.error_for(rows)
            if error is not None:
                raise error
        return fn(*args, **kwargs)

    return attempt


# -- after a failure ---------------------------------------------------------------------------------


def _tell(step: str, gpu_id: int | None, message: str, *values: object) -> None:
    import logging

    logging.getLogger("arraybridge.memory").info(message, *values)
    for watch in watchers:
        watch(step, message % values)
    if open_logs:
        trace.note(step, message % values, _words(gpu_id))


def _words(gpu_id: int | None) -> str:
    """The device that ran out of memory, as far as it is known."""
    return str(worker_device.get() or "") if gpu_id is None else f"gpu:{gpu_id}"


def _describe(error: BaseException) -> str:
    first = (text_of(error) or "").partition("\n")[0]
    return f"{type(error).__module__}.{type(error).__qualname__}: {first}".removeprefix("builtins.")


# -- again, and in parts -------------------------------------------------------------------------------


class _Call:
    """A call, made until it succeeds: again, or in parts."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: BaseException | None,
        gpu_id: int | None,
        before_retry: Callable[[], object] | None,
        split: Split,
        axis: int,
        min_split: int,
        whole: tuple[tuple[Any, ...], dict[str, Any]],
        given: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs
        #: The error that was being handled when the call began, which is not this call's.
        self.before = before
        self.gpu_id = gpu_id
        self.before_retry = before_retry
        #: The arguments of the whole call: the very objects that came in, where none is marked as fixed.
        self.whole = whole
        #: The arguments as the user knows them.
        self.given = (args, kwargs) if given is None else given
        self.axis = axis
        #: The fewest rows of a part; None where nothing is to be split.
        self.min_split: int | None = None
        #: Positions and keywords of the arguments to split; None: all.
        self.chosen: frozenset[str | int] | None = None
        if split is not False and split is not None:
            self.min_split = min_split
            if split is not True:
                self._choose(split)

    def recover(self, original: Exception, retries: int) -> Any:
        """Go on after a failure: attempt after attempt, each with nothing left of the one before."""
        splits, least = self.min_split is not None, self.min_split or 1
        rows = self.rows() if splits or faults else None
        hindrance = read_once(*self.given) if splits or retries > 0 else ""
        attempts = retries + 1
        done: list[Any] = []
        start, size, take = 0, rows or 0, rows  # the next row; how many are known, or hoped, to fit
        fitted, patience = 0, GROW_AFTER
        failure: Exception | None = original
        first = [original]  # whose traceback holds this frame; `_give_up` takes it out
        del original
        while True:
            if failure is not None:
                freed = self._clean_up(failure)
                reason, failure = _describe(failure), None
                if not hindrance and splits and retries == 0 and rows is not None and not done:
                    hindrance = self._uncut(rows)
                if hindrance:
                    self._give_up(first, hindrance)
                if retries > 0:
                    retries -= 1
                    _tell(
                        "retry",
                        self.gpu_id,
                        "%s ran out of memory (%s); freed %d bytes of caches and try again",
                        f"{take} rows" if splits else f"attempt {attempts - retries - 1} of {attempts}",
                        reason,
                        freed,
                    )
                elif splits and rows is not None and take is not None and take >= 2 * least:
                    size, fitted = take // 2, 0
                    if done:
                        patience *= 2
                    # Parts of the smallest size are tried twice, since nothing smaller is left to try.
                    retries = 1 if size < 2 * least else 0
                    _tell(
                        "split",
                        self.gpu_id,
                        "%d rows ran out of memory (%s); freed %d bytes of caches and go on with %d rows at a"
                        " time (%d of %d rows are done)",
                        take, reason, freed, size, start, rows,
                    )  # fmt: skip
                else:
                    self._give_up(first, self._why(first, take, rows, attempts))
                if self.before_retry is not None:
                    self.before_retry()
            if splits and rows is not None:
                take = portion(rows - start, size, least)
            result, failure = attempted(self._attempt, (start, take, rows), {}, self.before)
            if failure is not None:
                continue
            if take == rows or rows is None or take is None:
                return result
            batches.check_parts([*done[:1], result], self.axis, take, (self.args, self.kwargs))
            done.append(result)
            del result
            start += take
            if start == rows:
                return self._joined(done)
            fitted += 1
            if fitted >= patience and size < rows - start:
                _tell("grow", self.gpu_id, "%d parts of %d rows fitted; try %d rows", fitted, size, 2 * size)
                size, fitted = 2 * size, 0
            retries = 1 if portion(rows - start, size, least) < 2 * least else 0

    def _joined(self, done: list[Any]) -> Any:
        given = (self.args, self.kwargs)
        arguments = {"given": given}
        result, failure = attempted(batches.joined, (done, self.axis), arguments, self.before)
        if failure is None:
            return result
        self._clean_up(failure)
        failure = None
        return batches.joined(done, self.axis, given=given)

    def _clean_up(self, failure: Exception) -> int:
        span = trace.span("clean-up", "clean-up") if open_logs else None
        let_go(failure, self.before)
        freed = release_caches(loaded(), self.gpu_id)
        if span is not None:
            span.nbytes, span.device, span.reason = freed, _words(self.gpu_id), "memory ran out"
            span.end()
        return freed

    def _attempt(self, start: int, take: int | None, rows: int | None) -> Any:
        """Call the function on these rows. What it gives for some of them, it may write to at the next."""
        args, kwargs = self._part(start, take, rows)
        tried = _rehearsed(self.fn, take) if faults else self.fn
        if take == rows:
            return tried(*args, **kwargs)
        found = [tried(*args, **kwargs)]
        del args, kwargs  # memory is short
        return batches.owned(found)

    def _why(self, first: list[Exception], take: int | None, rows: int | None, attempts: int) -> str:
        """Why there is nothing left to try."""
        if self.min_split is None:
            return (
                f"in each of {attempts} attempts, with the caches of all loaded frameworks freed between"
                " them; process fewer rows at a time (oom_recovery='split'), or see memory_stats() for who"
                " holds the memory."
            )
        if rows is None:
            raise nothing_to_split(self.args, self.kwargs, self.axis) from first.pop()
        return (
            f"with {take} of {rows} rows, and {take} rows cannot be halved (min_split={self.min_split});"
            " lower min_split, or see memory_stats() for who holds the memory."
        )

    def _give_up(self, first: list[Exception], note: str) -> NoReturn:
        original = first.pop()
        note_on(original, f"arraybridge: out of memory {note}")
        try:
            raise original
        finally:
            del original  # whose traceback holds this frame

    # -- arguments --------------------------------------------------------------------------------

    def rows(self) -> int | None:
        """Rows of the first array to split, or None."""
        for key, x in (*enumerate(self.args), *self.kwargs.items()):
            if self.chosen is None or key in self.chosen:
                found = batches.rows(x, self.axis)
                if found is not None:
                    return found
        return None

    def _part(self, start: int, take: int | None, rows: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every array of the batch cut down to these rows."""
        if take is None or rows is None or take == rows:
            return self.whole
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for key, x in (*enumerate(self.args), *self.kwargs.items()):
            if self.chosen is None or key in self.chosen:
                value = batches.part(x, self.axis, rows, start, start + take)
            else:
                value = batches.plain(x)
            if isinstance(key, str):
                kwargs[key] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def _uncut(self, rows: int) -> str:
        """Why the batch cannot be cut into parts; "" where it can."""
        try:
            attempted(self._part, (0, 1, rows), {}, self.before)
        except refusals(*loaded()) as error:
            return (
                f"with {rows} rows, which cannot be cut along axis {self.axis} ({_describe(error)}); pass"
                " arrays that can be sliced, as x.to_dense() of a sparse one, or mark what every part is"
                " to get as fixed(array)."
            )
        return ""

    def _choose(self, split: Split) -> None:
        """Find the arguments that ``split`` names.

        Raises:
            CannotSplitError: the call does not have one of them, or they differ in length.
        """
        self.chosen = chosen_by(self.fn, self.args, self.kwargs, split)
        rows = self.rows()
        for key, x in (*enumerate(self.args), *self.kwargs.items()):
            if key in self.chosen and rows is not None:
                found = batches.rows(x, self.axis)
                if found != rows:
                    raise CannotSplitError(
                        f"argument {key!r} has {found} rows along axis {self.axis}, the batch has {rows};"
                        " split arguments of one length only",
                        reason="the arguments to split differ in length",
                    )
