"""Random numbers that a function drew, to be drawn again where it is run again for its pullback."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from arraybridge.errors import GradientError
from arraybridge.frameworks.autodiff import Autodiff

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
    """States of random numbers of a function inside a compiled program, where nothing else remembers them.

    The program runs it for its value, then for the pullback. A run for the pullback is told the number of
    the run that it belongs to.

    Under jax.checkpoint the function runs several times for its value, before and after pullbacks, and
    nothing tells which of these runs belong together: there the random numbers depend on the arguments, and
    on the seed. A program that was made elsewhere may come under a checkpoint, too: what shows it is a second
    run of the same arguments before a pullback.
    """

    _MOST = 4096

    def __init__(self) -> None:
        #: Whether it is under jax.checkpoint.
        self.checkpointed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(-1, -1)  # those of tokens are positive
        self._runs: OrderedDict[int, tuple[Drawn, bytes]] = OrderedDict()
        #: What runs of these arguments drew, and whether a pullback followed one of them.
        self._open: OrderedDict[bytes, tuple[Drawn, bool]] = OrderedDict()
        #: What is not known any more, and no pullback followed: under a checkpoint one will.
        self._forgotten: set[bytes] = set()

    def of_run(self, number: int) -> Drawn | None:
        """What the run of this number drew, for its pullback; None for 0.

        Raises:
            GradientError: it is forgotten.
        """
        if not number:
            return None
        with self._lock:
            if number not in self._runs:
                raise _forgotten()
            drawn, key = self._runs[number]
            if key in self._open:
                if self.checkpointed:
                    self._open[key] = (drawn, True)
                else:
                    del self._open[key]
            return drawn

    def of_arguments(self, arrays: Sequence[np.ndarray], seed: Hashable) -> Drawn | None:
        """What a run of these arguments drew, if this may be another one of the same call.

        Raises:
            GradientError: it is forgotten.
        """
        with self._lock:
            if not self._open and not self._forgotten:
                return None
            key = _fingerprint(arrays, seed)
            if key in self._forgotten:
                raise _forgotten()
            if key not in self._open:
                return None
            self.checkpointed = True
            self._open.move_to_end(key)
            return self._open[key][0]

    def remember(self, drawn: Drawn, arrays: Sequence[np.ndarray], seed: Hashable) -> int:
        """Keep what a run drew, which a pullback will follow; returns its number."""
        key = _fingerprint(arrays, seed)
        with self._lock:
            number = next(self._numbers)
            self._runs[number] = (drawn, key)
            self._open.setdefault(key, (drawn, False))
            if len(self._runs) > self._MOST:
                self._runs.popitem(last=False)
            if len(self._open) > self._MOST:
                oldest, (_, pulled) = self._open.popitem(last=False)
                if not pulled:
                    self._forgotten.add(oldest)
            return number


def _forgotten() -> GradientError:
    return GradientError(
        "the random numbers of this call are forgotten, since too many calls came between it and its"
        " backward; pass what is random as an argument",
        reason="random numbers are forgotten",
    )


def _fingerprint(arrays: Sequence[np.ndarray], seed: Hashable) -> bytes:
    import hashlib  # costs 12 ms, which `import arraybridge` saves

    digest = hashlib.blake2b(repr(seed).encode(), digest_size=16)
    for x in arrays:
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.digest()
