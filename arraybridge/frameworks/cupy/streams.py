"""CuPy's current card and its streams: a stream for each thread, and memory that another one reads."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy

from arraybridge.frameworks import driver, loans
from arraybridge.frameworks.parts import Mark, Streams
from arraybridge.types import Device


@contextmanager
def on_card(index: int) -> Iterator[None]:
    """Make the card the current one of this thread for a while.

    `cupy.cuda.Device` does the same, but with CUDA 12 and later it opens the card that it goes back to: a
    process that uses the second card alone would hold memory on the first, too.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == index:
        yield
    elif runtime.is_hip or driver.has_context(before):
        with cupy.cuda.Device(index):
            yield
    else:
        try:
            with driver.primary_context(index):
                yield
        finally:
            if runtime.getDevice() != before:
                runtime.setDevice(before)


def on_loan(x: cupy.ndarray, lender: Streams, borrower: Streams, device: Device) -> cupy.ndarray:
    """The same memory, in an array with whose end the loan ends in order."""
    if not x.size:
        return x
    owner = loans.Loan(x, lender, borrower, device)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.data.mem.size or x.nbytes, owner, device.index)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


loans.captures.append(lambda: cupy.cuda.get_current_stream().is_capturing())


# CUDA's handle for the default stream of whichever thread uses it.
_OF_EACH_THREAD = 2


class CupyStreams(Streams):
    has_queues = True

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return _side_stream(device.index)

    def take_stream(self, device: Device) -> None:
        with on_card(device.index):
            # Entered and never left: to a stream that was chosen with use(), CuPy does not come back from a
            # `with` in the user's function.
            _own_stream(device.index).__enter__()

    def mark(self, device: Device) -> Mark:
        with on_card(device.index):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream())

        def wait() -> None:
            with on_card(device.index):
                cupy.cuda.get_current_stream().wait_event(event)

        return Mark(self, device, wait, event.synchronize, lambda: event.done)

    def handle(self, device: Device) -> int | None:
        with on_card(device.index):
            handle = int(cupy.cuda.get_current_stream().ptr)
            return None if handle == _OF_EACH_THREAD else handle

    def wait_for(self, device: Device, handle: int) -> None:
        with on_card(device.index):
            stream = cupy.cuda.get_current_stream()
            if stream.ptr != handle:
                # By the runtime's own call: CuPy 14.2 warns of ExternalStream, and older ones have no other.
                reached = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(reached.ptr, handle)
                stream.wait_event(reached)

    def take_over(self, x: cupy.ndarray) -> cupy.ndarray:
        # CuPy's pool knows only the stream on which a block was allocated, and may give it away again there
        # while this thread still reads it: the block is kept until this thread's work is done.
        loans.release()
        return on_loan(x, Streams(), self, Device("gpu", x.device.id))


# Streams that no thread uses now. A stream that is destroyed leaves its part of CuPy's pool behind, which is
# keyed by the handle, so that streams are used again by the threads to come. By card.
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)


_streams = threading.local()


def _own_stream(index: int) -> Any:
    """This thread's stream on the card, which is the current one."""
    own: dict[Any, Any] = _streams.__dict__  # card → stream
    if index not in own:
        try:
            own[index] = _idle[index].popleft()
        except IndexError:
            own[index] = cupy.cuda.Stream(non_blocking=True)
        thread = threading.current_thread()
        weakref.finalize(thread, _idle[index].append, own[index]).atexit = False
    return own[index]


@contextmanager
def _side_stream(index: int) -> Iterator[None]:
    """This thread's own stream on the card, as `Streams.stream` describes."""
    with on_card(index):
        side, outer = _own_stream(index), cupy.cuda.get_current_stream()
        side.wait_event(outer.record())
        try:
            with side:
                try:
                    yield
                finally:
                    for stream in (side, cupy.cuda.get_current_stream()):  # one that the function has chosen
                        outer.wait_event(stream.record())
        finally:
            # On leaving `with`, CuPy goes back to the stream that was entered last, and not to one that was
            # chosen with use().
            outer.use()
