"""A lane keeps what its queued work still reads. Marks that are done when told so stand for a card."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from arraybridge.frameworks.parts import Mark, Streams
from arraybridge.lines.lanes import Lane
from arraybridge.types import Device

CARD = Device("gpu", 0)


class Item:
    """What the queued work reads."""


class Queue(Streams):
    """Counts its marks, and how many of them were waited for."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached = 0

    def mark(self, device: Device) -> Mark | None:
        self.marks += 1
        number = self.marks

        def synchronize() -> None:
            self.reached = max(self.reached, number)

        return Mark(self, device, lambda: None, synchronize, lambda: self.reached >= number)


def held(lane: Lane, queue: Queue) -> weakref.ref[Any]:
    """Hand the lane an item that nobody else keeps."""
    item = Item()
    mark = queue.mark(CARD)
    assert mark is not None
    lane.hold(item, [mark])
    gc.collect()
    return weakref.ref(item)


def test_an_item_goes_only_once_the_work_that_reads_it_is_done() -> None:
    lane, queue = Lane(2), Queue()
    items = [held(lane, queue) for _ in range(2)]
    assert queue.reached == 0
    assert all(item() is not None for item in items)
    items.append(held(lane, queue))  # one too many: the queue is waited for
    gc.collect()
    assert [item() is None for item in items] == [True, False, False]
    # The mark that was set after the work on the first item: its second one.
    assert queue.reached == 2
    lane.close()
    gc.collect()
    assert [item() is None for item in items] == [True, True, True]
    assert queue.reached == 6


def test_what_is_done_goes_without_a_wait() -> None:
    lane, queue = Lane(8), Queue()
    first = held(lane, queue)
    queue.reached = 2
    second = held(lane, queue)
    gc.collect()
    assert first() is None
    assert second() is not None
    assert queue.reached == 2
