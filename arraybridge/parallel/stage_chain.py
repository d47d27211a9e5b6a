"""A run of items through a chain of stages, in order, with a limited number of items in flight."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from arraybridge.compilers import run_eagerly
from arraybridge.errors import note_on
from arraybridge.interface.registry import loaded
from arraybridge.outcome import attempt
from arraybridge.parallel.streams_between_threads import (
    check_not_differentiated,
    receive,
    record_stream_events,
)
from arraybridge.parallel.workers import END, Item, ItemTime
from arraybridge.tracing.user_lines import handed_out, site

if TYPE_CHECKING:
    from arraybridge.parallel.workers import Worker


_run_numbers = count()
# Seconds after which the caller's waiting thread wakes up, so that it reacts to Ctrl-C on every platform.
_POLL_INTERVAL = 0.5
# Seconds that a deleted iterator waits for its threads.
_TIMEOUT = 0.1


class Run:
    """One run of items through a chain of stages with their workers.

    Args:
        stages: The workers of each stage, which share a queue and have one thread each.
        limit: The maximum number of items that are read but not yet returned.
        ordered: Whether to return results in the order of the input. False requires a single stage.
        refill: Whether to read up to the limit before a result is returned, for an input that never blocks.
        final_timeout: Seconds that the interpreter waits for busy threads at exit. A thread that returns from
            native code into an interpreter that is shutting down aborts the process with SIGABRT (Python <
            3.14, python/cpython#87135).
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
        self._queues: list[SimpleQueue[Item | None]] = [SimpleQueue() for _ in stages]
        self._done: SimpleQueue[Item] = SimpleQueue()
        #: Finished items that are not yet returned, by their position in the output.
        self._arrived: dict[int, Item] = {}
        self._read = self._returned = 0
        #: Items after this number are dropped, because that item failed or was the last; -1 after `stop`.
        self._end = sys.maxsize
        self._threads: list[threading.Thread] = []
        self._line = site()  # the user's line, for warnings and events of the threads

    def results(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the results, reading the source up to the limit. Closing the generator ends the threads.

        An exception from an item or from the source is raised after the results of the preceding items.
        If ``ordered`` is False, it is raised after the results that are ready.
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
            timeout = 10 * _TIMEOUT  # no work is left, so no thread is busy
        finally:
            # `_end_all` may have ended the threads, and the names of this module may be None by now.
            if self._end >= 0:
                self.stop()
                self.join(timeout)

    # -- the caller's thread ----------------------------------------------------------------------

    @run_eagerly
    def _start(self) -> None:
        self.began = self.ended = time.perf_counter()
        # Settings that frameworks keep per thread, such as no_grad, autocast and x64.
        settings = [one.runtime.thread_settings() for one in loaded()]
        _runs.add(self)
        for s, stage in enumerate(self.stages):
            for w, worker in enumerate(stage):
                # The threads inherit the caller's settings, traces and default device.
                context = copy_context()
                context.run(handed_out.set, self._line)
                arguments = self._work, s, worker, settings
                # Daemon threads let a program that keeps an unfinished iterator exit; see `_end_all`.
                thread = threading.Thread(
                    target=context.run, args=arguments, name=f"arraybridge-{s}-{w}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    @run_eagerly
    def _feed(self, source: Iterator[Any]) -> bool:
        """Read an item and pass it to the first stage. Return whether there may be more items."""
        number = self._read
        is_read = False
        try:
            value = next(source)
            check_not_differentiated(value)
            stream_events = record_stream_events(value)  # raises for deleted JAX arrays
            self._queues[0].put(Item(value, None, number, stream_events))
            is_read = True
        except StopIteration:
            return False
        except Exception as error:  # noqa: BLE001  # the input may raise anything, in the place of an item
            note_on(error, f"while reading item {number} of the input")
            self._done.put(Item(None, error, number))
        self._read += 1
        self.most_in_flight = max(self.most_in_flight, self._read - self._returned)
        return is_read

    def _is_ready(self, seconds: float = 0) -> bool:
        """Return whether a result is ready, after waiting at most ``seconds`` for the next one."""
        while self._returned not in self._arrived:
            try:
                item = self._done.get(timeout=seconds)
            except Empty:
                return False
            turn = item.number if self.ordered else self._returned + len(self._arrived)
            self._arrived[turn] = item
        return True

    @run_eagerly
    def _next(self) -> Any:
        """Return the next result when it is ready, or raise its exception."""
        while not self._is_ready(_POLL_INTERVAL):
            self._check()
        turn = self._returned
        stream_events = self._arrived[turn].stream_events
        result = self._arrived.pop(turn).result()
        self._returned += 1
        self.ended = time.perf_counter()
        return receive(result, stream_events) if stream_events else result

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
            started = attempt(worker.start, stack, settings)
            free = time.perf_counter()
            while (item := self._queues[s].get()) is not None:
                if worker.slots is not None:
                    worker.slots.put(None)
                number = item.number
                if number > self._end:  # an earlier item has failed, so this one is not needed
                    del item
                    continue
                start = time.perf_counter()
                if started.error is None:
                    result = worker.work_on(item, started.value, self._number)
                else:
                    result = worker.fail(started.error, number)
                del item  # a waiting thread must not keep arrays alive
                end = time.perf_counter()
                is_last = result.error is not None or result.value is END
                if is_last:
                    self._end = min(self._end, number if self.ordered else 0)
                if is_last or following is None:
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
        """End the waiting threads now, and the busy ones when their current calls return."""
        self._end = -1
        for stage, queue in zip(self.stages, self._queues, strict=True):
            for worker in stage:
                queue.put(None)
                if worker.slots is not None:
                    worker.slots.put(None)
                worker.stop()
        self._arrived.clear()  # a report keeps the run alive, but must not keep the arrays alive
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
