"""Worker threads of `device_map`, `Pipeline` and `prefetch`.

Items are numbered, and few are in progress at a time. The caller's thread reads the input and returns the
results, except that `prefetch` reads in its worker. After an iterator is deleted, no further item is started,
and busy workers end after their current item. Each item carries the stream events after which its arrays are
ready (see `streams_between_threads`), and either a result or an exception.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from arraybridge.device import Device
from arraybridge.errors import note_on
from arraybridge.interface.keep_alives import KeepAlives
from arraybridge.interface.streams import StreamEvent, Streams
from arraybridge.outcome import Outcome, attempt
from arraybridge.parallel.streams_between_threads import record_reader_events, record_stream_events
from arraybridge.tracing import trace_log
from arraybridge.tracing.events import device_text
from arraybridge.tracing.trace_log import open_logs

#: The result of a function that reads the items itself, as in `prefetch`, when there are no more items.
END = object()


class ItemTime(NamedTuple):
    """The number of an item, and its start and end in one worker in seconds since the start of the run."""

    item: int
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Item(Outcome):
    """An item that passes through the stages: the outcome of the last stage that processed it, or of reading.

    Attributes:
        number: Its number in the input.
        stream_events: The events after which its arrays are ready.
    """

    number: int = 0
    stream_events: Sequence[StreamEvent] = ()


#: A function that takes an item and returns its result.
Work = Callable[[Any], Any]
#: A function that takes a worker and returns the context manager of its thread. Entering the context manager
#: returns the function to call with each item.
Enter: TypeAlias = "Callable[[Worker], AbstractContextManager[Work]]"


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to any exception that is raised in the ``with`` block."""
    try:
        yield
    except BaseException as error:
        note_on(error, note)
        raise


def note_on_argument_count(error: TypeError, fn: Any, count: int, note: str) -> None:
    """Add a note to an error if the function cannot be called with ``count`` positional arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # the function has no signature
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        note_on(error, note)


def source_of_items(who: str, items: Any) -> Iterator[Any]:
    """Return an iterator over the items.

    Raises:
        TypeError: The items are not iterable; the message names the function ``who``.
    """
    try:
        return iter(items)
    except TypeError:
        raise TypeError(f"{who} expected an iterable of items, got {items!r}.") from None


def nothing() -> None:
    """Do nothing."""


def make_slots(count: int) -> SimpleQueue[None]:
    """Return a queue with ``count`` tokens, one per free slot."""
    slots: SimpleQueue[None] = SimpleQueue()
    for _ in range(count):
        slots.put(None)
    return slots


@dataclass(slots=True, eq=False)
class Worker:
    """The work of one thread, the streams that it uses, and the time that it takes.

    Attributes:
        enter: A function that takes the worker and returns a context manager. Entering it returns the
            function to call with each item.
        note: A function that takes the number of an item and returns the note to add to its exception.
        kind: The kind of the worker's events in a trace, ``"stage"`` or ``"item"``; ``""`` if the function
            records its own events.
        name: The name of the function.
        device: The device of the events; ``""`` to use that of the result.
        stop: A function that is called when no more results are needed. It unblocks the thread, for example
            by terminating a process that the thread waits for.
        depth: The maximum number of inputs that are kept alive while pending work may read them.
        slots: One token per free slot for an item that waits for this worker; None for any number of items.
        streams: The streams and devices that the thread uses.
        keep_alives: The inputs that are kept alive.
        items: The number of finished items.
        busy: The time in seconds spent working.
        starved: The time spent waiting for an item.
        blocked: The time spent waiting for a slot of the next stage.
        spans: The times of the last items.
    """

    enter: Enter
    note: Callable[[int], str]
    kind: str = ""
    name: str = ""
    device: str = ""
    stop: Callable[[], object] = nothing
    depth: int = 2
    slots: SimpleQueue[None] | None = None
    streams: set[tuple[Streams, Device]] = field(default_factory=set)
    keep_alives: KeepAlives = field(default_factory=KeepAlives)
    items: int = 0
    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    spans: deque[ItemTime] = field(default_factory=partial(deque, maxlen=10_000))

    def start(self, stack: ExitStack, settings: list[Any]) -> Work:
        """Enter the context managers of the thread, and return the function to call with each item."""
        for settings_context in settings:
            stack.enter_context(settings_context())
        work = stack.enter_context(self.enter(self))
        # Pending work ends before its inputs are released.
        stack.callback(self.keep_alives.block_until_ready)
        return work

    def use_stream(self, streams: Streams, device: Device) -> None:
        """Give this thread a separate stream on the device, unless it already has one."""
        if (streams, device) not in self.streams:
            self.streams.add((streams, device))
            streams.take_stream(device)

    def keep_alive_until_done(self, item: Any) -> list[StreamEvent]:
        """Keep an input alive until the work that reads it is done, and return the events of that work."""
        stream_events = record_reader_events(item)
        if stream_events:
            self.keep_alives.keep(
                item,
                lambda: all(m.is_done() for m in stream_events),
                lambda: [m.synchronize() for m in stream_events],
            )
        if self.keep_alives.entries:
            self.keep_alives.release()
            self.keep_alives.block_until_ready(self.depth)
        return stream_events

    def work_on(self, item: Item, work: Work, run: int) -> Item:
        """Process an item, and return it with its result or exception."""
        outcome = attempt(self._process, item, work, run)
        return outcome.value if outcome.error is None else self.fail(outcome.error, item.number)

    def _process(self, item: Item, work: Work, run: int) -> Item:
        for event in item.stream_events:  # this thread's work waits for the input
            self.use_stream(event.streams, event.device)
            event.wait()
        result = self._trace(item, work, run) if open_logs and self.kind else work(item.value)
        stream_events = record_stream_events(result)
        self.keep_alive_until_done(item.value)
        return Item(result, None, item.number, stream_events)

    def fail(self, error: BaseException, number: int) -> Item:
        """Return an item with the exception. StopIteration, which would end the iterator, is replaced."""
        note = self.note(number)
        if isinstance(error, StopIteration):
            named = RuntimeError(f"{note}: StopIteration was raised, which would end the iterator")
            named.__cause__ = error
            error = named
        note_on(error, note)
        return Item(None, error, number)

    def _trace(self, item: Item, work: Work, run: int) -> Any:
        span = trace_log.span(self.kind, self.name)
        if span is None:
            return work(item.value)
        span.device = self.device
        span.item = item.number
        span.flow = f"{run}.{item.number}"
        with span:
            result = work(item.value)
            span.device = self.device or device_text(result)
        return result
