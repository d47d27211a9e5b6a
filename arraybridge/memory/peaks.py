"""The most memory that each framework uses within a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from arraybridge.frameworks.registry import loaded
from arraybridge.memory.stats import holdings
from arraybridge.show import Contents, Table, format_bytes

__all__ = ["memory_peak"]

_COLUMNS = ("device", "holder", "before", "peak", "growth")


class PeakRow(NamedTuple):
    """Bytes that a holder used before a block, and the most it used within; ``growth`` is the difference."""

    device: str
    holder: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)


class MemoryPeak(Table):
    """What a block of `memory_peak` used at most so far: ``rows``, ``m["torch"]``."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], PeakRow] = {}
        # What frameworks had counted by then: only a larger peak is of the block.
        self._stale: dict[tuple[str, str], int] = {}

    @property
    def rows(self) -> tuple[PeakRow, ...]:
        """One for each device and holder."""
        return tuple(self._rows.values())

    def __getitem__(self, holder: str) -> PeakRow:
        """The row of a framework (of its first card), or of ``"this process"``: the host's memory.

        Raises:
            KeyError: it has none: it holds nothing that it counts.
        """
        for row in self.rows:
            if row.holder == holder:
                return row
        raise KeyError(f"{holder} is not among {', '.join(row.holder for row in self.rows) or 'no rows'}")

    def _table(self) -> Contents:
        rows = [
            (r.device, r.holder, format_bytes(r.before), format_bytes(r.peak), format_bytes(r.growth))
            for r in self.rows
        ]
        return _COLUMNS, rows, _COLUMNS[2:], ""

    def _start(self) -> None:
        for one in loaded():
            one.pool.reset_peak()
        for device, holder, used, _, peak in holdings():
            if used is not None:
                self._rows[device, holder] = PeakRow(device, holder, used, used)
                self._stale[device, holder] = peak or 0

    def _look(self) -> None:
        for device, holder, used, _, peak in holdings():
            if used is not None:
                counted = peak if peak is not None and peak > self._stale.get((device, holder), -1) else 0
                row = self._rows.get((device, holder), PeakRow(device, holder, 0, 0))
                self._rows[device, holder] = row._replace(peak=max(row.peak, used, counted))


_open_peaks: list[MemoryPeak] = []
_peaks_lock = threading.Lock()


@contextmanager
def memory_peak() -> Iterator[MemoryPeak]:
    """Measure the most memory that each framework uses within a ``with`` block, and this process on the host.

    PyTorch and TensorFlow count it themselves (their own peak counters start anew with the block); so does
    JAX, when the block goes beyond what came before. CuPy, and the host below the highest mark that the
    process ever reached, are looked at every two milliseconds.

    Yields:
        The measurement, which is complete once the block has ended.

    >>> with memory_peak() as m:
    ...     pass
    >>> m["this process"].growth >= 0
    True
    """
    measured = MemoryPeak()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            with _peaks_lock:
                measured._look()

    with _peaks_lock:
        for outer in _open_peaks:  # keep what they have seen: the counters start anew
            outer._look()
        measured._start()
        _open_peaks.append(measured)
    watcher = threading.Thread(target=watch, name="arraybridge-memory-peak", daemon=True)
    watcher.start()
    try:
        yield measured
    finally:
        ended.set()
        watcher.join()
        with _peaks_lock:
            _open_peaks.remove(measured)
            measured._look()
