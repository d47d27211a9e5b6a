"""Random numbers that a function drew, to be drawn again where it is run again for its pullback."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraybridge.errors import GradientError

__all__ = ["Draws"]


class Draws:
    """States of random numbers of a function inside a compiled program, where nothing else remembers them.

    The program runs it for its value, then for the pullback; under jax.checkpoint twice for its value. A run
    for the pullback is told the number of the run that it belongs to. A second run for the value is known by
    its arguments, as long as no pullback followed the first.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(-1, -1)  # those of tokens are positive
        self._states: OrderedDict[int, tuple[Any, bytes]] = OrderedDict()
        self._open: OrderedDict[bytes, Any] = OrderedDict()

    def of_run(self, number: int) -> Any:
        """The state that the run of this number began with, for its pullback; None for 0.

        Raises:
            GradientError: it is forgotten.
        """
        if not number:
            return None
        with self._lock:
            if number not in self._states:
                raise GradientError(
                    "the random numbers of this call are forgotten, since too many calls came between it and"
                    " its backward; pass what is random as an argument",
                    reason="random numbers are forgotten",
                )
            state, arguments = self._states[number]
            self._open.pop(arguments, None)
            return state

    def of_arguments(self, arrays: Sequence[np.ndarray]) -> Any:
        """The state that a run of these arguments began with, if none of its pullbacks ran yet."""
        return self._open.get(_fingerprint(arrays)) if self._open else None

    def remember(self, state: Any, arrays: Sequence[np.ndarray]) -> int:
        """Keep the state that a run began with, which a pullback will follow; returns its number."""
        arguments = _fingerprint(arrays)
        with self._lock:
            number = next(self._numbers)
            self._states[number] = (state, arguments)
            self._open[arguments] = state
            for known in (self._states, self._open):
                if len(known) > self._MOST:
                    known.popitem(last=False)
            return number


def _fingerprint(arrays: Sequence[np.ndarray]) -> bytes:
    import hashlib  # costs 12 ms, which `import arraybridge` saves

    digest = hashlib.blake2b(digest_size=16)
    for x in arrays:
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.digest()
