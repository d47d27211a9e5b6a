"""Memory that one framework imports from another is kept alive until queued work has read it.

When an allocator reuses freed memory, it considers only the work on its own streams. It could therefore
overwrite memory that the importer still has to read. To prevent this, the importer's array holds the
object that `keep_alive` returns. When the array is collected, the exporter's stream waits for the importer's
stream. If the exporter has no streams (JAX, TensorFlow), or if its current stream is not the same as during
the import, a `KeepAlives` holds the memory until the importer's work is done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from arraybridge import cuda_driver
from arraybridge.device import Device
from arraybridge.host.protocols import Exported
from arraybridge.interface.streams import StreamEvent, Streams

__all__ = ["KeepAlives", "block_until_ready"]

# -- objects that queued work still reads --------------------------------------------------------------

#: For each framework that can capture CUDA graphs, a function that returns whether this thread is doing so.
captures: list[Callable[[], bool]] = []


@dataclass(slots=True, eq=False)
class _Entry:
    """An object that is kept alive.

    Attributes:
        what: The object.
        is_done: A function that returns whether the work that reads the object is done.
        wait: A function that waits until that work is done.
    """

    what: Any
    is_done: Callable[[], bool]
    wait: Callable[[], object]


class KeepAlives:
    """Objects that are kept alive until the queued work that reads them is done.

    Attributes:
        entries: The objects, those that were kept first in front.
    """

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()

    def keep(self, what: Any, is_done: Callable[[], bool], wait: Callable[[], object]) -> None:
        """Keep an object alive until ``is_done`` returns true; ``wait`` blocks until then.

        This method does not call ``is_done``, because finalizers call this method and may interrupt any code.
        """
        self.entries.append(_Entry(what, is_done, wait))

    def release(self) -> None:
        """Drop the objects that are no longer read, without waiting."""
        if not self.entries or _is_capturing():
            return
        with cuda_driver.allow_queries():
            for _ in range(len(self.entries)):
                with suppress(IndexError):  # another thread has emptied the queue
                    entry = self.entries.popleft()
                    with suppress(RuntimeError):  # the GPU has failed; its next use reports that
                        if entry.is_done():
                            continue
                    self.entries.append(entry)

    def block_until_ready(self, leaving: int = 0) -> None:
        """Wait for the work that reads the objects, and drop all except the latest ``leaving`` objects."""
        if not self.entries or _is_capturing():
            return
        while len(self.entries) > leaving:
            try:
                entry = self.entries.popleft()
            except IndexError:  # another thread has emptied the queue
                return
            entry.wait()


def _is_capturing() -> bool:
    """Return whether this thread captures a CUDA graph. Queries of events and waits would invalidate it."""
    with suppress(RuntimeError):  # raised if there is no CUDA driver
        return any(is_capturing() for is_capturing in captures)
    return False


_keep_alives = KeepAlives()
keep = _keep_alives.keep
#: Called before each import of memory.
release = _keep_alives.release
block_until_ready = _keep_alives.block_until_ready


# -- imported memory -----------------------------------------------------------------------------------


def keep_alive(imported: Any, exporter: Streams, importer: Streams, device: Device) -> object:
    """Return an object that keeps imported memory alive, and orders its release after the importer's work.

    The importer's array must hold a reference to this object.

    Args:
        imported: The object that keeps the memory alive.
        exporter: The streams of the framework that owns the memory.
        importer: The streams of the framework that reads it.
        device: The GPU that the memory is on.
    """
    owner = Exported()
    # The exporter's allocator orders the release after the work on this stream, regardless of the thread.
    export_stream = exporter.handle(device)
    finalizer = weakref.finalize(
        owner, _release_in_order, imported, exporter, export_stream, importer, device
    )
    finalizer.atexit = False
    return owner


def _release_in_order(
    imported: Any, exporter: Streams, export_stream: int | None, importer: Streams, device: Device
) -> None:
    """Order the release of imported memory after the importer's work, or keep it until that work is done."""
    if _is_capturing():
        # An event would become part of the graph, so it is recorded after the capture.
        late = _LateEvent(importer, device)
        keep(imported, late.is_done, late.wait)
        return
    try:
        reader = importer.handle(device)
        if export_stream is not None and reader is not None and exporter.handle(device) == export_stream:
            exporter.wait_for(device, reader)
        elif (event := importer.record_event(device)) is not None:
            keep(imported, event.is_done, event.synchronize)
    except RuntimeError:
        # The streams could not be ordered, so the host waits before the memory is freed.
        with suppress(RuntimeError):  # the GPU has failed, and no work on it can succeed
            if (event := importer.record_event(device)) is not None:
                event.synchronize()


class _LateEvent:
    """An event in the current stream of an importer, which is recorded only when it is needed."""

    def __init__(self, importer: Streams, device: Device) -> None:
        self._importer = importer
        self._device = device
        self._stream = importer.handle(device)

    @cached_property
    def _event(self) -> StreamEvent | None:
        # Another thread, whose current stream differs, may record the event.
        if self._stream is not None:
            self._importer.wait_for(self._device, self._stream)
        return self._importer.record_event(self._device)

    def is_done(self) -> bool:
        return self._event is None or self._event.is_done()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def keep_until_done(
    imported_array: Any, what: Any, begin: Callable[[], Any], wait: Callable[[Any], object]
) -> None:
    """Keep ``what`` alive until an importer has done all work that reads its memory.

    Use this for frameworks that have no stream events, but run their work in order. After the array is
    collected, the first check for completion starts another computation with ``begin``. When the result of
    that computation is ready, all earlier work is done. If the result has no ``is_ready`` method, the second
    check waits for it.

    Args:
        imported_array: The importer's array, which shares the memory.
        what: The object that keeps the memory alive.
        begin: A function that starts a computation and returns its result.
        wait: A function that waits for that result.
    """
    result = cache(begin)

    def is_done() -> bool:
        if not result.cache_info().currsize:
            result()
            return False
        if hasattr(result(), "is_ready"):  # a JAX array
            return bool(result().is_ready())
        wait(result())
        return True

    def wait_for_result() -> None:
        wait(result())

    weakref.finalize(imported_array, keep, what, is_done, wait_for_result).atexit = False
