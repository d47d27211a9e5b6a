"""Random numbers that a function drew, to be drawn again where it is run again for its pullback."""

from __future__ import annotations

import hashlib
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

    The program may run it once for its value and once more for the pullback, or twice to save memory. A run
    for the pullback is told the number of the run that it belongs to; a run that was made for the value alone
    is known by the arguments.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(-1, -1)  # those of tokens are positive
        self._states: OrderedDict[int, Any] = OrderedDict()
        self._values: OrderedDict[bytes, list[Any]] = OrderedDict()

    def before(self, number: int, keep: bool, arrays: Sequence[np.ndarray]) -> Any:
        """The state to begin with; None for that which is in force.

        Args:
            number: of the run to be repeated; 0 where there is none.
            keep: whether a pullback will follow.
            arrays: the arguments.

        Raises:
            GradientError: it cannot be told any more.
        """
        with self._lock:
            if number:
                if number not in self._states:
                    raise GradientError(
                        "the random numbers of this call are forgotten, since too many calls came between it"
                        " and its backward; pass what is random as an argument",
                        reason="random numbers are forgotten",
                    )
                return self._states[number]
            if not keep or not self._values:
                return None
            states = self._values.pop(_fingerprint(arrays), [])
        if any(state != states[0] for state in states):
            raise GradientError(
                "the function drew different random numbers for the same arguments before, and it cannot be"
                " told which of them this backward is for; pass what is random as an argument",
                reason="random numbers are ambiguous",
            )
        return states[0] if states else None

    def remember(self, state: Any, keep: bool, arrays: Sequence[np.ndarray]) -> int:
        """Keep the state that a run began with; returns its number, 0 for a run that no pullback follows."""
        with self._lock:
            if not keep:
                self._values.setdefault(_fingerprint(arrays), []).append(state)
                if len(self._values) > self._MOST:
                    self._values.popitem(last=False)
                return 0
            number = next(self._numbers)
            self._states[number] = state
            if len(self._states) > self._MOST:
                self._states.popitem(last=False)
            return number


def _fingerprint(arrays: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for x in arrays:
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.digest()
