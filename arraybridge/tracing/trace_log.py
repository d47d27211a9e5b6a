"""Traces: `trace`, its `TraceLog`, and the functions with which the library records events."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import partial
from threading import RLock, current_thread, get_ident
from typing import TYPE_CHECKING, Any, Self, overload

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.formatting import Contents, Table, format_bytes, format_count, format_seconds
from arraybridge.hooks import hooks
from arraybridge.interface import registry
from arraybridge.route import Route
from arraybridge.tracing import events, user_lines
from arraybridge.tracing.events import Event, start_up_lines
from arraybridge.tracing.records import ConversionRecord, Record
from arraybridge.validation import add_hints, bool_option, whole_number

if TYPE_CHECKING:
    from arraybridge.tracing.hotspots import HotSpots

__all__ = ["TraceLog", "active_logs", "everywhere", "note", "open_logs", "record_in_context", "span", "trace"]

_COLUMNS = ("source", "target", "method", "device", "shares memory", "copies", "bytes", "time", "reason")

#: The number of conversions at each end of a long log that its table shows.
_SHOWN = 20

# All logs share this lock. It is reentrant, since the garbage collector may run a finalizer that converts an
# array.
_adding = RLock()


def _after_fork() -> None:
    """Replace the lock in a child process, where the thread that may have held it does not exist."""
    global _adding
    _adding = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class TraceLog(Table):
    """The log of a ``with trace()`` block. It prints as a table of its conversions.

    Attributes:
        records: The `Route` of each conversion, in order, with its ``seconds``.
        events: All events, sorted by start.
        dropped: The number of events that were dropped because of ``limit``; their records are dropped too.
        foreign: Whether the log records conversions by the frameworks' own calls.
        total_bytes_copied: The number of bytes copied, summed over all copies, including dropped events.
        total_seconds: The time spent in conversions, including dropped events and without start-ups.
        start_ups: The imports of frameworks and the starts of their devices, as events.

    >>> import numpy as np, arraybridge
    >>> image = np.zeros((2, 3)).T
    >>> with arraybridge.trace() as log:
    ...     _ = arraybridge.convert_memory(image, "torch", copy=True)
    >>> log.events[0].name, log.events[0].nbytes, log.events[0].layout
    ('numpy → torch', 48, 'transposed')
    """

    def __init__(self, limit: int | None = None, foreign: bool = False) -> None:
        if limit is not None:
            limit = whole_number("limit", limit, least=1)
        self.dropped = 0
        self.foreign = bool_option("foreign", foreign)
        self._limit = limit
        self._records: deque[Record] = deque(maxlen=limit)
        self.total_bytes_copied = 0
        self.total_seconds = 0.0
        self._start_ups: list[Record] = []
        self._opened = time.perf_counter()

    @property
    def records(self) -> list[Route]:
        """The `Route` of each conversion, in order, with its ``seconds``."""
        with _adding:
            return [record.route for record in self._records if isinstance(record, ConversionRecord)]

    @property
    def events(self) -> list[Event]:
        """All events, sorted by start."""
        with _adding:
            records = list(self._records)
        # Events are created here, since creating them while recording would distort the measured times.
        lines: dict[tuple[int, int], int] = {}
        return sorted((self._event(record, lines) for record in records), key=events.began)

    @property
    def start_ups(self) -> list[Event]:
        """The imports of frameworks and the starts of their devices, as events."""
        return [self._event(record, {}) for record in self._start_ups]

    def _start_up_seconds(self) -> dict[str, float]:
        """Return the seconds that each framework took to start."""
        seconds: dict[str, float] = {}
        for event in self.start_ups:
            seconds[event.name] = seconds.get(event.name, 0.0) + event.seconds
        return seconds

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> Route: ...
    @overload
    def __getitem__(self, index: slice) -> list[Route]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def _event(self, record: Record, lines: dict[tuple[int, int], int]) -> Event:
        """Return a record as an event; ``lines`` caches the line number of each instruction."""
        _, code, instruction, _ = record.site
        line = lines.get((id(code), instruction))
        if line is None:
            line = user_lines.line_of(record.site)
            lines[id(code), instruction] = line
        return record.event(self._opened, line)

    # -- recording --------------------------------------------------------------------------------

    def add(self, record: Record, copied: int = 0, seconds: float = 0.0) -> None:
        """Append a record; drop the oldest one if the log is full.

        Args:
            record: The record.
            copied: The number of bytes to add to `total_bytes_copied`.
            seconds: The duration to add to `total_seconds`.
        """
        with _adding:
            if len(self._records) == self._limit:
                self.dropped += 1
            self._records.append(record)
            self.total_bytes_copied += copied
            self.total_seconds += seconds

    def add_start_up(self, record: Record) -> None:
        """Append the record of the start-up of a framework."""
        self._start_ups.append(record)

    # -- reports ----------------------------------------------------------------------------------

    def hotspots(self, top: int | None = None, *, libraries: bool = True) -> HotSpots:
        """Return the lines that copied bytes or caused an out-of-memory recovery, with advice.

        The lines of the user's code precede those of libraries. Both are sorted by bytes copied and then by
        time, in descending order.

        Args:
            top: The maximum number of lines. Defaults to all lines.
            libraries: Whether to include calls to arraybridge by other libraries.

        Returns:
            A sequence of `HotSpot`, shown as a table in terminals and notebooks. ``to_dict()`` converts it
            for JSON.

        Raises:
            ValueError: If ``top`` is not a positive whole number.
            TypeError: If ``libraries`` is not a bool.

        >>> import numpy as np, arraybridge
        >>> with arraybridge.trace() as log:
        ...     for _ in range(3):
        ...         _ = arraybridge.to_torch(np.zeros(4)[::-1])
        >>> spot = log.hotspots()[0]
        >>> spot.nbytes, spot.count, spot.reason
        (96, 3, 'torch does not support negative strides')
        """
        from arraybridge.tracing.hotspots import hotspots

        bool_option("libraries", libraries)
        recorded = [event for event in self.events if libraries or not event.library]
        return hotspots(recorded, self.dropped, top, self._start_up_seconds())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events in the trace-event format, which Perfetto, chrome://tracing and Speedscope open.

        Threads and devices are tracks. Arrows connect the stages of an item. A counter shows copied bytes.

        Args:
            path: The file to write; the name ends in ``.json``.

        Raises:
            ValueError: If the name has another suffix.
            OSError: If the file cannot be written.

        >>> import arraybridge, json, pathlib, tempfile
        >>> with arraybridge.trace() as log:
        ...     pass
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> log.save(file)
        >>> sorted(json.loads(file.read_text()))
        ['displayTimeUnit', 'otherData', 'traceEvents']
        """
        from arraybridge.tracing.export import save

        save(path, sorted([*self.events, *self.start_ups], key=events.began), self.dropped)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the events with Matplotlib: a row per thread, a bar per event, copies in red.

        Args:
            path: The image file to write, such as ``"run.png"``; the suffix sets the format. Defaults to
                None: no file is written.

        Returns:
            A ``matplotlib.figure.Figure``, which a notebook displays.

        Raises:
            ImportError: If Matplotlib is not installed; the extra ``plot`` installs it.
            ValueError: If the suffix is not that of an image format.
        """
        from arraybridge.tracing.export import plot

        return plot([*self.events, *self.start_ups], path)

    def __repr__(self) -> str:
        copied = format_bytes(self.total_bytes_copied)
        return f"<TraceLog of {format_count(len(self), 'conversion')}, {copied} copied>"

    def _table(self) -> Contents:
        """Return a row per conversion; for a long log, only the first and last ones."""
        records = self.records
        summary = self._summary(len(records))
        if len(records) <= 2 * _SHOWN + 1:
            return _COLUMNS, [*map(_row, records)], (), summary
        gap = (*("…",) * (len(_COLUMNS) - 1), f"({len(records) - 2 * _SHOWN:,} more)")
        rows = [*map(_row, records[:_SHOWN]), gap, *map(_row, records[-_SHOWN:])]
        return _COLUMNS, rows, (), summary

    def _summary(self, conversions: int) -> str:
        copied = format_bytes(self.total_bytes_copied)
        took = format_seconds(self.total_seconds)
        dropped = (
            f"; the oldest {self.dropped} events were dropped (limit={self._limit})" if self.dropped else ""
        )
        started = start_up_lines(self._start_up_seconds())
        return f"{format_count(conversions, 'conversion')}, {copied} copied, {took}{dropped}{started}"

    def __str__(self) -> str:
        return super().__str__() if self.records else "no conversions"


def _row(route: Route) -> tuple[str, ...]:
    shares = "yes" if route.shares_memory else "no"
    amounts = str(route.copies), format_bytes(route.nbytes), format_seconds(route.seconds or 0.0)
    return route.source, route.target, route.method, str(route.device), shares, *amounts, route.reason


# -- open logs ---------------------------------------------------------------------------------------

#: A function that opens a named range in a profiler.
Annotation = Callable[[str], AbstractContextManager[Any]]
#: The logs that record this thread or task, and its profiler annotation.
ActiveLogs = tuple[tuple[TraceLog, ...], Annotation]

# The logs and annotations that were opened in this thread or task, including closed ones.
_opened_here: ContextVar[tuple[TraceLog | Annotation, ...]] = ContextVar("arraybridge_trace", default=())
#: The logs that record all threads of the process.
_everywhere: list[TraceLog] = []
#: All open logs and annotations, by their id(). While this dict is empty, callers do not call `active_logs`
#: and measure nothing.
open_logs: dict[int, Any] = {}


def _still_open(opened: tuple[TraceLog | Annotation, ...]) -> list[TraceLog | Annotation]:
    return [one for one in opened if id(one) in open_logs]


def record_in_context(context: Context) -> None:
    """Make the logs of this thread or task also record code that runs in a context copied earlier."""
    theirs = _still_open(context.get(_opened_here, ()))
    context.run(_opened_here.set, tuple(dict.fromkeys((*_opened_here.get(), *theirs))))


@contextmanager
def _open_in_context(one: TraceLog | Annotation) -> Iterator[None]:
    """Open a log or annotation for this thread or task.

    The ``with`` blocks of several logs may end in other threads, in any order.
    """
    _opened_here.set((*_still_open(_opened_here.get()), one))
    open_logs[id(one)] = one  # this assignment is atomic
    try:
        yield
    finally:
        del open_logs[id(one)]
        _opened_here.set(tuple(_still_open(_opened_here.get())))


@add_hints
def trace(*, limit: int | None = None, foreign: bool = False) -> AbstractContextManager[TraceLog]:
    """Record the conversions and related events of this thread or task.

    Events in the worker threads of its `device_map`, `Pipeline` and `prefetch` iterators are included. The
    events are conversions, calls to decorated functions, stages of pipelines, items of `device_map` and
    `prefetch`, decisions of `gpu`, and the steps of out-of-memory recoveries. The import of a framework and
    the start of its devices do not count as conversion time; they are in ``log.start_ups``.

    Args:
        limit: The maximum number of events in the log; the oldest are dropped and counted in
            ``log.dropped``. Defaults to None: unlimited.
        foreign: Whether to also record conversions by the frameworks' own calls, such as `torch.from_numpy`,
            `jnp.asarray`, and `np.asarray` of a tensor. Their events have the kind ``"foreign"``.

    Returns:
        A context manager, whose value is the `TraceLog`; see its ``records``, ``events``, ``hotspots()`` and
        ``save("run.json")``.

    Raises:
        TypeError, ValueError: If ``limit`` is not a positive whole number, or ``foreign`` is not a bool.

    >>> import numpy as np, arraybridge
    >>> with arraybridge.trace() as log:
    ...     _ = arraybridge.convert_memory(np.zeros(3), "numpy")
    >>> log.records[0].method, log.total_bytes_copied
    ('same', 0)
    """
    TraceLog(limit, foreign)  # checks the options now, and not only in the with statement
    return _tracing(limit, foreign)


@contextmanager
def _tracing(limit: int | None, foreign: bool) -> Iterator[TraceLog]:
    log = TraceLog(limit, foreign)
    with _open_in_context(log), _intercept_native_calls(log):
        yield log


@contextmanager
def everywhere(limit: int | None = None, foreign: bool = False) -> Iterator[TraceLog]:
    """Record the events of all threads of the process, as `trace` does for one thread or task."""
    log = TraceLog(limit, foreign)
    _everywhere.append(log)
    open_logs[id(log)] = log
    try:
        with _intercept_native_calls(log):
            yield log
    finally:
        del open_logs[id(log)]
        _everywhere.remove(log)


def _intercept_native_calls(log: TraceLog) -> AbstractContextManager[None]:
    """Return a context manager that records the frameworks' own calls if the log has ``foreign=True``."""
    if not log.foreign:
        return nullcontext()
    from arraybridge.tracing.interception import intercepting  # few programs need it

    return intercepting(_native_call_logs)


def _native_call_logs() -> list[Any]:
    """Return the open logs of this thread or task that record the frameworks' own calls."""
    logs = []
    opened = _opened_here.get()
    for log in (*opened, *_everywhere) if _everywhere else opened:
        # Annotations have no attribute `foreign`.
        if id(log) in open_logs and getattr(log, "foreign", False):
            logs.append(log)  # noqa: PERF401  # a comprehension takes 0.1 µs longer (Python 3.11)
    return logs


@contextmanager
def _annotating(profiler: str) -> Iterator[None]:
    """Annotate the work of this thread or task in the profiler of that name.

    Raises:
        FrameworkNotInstalledError: If the package of the profiler is missing.
    """
    if profiler == "nvtx":
        try:
            import nvtx
        except ImportError as error:
            raise FrameworkNotInstalledError(
                'settings(annotate="nvtx") needs the package nvtx.',
                target_type="nvtx",
                reason=str(error),
                advice='Run pip install nvtx, or pip install ".[nvtx]" in a checkout of arraybridge.',
            ) from error
        annotation = partial(nvtx.annotate, domain="arraybridge")
    else:  # a new object for each block, since `open_logs` identifies it by id()
        annotation = partial(registry.framework(profiler).runtime.annotation)
    with _open_in_context(annotation):
        yield


hooks.annotate = _annotating


def active_logs() -> ActiveLogs | None:
    """Return the logs and the annotation of this thread or task; None if there are none."""
    opened = _opened_here.get()
    if not opened and not _everywhere:
        return None
    logs: list[TraceLog] = []
    annotation: Annotation | None = None
    for one in opened:
        if id(one) not in open_logs:
            continue
        if isinstance(one, TraceLog):
            logs.append(one)
        else:
            annotation = one  # the innermost one has priority
    if not logs and annotation is None and not _everywhere:
        return None
    return (*logs, *_everywhere), annotation or nullcontext


# -- events ------------------------------------------------------------------------------------------


class Span(Record):
    """A piece of work in progress, which its end records; see `Event` for the attributes.

    A ``with`` block, or `end`, ends it.
    """

    __slots__ = ("_annotation", "_logs", "device", "flow", "item", "kind", "name", "nbytes", "reason")

    def __init__(
        self, kind: str, name: str, logs: tuple[TraceLog, ...], annotation: Annotation = nullcontext
    ) -> None:
        self.kind = kind
        self.name = name
        self.device = ""
        self.nbytes = 0
        self.reason = ""
        self.item: int | None = None
        self.flow = ""
        self._logs = logs
        if logs:
            self.site = user_lines.site()
        self._annotation = annotation(name)
        self._annotation.__enter__()
        self.began = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cls: object, error: BaseException | None, _: object) -> None:
        self.end(error)

    def drop(self) -> None:
        """Discard the span, so that no log records it."""
        self._logs = ()

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the work, or the error that ended it."""
        self.seconds = time.perf_counter() - self.began
        self._annotation.__exit__(None, None, None)
        # The log keeps this object alive, which must not refer to the log in turn.
        self._annotation = nullcontext()
        logs = self._logs
        self._logs = ()
        if error is not None:
            self.reason = f"raised {type(error).__name__}"
        self.thread = current_thread().name
        self.thread_id = get_ident()
        for log in logs:
            if self.kind == "start-up":
                log.add_start_up(self)
            else:
                log.add(self)

    def event(self, opened: float, line: int) -> Event:
        """Return the event of the span; see `Record.event`."""
        file, _, _, library = self.site
        return Event(
            kind=self.kind,
            name=self.name,
            start=self.began - opened,
            seconds=self.seconds,
            thread=self.thread,
            device=self.device,
            file=file,
            line=line,
            nbytes=self.nbytes,
            reason=self.reason,
            library=library,
            item=self.item,
            flow=self.flow,
            thread_id=self.thread_id,
        )


def span(kind: str, name: str, *, annotate: bool = True) -> Span | None:
    """Return a started span of work; None if no log or annotation is open for this thread or task.

    Pass ``annotate=False`` for work that other work of the same thread may interrupt, such as a coroutine.
    """
    active = active_logs()
    if active is None:
        return None
    logs, annotation = active
    return Span(kind, name, logs, annotation if annotate else nullcontext)


def note(kind: str, reason: str, device: str = "") -> None:
    """Record an event without a duration in the open logs."""
    step = span(kind, kind, annotate=False)
    if step is not None:
        step.reason = reason
        step.device = device
        step.end()


# The frameworks that are starting, with the thread that records the start. Other threads that start the same
# framework, and starts within this one, are not recorded, so that no time counts twice.
_starting: dict[str, int] = {}


@contextmanager
def _start_up(name: str) -> Iterator[None]:
    """Record the block as the start-up of a framework, unless it raises."""
    thread = get_ident()
    with _adding:
        is_recorded = name not in _starting and thread not in _starting.values()
        if is_recorded:
            _starting[name] = thread
    if not is_recorded:
        yield
        return
    step = span("start-up", name, annotate=False)
    try:
        yield
        if step is not None:
            step.end()
    finally:
        del _starting[name]


hooks.start_up = _start_up
