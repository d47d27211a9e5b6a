"""Memory of a card that one framework lends to another, and when it goes back.

Each framework's allocator gives freed memory away again in the order of its own queues. What another one
has queued on it is unknown there, so that memory which is freed as soon as nobody refers to it may be written
to while it is still to be read. A `Loan` stands between the borrower's array and what it borrowed: when that
array goes, the lender's queue first waits for the borrower's. What was lent by a lender without queues to
speak of (JAX, TensorFlow), or on another queue than the present one, is kept until the borrower's work is
done.

`Kept` does the keeping, here and for the threads of pipelines (lines/streams.py).
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from arraybridge.frameworks.parts import Streams
from arraybridge.types import Device

__all__ = ["Kept", "settle"]

#: Of each framework that records graphs of CUDA: whether this thread records one now.
captures: list[Callable[[], bool]] = []


def _is_captured() -> bool:
    with suppress(RuntimeError):  # there is no driver
        return any(is_capturing() for is_capturing in captures)
    return False


class Loan:
    """Holds what was borrowed for as long as the borrower's array lives, and orders its end.

    Args:
        borrowed: what keeps the memory alive.
        lender: the queues of the framework that owns it.
        borrower: the queues of the framework that reads it.
        device: the card.
    """

    __slots__ = ("__weakref__", "_borrowed", "_borrower", "_device", "_lender", "_lent_on")

    def __init__(self, borrowed: Any, lender: Streams, borrower: Streams, device: Device) -> None:
        self._borrowed = borrowed
        self._lender = lender
        self._borrower = borrower
        self._device = device
        #: The lender's queue, by its handle: its allocator minds that one alone, whichever thread asks it.
        self._lent_on = lender.handle(device)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if _is_finalizing():  # modules may be gone by then
            return
        try:
            lent_on, read_on = self._lent_on, self._borrower.handle(self._device)
            if lent_on is not None and read_on is not None and self._lender.handle(self._device) == lent_on:
                self._lender.wait_for(self._device, read_on)
                return
            mark = self._borrower.mark(self._device)
            if mark is not None:
                keep(self._borrowed, mark.is_done, mark.synchronize)
        except RuntimeError:
            return  # the card has failed: what runs there still is of no use to anybody


class Kept:
    """Objects that are kept alive, each until the queued work that reads it is done."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Any, Callable[[], bool], Callable[[], object]]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, what: Any, is_done: Callable[[], bool], wait: Callable[[], object]) -> None:
        """Keep an object until ``is_done`` says so; ``wait`` waits for that.

        It asks nothing now, since it is called when objects are collected, which may be in the midst of
        anything.
        """
        self._entries.append((what, is_done, wait))

    def release(self) -> None:
        """Let go of what is not read any more. Asks, and waits for nothing."""
        if self._entries and _is_captured():  # a question would break off the graph, whoever records it
            return
        for _ in range(len(self._entries)):
            try:
                entry = self._entries.popleft()
            except IndexError:  # another thread did the same
                return
            try:
                is_done = entry[1]()
            except RuntimeError:  # the card has failed, and tells so to whoever uses it next
                is_done = False
            if not is_done:
                self._entries.append(entry)

    def settle(self, leaving: int = 0) -> None:
        """Wait for the work that reads what is kept, and let go of all but the latest, so many of them."""
        while len(self._entries) > leaving:
            try:
                entry = self._entries.popleft()
            except IndexError:
                return
            entry[2]()


_kept = Kept()
keep = _kept.keep
#: Before each new loan.
release = _kept.release
settle = _kept.settle


def keep_after(
    lent: Any,
    what: Any,
    begin: Callable[[], Any],
    wait: Callable[[Any], object],
    is_ready: Callable[[Any], bool] | None = None,
) -> None:
    """Keep ``what`` on once the array goes that shares its memory, for a borrower without queues to mark.

    Such a borrower computes one thing after the other: what was queued then is done when a result is there
    that it begins afterwards. One whose results do not tell is waited for when it is asked again, by when it
    has most likely got there.
    """
    result = cache(begin)

    def is_done() -> bool:
        if not result.cache_info().currsize:
            result()
            return False
        if is_ready is not None:
            return is_ready(result())
        wait(result())
        return True

    weakref.finalize(lent, keep, what, is_done, lambda: wait(result())).atexit = False
