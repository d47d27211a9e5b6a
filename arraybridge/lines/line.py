"""Threads behind bounded queues: what `device_map` and `Pipeline` have in common.

The caller's own thread reads the input and hands out the results, so that an input that blocks holds up no
other thread, and an iterator that is dropped has only idle workers to end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, Mark
from arraybridge.frameworks.registry import loaded
from arraybridge.functions.trees import ARRAY, LEAF, NAMESPACE, kind_of, kinds
from arraybridge.types import Device

__all__ = ["Clock", "Lane", "Line", "Span", "Station", "arrays_of", "marks_of"]

#: Spans kept of each station, for the picture of a run; older ones go.
MAX_SPANS = 10_000

# How long the caller's thread waits before it looks up, so that Ctrl-C is minded on every system.
_LOOK_UP = 0.5
# How long an iterator that is dropped waits for its threads; they end by themselves when their call returns.
_PATIENCE = 0.1


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


class Station:
    """A queue with one or more threads behind it.

    Args:
        works: one function for each thread, from an item to its result.
        room: items that wait in the queue at most.
        where: what to say of an error, from the number of the item and that of the thread.
        enter: a context in which each thread works, from the thread's number.
    """

    def __init__(
        self,
        works: Sequence[Callable[[Any], Any]],
        room: int,
        where: Callable[[int, int], str],
        enter: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.works = works
        self.room = room
        self.where = where
        self.enter = enter or (lambda _: nullcontext())
        self.clock = Clock()

    def stop(self) -> None:
        """Called when no more results are wanted; the threads end when their call returns."""


class Line:
    """Stations one after the other, and the items on their way through them.

    Args:
        stations: one or more.
        limit: items that are read and not handed out yet, at most.
        ordered: hand results out in the order of the input.
    """

    def __init__(self, stations: Sequence[Station], limit: int, ordered: bool = True) -> None:
        self.stations = stations
        self.limit = limit
        self.ordered = ordered
        self.began = self.ended = time.perf_counter()
        #: Most items that were on their way at one time.
        self.most_in_flight = 0
        # Reentrant: the collector may close a dropped iterator in any thread, one that holds the lock too.
        self._lock = threading.RLock()
        self._caller = threading.Condition(self._lock)
        self._filled = [threading.Condition(self._lock) for _ in stations]
        self._emptied = [threading.Condition(self._lock) for _ in stations]
        self._queues: list[deque[tuple[int, Any]]] = [deque() for _ in stations]
        self._done: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._settings: list[Callable[[], AbstractContextManager[Any]]] = []
        self._threads: list[threading.Thread] = []

    def run(self, source: Iterator[Any]) -> Iterator[Any]:
        """The results; reads the source as there is room, and ends the threads when it is closed."""
        fed = taken = 0
        more = True
        first = self.stations[0]
        try:
            self._start()
            while more or taken < fed:
                with self._lock:
                    while True:
                        if self._error is not None:
                            raise self._error
                        have = bool(self._done) and (not self.ordered or taken in self._done)
                        room = more and len(self._queues[0]) < first.room and fed - taken < self.limit
                        if have or room:
                            break
                        self._caller.wait(_LOOK_UP)
                if room:
                    try:
                        item = next(source)
                    except StopIteration:
                        more = False
                    except Exception as error:
                        error.add_note(f"while reading item {fed} of the input")
                        raise
                    else:
                        with self._lock:
                            self._queues[0].append((fed, item))
                            self._filled[0].notify()
                        del item
                        fed += 1
                        self.most_in_flight = max(self.most_in_flight, fed - taken)
                if have:
                    with self._lock:
                        result = self._done.pop(taken if self.ordered else next(iter(self._done)))
                    taken += 1
                    self.ended = time.perf_counter()
                    yield result
                    del result
            self._stop(patience=10 * _PATIENCE)
        finally:
            self._stop(patience=_PATIENCE)
            self._error = None  # its traceback holds this frame, and so would close a circle

    # -- threads ----------------------------------------------------------------------------------

    def clocks(self) -> list[tuple[Clock, tuple[Span, ...]]]:
        """The clock of each station and a copy of its spans, also while the line runs."""
        with self._lock:
            return [(station.clock, tuple(station.clock.spans)) for station in self.stations]

    def _start(self) -> None:
        self.began = self.ended = time.perf_counter()
        # Gradients off, autocast, 64 bits: what frameworks keep for each thread.
        self._settings = [one.thread_settings() for one in loaded()]
        for s, station in enumerate(self.stations):
            for w in range(len(station.works)):
                # Settings, traces and the default device of the caller hold in the threads that work for it.
                context = copy_context()
                thread = threading.Thread(
                    target=context.run,
                    args=(self._work, s, w),
                    name=f"arraybridge-{s}-{w}",
                    daemon=True,  # a program that keeps a half-read iterator must be able to end
                )
                thread.start()
                self._threads.append(thread)

    def _stop(self, patience: float) -> None:
        with self._lock:
            self._stopped = True
            for condition in (*self._filled, *self._emptied, self._caller):
                condition.notify_all()
            for queue in self._queues:
                queue.clear()
            self._done.clear()  # a report keeps the line, and need not keep the arrays
        for station in self.stations:
            station.stop()
        until = time.perf_counter() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.perf_counter()))

    def _work(self, s: int, w: int) -> None:
        station, number = self.stations[s], -1
        try:
            with ExitStack() as stack:
                for same in self._settings:
                    stack.enter_context(same())
                stack.enter_context(station.enter(w))
                work = station.works[w]
                while True:
                    asked = time.perf_counter()
                    taken = self._take(s)
                    if taken is None:
                        return
                    number, item = taken
                    del taken
                    start = time.perf_counter()
                    result = work(item)
                    end = time.perf_counter()
                    del item
                    if not self._hand_on(s, number, result):
                        return
                    del result
                    self._count(station.clock, number, asked, start, end)
        except BaseException as error:  # noqa: BLE001  # whatever ends the work goes to the caller
            if number >= 0:
                error.add_note(station.where(number, w))
            with self._lock:
                if self._error is None and not self._stopped:
                    self._error = error
                self._stopped = True
                for condition in (*self._filled, *self._emptied, self._caller):
                    condition.notify_all()

    def _take(self, s: int) -> tuple[int, Any] | None:
        with self._lock:
            queue = self._queues[s]
            while not queue:
                if self._stopped:
                    return None
                self._filled[s].wait()
            if self._stopped:
                return None
            taken = queue.popleft()
            if s == 0:
                self._caller.notify()
            else:
                self._emptied[s].notify()
            return taken

    def _hand_on(self, s: int, number: int, result: Any) -> bool:
        with self._lock:
            if s + 1 == len(self.stations):
                if self._stopped:
                    return False
                self._done[number] = result  # bounded by `limit`
                self._caller.notify()
                return True
            queue, room = self._queues[s + 1], self.stations[s + 1].room
            while len(queue) >= room:
                if self._stopped:
                    return False
                self._emptied[s + 1].wait()
            if self._stopped:
                return False
            queue.append((number, result))
            self._filled[s + 1].notify()
            return True

    def _count(self, clock: Clock, number: int, asked: float, start: float, end: float) -> None:
        now = time.perf_counter()
        with self._lock:
            clock.items += 1
            clock.busy += end - start
            clock.starved += start - asked
            clock.blocked += now - end
            clock.spans.append(Span(number, start - self.began, end - self.began))


# -- work on accelerators ----------------------------------------------------------------------------


def arrays_of(tree: Any) -> list[Any]:
    """The arrays in nested containers."""
    kind = kinds.get(type(tree)) or kind_of(tree)
    if kind == LEAF:
        return []
    if kind == ARRAY:
        return [tree]
    import optree

    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [leaf for leaf in leaves if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY]


def marks_of(tree: Any) -> list[Mark]:
    """What another thread has to wait for before it reads the arrays of this thread; one mark a device.

    JAX orders its own work, but would raise an error of this thread's computation in the thread that reads
    the result: such arrays are waited for here.
    """
    found: dict[tuple[str, Device], Mark] = {}
    for x in arrays_of(tree):
        owner = registry.find_owner(x)
        if owner is None:
            continue
        if not owner.has_streams:
            wait = owner.late_errors(type(x))
            if wait is not None:
                wait(x)
            continue
        device = owner.device_of(x)
        if (owner.name, device) not in found:
            mark = owner.mark(device)
            if mark is not None:
                found[owner.name, device] = mark
    return list(found.values())


class Lane:
    """A thread's streams, and the inputs that its queued work still reads.

    Args:
        depth: inputs that may wait for the accelerator before this thread waits for it.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._streams: set[tuple[str, Device]] = set()
        self._held: deque[tuple[Any, list[Mark]]] = deque()

    def use_stream(self, framework: Framework, device: Device) -> None:
        """Give this thread a stream of its own on the device, the first time that it is asked to."""
        if framework.has_streams and (framework.name, device) not in self._streams:
            self._streams.add((framework.name, device))
            framework.take_stream(device)

    def receive(self, marks: list[Mark]) -> None:
        """Order this thread's work after what made its input."""
        for mark in marks:
            self.use_stream(mark.framework, mark.device)
            mark.wait()

    def hold(self, item: Any, marks: list[Mark]) -> None:
        """Keep the input until the work that reads it is done: its memory belongs to another stream."""
        own = [m for mark in marks if (m := mark.framework.mark(mark.device)) is not None]
        if own:
            self._held.append((item, own))
        while self._held and (len(self._held) > self._depth or all(m.is_done() for m in self._held[0][1])):
            for m in self._held[0][1]:
                m.synchronize()
            self._held.popleft()

    def close(self) -> None:
        """Wait for what is queued, before its inputs go."""
        while self._held:
            for m in self._held[0][1]:
                m.synchronize()
            self._held.popleft()
