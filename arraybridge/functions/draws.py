"""Random numbers that a function drew, to be drawn again where it is run again for its pullback."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from arraybridge.errors import GradientError
from arraybridge.frameworks.autodiff import LOST_CALL, Autodiff

__all__ = ["Drawn", "Draws", "again", "first"]


class Drawn(NamedTuple):
    """The random numbers of a run: the state before it, and a hash of the one after, if that is known.

    ``changed``: whether they differ. A function that puts the state back may have drawn although they do not.
    """

    before: Any
    after: int | None
    changed: bool = True


class _Replays(threading.local):
    """How many replays this thread has begun, and is in; those of all threads stand below."""

    begun = inside = 0


_mine, _lock = _Replays(), threading.Lock()
_begun = _inside = 0


def _of_others() -> tuple[int, int]:
    with _lock:
        return _begun - _mine.begun, _inside - _mine.inside


@contextmanager
def _replaying(there: Autodiff, state: Any) -> Iterator[None]:
    global _begun, _inside
    with _lock:
        _begun, _inside = _begun + 1, _inside + 1
        _mine.begun, _mine.inside = _mine.begun + 1, _mine.inside + 1
    try:
        with there.replayed(state):
            yield
    finally:
        with _lock:
            _inside, _mine.inside = _inside - 1, _mine.inside - 1


def first(there: Autodiff, run: Callable[..., Any], *args: Any) -> tuple[Any, Drawn | None]:
    """The result of a run, and the random numbers that it may have drawn; None in a framework without any."""
    before = _shared(there.random_state())
    if before is None:
        return run(*args), None
    others = _of_others()
    result = run(*args)
    after = there.random_state()
    if others[1] or _of_others()[0] != others[0]:
        return result, Drawn(before, None)  # the state was another thread's meanwhile
    changed = after != before
    return result, Drawn(before, hash(after) if changed else None, changed)


def _shared(state: Any) -> Any:
    """The state, as the object that it was the last time where it is the same: of kilobytes."""
    global _last
    if state != _last:
        _last = state
    return _last


_last: Any = None


def again(there: Autodiff, drawn: Drawn, label: str, run: Callable[..., Any], *args: Any) -> Any:
    """The result of a run with the random numbers of an earlier one.

    A generator belongs to all threads. When another one draws from it during either run, the state after this
    one is another than it should be, unless it drew as much during both.

    Raises:
        GradientError: another thread drew meanwhile.
    """
    before = hash(drawn.before)
    with _replaying(there, drawn.before):
        result = run(*args)
        after = hash(there.random_state())
    if after in (before, drawn.after):
        return result
    # What draws nothing itself is right whoever draws; now it is watched.
    with _replaying(there, drawn.before), there.drawing() as drew:
        result = run(*args)
        after = hash(there.random_state())
    if after == (drawn.after if drawn.changed else before) or drew == []:
        return result
    raise GradientError(
        f"{label}(): it has to run once more for its backward (in jax.jit, under a checkpoint, for higher"
        " orders), and its random numbers did not come again: another thread drew from the same generator"
        " meanwhile. Pass what is random as an argument, or draw in one thread at a time",
        reason="random numbers of several threads",
    )


class Draws:
    """The random numbers of a function inside a compiled program, by the number of the call.

    The program runs it for its value and for its pullback, under a checkpoint more often, in an order that
    nothing tells. Each run is given the number of the call that it belongs to; the first one draws.
    """

    _MOST, _MOST_FORGOTTEN = 4096, 65536

    def __init__(self) -> None:
        #: Whether a call may run again although nobody differentiates it: it is under jax.checkpoint.
        self.checkpointed = False
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._drawn: OrderedDict[int, Drawn] = OrderedDict()
        #: Calls that were remembered once, and the last one of which not even that is known.
        self._forgotten: OrderedDict[int, None] = OrderedDict()
        self._unknown = 0

    def next_call(self) -> int:
        """The number of a call, below zero: those of tokens are above."""
        return -1 - next(self._calls) % 0x7FFFFFFF

    def of_call(self, number: int) -> Drawn | None:
        """What the first run of a call drew; None where this is the first, or there is no such call.

        Raises:
            GradientError: it is forgotten.
        """
        if number in (0, LOST_CALL):
            return None
        with self._lock:
            drawn = self._drawn.get(number)
            if drawn is None and (number in self._forgotten or self._unknown <= number):
                raise _forgotten()
            return drawn

    def remember(self, number: int, drawn: Drawn) -> None:
        """Keep what the first run of a call drew, for those that follow."""
        if not number:
            return
        with self._lock:
            self._drawn[number] = drawn
            if len(self._drawn) > self._MOST:
                oldest, runs = self._drawn.popitem(last=False)
                if runs.changed:
                    self._forgotten[oldest] = None
            if len(self._forgotten) > self._MOST_FORGOTTEN:
                self._unknown = min(self._unknown, self._forgotten.popitem(last=False)[0])


def _forgotten() -> GradientError:
    return GradientError(
        "the random numbers of this call are forgotten, since too many calls came between it and its"
        " backward; pass what is random as an argument",
        reason="random numbers are forgotten",
    )
