"""A lane keeps what its queued work still reads. Marks that are done when told so stand for a card."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.parts import Mark, Pool, Streams
from arraybridge.lines.streams import ThreadStreams
from arraybridge.types import Device
from tests.cards import CardArray, CardFramework
from tests.helpers import registry_kept

pytestmark = pytest.mark.usefixtures("no_real_card")

CARD = Device("gpu", 0)


class Queue(Streams):
    """Counts its marks, and how many of them were waited for."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached = 0

    def mark(self, device: Device) -> Mark | None:
        assert device == CARD
        self.marks += 1
        number = self.marks

        def synchronize() -> None:
            self.reached = max(self.reached, number)

        return Mark(self, device, lambda: None, synchronize, lambda: self.reached >= number)


class Opened(Pool):
    def __init__(self, is_opened: bool) -> None:
        self.is_opened = is_opened

    def is_started(self) -> bool:
        return self.is_opened


class Lender(CardFramework):
    """Owns the arrays, and has no queues, as JAX."""

    name = "lender"


class Reader(Lender):
    """Owns no item, and reads those of the other one."""

    name = "reader"

    def __init__(self, is_opened: bool = True) -> None:
        super().__init__()
        self.streams: Queue = Queue()
        self.pool = Opened(is_opened)

    def owns(self, x: Any) -> bool:
        return False


@pytest.fixture
def lender() -> Iterator[Lender]:
    with registry_kept():
        yield arraybridge.register(Lender())  # type: ignore[misc]


@pytest.fixture
def queue(lender: Lender) -> Queue:
    reader = Reader()
    arraybridge.register(reader)
    return reader.streams


def held(lane: ThreadStreams, device: Device = CARD) -> weakref.ref[Any]:
    """Hand the lane an item that nobody else keeps."""
    item = CardArray(np.zeros(1), -1 if device == CPU else device.index)
    lane.hold([item])
    gc.collect()
    return weakref.ref(item)


def test_an_item_goes_only_once_the_work_that_reads_it_is_done(queue: Queue) -> None:
    lane = ThreadStreams(2)
    items = [held(lane) for _ in range(2)]
    assert queue.reached == 0
    assert all(item() is not None for item in items)
    items.append(held(lane))  # one too many: the queue is waited for
    gc.collect()
    assert [item() is None for item in items] == [True, False, False]
    # The mark that was set after the work on the first item.
    assert queue.reached == 1
    lane.close()
    gc.collect()
    assert [item() is None for item in items] == [True, True, True]
    assert queue.reached == 3


def test_what_is_done_goes_without_a_wait(queue: Queue) -> None:
    lane = ThreadStreams(8)
    first = held(lane)
    queue.reached = 1
    second = held(lane)
    gc.collect()
    assert first() is None
    assert second() is not None
    assert queue.reached == 1


def test_every_queue_that_may_read_it_is_waited_for(lender: Lender, queue: Queue) -> None:
    own = Queue()
    lender.streams = own
    lane = ThreadStreams(8)
    item = held(lane)
    own.reached = 1
    held(lane)
    assert item() is not None, "the reader is not done yet"
    queue.reached = 1
    held(lane)
    assert item() is None
    lane.close()
    assert own.reached == queue.reached == 3


def test_what_no_card_holds_is_not_held(queue: Queue) -> None:
    lane = ThreadStreams(8)
    assert held(lane, CPU)() is None
    assert queue.marks == 0


def test_a_framework_that_has_opened_no_card_is_not_asked(lender: Lender) -> None:
    reader = Reader(is_opened=False)
    arraybridge.register(reader)
    assert held(ThreadStreams(8))() is None
    assert reader.streams.marks == 0
