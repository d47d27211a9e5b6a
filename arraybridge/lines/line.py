"""Threads behind bounded queues: what `device_map`, `Pipeline` and `prefetch` have in common.

The caller's own thread reads the input and hands out the results, so that an input that blocks holds up no
other thread, and an iterator that is dropped has only idle workers to end. With each item travel the marks
behind which its arrays are ready (see lanes.py). What is raised at an item takes the place of its result, and
comes out when its turn comes; items behind it are not worked on any more.
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
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from itertools import count
from typing import Any, NamedTuple

from arraybridge.conversion import trace
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import handed_from, note_on, place
from arraybridge.frameworks.parts import Mark, Running
from arraybridge.frameworks.registry import loaded
from arraybridge.lines.lanes import Lane, marks_of, received
from arraybridge.options import already_told
from arraybridge.timeline.events import Site, device_words, handed_out, site

__all__ = ["BURST", "Clock", "Line", "Shown", "Span", "Station", "here"]

_numbers = count()

#: Inputs that are read at most before a result is handed out that is ready, however many may be on their way.
BURST = 64

#: Spans kept of each station, for the picture of a run; older ones go.
MAX_SPANS = 10_000

# How long the caller's thread waits before it looks up, so that Ctrl-C is minded on every system.
_LOOK_UP = 0.5
# How long an iterator that is dropped waits for its threads; they end by themselves when their call returns.
_PATIENCE = 0.1
# How long the end of the program waits for threads at work: one that comes back from native code into
# an interpreter that is being taken down ends the process with SIGABRT.
_LAST_PATIENCE = 20.0


def here() -> Site | None:
    """The user's line that hands out work now; None where no trace would ask for it."""
    return site() if open_logs and trace.listeners() else None


class Span(NamedTuple):
    """One item in one station: its number, and start and end in seconds since the run began."""

    item: int
    start: float
    end: float


class Clock:
    """Seconds that a station has worked, waited for input, and waited for room behind it."""

    def __init__(self) -> None:
        self.items = 0
        self.busy = self.starved = self.blocked = 0.0
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)


class Shown(NamedTuple):
    """How a trace calls the work of a station: kind and name of its events, and each thread's device.

    ``nothing`` is a result that stands for no item.
    """

    kind: str
    name: str
    devices: Sequence[str]
    nothing: object = None


class Station:
    """A queue with one or more threads behind it.

    Args:
        works: one function for each thread, from an item to its result.
        room: items that wait in the queue at most.
        where: what to say of an error, from the number of the item and that of the thread.
        enter: a context in which each thread works, from the thread's number and its lane.
        depth: inputs whose work may wait for an accelerator, in each thread.
        stop: called when no more results are wanted; the threads end when their call returns.
        in_step: the station before goes on only when this one has worked on what it got, whose memory it may
            then fill anew. Both have one thread.
        shown: how a trace calls it.
    """

    def __init__(
        self,
        works: Sequence[Callable[[Any], Any]],
        room: int,
        where: Callable[[int, int], str],
        enter: Callable[[int, Lane], AbstractContextManager[Any]] | None = None,
        *,
        depth: int = 2,
        stop: Callable[[], object] | None = None,
        in_step: bool = False,
        shown: Shown,
    ) -> None:
        self.works = works
        self.room = room
        self.where = where
        self.enter = enter
        self.depth = depth
        self.stop = stop
        self.in_step = in_step
        self.shown = shown


class _Failed(list[BaseException]):
    """What takes the place of a result: the error.

    It is popped where it is raised, since a frame that kept the error that it raises would close a circle.
    """


class Line:
    """Stations one after the other, and the items on their way through them.

    Args:
        stations: one or more.
        limit: items that are read and not handed out yet, at most.
        ordered: hand results out in the order of the input.
        refill: read the input before a result is handed out that is ready, so that the threads have work
            while it is used; for an input that never blocks.
        at: the user's line that hands out the work, for a trace; see `here`.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        limit: int,
        ordered: bool = True,
        *,
        refill: bool = False,
        at: Site | None = None,
    ) -> None:
        self.stations = stations
        self.at = at
        self.number = next(_numbers)
        self.limit = limit
        self.ordered = ordered
        self.refill = refill
        self.began = self.ended = time.perf_counter()
        #: Most items that were on their way at one time.
        self.most_in_flight = 0
        # Reentrant: the collector may close a dropped iterator in any thread, one that holds the lock too.
        self._lock = threading.RLock()
        self._caller = threading.Condition(self._lock)
        self._filled: list[threading.Condition] = []
        self._emptied: list[threading.Condition] = []
        # Numbers, items and their marks.
        self._queues: list[deque[tuple[int, Any, list[Mark]]]] = []
        self._clocks: list[Clock] = []
        # Of the last item of the station that is in step: behind these its memory is read no more.
        self._readers: list[Mark] = []
        for _ in stations:
            self._filled.append(threading.Condition(self._lock))
            self._emptied.append(threading.Condition(self._lock))
            self._queues.append(deque())
            self._clocks.append(Clock())
        self._done: dict[int, tuple[Any, list[Mark]]] = {}
        # Items from this number on are of no use, since one before them has failed.
        self._end = sys.maxsize
        self._error: BaseException | None = None  # of a thread; those of items are among the results
        self._stopped = False
        self._forked = False
        self._settings: list[Callable[[], AbstractContextManager[Any]]] = []
        self._threads: list[threading.Thread] = []
        told = already_told.get()
        self._warned: dict[str, object] = {} if told is None else told
        self._place = place()

    def run(self, source: Iterator[Any]) -> Iterator[Any]:
        """The results; reads the source as there is room, and ends the threads when it is closed.

        What is raised at an item, or by the source, comes after the results of the items before it; without
        order, after those that were ready when it was raised.
        """
        fed = taken = fed_before = 0
        more = True
        unread = _Failed()
        first = self.stations[0]
        patience = _PATIENCE
        try:
            self._start()
            while more or taken < fed:
                with self._lock:
                    while True:
                        if self._error is not None:
                            raise self._error
                        if self._stopped:
                            raise RuntimeError("the program ends, and with it the threads of this iterator")
                        have = bool(self._done) and (not self.ordered or taken in self._done)
                        waiting = fed - taken - (1 if have and self.refill else 0)
                        room = more and len(self._queues[0]) < first.room and waiting < self.limit
                        room = room and fed < self._end and not (have and fed - fed_before >= BURST)
                        if have or room:
                            break
                        self._caller.wait(_LOOK_UP)
                if room:
                    try:
                        item = next(source)
                        marks = marks_of(item)  # which raises for a deleted array of JAX
                    except StopIteration:
                        more = False
                    except Exception as error:  # noqa: BLE001  # whatever it is, it goes on to the caller
                        note_on(error, f"while reading item {fed} of the input")
                        unread.append(error)
                        more = False
                    else:
                        with self._lock:
                            self._queues[0].append((fed, item, marks))
                            self._filled[0].notify()
                        del item
                        fed += 1
                        self.most_in_flight = max(self.most_in_flight, fed - taken)
                if have and not (room and self.refill):
                    with self._lock:
                        result, marks = self._done.pop(taken if self.ordered else next(iter(self._done)))
                    if type(result) is _Failed:
                        raise result.pop()
                    taken += 1
                    fed_before = fed
                    self.ended = time.perf_counter()
                    yield received(result, marks)
                    del result
            if unread:
                raise unread.pop()
            patience = 10 * _PATIENCE  # nothing is left to do, so that none is at work
        finally:
            self.stop()
            self.join(patience)
            self._error = None  # its traceback holds this frame, and so would close a circle

    # -- threads ----------------------------------------------------------------------------------

    def clocks(self) -> list[tuple[Clock, tuple[Span, ...]]]:
        """The clock of each station and a copy of its spans, also while the line runs."""
        with self._lock:
            return [(clock, tuple(clock.spans)) for clock in self._clocks]

    def _start(self) -> None:
        self.began = self.ended = time.perf_counter()
        # Gradients off, autocast, 64 bits: what frameworks keep for each thread.
        for one in loaded():
            self._settings.append((one.running or Running()).thread_settings())
        _running.add(self)
        for s, station in enumerate(self.stations):
            for w in range(len(station.works)):
                # Settings, traces and the default device of the caller hold in the threads that work for it.
                context = copy_context()
                context.run(already_told.set, self._warned)  # one call to the user, which warns once
                context.run(handed_from.set, self._place)  # and at the line of that call
                if self.at is not None:
                    context.run(handed_out.set, self.at)
                thread = threading.Thread(
                    target=context.run,
                    args=(self._work, s, w),
                    name=f"arraybridge-{s}-{w}",
                    daemon=True,  # a program that keeps a half-read iterator must be able to end: _end_all
                )
                thread.start()
                self._threads.append(thread)

    def stop(self) -> None:
        """No more results are wanted: threads that wait end, the others when their call returns."""
        with self._lock:
            self._stopped = True
            for condition in (*self._filled, *self._emptied, self._caller):
                condition.notify_all()
            for queue in self._queues:
                queue.clear()
            self._done.clear()  # a report keeps the line, and need not keep the arrays
        for station in self.stations:
            if station.stop is not None and not self._forked:
                station.stop()

    def join(self, patience: float) -> None:
        """Wait so many seconds for the threads to end."""
        until = time.perf_counter() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.perf_counter()))

    def left_behind(self) -> None:
        """This is a forked process now: the threads are in the other one, and the lock may stay held."""
        self._forked = True
        self._lock = threading.RLock()
        self._caller = threading.Condition(self._lock)
        self._filled = self._emptied = []
        self._threads = []
        self._error = RuntimeError(
            "this iterator was begun before its process was forked, and its threads are in the other process;"
            " begin it after the fork"
        )

    def _work(self, s: int, w: int) -> None:
        station, lane = self.stations[s], Lane(self.stations[s].depth)
        try:
            with ExitStack() as stack:
                for same in self._settings:
                    stack.enter_context(same())
                if station.enter is not None:
                    stack.enter_context(station.enter(w, lane))
                stack.callback(lane.close)
                work = station.works[w]
                asked = time.perf_counter()
                taken = self._take(s)
                while taken is not None:
                    number, item, marks = taken
                    taken = None  # a thread that works holds what it works on, and nothing else
                    start = time.perf_counter()
                    try:
                        lane.receive(marks)
                        result = self._told(s, w, number, item) if open_logs else work(item)
                        made = marks_of(result)
                        readers = lane.hold(item)
                    except BaseException as error:  # noqa: BLE001  # whatever it is, it goes to the caller
                        result, made = self._failed(number, error, station.where(number, w)), []
                        readers = []
                    end = time.perf_counter()
                    del item, marks
                    with self._lock:  # held once: whom the result wakes would fight for it with this thread
                        if not self._hand_on(s, number, result, made):
                            return
                        del result, made
                        asked = self._count(self._clocks[s], number, asked, start, end)
                        if station.in_step:
                            self._readers = readers
                            self._emptied[s].notify()
                        taken = self._take(s)
        except BaseException as error:  # noqa: BLE001  # where the thread works cannot be entered or left
            with self._lock:
                if self._error is None and not self._stopped:
                    self._error = _as_error(error, f"in thread {w} of station {s}")
                self._stopped = True
                for condition in (*self._filled, *self._emptied, self._caller):
                    condition.notify_all()

    def _told(self, s: int, w: int, number: int, item: Any) -> Any:
        """The result of the work, which the traces of whoever handed it out hear of."""
        station = self.stations[s]
        shown, work = station.shown, station.works[w]
        span = trace.span(shown.kind, shown.name)
        if span is None:
            return work(item)
        span.device, span.item, span.flow = shown.devices[w], number, f"{self.number}.{number}"
        with span:
            result = work(item)
            if result is shown.nothing and result is not None:
                span.drop()
            span.device = span.device or device_words(result)
        return result

    def _failed(self, number: int, error: BaseException, where: str) -> _Failed:
        """What takes the place of the item's result; no item behind it is begun any more."""
        error = _as_error(error, where)
        note_on(error, where)
        with self._lock:
            self._end = min(self._end, number if self.ordered else 0)
        return _Failed([error])

    def _take(self, s: int) -> tuple[int, Any, list[Mark]] | None:
        with self._lock:
            queue = self._queues[s]
            while True:
                while not queue:
                    if self._stopped:
                        return None
                    self._filled[s].wait()
                if self._stopped:
                    return None
                taken = queue.popleft()
                if s == 0:
                    self._caller.notify()
                elif not self.stations[s].in_step:
                    self._emptied[s].notify()
                if taken[0] < self._end:
                    return taken
                del taken

    def _hand_on(self, s: int, number: int, result: Any, marks: list[Mark]) -> bool:
        with self._lock:
            if s + 1 == len(self.stations) or type(result) is _Failed:
                if self._stopped:
                    return False
                self._done[number] = result, marks  # bounded by `limit`
                self._caller.notify()
                return True
            queue, room = self._queues[s + 1], self.stations[s + 1].room
            while len(queue) >= room:
                if self._stopped:
                    return False
                self._emptied[s + 1].wait()
            if self._stopped:
                return False
            queue.append((number, result, marks))
            self._filled[s + 1].notify()
            if self.stations[s + 1].in_step:
                while self._clocks[s + 1].items <= number and not self._stopped:
                    self._emptied[s + 1].wait()
                for mark in self._readers:
                    mark.wait()
            return True

    def _count(self, clock: Clock, number: int, asked: float, start: float, end: float) -> float:
        """Add an item to the clock; the time it is now."""
        now = time.perf_counter()
        clock.items += 1
        clock.busy += end - start
        clock.starved += start - asked
        clock.blocked += now - end
        clock.spans.append(Span(number, start - self.began, end - self.began))
        return now


def _as_error(error: BaseException, where: str) -> BaseException:
    """The error as the caller's iterator can raise it: to Python a StopIteration would be its end."""
    if not isinstance(error, StopIteration):
        return error
    named = RuntimeError(f"{where}: StopIteration was raised, which Python takes for an end")
    named.__cause__ = error
    return named


#: Lines some of whose threads may be alive; each thread holds its line.
_running: weakref.WeakSet[Line] = weakref.WeakSet()


def _after_fork() -> None:
    for line in list(_running):
        line.left_behind()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_all() -> None:
    """End the threads of half-read iterators before the interpreter goes, those in native code too."""
    lines = list(_running)
    for line in lines:
        line.stop()
    until = time.perf_counter() + _LAST_PATIENCE
    for line in lines:
        line.join(max(0.0, until - time.perf_counter()))
