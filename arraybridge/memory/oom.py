"""When memory runs out: recognise it, clean up and retry, and go on in smaller parts.

Retrying and splitting are separate. An attempt that fails is left behind before the next one starts: outside
the ``except`` block, with the variables of its frames cleared, so that nothing pins the arrays it had made.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, cast

from arraybridge.errors import CannotSplitError, FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.parts import Running
from arraybridge.frameworks.registry import loaded
from arraybridge.memory.cleanup import release_caches

__all__ = ["CannotSplitError", "fixed", "is_oom_error", "run_with_oom_recovery", "split_and_retry"]

R = TypeVar("R")
Split = bool | str | int | tuple[str | int, ...] | list[str | int] | None

#: After so many parts in a row that fit, twice the size is tried; each failure doubles the wait.
GROW_AFTER = 4
#: Attempts of a batch that may fail, beside one for each part that was finished, before it is given up.
MAX_FAILURES = 100


class fixed:  # noqa: N801 - reads as a word in a call, like slice or property
    """Marks an argument that is handed whole to every part, though its length is that of the batch.

    >>> import numpy as np
    >>> x, weights = np.ones((4, 4)), np.eye(4)
    >>> split_and_retry(np.matmul, (x, fixed(weights))).shape
    (4, 4)
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"fixed({self.value!r})"


# -- recognising -------------------------------------------------------------------------------------


def is_oom_error(error: BaseException) -> bool:
    """Whether memory running out, of the host or of any framework's device, is what ``error`` is about.

    It is when the error itself, one that it was raised from or while handling, or one in its group is an
    out-of-memory error of a loaded framework, told by class and, where the class is a general one, by the
    message. What was hidden by ``raise … from None`` does not count. Imports no framework.

    >>> is_oom_error(MemoryError()), is_oom_error(ValueError("out of memory budget"))
    (True, False)
    """
    return _is_oom(error, None)


def _is_oom(error: BaseException, before: BaseException | None) -> bool:
    """`is_oom_error`, but for ``before``, an error that was being handled when the attempt began."""
    frameworks = loaded()
    return any(_is_oom_itself(one, frameworks) for one in _chain(error, before))


def _is_oom_itself(error: BaseException, frameworks: list[Framework]) -> bool:
    if isinstance(error, MemoryError) or any(one.is_oom(error) for one in frameworks):
        return True
    if type(error).__module__.partition(".")[0] == "pyopencl":  # on its own, without pyclesperanto
        from arraybridge.frameworks import opencl

        return opencl.is_oom(error)
    return False


def _chain(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """``error``, its causes, contexts and group members, each once."""
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


# -- one attempt -------------------------------------------------------------------------------------


#: Faults of `arraybridge.testing.inject_oom`, each asked before every attempt.
faults: list[Any] = []  # Rehearsal, which stands in a layer above

# Type of a value → its framework, or None for what is no array; looked up millions of times.
_owners: dict[type, Framework | None] = {}


def _owner(x: Any) -> Framework | None:
    cls = type(x)
    if cls in _owners:
        return _owners[cls]
    try:
        found = registry.find_owner(x)
    except FrameworkNotInstalledError:  # something else of a framework that does not work here
        found = None
    if len(_owners) > 1000:
        _owners.clear()
    _owners[cls] = found
    return found


def _settle(result: Any) -> None:
    """Let an allocation that failed behind the caller's back (JAX) show itself here."""
    try:
        wait = _waits[type(result)]
    except KeyError:
        wait = _find_wait(result)
    if wait is not None:
        wait(result)


def _settle_all(results: Iterable[Any]) -> None:
    # So many arrays settle the question; a list of a million numbers costs no time.
    for one in islice(results, 100):
        _settle(one)


def _settle_values(results: dict[Any, Any]) -> None:
    _settle_all(results.values())


# Type of a result → what waits for it, or None where there is nothing to wait for.
_waits: dict[type, Callable[[Any], object] | None] = {
    tuple: _settle_all,
    list: _settle_all,
    dict: _settle_values,
}


def _find_wait(result: Any) -> Callable[[Any], object] | None:
    owner = _owner(result)
    wait = None if owner is None else (owner.running or Running()).late_errors(type(result))
    if len(_waits) < 1000:
        _waits[type(result)] = wait
    return wait


def _forget_types() -> None:
    _owners.clear()
    for cls in [cls for cls in _waits if cls not in (tuple, list, dict)]:
        del _waits[cls]


registry.on_register.append(_forget_types)


def _attempt(
    fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], rows: Callable[[], int | None]
) -> R:
    if faults:
        count = rows()
        for fault in tuple(faults):  # another thread may end its rehearsal
            error = fault.error_for(count)
            if error is not None:
                raise error
    result = fn(*args, **kwargs)
    _settle(result)
    return result


def _let_go(error: BaseException, before: BaseException | None) -> None:
    """Clear the variables of every finished frame in the tracebacks, which keep their lines."""
    import traceback

    for one in _chain(error, before):
        traceback.clear_frames(one.__traceback__)


#: Called with "retry", "split" or "grow" and a message whenever a recovery takes that step.
watchers: list[Callable[[str, str], None]] = []


def _tell(step: str, message: str, *values: object) -> None:
    import logging

    logging.getLogger("arraybridge.memory").info(message, *values)
    for watch in watchers:
        watch(step, message % values)


def _describe(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__module__}.{type(error).__qualname__}: {first}".removeprefix("builtins.")


# -- retrying ----------------------------------------------------------------------------------------


def run_with_oom_recovery(
    fn: Callable[..., R],
    *args: Any,
    max_retries: int = 2,
    gpu_id: int | None = None,
    split: Split = False,
    split_axis: int = 0,
    min_split: int = 1,
    **kwargs: Any,
) -> R:
    """Call ``fn(*args, **kwargs)``; when memory runs out, free all caches and call it again.

    Between two attempts everything that the failed one had made is released, garbage is collected, and the
    caches of all loaded frameworks on that device are freed. Other errors pass untouched. ``fn`` must bear
    being called again: it should not change its arguments in place before it can fail.

    Args:
        fn: a function.
        *args: handed to it.
        **kwargs: handed to it; none of them may be called like the five below (bind such a one with
            ``functools.partial``).
        max_retries: attempts after the first; 0 only calls.
        gpu_id: the accelerator of which to free caches; None: all.
        split: True: when a retry fails too, go on in halves, as `split_and_retry` does. Names or positions of
            arguments split these and no others.
        split_axis: the axis to split along.
        min_split: the fewest rows of a part.

    Raises:
        The original error, with a note of what was tried, when every attempt ran out of memory.
        CannotSplitError: with ``split``, no argument has that axis, or the results cannot be joined.
        ValueError: ``max_retries`` or ``min_split`` is out of range.

    >>> import numpy as np
    >>> run_with_oom_recovery(np.add, np.ones(2), 1)
    array([2., 2.])
    """
    if max_retries.__class__ is not int or max_retries < 0:
        raise ValueError(f"max_retries={max_retries!r} is no number of retries; pass 0, 1, 2, …")
    if split is not False and split is not None:
        plan = _Plan(fn, args, kwargs, split, split_axis, min_split)
        return cast("R", plan.run(min(max_retries, 1), gpu_id))
    before = sys.exception()
    try:
        if faults:
            return _attempt(fn, args, kwargs, lambda: _first_extent(args, kwargs, split_axis))
        result = fn(*args, **kwargs)
        _settle(result)
        return result
    except Exception as error:  # an unknown function's error: it is classified, and raised again
        if not _is_oom(error, before):
            raise
        failure = error
    try:
        return _retry(fn, args, kwargs, failure, before, max_retries, gpu_id, split_axis)
    finally:
        del failure  # whose traceback holds this frame


def _retry(
    fn: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original: Exception,
    before: BaseException | None,
    max_retries: int,
    gpu_id: int | None,
    axis: int,
) -> R:
    failure = original
    for retry in range(1, max_retries + 1):
        freed = _clean_up(failure, before, gpu_id)
        _tell(
            "retry",
            "attempt %d of %d ran out of memory (%s); freed %d bytes of caches and try again",
            retry, max_retries + 1, _describe(failure), freed,
        )  # fmt: skip
        failure = original  # the last failure is let go before the next attempt
        try:
            return _attempt(fn, args, kwargs, lambda: _first_extent(args, kwargs, axis))
        except Exception as error:
            if not _is_oom(error, before):
                raise
            failure = error
    failure = original
    original.add_note(
        f"arraybridge: out of memory in each of {max_retries + 1} attempts, with the caches of all loaded"
        " frameworks freed between them; process fewer rows at a time (oom_recovery='split'), or see"
        " memory_stats() for who holds the memory."
    )
    try:
        raise original
    finally:
        del original, failure  # the error's traceback holds this frame


def _clean_up(failure: Exception, before: BaseException | None, gpu_id: int | None) -> int:
    _let_go(failure, before)
    return release_caches(loaded(), gpu_id)


def _first_extent(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int | None:
    """Rows of the first array among the arguments, or None."""
    for x in (*args, *kwargs.values()):
        extent = _find_rows(x, axis)
        if extent is not None:
            return extent
    return None


# -- splitting ---------------------------------------------------------------------------------------


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
            split, also within lists, tuples and dicts, and everything else is handed whole to each part.
            Wrap an argument that has that length by chance in `fixed`.
        axis: the axis to split along, of arguments and results; negative axes count from the end.
        min_split: the fewest rows of a part; fewer than twice as many are not halved.

    Returns:
        What ``fn`` returns. Of several parts, the arrays are joined along ``axis``, within tuples, lists and
        dicts as well.

    Raises:
        The original error, with a note, when a part of the smallest size does not fit.
        CannotSplitError: no argument has that axis; or a result has not as many rows as its part, or is a
            number, of which nobody can say how to join it.
        ValueError: ``min_split`` is less than 1.

    >>> import numpy as np
    >>> split_and_retry(np.sqrt, np.array([1.0, 4.0, 9.0]))
    array([1., 2., 3.])
    """
    if type(batch) is tuple:
        plan = _Plan(fn, batch, {}, True, axis, min_split)
    elif type(batch) is dict:
        plan = _Plan(fn, (), batch, True, axis, min_split)
    else:
        plan = _Plan(fn, (batch,), {}, True, axis, min_split)
    return plan.run(1, None)


class _Plan:
    """A call, and which of its arguments are split along which axis."""

    __slots__ = ("args", "axis", "chosen", "fn", "kwargs", "min_split", "rows", "whole")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        split: Split,
        axis: int,
        min_split: int,
    ) -> None:
        if min_split.__class__ is not int or min_split < 1:
            raise ValueError(f"min_split={min_split!r} is no number of rows; pass 1 or more")
        self.fn, self.args, self.kwargs, self.axis, self.min_split = fn, args, kwargs, axis, min_split
        self.chosen = None if split is True else _chosen(fn, args, kwargs, split)
        rows = None
        for key, x in self._arguments():
            if self.chosen is None or key in self.chosen:
                rows = _find_rows(x, axis)
                if rows is not None:
                    break
        if rows is None:
            raise self._nothing_to_split()
        self.rows = rows
        if self.chosen is not None:
            self._check_chosen()
        # The call on the whole batch, with the very objects that came in.
        self.whole = (args, kwargs)
        if any(type(x) is fixed for x in args) or any(type(x) is fixed for x in kwargs.values()):
            self.whole = (tuple(_plain(x) for x in args), {k: _plain(x) for k, x in kwargs.items()})

    def _arguments(self) -> Iterator[tuple[str | int, Any]]:
        yield from enumerate(self.args)
        yield from self.kwargs.items()

    def _nothing_to_split(self) -> CannotSplitError:
        shapes = []
        for key, x in self._arguments():
            owner = _owner(x)
            shapes.append(f"{key}: {type(x).__name__}" + (f" {owner.shape(x)}" if owner is not None else ""))
        return CannotSplitError(
            f"no argument to split is an array with an axis {self.axis} (arguments:"
            f" {', '.join(shapes) or 'none'}); pass the batch as an array, and another split axis if"
            " its rows lie elsewhere",
            reason=f"no argument to split has an axis {self.axis}",
        )

    def _check_chosen(self) -> None:
        for key, x in self._arguments():
            rows = _find_rows(x, self.axis) if self.chosen is not None and key in self.chosen else self.rows
            if rows != self.rows:
                raise CannotSplitError(
                    f"argument {key!r} has {rows} rows along axis {self.axis}, the batch has {self.rows};"
                    " split arguments of one length only",
                    reason="the arguments to split differ in length",
                )

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every array of the batch cut down to these rows."""
        if start == 0 and stop == self.rows:
            return self.whole
        cut = {
            key: _cut(x, self.axis, self.rows, start, stop)
            if self.chosen is None or key in self.chosen
            else _plain(x)
            for key, x in self._arguments()
        }
        return tuple(cut[i] for i in range(len(self.args))), {key: cut[key] for key in self.kwargs}

    def run(self, retries: int, gpu_id: int | None) -> Any:
        before = sys.exception()
        args, kwargs = self.whole
        try:
            if faults:
                return _attempt(self.fn, args, kwargs, lambda: self.rows)
            result = self.fn(*args, **kwargs)
            _settle(result)
            return result
        except Exception as error:  # an unknown function's error: it is classified, and raised again
            if not _is_oom(error, before):
                raise
            failure = error
        return self._in_parts(failure, before, retries, gpu_id)

    def _in_parts(
        self, original: Exception, before: BaseException | None, retries: int, gpu_id: int | None
    ) -> Any:
        done: list[Any] = []
        start, size = 0, self.rows  # the next row, and how many rows are known, or hoped, to fit
        take = self.rows
        fitted, patience = 0, GROW_AFTER
        failures = 1
        failure: Exception | None = original
        while True:
            if failure is not None:
                freed = _clean_up(failure, before, gpu_id)
                reason, failure = _describe(failure), None
                if retries > 0:
                    retries -= 1
                    _tell(
                        "retry",
                        "%d rows ran out of memory (%s); freed %d bytes of caches and try them again",
                        take, reason, freed,
                    )  # fmt: skip
                elif take >= 2 * self.min_split and failures < MAX_FAILURES + len(done):
                    size, fitted = take // 2, 0
                    if done:
                        patience *= 2
                    # Parts of the smallest size are tried twice, since nothing smaller is left to try.
                    retries = 1 if size < 2 * self.min_split else 0
                    _tell(
                        "split",
                        "%d rows ran out of memory (%s); freed %d bytes of caches and go on with %d rows at a"
                        " time (%d of %d rows are done)",
                        take, reason, freed, size, start, self.rows,
                    )  # fmt: skip
                else:
                    self._give_up(original, take, failures)
            take = _portion(self.rows - start, size, self.min_split)
            args, kwargs = self.part(start, start + take)
            try:
                result = _attempt(self.fn, args, kwargs, lambda take=take: take)  # type: ignore[misc]
            except Exception as error:
                if not _is_oom(error, before):
                    raise
                failure, failures = error, failures + 1
                del args, kwargs
                continue
            if take == self.rows:
                return result
            _check_rows(result, take, self.axis)
            done.append(result)
            del args, kwargs, result
            start += take
            if start == self.rows:
                break
            fitted += 1
            if fitted >= patience and size < self.rows - start:
                _tell("grow", "%d parts of %d rows fitted; try %d rows", fitted, size, 2 * size)
                size, fitted = 2 * size, 0
            left = self.rows - start
            retries = 1 if _portion(left, size, self.min_split) < 2 * self.min_split else 0
        return self._joined(done, before, gpu_id)

    def _joined(self, done: list[Any], before: BaseException | None, gpu_id: int | None) -> Any:
        try:
            return _join(done, self.axis)
        except Exception as error:
            if not _is_oom(error, before):
                raise
            failure = error
        _clean_up(failure, before, gpu_id)
        return _join(done, self.axis)

    def _give_up(self, original: Exception, take: int, failures: int) -> None:
        why = (
            f"{failures} attempts failed"
            if take >= 2 * self.min_split
            else f"{take} rows cannot be halved (min_split={self.min_split})"
        )
        original.add_note(
            f"arraybridge: out of memory with {take} of {self.rows} rows, and {why}; lower min_split, or see"
            " memory_stats() for who holds the memory."
        )
        try:
            raise original
        finally:
            del original


def _portion(remaining: int, size: int, least: int) -> int:
    """Rows of the next part: at most ``size`` if it can be, in even parts, none smaller than ``least``."""
    if remaining <= size:
        return remaining
    parts = max(1, min(-(-remaining // size), remaining // least))
    return -(-remaining // parts)


def _chosen(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], split: Split
) -> frozenset[str | int]:
    """Positions and keywords of the arguments that ``split`` names."""
    named = split if isinstance(split, (tuple, list)) else (split,)
    keys: set[str | int] = set()
    for one in named:
        if isinstance(one, str) and one not in kwargs:
            import inspect

            try:
                names = list(inspect.signature(fn).parameters)
            except (TypeError, ValueError):  # a built-in without a signature
                names = []
            one = names.index(one) if one in names else one  # noqa: PLW2901
        if one not in kwargs and not (isinstance(one, int) and 0 <= one < len(args)):
            raise CannotSplitError(
                f"split={split!r} names an argument {one!r} that the call does not have; pass its name, its"
                " position, or True",
                reason=f"there is no argument {one!r}",
            )
        keys.add(one)
    return frozenset(keys)


def _extent(x: Any, axis: int) -> int | None:
    """Rows of an array along the axis; None for what is no array, or has no such axis."""
    owner = _owner(x)
    if owner is None:
        return None
    shape = owner.shape(x)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def _children(x: Any) -> list[Any] | None:
    """What a container holds, or None for what is none."""
    if isinstance(x, dict):
        return list(x.values())
    return list(x) if isinstance(x, (tuple, list)) else None


def _rebuilt(like: Any, children: list[Any]) -> Any:
    if isinstance(like, dict):
        made = copy.copy(like)  # keeps what a subclass has besides, such as a default factory
        made.update(zip(like, children, strict=True))
        return made
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*children)
    return type(like)(children)


def _find_rows(x: Any, axis: int) -> int | None:
    extent = _extent(x, axis)
    if extent is None:
        for child in _children(x) or ():
            extent = _find_rows(child, axis)
            if extent is not None:
                break
    return extent


def _cut(x: Any, axis: int, rows: int, start: int, stop: int) -> Any:
    if type(x) is fixed:
        return x.value
    owner = _owner(x)
    if owner is not None:
        return owner.part(x, axis, start, stop) if _extent(x, axis) == rows else x
    children = _children(x)
    if children is None:
        return x
    return _rebuilt(x, [_cut(child, axis, rows, start, stop) for child in children])


def _plain(x: Any) -> Any:
    return x.value if type(x) is fixed else x


def _check_rows(result: Any, rows: int, axis: int) -> None:
    """Refuse, after the first part and not after the last, what cannot be joined."""
    owner = _owner(result)
    if owner is None:
        children = _children(result)
        if children is not None:
            for child in children:
                _check_rows(child, rows, axis)
        elif result is not None and not isinstance(result, str):
            raise CannotSplitError(
                f"a result of type {type(result).__name__} cannot be joined from parts of the batch: nobody"
                " can say whether to add, average or list it. Return arrays with one row for each row of the"
                " batch, and reduce them afterwards.",
                reason=f"a {type(result).__name__} cannot be joined",
            )
        return
    if _extent(result, axis) != rows:
        raise CannotSplitError(
            f"the function gave an array of shape {owner.shape(result)} for {rows} rows along axis {axis}:"
            " only results with one row for each row of the batch can be joined. Reduce over the batch"
            " afterwards, or pass the axis along which the rows lie.",
            source_type=owner.name,
            reason="the result has not as many rows as its part of the batch",
        )


def _join(parts: list[Any], axis: int) -> Any:
    first = parts[0]
    owner = _owner(first)
    if owner is not None:
        return owner.concatenate(parts, axis)
    children = [_children(part) for part in parts]
    if children[0] is None:
        if any(part != first for part in parts):
            raise CannotSplitError(
                f"the parts of the batch gave different values, {first!r} and another one, that cannot be"
                " joined; return arrays with one row for each row of the batch",
                reason="the parts gave different values",
            )
        return first
    columns = [[*column] for column in zip(*[c or [] for c in children], strict=True)]
    return _rebuilt(first, [_join(column, axis) for column in columns])
