"""Threads that work for an iterator: what `device_map`, `Pipeline` and `prefetch` have in common.

Each item has a number, and few are on their way at a time. The caller's own thread reads the input and hands
out the results, so that an iterator that is dropped has only idle workers to end. With each item travel the
marks behind which its arrays are ready (see streams.py). What is raised at an item takes the place of its
result.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, cast

from arraybridge.errors import note_on
from arraybridge.frameworks.accelerators import StreamEvent, Streams
from arraybridge.frameworks.gpu_memory import KeepAlives
from arraybridge.frameworks.registry import loaded
from arraybridge.parallel.stream_synchronization import (
    check_not_differentiated,
    received,
    record_reader_events,
    record_stream_events,
)
from arraybridge.tracing import trace_log
from arraybridge.tracing.events import device_text, handed_out, site
from arraybridge.tracing.trace_log import open_logs
from arraybridge.types import Device

#: A result that stands for no item: the input has ended.
END = object()

_thread_numbers = count()
# How long the caller's thread waits before it looks up, so that Ctrl-C is minded on every system.
_POLL_INTERVAL = 0.5
# How long an iterator that is dropped waits for its threads.
_TIMEOUT = 0.1


class ItemTime(NamedTuple):
    """One item in one worker: its number, and start and end in seconds since the run began."""

    item: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Shown:
    """What the events of a worker have in common; see `Event`.

    Attributes:
        kind: ``"stage"`` or ``"item"``.
        name: The name of the function.
        device: The device; ``""`` for that of the result.
    """

    kind: str
    name: str
    device: str


@dataclass(slots=True, eq=False)
class Outcome:
    """What a function returned or raised.

    Attributes:
        value: The result; None if it raised.
        error: The exception; None if it returned.
    """

    value: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """An item on its way through the stations.

    Attributes:
        number: Its number in the input.
        value: The item, or the result of the last station.
        stream_events: The marks behind which its arrays are ready.
        error: The exception that takes the place of the result, or None.
    """

    number: int
    value: Any
    stream_events: list[StreamEvent]
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after it: it failed, or the input has ended."""
        return self.error is not None or self.value is END

    def take_error(self) -> BaseException:
        """Return the exception and forget it: a frame that keeps what it raises would close a circle."""
        error = cast("BaseException", self.error)
        self.error = None
        return error


#: From an item to its result.
Work = Callable[[Any], Any]
#: What a thread works in; it gives what the thread does with each item.
Enter: TypeAlias = "Callable[[Worker], AbstractContextManager[Work]]"


def attempt(work: Callable[..., Any], *args: Any) -> Outcome:
    """Call a function and return the outcome, so that another thread or process can raise the exception."""
    try:
        return Outcome(work(*args))
    except BaseException as error:  # noqa: BLE001  # also Ctrl-C and SystemExit
        return Outcome(error=error)


@contextmanager
def noting(note: str) -> Iterator[None]:
    """What is raised inside, whatever it is, goes on with a note."""
    try:
        yield
    except BaseException as error:
        note_on(error, note)
        raise


def nothing() -> None:
    """What a worker does that has nothing to stop."""


class Worker:
    """What one thread makes of an item, on streams of its own, and how long that took.

    Args:
        enter: a context, from the worker, that gives the function from an item to its result.
        note: what to say of an error, from the number of the item.
        shown: Its events in a trace; None for a function that records its own events.
        stop: is called when no more results are wanted, to end what the function waits for.
        depth: inputs at most whose work may wait for an accelerator, and which are kept until it is done.
        slots: items that wait in front of it at most; 0 for any number.
    """

    def __init__(
        self,
        enter: Enter,
        note: Callable[[int], str],
        shown: Shown | None = None,
        stop: Callable[[], object] = nothing,
        *,
        depth: int = 2,
        slots: int = 0,
    ) -> None:
        self.enter = enter
        self.note = note
        self.shown = shown
        self.stop = stop
        #: A token for each item that may still come to wait here.
        self.slots: SimpleQueue[None] | None = SimpleQueue() if slots else None
        for _ in range(slots):
            self.slots.put(None)  # type: ignore[union-attr]
        self._depth = depth
        self._streams: set[tuple[Streams, Device]] = set()
        self._keep_alives = KeepAlives()
        #: Items done, and seconds at work, waiting for input, and waiting for room behind.
        self.items = 0
        self.busy = self.starved = self.blocked = 0.0
        self.spans: deque[ItemTime] = deque(maxlen=10_000)

    def entered(self, stack: ExitStack, settings: list[Any]) -> Work:
        """What it does with each item, once all that it works in is entered."""
        for same in settings:
            stack.enter_context(same())
        work = stack.enter_context(self.enter(self))
        stack.callback(self._keep_alives.block_until_ready)  # what is queued is done before its inputs go
        return work

    def use_stream(self, streams: Streams, device: Device) -> None:
        """Give this thread a stream of its own on the device, the first time that it is asked to."""
        if (streams, device) not in self._streams:
            self._streams.add((streams, device))
            streams.take_stream(device)

    def keep_alive_until_done(self, item: Any) -> list[StreamEvent]:
        """Keep an input until the work that reads it is done; the marks behind which that is so."""
        stream_events = record_reader_events(item)
        if stream_events:
            self._keep_alives.keep(
                item,
                lambda: all(m.is_done() for m in stream_events),
                lambda: [m.synchronize() for m in stream_events],
            )
        if self._keep_alives:
            self._keep_alives.release()
            self._keep_alives.block_until_ready(self._depth)
        return stream_events

    def work_on(self, item: _Item, work: Work, run: int) -> _Item:
        """Return the result, or the exception that takes its place."""
        outcome = attempt(self._result_of, item, work, run)
        if outcome.error is not None:
            return self.failed(outcome.error, item.number)
        result: _Item = outcome.value
        return result

    def failed(self, error: BaseException, number: int) -> _Item:
        """Return what takes the place of a result; a StopIteration would be the end of the iterator."""
        note = self.note(number)
        if isinstance(error, StopIteration):
            named = RuntimeError(f"{note}: StopIteration was raised, which Python takes for an end")
            named.__cause__ = error
            error = named
        note_on(error, note)
        return _Item(number, None, [], error)

    def _result_of(self, item: _Item, work: Work, run: int) -> _Item:
        for event in item.stream_events:  # this thread's work comes after what made its input
            self.use_stream(event.streams, event.device)
            event.wait()
        if open_logs and self.shown is not None:
            result = self._traced(self.shown, item, work, run)
        else:
            result = work(item.value)
        stream_events = record_stream_events(result)
        self.keep_alive_until_done(item.value)
        return _Item(item.number, result, stream_events)

    def _traced(self, shown: Shown, item: _Item, work: Work, run: int) -> Any:
        span = trace_log.span(shown.kind, shown.name)
        if span is None:
            return work(item.value)
        span.device = shown.device
        span.item = item.number
        span.flow = f"{run}.{item.number}"
        with span:
            result = work(item.value)
            span.device = shown.device or device_text(result)
        return result


def _read(source: Iterator[Any], number: int) -> _Item:
    value = next(source)
    check_not_differentiated(value)
    return _Item(number, value, record_stream_events(value))  # marks_of() raises for a deleted array of JAX


class Run:
    """Stations in a row with their workers, and the items on their way through them.

    Args:
        stages: for each the workers that share its queue, every one with a thread.
        limit: items that are read and not handed out yet, at most.
        ordered: hand results out in the order of the input; only one station need not.
        refill: read as far as the limit goes before a result is handed out; for an input that never blocks.
        final_timeout: seconds that the end of the program waits for threads at work. One that comes back from
            native code into an interpreter that is being taken down ends the process with SIGABRT.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Worker]],
        limit: int,
        *,
        ordered: bool = True,
        refill: bool = False,
        final_timeout: float = 20.0,
    ) -> None:
        self.stages = stages
        self.limit = limit
        self.ordered = ordered
        self.refill = refill
        self.final_timeout = final_timeout
        self.began = self.ended = time.perf_counter()
        #: Most items that were on their way at one time.
        self.most_in_flight = 0
        self._number = next(_thread_numbers)
        self._process = os.getpid()
        self._queues: list[SimpleQueue[_Item | None]] = [SimpleQueue() for _ in stages]
        self._done: SimpleQueue[_Item] = SimpleQueue()
        #: What came from there and is not handed out yet, by its turn.
        self._arrived: dict[int, _Item] = {}
        self._read = self._given = 0
        self._unread: list[BaseException] = []
        #: Items behind this number are of no use, since that one failed, or was the last.
        self._end = sys.maxsize
        self._threads: list[threading.Thread] = []
        self._line = site()  # of the user, to which warnings and events of the threads belong

    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        """The results; reads the source as there is room, and ends the threads when it is closed.

        What is raised at an item, or by the source, comes after the results of the items before it; without
        order, after those that were ready when it was raised.
        """
        more = True
        timeout = _TIMEOUT
        try:
            self._start()
            while True:
                self._check()
                while more and self._read - self._given < self.limit and self._read <= self._end:
                    more = self._feed(source)
                    if self._is_ready() and not self.refill:  # the source may block
                        break
                if self._read == self._given:
                    self._check()
                    break
                result = self._next()
                if result is END:
                    break
                yield result
                del result
            if self._unread:
                raise self._unread.pop()
            timeout = 10 * _TIMEOUT  # nothing is left to do, so that none is at work
        finally:
            self.stop()
            self.join(timeout)

    # -- the caller's thread ----------------------------------------------------------------------

    def _start(self) -> None:
        self.began = self.ended = time.perf_counter()
        # Gradients off, autocast, 64 bits: what frameworks keep for each thread.
        settings = [one.runtime.thread_settings() for one in loaded()]
        _runs.add(self)
        for s, stage in enumerate(self.stages):
            for w, worker in enumerate(stage):
                # Settings, traces and the default device of the caller hold in the threads that work for it.
                context = copy_context()
                context.run(handed_out.set, self._line)
                arguments = self._work, s, worker, settings
                # A program that keeps a half-read iterator must be able to end, hence daemons: see _end_all.
                thread = threading.Thread(
                    target=context.run, args=arguments, name=f"arraybridge-{s}-{w}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _feed(self, source: Iterator[Any]) -> bool:
        """Read an item and give it to the first station; whether there may be more."""
        outcome = attempt(_read, source, self._read)
        error = outcome.error
        outcome.error = None  # see `_Item.take_error`
        if error is not None:
            if not isinstance(error, Exception):
                raise error  # Ctrl-C
            if not isinstance(error, StopIteration):
                note_on(error, f"while reading item {self._read} of the input")
                self._unread.append(error)
            return False
        self._queues[0].put(outcome.value)
        self._read += 1
        self.most_in_flight = max(self.most_in_flight, self._read - self._given)
        return True

    def _is_ready(self, seconds: float = 0) -> bool:
        """Whether there is a result to hand out; waits so many seconds for the next one to arrive."""
        with suppress(Empty):
            while self._given not in self._arrived:
                item = self._done.get(timeout=seconds)
                turn = item.number if self.ordered else self._given + len(self._arrived)
                self._arrived[turn] = item
        return self._given in self._arrived

    def _next(self) -> Any:
        """The next result, once it is ready; or its error is raised."""
        while not self._is_ready(_POLL_INTERVAL):
            self._check()
        item = self._arrived.pop(self._given)
        if item.error is not None:
            raise item.take_error()
        self._given += 1
        self.ended = time.perf_counter()
        return received(item.value, item.stream_events)

    def _check(self) -> None:
        """Refuse to go on without threads."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this iterator was begun before its process was forked, and its threads are in the other"
                " process; begin it after the fork"
            )
        if self._end < 0:
            raise RuntimeError("the program ends, and with it the threads of this iterator")

    # -- the threads ------------------------------------------------------------------------------

    def _work(self, s: int, worker: Worker, settings: list[Any]) -> None:
        following = self.stages[s + 1][0] if s + 1 < len(self.stages) else None
        with ExitStack() as stack:
            entered = attempt(worker.entered, stack, settings)
            free = time.perf_counter()
            while (item := self._queues[s].get()) is not None:
                if worker.slots is not None:
                    worker.slots.put(None)
                number = item.number
                if number > self._end:  # one before it has failed, so that nobody waits for this one
                    del item
                    continue
                start = time.perf_counter()
                if entered.error is None:
                    result = worker.work_on(item, entered.value, self._number)
                else:
                    result = worker.failed(entered.error, number)
                del item  # a thread that waits holds nothing
                end = time.perf_counter()
                if result.is_last:
                    self._end = min(self._end, number if self.ordered else 0)
                if result.is_last or following is None:
                    self._done.put(result)
                else:
                    if following.slots is not None:
                        following.slots.get()
                    self._queues[s + 1].put(result)
                del result
                worker.items += 1
                worker.starved += start - free
                worker.busy += end - start
                free = time.perf_counter()
                worker.blocked += free - end
                worker.spans.append(ItemTime(number, start - self.began, end - self.began))

    def stop(self) -> None:
        """No more results are wanted: threads that wait end, the others when their call returns."""
        self._end = -1
        for stage, queue in zip(self.stages, self._queues, strict=True):
            for worker in stage:
                queue.put(None)
                if worker.slots is not None:
                    worker.slots.put(None)
                worker.stop()
        self._arrived.clear()  # a report keeps the run, and need not keep the arrays
        self._done = SimpleQueue()

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the threads to end."""
        until = time.perf_counter() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.perf_counter()))


#: Runs some of whose threads may be alive; each thread holds its run.
_runs: weakref.WeakSet[Run] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads of half-read iterators before the interpreter goes, those in native code too."""
    runs = list(_runs)
    for run in runs:
        run.stop()
    start = time.perf_counter()
    for run in runs:
        run.join(start + run.final_timeout - time.perf_counter())
