"""Memory of cards: which cards are open, and when what was lent goes back.

What only CUDA's driver tells stands first: the runtime's calls for the same open the current card, and take
some hundred megabytes there.

Each framework's allocator gives freed memory away again in the order of its own queues. What another one
has queued on it is unknown there, so that memory which is freed as soon as nobody refers to it may be written
to while it is still to be read. A `keep_alive` stands between the borrower's array and what it borrowed: when that
array goes, the lender's queue first waits for the borrower's. What was lent by a lender without queues to
speak of (JAX, TensorFlow), or on another queue than the present one, is kept until the borrower's work is
done. `KeepAlives` does the keeping, here and for the threads of pipelines (lines/threads.py).
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from arraybridge.frameworks.accelerators import Streams
from arraybridge.frameworks.protocols import Exported
from arraybridge.types import Device

__all__ = ["KeepAlives", "block_until_ready"]

# -- CUDA's driver -------------------------------------------------------------------------------------


# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_DEVICE_ORDINAL = 9


@cache
def _driver() -> ctypes.CDLL | None:
    """CUDA's driver as it is, not initialised by this; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_driver_initialized() -> bool:
    """Whether something in this process has initialised CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so that nobody should do it without need.
    """
    library = _driver()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


def has_context(index: int) -> bool:
    """Whether this process has a context on the card. Does not wake the driver."""
    library = _driver()
    flags = ctypes.c_uint()
    active = ctypes.c_int()
    if library is None:
        return False
    failed = library.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return not failed and active.value == 1


def device_at(address: int) -> int | None:
    """Return the number of the CUDA device whose memory is at this address; None for unknown memory.

    Unlike the runtime's query, it opens no device.
    """
    library = _driver()
    index = ctypes.c_int()
    if library is None or not address:
        return None
    failed = library.cuPointerGetAttribute(ctypes.byref(index), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    return None if failed else index.value


@contextmanager
def primary_context(index: int) -> Iterator[None]:
    """Make the card the current one; it stays open, as after cudaSetDevice."""
    library = _driver()
    context = ctypes.c_void_p()
    if library is None or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index):
        raise RuntimeError(f"CUDA's driver opens no card {index}")
    if library.cuCtxPushCurrent_v2(context):
        library.cuDevicePrimaryCtxRelease_v2(index)
        raise RuntimeError(f"CUDA's driver cannot make card {index} the current one")
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


# -- what is kept until it was read --------------------------------------------------------------------

#: Of each framework that records graphs of CUDA: whether this thread records one now.
captures: list[Callable[[], bool]] = []


@dataclass(slots=True, eq=False)
class _Entry:
    """An object that is kept alive.

    Attributes:
        what: The object.
        is_done: Returns whether the work that reads it is done.
        wait: Waits until it is.
    """

    what: Any
    is_done: Callable[[], bool]
    wait: Callable[[], object]


class KeepAlives:
    """Objects that are kept alive, each until the queued work that reads it is done."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, what: Any, is_done: Callable[[], bool], wait: Callable[[], object]) -> None:
        """Keep an object until ``is_done`` says so; ``wait`` waits for that.

        It asks nothing now, since it is called when objects are collected, which may be in the midst of
        anything.
        """
        self._entries.append(_Entry(what, is_done, wait))

    def release(self) -> None:
        """Let go of what is not read any more. Asks, and waits for nothing."""
        with suppress(RuntimeError):  # there is no driver
            if self._entries and any(is_capturing() for is_capturing in captures):
                return  # a question would break off the graph, whoever records it
        for _ in range(len(self._entries)):
            with suppress(IndexError):  # another thread did the same
                entry = self._entries.popleft()
                with suppress(RuntimeError):  # the card has failed, and tells so to whoever uses it next
                    if entry.is_done():
                        continue
                self._entries.append(entry)

    def block_until_ready(self, leaving: int = 0) -> None:
        """Wait for the work that reads what is kept, and let go of all but the latest, so many of them."""
        with suppress(IndexError):  # another thread did the same
            while len(self._entries) > leaving:
                self._entries.popleft().wait()


_keep_alives = KeepAlives()
keep = _keep_alives.keep
#: Before each new loan.
release = _keep_alives.release
block_until_ready = _keep_alives.block_until_ready


# -- loans ---------------------------------------------------------------------------------------------


def keep_alive(imported: Any, exporter: Streams, importer: Streams, device: Device) -> object:
    """What the borrower's array has to keep: it holds what was borrowed, and orders the end of that.

    Args:
        imported: what keeps the memory alive.
        exporter: the queues of the framework that owns it.
        importer: the queues of the framework that reads it.
        device: the card.
    """
    exported = Exported()
    # The lender's queue, by its handle: its allocator minds that one alone, whichever thread asks it.
    export_stream = exporter.handle(device)
    weakref.finalize(exported, _end, imported, exporter, export_stream, importer, device).atexit = False
    return exported


def _end(
    imported: Any, exporter: Streams, export_stream: int | None, importer: Streams, device: Device
) -> None:
    try:
        read_on = importer.handle(device)
        if export_stream is not None and read_on is not None and exporter.handle(device) == export_stream:
            exporter.wait_for(device, read_on)
        elif (event := importer.record_event(device)) is not None:
            keep(imported, event.is_done, event.synchronize)
    except RuntimeError:
        # The queues could not be ordered. The host waits instead, before the memory goes back.
        with suppress(RuntimeError):  # the card has failed: what runs there still is of no use to anybody
            if (event := importer.record_event(device)) is not None:
                event.synchronize()


def keep_until_done(
    imported_array: Any, what: Any, begin: Callable[[], Any], wait: Callable[[Any], object]
) -> None:
    """Keep ``what`` on once the array goes that shares its memory, for a borrower without queues to mark.

    Such a borrower computes one thing after the other: what was queued then is done when a result is there
    that it begins afterwards. One whose results do not tell is waited for when it is asked again, by when it
    has most likely got there.
    """
    result = cache(begin)

    def is_done() -> bool:
        if not result.cache_info().currsize:
            result()
            return False
        if hasattr(result(), "is_ready"):  # JAX's arrays have
            return bool(result().is_ready())
        wait(result())
        return True

    def wait_for_result() -> None:
        wait(result())

    weakref.finalize(imported_array, keep, what, is_done, wait_for_result).atexit = False
