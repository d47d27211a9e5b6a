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
    nothing tells which of these runs belong together: there the random numbers depend on the arguments; once
    a pullback followed, on the seed, too. A program that was made elsewhere may come under a checkpoint: what
    shows it is a second run of the same arguments before a pullback.
    """

    _MOST, _MOST_FORGOTTEN = 4096, 65536

    def __init__(self) -> None:
        #: Whether it is under jax.checkpoint, and whether it drew where its shapes were foretold.
        self.checkpointed = self.foretold = False
        self._lock = threading.Lock()
        # Those of tokens are positive.
        self._numbers, self._odd_numbers = itertools.count(-2, -2), itertools.count(-1, -2)
        self._runs: OrderedDict[int, _Runs] = OrderedDict()
        #: Of runs that seem to have drawn nothing, by odd numbers: they may have put the state back.
        self._others: OrderedDict[int, Drawn] = OrderedDict()
        self._open: OrderedDict[bytes, _Runs] = OrderedDict()
        #: What is not known any more; another run of it may come.
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()

    def of_run(self, number: int) -> Drawn | None:
        """What the run of this number drew, for its pullback; None for 0.

        Raises:
            GradientError: it is forgotten.
        """
        if not number:
            return None
        with self._lock:
            if number % 2:
                return self._others.get(number)
            if number not in self._runs:
                raise _forgotten()
            runs = self._runs[number]
            if self.checkpointed and any(
                one.waiting > 0 and one is not runs and one.sketch.is_near(runs.sketch, _MAY_BE_ONE)
                for one in self._open.values()
            ):
                for one in self._open.values():  # so that later calls are not refused for this one
                    one.waiting = 0
                raise _other_bits()  # these may be the first and the second run of one call
            runs.waiting -= 2
            runs.pulled = True
            if not self.checkpointed and self._open.get(runs.key) is runs:
                del self._open[runs.key]
            return runs.drawn

    def of_arguments(self, arrays: Sequence[np.ndarray], seed: Hashable) -> Drawn | None:
        """What a run of these arguments drew, if this may be another one of the same call.

        Raises:
            GradientError: it is forgotten.
        """
        with self._lock:
            if not self._open:
                return None
            key = _fingerprint(arrays)
            if key in self._forgotten:
                raise _forgotten()
            runs = self._open.get(key)
            if runs is None and self.checkpointed:
                # Under jax.jit, XLA may round what is computed again otherwise.
                sketch = _Sketch(arrays)
                near = (one for one in self._open.values() if one.sketch.is_near(sketch, _IS_ONE))
                runs = next(near, None)
                if runs is not None:
                    self._open[key] = runs
            if runs is None or (runs.pulled and runs.seed != seed):
                return None
            self.checkpointed, runs.seed = True, seed
            self._open.move_to_end(key)
            return runs.drawn

    def remember(
        self, drawn: Drawn, arrays: Sequence[np.ndarray], seed: Hashable, *, pulled: bool = False
    ) -> int:
        """Keep what a run drew, which a pullback will follow; returns its number.

        ``pulled``: none will, under a checkpoint, where it is run again for the others.
        """
        if not (drawn.changed or self.foretold):
            with self._lock:
                number = next(self._odd_numbers)
                self._others[number] = drawn
                if len(self._others) > self._MOST:
                    self._others.popitem(last=False)
                return number
        key = _fingerprint(arrays)
        with self._lock:
            number = next(self._numbers)
            runs = self._open.get(key)
            if runs is None or runs.drawn is not drawn:
                runs = self._open[key] = _Runs(drawn, key, seed, pulled, _Sketch(arrays))
            runs.pulled = runs.pulled and pulled
            runs.waiting += not pulled
            self._runs[number] = runs
            if len(self._runs) > self._MOST:
                self._runs.popitem(last=False)
            if len(self._open) > self._MOST:
                self._forgotten[self._open.popitem(last=False)[0]] = None
            if len(self._forgotten) > self._MOST_FORGOTTEN:
                self._forgotten.popitem(last=False)
            return number


class _Runs:
    """Runs for the value, of equal arguments, that drew the same."""

    def __init__(self, drawn: Drawn, key: bytes, seed: Hashable, pulled: bool, sketch: _Sketch) -> None:
        self.drawn, self.key, self.seed, self.sketch = drawn, key, seed, sketch
        #: How many there are that no pullback followed, which under a checkpoint follows two; JAX leaves out
        #: the first one where nobody needs its value.
        self.waiting = 0
        #: Whether a pullback followed, or none will.
        self.pulled = pulled


def _forgotten() -> GradientError:
    return GradientError(
        "the random numbers of this call are forgotten, since too many calls came between it and its"
        " backward; pass what is random as an argument",
        reason="random numbers are forgotten",
    )


#: Roundings apart at most, of the largest number: arguments of one call, and those that may be of one.
_IS_ONE, _MAY_BE_ONE = 64, 4096


class _Sketch:
    """Some of the numbers of arguments, by which those are told that merely were rounded otherwise."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        parts, exact = [], []
        for x in arrays:
            eps = 0.0
            if x.dtype.kind in "fc" and x.size:
                some = x.reshape(-1)[np.linspace(0, x.size - 1, min(x.size, 64)).astype(int)]
                wide = some.astype(complex if x.dtype.kind == "c" else float)
                eps = float(np.finfo(x.dtype).eps)
                parts.append((float(wide[0].real), wide, float(np.abs(wide).max()), eps))
            exact.append((x.shape, x.dtype.str, None if eps else x.tobytes()))
        self.parts, self.exact = parts, exact

    def is_near(self, other: _Sketch, roundings: int) -> bool:
        for (first, some, most, eps), (first2, some2, most2, _) in zip(self.parts, other.parts, strict=False):
            allowed = min(roundings * eps, 0.01) * max(most, most2)
            # The first one alone tells most of them apart.
            if not abs(first - first2) <= allowed or some.shape != some2.shape:
                return False
            if not np.abs(some - some2).max() <= allowed:
                return False
        return self.exact == other.exact


def _other_bits() -> GradientError:
    return GradientError(
        "under jax.checkpoint a function that draws random numbers was run again with arguments that are"
        " equal to no earlier ones: JAX has compiled what comes before it anew, and rounds otherwise, so that"
        " its numbers cannot be told. Call it before what rounds, or outside of the checkpoint, or pass what"
        " is random as an argument",
        reason="a checkpoint that rounds otherwise",
    )


def _fingerprint(arrays: Sequence[np.ndarray]) -> bytes:
    import hashlib  # costs 12 ms, which `import arraybridge` saves

    digest = hashlib.blake2b(digest_size=16)
    for x in arrays:
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.digest()
