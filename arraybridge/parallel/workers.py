"""Worker threads of `device_map`, `Pipeline` and `prefetch`.

Items are numbered, and few are in progress at a time. The caller's thread reads the input and returns the
results, except that `prefetch` reads in its worker. After an iterator is dropped, no further item is started,
and busy workers end after their current item. Each item carries the stream events after which its arrays are
ready (see `stream_synchronization`). An exception takes the place of the item's result.
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

#: The result of a function that reads the items itself, as in `prefetch`, when there are no more.
END = object()

_run_numbers = count()
# Seconds between checks of the waiting caller's thread, so that it reacts to Ctrl-C on every platform.
_POLL_INTERVAL = 0.5
# Seconds that a dropped iterator waits for its threads.
_TIMEOUT = 0.1


class ItemTime(NamedTuple):
    """The number of an item, and its start and end in one worker in seconds since the start of the run."""

    item: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Shown:
    """The fields that all events of a worker share; see `Event`.

    Attributes:
        kind: ``"stage"`` or ``"item"``.
        name: The name of the function.
        device: The device, or ``""`` to use that of the result.
    """

    kind: str
    name: str
    device: str


@dataclass(slots=True, eq=False)
class Outcome:
    """The result or exception of a function call.

    Attributes:
        value: The result, or None if the call raised.
        error: The exception, or None if the call returned.
    """

    value: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """An item that passes through the stages.

    Attributes:
        number: Its number in the input.
        value: The item, or the result of the last stage that processed it.
        stream_events: The events after which its arrays are ready.
        error: The exception that takes the place of the result, or None.
    """

    number: int
    value: Any
    stream_events: list[StreamEvent]
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether no item follows, because this one failed or is `END`."""
        return self.error is not None or self.value is END

    def take_error(self) -> BaseException:
        """Return the exception and drop it, since a frame that keeps an exception makes a reference cycle."""
        error = cast("BaseException", self.error)
        self.error = None
        return error


#: A function from an item to its result.
Work = Callable[[Any], Any]
#: A function from a worker to the context of its thread; entering that context returns the function to call
#: with each item.
Enter: TypeAlias = "Callable[[Worker], AbstractContextManager[Work]]"


def attempt(work: Callable[..., Any], *args: Any) -> Outcome:
    """Call a function and return the outcome, so that another thread or process can raise the exception."""
    try:
        return Outcome(work(*args))
    except BaseException as error:  # noqa: BLE001  # also Ctrl-C and SystemExit
        return Outcome(error=error)


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to any exception that is raised in the ``with`` block."""
    try:
        yield
    except BaseException as error:
        note_on(error, note)
        raise


def nothing() -> None:
    """Do nothing."""


class Worker:
    """The work of one thread, the streams that it uses, and the time that it takes.

    Args:
        enter: A function from the worker to a context, which returns the function to call with each item.
        note: A function from the number of an item to the note that is added to its exception.
        shown: The fields of its events in a trace; None for a function that records its own events.
        stop: A function that is called when no more results are needed. It unblocks the thread, for example
            by terminating a process that the thread waits for.
        depth: The maximum number of inputs that are kept alive while pending work may read them.
        slots: The maximum number of items that wait for this worker; 0 for any number.
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
        #: One token per free slot.
        self.slots: SimpleQueue[None] | None = SimpleQueue() if slots else None
        for _ in range(slots):
            self.slots.put(None)  # type: ignore[union-attr]
        self._depth = depth
        self._streams: set[tuple[Streams, Device]] = set()
        self._keep_alives = KeepAlives()
        #: The number of finished items, and the seconds spent working, waiting for an item, and waiting for a
        #: slot of the next stage.
        self.items = 0
        self.busy = self.starved = self.blocked = 0.0
        self.spans: deque[ItemTime] = deque(maxlen=10_000)

    def entered(self, stack: ExitStack, settings: list[Any]) -> Work:
        """Enter the contexts of the thread, and return the function to call with each item."""
        for settings_context in settings:
            stack.enter_context(settings_context())
        work = stack.enter_context(self.enter(self))
        stack.callback(
            self._keep_alives.block_until_ready
        )  # pending work ends before its inputs are released
        return work

    def use_stream(self, streams: Streams, device: Device) -> None:
        """Give this thread a separate stream on the device, unless it has one."""
        if (streams, device) not in self._streams:
            self._streams.add((streams, device))
            streams.take_stream(device)

    def keep_alive_until_done(self, item: Any) -> list[StreamEvent]:
        """Keep an input alive until the work that reads it is done, and return the events of that work."""
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
        """Process an item, and return it with its result or exception."""
        outcome = attempt(self._result_of, item, work, run)
        if outcome.error is not None:
            return self.failed(outcome.error, item.number)
        result: _Item = outcome.value
        return result

    def failed(self, error: BaseException, number: int) -> _Item:
        """Return the item with its exception. StopIteration is replaced: it would end the iterator."""
        note = self.note(number)
        if isinstance(error, StopIteration):
            named = RuntimeError(f"{note}: StopIteration was raised, which would end the iterator")
            named.__cause__ = error
            error = named
        note_on(error, note)
        return _Item(number, None, [], error)

    def _result_of(self, item: _Item, work: Work, run: int) -> _Item:
        for event in item.stream_events:  # this thread's work waits for the input
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
    return _Item(number, value, record_stream_events(value))  # raises for a deleted JAX array


class Run:
    """One run of items through a chain of stages with their workers.

    Args:
        stages: The workers of each stage, which share a queue and have one thread each.
        limit: The maximum number of items that are read but not yet returned.
        ordered: Whether to return results in the order of the input. False requires a single stage.
        refill: Whether to read up to the limit before a result is returned, for an input that never blocks.
        final_timeout: Seconds that the interpreter waits for busy threads at exit. A thread that returns from
            native code into an interpreter that is shutting down aborts the process with SIGABRT.
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
        #: The maximum number of items in progress at one time.
        self.most_in_flight = 0
        self._number = next(_run_numbers)
        self._process = os.getpid()
        self._queues: list[SimpleQueue[_Item | None]] = [SimpleQueue() for _ in stages]
        self._done: SimpleQueue[_Item] = SimpleQueue()
        #: Finished items that are not yet returned, by their position in the output.
        self._arrived: dict[int, _Item] = {}
        self._read = self._returned = 0
        #: The exception of the input, if any. It is raised after the results of the items before it.
        self._input_errors: list[BaseException] = []
        #: Items after this number are dropped, because that item failed or was the last; -1 after `stop`.
        self._end = sys.maxsize
        self._threads: list[threading.Thread] = []
        self._line = site()  # the user's line, for warnings and events of the threads

    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the results, reading the source up to the limit; end the threads when closed.

        An exception of an item or of the source is raised after the results of the items before it. If
        ``ordered`` is False, it is raised after the results that are ready.
        """
        more = True
        timeout = _TIMEOUT
        try:
            self._start()
            while True:
                self._check()
                while more and self._read - self._returned < self.limit and self._read <= self._end:
                    more = self._feed(source)
                    if self._is_ready() and not self.refill:  # the source may block
                        break
                if self._read == self._returned:
                    self._check()
                    break
                result = self._next()
                if result is END:
                    break
                yield result
                del result
            if self._input_errors:
                raise self._input_errors.pop()
            timeout = 10 * _TIMEOUT  # no work is left, so no thread is busy
        finally:
            self.stop()
            self.join(timeout)

    # -- the caller's thread ----------------------------------------------------------------------

    def _start(self) -> None:
        self.began = self.ended = time.perf_counter()
        # Settings that frameworks keep per thread, such as no_grad, autocast and x64.
        settings = [one.runtime.thread_settings() for one in loaded()]
        _runs.add(self)
        for s, stage in enumerate(self.stages):
            for w, worker in enumerate(stage):
                # The threads inherit settings, traces and the default device of the caller.
                context = copy_context()
                context.run(handed_out.set, self._line)
                arguments = self._work, s, worker, settings
                # Daemon threads, so that a program that keeps an unfinished iterator can end; see _end_all.
                thread = threading.Thread(
                    target=context.run, args=arguments, name=f"arraybridge-{s}-{w}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _feed(self, source: Iterator[Any]) -> bool:
        """Read an item and pass it to the first stage; return whether there may be more."""
        outcome = attempt(_read, source, self._read)
        error = outcome.error
        outcome.error = None  # see `_Item.take_error`
        if error is not None:
            if not isinstance(error, Exception):
                raise error  # Ctrl-C
            if not isinstance(error, StopIteration):
                note_on(error, f"while reading item {self._read} of the input")
                self._input_errors.append(error)
            return False
        self._queues[0].put(outcome.value)
        self._read += 1
        self.most_in_flight = max(self.most_in_flight, self._read - self._returned)
        return True

    def _is_ready(self, seconds: float = 0) -> bool:
        """Return whether a result is ready, after waiting at most ``seconds`` for the next one."""
        with suppress(Empty):
            while self._returned not in self._arrived:
                item = self._done.get(timeout=seconds)
                turn = item.number if self.ordered else self._returned + len(self._arrived)
                self._arrived[turn] = item
        return self._returned in self._arrived

    def _next(self) -> Any:
        """Return the next result when it is ready, or raise its exception."""
        while not self._is_ready(_POLL_INTERVAL):
            self._check()
        item = self._arrived.pop(self._returned)
        if item.error is not None:
            raise item.take_error()
        self._returned += 1
        self.ended = time.perf_counter()
        return received(item.value, item.stream_events)

    def _check(self) -> None:
        """Raise `RuntimeError` if the threads of this run have ended or are in another process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator was created before the process was forked, so its threads are in the parent"
                " process. Create it after the fork."
            )
        if self._end < 0:
            raise RuntimeError(
                "The interpreter is shutting down, and the threads of this iterator have ended."
            )

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
                if number > self._end:  # an earlier item has failed, so this one is not needed
                    del item
                    continue
                start = time.perf_counter()
                if entered.error is None:
                    result = worker.work_on(item, entered.value, self._number)
                else:
                    result = worker.failed(entered.error, number)
                del item  # a waiting thread must not keep arrays alive
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
        """End the waiting threads now, and the busy ones when their call returns."""
        self._end = -1
        for stage, queue in zip(self.stages, self._queues, strict=True):
            for worker in stage:
                queue.put(None)
                if worker.slots is not None:
                    worker.slots.put(None)
                worker.stop()
        self._arrived.clear()  # a report keeps the run, but must not keep the arrays alive
        self._done = SimpleQueue()

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the threads to end."""
        until = time.perf_counter() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.perf_counter()))


#: Runs whose threads may be alive; each thread keeps its run alive.
_runs: weakref.WeakSet[Run] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads of unfinished iterators before the interpreter shuts down."""
    runs = list(_runs)
    for run in runs:
        run.stop()
    start = time.perf_counter()
    for run in runs:
        run.join(start + run.final_timeout - time.perf_counter())
