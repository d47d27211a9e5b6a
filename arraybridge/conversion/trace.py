"""Foretelling a conversion (`explain`) and recording those that happen (`trace`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from arraybridge.conversion.routes import Route
from arraybridge.show import format_bytes, format_seconds, html_table, text_table

__all__ = ["TraceLog", "trace"]

_COLUMNS = ("source", "target", "method", "device", "shares memory", "copies", "bytes", "time", "reason")


class TraceLog:
    """The conversions made inside a ``with trace()`` block; prints as a table.

    Attributes:
        records: one `Route` a conversion, in order, each with its ``seconds``.
    """

    def __init__(self) -> None:
        self.records: list[Route] = []

    @property
    def total_bytes_copied(self) -> int:
        """Bytes copied, each copy of an array counted."""
        return sum(r.nbytes * r.copies for r in self.records)

    @property
    def total_seconds(self) -> float:
        return sum(r.seconds or 0.0 for r in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"<TraceLog of {len(self)} conversions, {format_bytes(self.total_bytes_copied)} copied>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                r.source,
                r.target,
                r.method,
                str(r.device),
                "yes" if r.shares_memory else "no",
                str(r.copies),
                format_bytes(r.nbytes),
                format_seconds(r.seconds or 0.0),
                r.reason,
            )
            for r in self.records
        ]

    def _summary(self) -> str:
        plural = "" if len(self) == 1 else "s"
        copied, took = format_bytes(self.total_bytes_copied), format_seconds(self.total_seconds)
        return f"{len(self)} conversion{plural}, {copied} copied, {took}"

    def __str__(self) -> str:
        if not self.records:
            return "no conversions"
        return f"{text_table(_COLUMNS, self._rows(), rule=True)}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._summary())


_current: ContextVar[tuple[TraceLog, ...]] = ContextVar("arraybridge_trace", default=())
#: The logs open anywhere, by their id. While it is empty, conversions do not even ask whether one of them is
#: open in their own thread or task (`listening`), and measure nothing.
open_logs: dict[int, TraceLog] = {}


@contextmanager
def trace() -> Iterator[TraceLog]:
    """Record every conversion that this thread or task makes inside the block.

    >>> import numpy as np, arraybridge
    >>> with arraybridge.trace() as log:
    ...     _ = arraybridge.convert_memory(np.zeros(3), "numpy")
    >>> log.records[0].method, log.total_bytes_copied
    ('same', 0)
    """
    log = TraceLog()
    token = _current.set((*_current.get(), log))
    open_logs[id(log)] = log  # one step, which no other thread can come between
    try:
        yield log
    finally:
        del open_logs[id(log)]
        _current.reset(token)


def listening() -> bool:
    """Whether a trace is open in this thread or task."""
    return bool(_current.get())


def record(route: Route) -> None:
    """Add a conversion to the traces of this thread or task."""
    for log in _current.get():
        log.records.append(route)
