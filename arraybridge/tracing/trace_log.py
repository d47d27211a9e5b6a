"""Recording what happens: `trace`, and what the rest of the library tells it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from functools import partial
from threading import RLock, current_thread, get_ident
from typing import TYPE_CHECKING, Any, Self

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.formatting import Contents, Table, format_bytes, format_seconds
from arraybridge.frameworks import registry
from arraybridge.tracing import events
from arraybridge.tracing.events import Event
from arraybridge.tracing.records import ConversionRecord, Record, SpanRecord
from arraybridge.tracing.route import Route
from arraybridge.types import hooks
from arraybridge.validation import whole_number

if TYPE_CHECKING:
    from arraybridge.tracing.hotspots import HotSpots

__all__ = ["TraceLog", "active_logs", "everywhere", "note", "open_logs", "record_in_context", "span", "trace"]

_COLUMNS = ("source", "target", "method", "device", "shares memory", "copies", "bytes", "time", "reason")

#: Conversions at each end of a log that its table shows.
_SHOWN = 20

# One for all logs. Reentrant: the collector may run a finaliser that converts.
_adding = RLock()


def _after_fork() -> None:
    """In a child, nobody is there to let go of a lock that another thread held."""
    global _adding
    _adding = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class TraceLog(Table):
    """What happened inside a ``with trace()`` block; prints as a table of its conversions.

    Attributes:
        records: one `Route` a conversion, in order, each with its ``seconds``.
        events: one `Event` for all that happened, in the order in which it began.
        dropped: events that went because of ``limit``, with their records.

    >>> import numpy as np, arraybridge
    >>> image = np.zeros((2, 3)).T
    >>> with arraybridge.trace() as log:
    ...     _ = arraybridge.convert_memory(image, "torch", copy=True)
    >>> log.events[0].name, log.events[0].nbytes, log.events[0].layout
    ('numpy → torch', 48, 'transposed')
    """

    def __init__(self, limit: int | None = None, foreign: bool = False) -> None:
        if limit is not None:
            whole_number("limit", limit, least=1)
        self.dropped = 0
        #: Whether it hears of the frameworks' own calls too.
        self.foreign = foreign
        self._limit = limit
        self._records: deque[Record] = deque(maxlen=limit)
        #: Bytes copied, each copy of an array counted; also by conversions that went because of ``limit``.
        self.total_bytes_copied = 0
        #: Seconds of all conversions, also of those that went because of ``limit``.
        self.total_seconds = 0.0
        self._open_logs_here = time.perf_counter()

    @property
    def records(self) -> list[Route]:
        """One `Route` a conversion, in order, each with its ``seconds``."""
        with _adding:
            return [record.route for record in self._records if isinstance(record, ConversionRecord)]

    @property
    def events(self) -> list[Event]:
        """All that happened, in the order in which it began."""
        with _adding:
            records = list(self._records)
        # Events are made here and not when they are recorded, since that would be part of the measured time.
        lines: dict[tuple[int, int], int] = {}
        return sorted((self._event(record, lines) for record in records), key=events.began)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.records)

    def _event(self, record: Record, lines: dict[tuple[int, int], int]) -> Event:
        """Return the event; ``lines`` caches the line number of each instruction."""
        _, code, instruction, _ = record.site
        line = lines.get((id(code), instruction))
        if line is None:
            line = events.line_of(record.site)
            lines[id(code), instruction] = line
        return record.event(self._open_logs_here, line)

    # -- recording --------------------------------------------------------------------------------

    def add(self, record: Record) -> None:
        with _adding:
            if len(self._records) == self._limit:
                self.dropped += 1
            self._records.append(record)
            if isinstance(record, ConversionRecord):
                route = record.route
                self.total_bytes_copied += route.nbytes * route.copies
                self.total_seconds += record.seconds

    # -- telling ----------------------------------------------------------------------------------

    def hotspots(self, top: int | None = None, *, libraries: bool = True) -> HotSpots:
        """The lines of the user's code by bytes copied, and then by time, with what would save the copies.

        Args:
            top: only so many of them.
            libraries: False leaves out what other libraries call of arraybridge.

        Returns:
            a table, also in a notebook; ``to_dict()`` is ready for JSON.

        >>> import numpy as np, arraybridge
        >>> with arraybridge.trace() as log:
        ...     for _ in range(3):
        ...         _ = arraybridge.to_torch(np.zeros(4)[::-1])
        >>> spot = log.hotspots()[0]
        >>> spot.nbytes, spot.count, spot.reason
        (96, 3, 'torch does not support negative strides')
        """
        from arraybridge.tracing.hotspots import hotspots

        return hotspots([e for e in self.events if libraries or not e.library], self.dropped, top)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events in the trace-event format, which Perfetto, chrome://tracing and Speedscope open.

        Threads and devices are tracks; arrows lead an item from stage to stage; bytes copied are a counter.

        Args:
            path: a file that ends in ``.json``.

        Raises:
            ValueError: another suffix.
            OSError: it cannot be written.

        >>> import arraybridge, json, pathlib, tempfile
        >>> with arraybridge.trace() as log:
        ...     pass
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> log.save(file)
        >>> sorted(json.loads(file.read_text()))
        ['displayTimeUnit', 'otherData', 'traceEvents']
        """
        from arraybridge.tracing.export import save

        save(path, self.events, self.dropped)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the events: a row for each thread, a bar for each event, copies in red. Needs matplotlib.

        Args:
            path: where to write the picture too; the suffix says the form, ``.png``, ``.svg`` or ``.pdf``.

        Returns:
            a ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            ImportError: matplotlib is not installed; the extra ``plot`` brings it.
        """
        from arraybridge.tracing.export import plot

        return plot(self.events, path)

    def __repr__(self) -> str:
        return f"<TraceLog of {len(self)} conversions, {format_bytes(self.total_bytes_copied)} copied>"

    def _table(self) -> Contents:
        """A row for each conversion, and of very many for the first and the last twenty."""
        records = self.records
        if len(records) <= 2 * _SHOWN + 1:
            return _COLUMNS, [*map(_row, records)], (), self._summary()
        gap = (*("…",) * (len(_COLUMNS) - 1), f"({len(records) - 2 * _SHOWN:,} more)")
        rows = [*map(_row, records[:_SHOWN]), gap, *map(_row, records[-_SHOWN:])]
        return _COLUMNS, rows, (), self._summary()

    def _summary(self) -> str:
        plural = "" if len(self) == 1 else "s"
        copied = format_bytes(self.total_bytes_copied)
        took = format_seconds(self.total_seconds)
        gone = f"; the oldest {self.dropped} events are gone (limit={self._limit})" if self.dropped else ""
        return f"{len(self)} conversion{plural}, {copied} copied, {took}{gone}"

    def __str__(self) -> str:
        return super().__str__() if self.records else "no conversions"


def _row(route: Route) -> tuple[str, ...]:
    shares = "yes" if route.shares_memory else "no"
    amounts = str(route.copies), format_bytes(route.nbytes), format_seconds(route.seconds or 0.0)
    return route.source, route.target, route.method, str(route.device), shares, *amounts, route.reason


# -- who listens -------------------------------------------------------------------------------------

#: Opens a span of that name in a profiler.
Annotation = Callable[[str], AbstractContextManager[Any]]
#: The traces open in this thread or task, and what names its work in a profiler.
ActiveLogs = tuple[tuple[TraceLog, ...], Annotation]

# The traces and annotations that were opened in this thread or task, those that are closed by now included.
_open_logs_here: ContextVar[tuple[TraceLog | Annotation, ...]] = ContextVar("arraybridge_trace", default=())
#: Logs that hear every thread of the process.
_everywhere: list[TraceLog] = []
#: What listens anywhere, by its id. While it is empty, nobody even asks whether one of them was opened in
#: their own thread or task (`active_logs`), and nothing is measured.
open_logs: dict[int, Any] = {}


def _active_logs(opened: tuple[TraceLog | Annotation, ...]) -> list[TraceLog | Annotation]:
    return [one for one in opened if id(one) in open_logs]


def record_in_context(context: Context) -> None:
    """Let the logs of this thread or task hear what will run in a context that was copied before."""
    theirs = _active_logs(context.get(_open_logs_here, ()))
    context.run(_open_logs_here.set, tuple(dict.fromkeys((*_open_logs_here.get(), *theirs))))


@contextmanager
def _open_in_context(one: TraceLog | Annotation) -> Iterator[None]:
    """Let it hear this thread or task. It may be closed in another one, and in any order."""
    _open_logs_here.set((*_active_logs(_open_logs_here.get()), one))
    open_logs[id(one)] = one  # one step, which no other thread can come between
    try:
        yield
    finally:
        del open_logs[id(one)]
        _open_logs_here.set(tuple(_active_logs(_open_logs_here.get())))


@contextmanager
def trace(*, limit: int | None = None, foreign: bool = False) -> Iterator[TraceLog]:
    """Record what this thread or task does inside the block, in the threads of its pipelines too.

    Conversions, calls of decorated functions, stages of pipelines, items of `device_map` and `prefetch`,
    decisions of `gpu`, and what a recovery did when memory ran out.

    Args:
        limit: events to keep; then the oldest go, and are counted in ``log.dropped``. None: all are kept.
        foreign: record conversions by the frameworks' own calls too, as `torch.from_numpy`, `jnp.asarray` and
            `np.asarray` of a tensor; their events are of the kind ``"foreign"``.

    Yields:
        the log: ``log.records``, ``log.events``, ``log.hotspots()``, ``log.save("run.json")``.

    Raises:
        TypeError, ValueError: ``limit`` is no positive whole number.

    >>> import numpy as np, arraybridge
    >>> with arraybridge.trace() as log:
    ...     _ = arraybridge.convert_memory(np.zeros(3), "numpy")
    >>> log.records[0].method, log.total_bytes_copied
    ('same', 0)
    """
    log = TraceLog(limit, foreign)
    with _open_in_context(log), _intercept_native_calls(log):
        yield log


@contextmanager
def everywhere(limit: int | None = None, foreign: bool = False) -> Iterator[TraceLog]:
    """As `trace`, for all threads of the process."""
    log = TraceLog(limit, foreign)
    _everywhere.append(log)
    open_logs[id(log)] = log
    try:
        with _intercept_native_calls(log):
            yield log
    finally:
        del open_logs[id(log)]
        _everywhere.remove(log)


def _interception() -> Any:
    """The room for the frameworks' own calls, which few logs hear of."""
    from arraybridge.tracing import interception

    return interception


def _intercept_native_calls(log: TraceLog) -> AbstractContextManager[None]:
    """Let a log hear of the frameworks' own calls, if it wants to."""
    return _interception().intercepting(_native_call_logs) if log.foreign else nullcontext()


def _native_call_logs() -> Iterable[TraceLog]:
    intercepting = active_logs()
    return [log for log in intercepting[0] if log.foreign] if intercepting else []


@contextmanager
def _annotating(profiler: str) -> Iterator[None]:
    """Name what happens in this thread or task in the profiler of that name.

    Raises:
        FrameworkNotInstalledError: its package is missing.
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
    else:  # an object of this block's own, which no other closes
        annotation = partial(registry.framework(profiler).runtime.annotation)
    with _open_in_context(annotation):
        yield


hooks.annotate = _annotating


def active_logs() -> ActiveLogs | None:
    """Who listens in this thread or task; None where nobody does."""
    opened = _open_logs_here.get()
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
            annotation = one  # the innermost one counts
    if not logs and annotation is None and not _everywhere:
        return None
    return (*logs, *_everywhere), annotation or nullcontext


# -- what is told ------------------------------------------------------------------------------------


class Span:
    """A piece of work that goes on; `end`, or the end of a ``with`` block, records it."""

    __slots__ = (
        *("kind", "name", "device", "nbytes", "reason", "item", "flow"),
        *("_annotation", "_at", "_began", "_logs"),
    )

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
        self._at = events.site() if logs else None
        self._annotation = annotation(name)
        self._annotation.__enter__()
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, cls: object, error: BaseException | None, _: object) -> None:
        self.end(error)

    def drop(self) -> None:
        """It was nothing, and no trace hears of it."""
        self._logs = ()

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed; nothing where that was said before."""
        seconds = time.perf_counter() - self._began
        self._annotation.__exit__(None, None, None)
        self._annotation = nullcontext()
        if error is not None:
            self.reason = f"raised {type(error).__name__}"
        logs = self._logs
        self._logs = ()
        at = self._at
        if not logs or at is None:
            return
        record = SpanRecord(
            self._began,
            seconds,
            current_thread().name,
            get_ident(),
            at,
            self.kind,
            self.name,
            self.device,
            self.nbytes,
            self.reason,
            self.item,
            self.flow,
        )
        for log in logs:
            log.add(record)


def span(kind: str, name: str, *, annotate: bool = True) -> Span | None:
    """A piece of work that begins now; None where nobody listens in this thread or task.

    ``annotate=False`` is for work that other work of the same thread may interrupt, as a coroutine's.
    """
    intercepting = active_logs()
    if intercepting is None:
        return None
    logs, annotation = intercepting
    return Span(kind, name, logs, annotation if annotate else nullcontext)


def note(kind: str, reason: str, device: str = "") -> None:
    """Record what happens in a moment."""
    step = span(kind, kind, annotate=False)
    if step is not None:
        step.reason = reason
        step.device = device
        step.end()
