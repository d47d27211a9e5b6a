"""Memory of a card that one framework lends to another, and when it goes back.

Each framework's allocator gives freed memory away again in the order of its own queues. What another one
has queued on it is unknown there, so that memory which is freed as soon as nobody refers to it may be written
to while it is still to be read. A `Loan` stands between the borrower's array and what it borrowed: when that
array goes, the lender's queue first waits for the borrower's. A lender without queues to speak of (JAX,
TensorFlow) has its array kept until the borrower's work is done.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from arraybridge.frameworks.parts import Streams
from arraybridge.types import Device

__all__ = ["Loan", "keep", "release", "settle"]

# What nobody refers to any more, and whether the work that reads it is done.
_kept: deque[tuple[Any, Callable[[], bool], Callable[[], object]]] = deque()


class Loan:
    """Holds what was borrowed for as long as the borrower's array lives, and orders its end.

    Args:
        borrowed: what keeps the memory alive.
        lender: the queues of the framework that owns it; None where they cannot be told to wait.
        borrower: the queues of the framework that reads it.
        device: the card.
    """

    __slots__ = ("__weakref__", "_borrowed", "_borrower", "_device", "_lender")

    def __init__(self, borrowed: Any, lender: Streams | None, borrower: Streams, device: Device) -> None:
        self._borrowed = borrowed
        self._lender = lender
        self._borrower = borrower
        self._device = device

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            if self._lender is not None:
                self._lender.wait_for(self._device, self._borrower.handle(self._device))
                return
            mark = self._borrower.mark(self._device)
            if mark is not None:
                keep(self._borrowed, mark.is_done, mark.synchronize)
        except RuntimeError:
            return  # the card has failed: what runs there still is of no use to anybody


def keep(what: Any, is_done: Callable[[], bool], wait: Callable[[], object]) -> None:
    """Keep an object alive until the work that reads it is done; ``wait`` waits for that.

    It asks nothing now, since it is called when objects are collected, which may be in the midst of anything.
    """
    _kept.append((what, is_done, wait))


def release() -> None:
    """Let go of what is not read any more; before each new loan. Asks, and waits for nothing."""
    for _ in range(len(_kept)):
        try:
            entry = _kept.popleft()
        except IndexError:  # another thread did the same
            return
        if not entry[1]():
            _kept.append(entry)


def settle() -> None:
    """Wait for the work that reads what is kept, and let all of it go."""
    while _kept:
        try:
            _, _, wait = _kept.popleft()
        except IndexError:
            return
        wait()
