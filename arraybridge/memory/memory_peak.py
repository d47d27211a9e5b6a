"""`memory_peak`: the largest memory use within a block, per device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from arraybridge.compilers import run_eagerly
from arraybridge.errors import nearest
from arraybridge.formatting import Contents, Table, format_bytes, one_of
from arraybridge.interface import registry
from arraybridge.interface.registry import loaded
from arraybridge.memory.stats import holdings

__all__ = ["memory_peak"]


@contextmanager
def repeat(probe: Callable[[], object], interval: float) -> Iterator[None]:
    """Call ``probe`` every ``interval`` seconds in a thread during a ``with`` block, and once at its end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(interval):
            probe()

    watcher = threading.Thread(target=watch, name="arraybridge-memory", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        probe()


_PEAK_HEAD = ("device", "holder", "before", "peak", "growth")


class PeakRow(NamedTuple):
    """The memory use of one framework or process on one device, before and during a `memory_peak` block.

    Attributes:
        device: The device string, such as ``"gpu:0"``.
        holder: The name of the framework, or ``"this process"`` on the host.
        before: The number of bytes in use before the block.
        peak: The largest number of bytes in use during the block.
    """

    device: str
    holder: str
    before: int
    peak: int

    @property
    def growth(self) -> int:
        """The difference between ``peak`` and ``before``, in bytes."""
        return max(0, self.peak - self.before)


# Reentrant: at the start of a block, a thread that holds the lock probes the enclosing blocks.
_peaks_lock = threading.RLock()
_open_peaks: list[MemoryPeak] = []


class MemoryPeak(Table):
    """The peak memory use so far in a `memory_peak` block, as ``rows`` or by name, such as ``m["torch"]``."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], PeakRow] = {}
        #: The peaks that frameworks reported before the block. Only larger ones are counted.
        self._counted: dict[tuple[str, str], int] = {}
        for one in holdings():
            if one.used is not None:
                key = one.device, one.holder
                self._rows[key] = PeakRow(*key, before=one.used, peak=one.used)
                self._counted[key] = one.peak or 0

    @property
    def rows(self) -> tuple[PeakRow, ...]:
        """One row per device and framework or process."""
        return tuple(self._rows.values())

    def __getitem__(self, holder: str) -> PeakRow:
        """Return the row of a framework on its first device, or of ``"this process"`` on the host.

        Raises:
            KeyError: If there is no such row: the framework is unknown or not loaded, has not initialized a
                device, or does not report its memory use.
        """
        for row in self.rows:
            if row.holder == holder:
                return row
        holders = list(dict.fromkeys(row.holder for row in self.rows))
        names = registry.framework_names()
        if holder in names:
            cause = f"{holder} has not initialized a device, or does not report its memory use."
        else:
            cause = f"it is not the name of a framework{nearest(str(holder), [*names, *holders])}."
        raise KeyError(f"no row for {holder!r}: {cause} Pass {one_of(holders)}.")

    def _table(self) -> Contents:
        rows = [(r.device, r.holder, *map(format_bytes, (r.before, r.peak, r.growth))) for r in self.rows]
        return _PEAK_HEAD, rows, _PEAK_HEAD[2:], ""

    def probe(self) -> None:
        """Read the current memory of all frameworks, and update the peaks."""
        with _peaks_lock:
            for one in holdings():
                if one.used is not None:
                    key = one.device, one.holder
                    row = self._rows.get(key) or PeakRow(*key, before=0, peak=0)
                    reported = one.peak or 0
                    is_new = reported > self._counted.get(key, 0)
                    peak = max(row.peak, one.used, reported if is_new else 0)
                    self._rows[key] = row._replace(peak=peak)


@run_eagerly
@contextmanager
def memory_peak() -> Iterator[MemoryPeak]:
    """Measure the peak memory of each framework, and of this process on the host, in a ``with`` block.

    PyTorch and TensorFlow track their own peaks, which the block resets. JAX also tracks its peak, but
    reports the peak of the block only if it exceeds every earlier one. CuPy is sampled every two
    milliseconds, and so is the host while it stays below the highest peak of the process.

    Yields:
        The measurement. It is complete when the block has ended.

    Example:
        >>> with memory_peak() as m:
        ...     pass
        >>> m["this process"].growth >= 0
        True
    """
    with _peaks_lock:
        for outer in _open_peaks:  # read their peaks before the counters are reset
            outer.probe()
        for one in loaded():
            one.memory.reset_peak()
        measured = MemoryPeak()
        _open_peaks.append(measured)
    try:
        with repeat(measured.probe, 0.002):
            yield measured
    finally:
        _open_peaks.remove(measured)
