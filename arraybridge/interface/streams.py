"""The component `Streams`: streams on accelerators, one per thread, and the order between them.

If an array passes from one framework to another, `Interchange.import_from` of the receiving framework orders
their streams. `parallel.streams_between_threads` orders threads, and `interface.keep_alives` the release of
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

from arraybridge.device import Device

__all__ = ["StreamEvent", "Streams", "identity"]


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


class StreamEvent(NamedTuple):
    """An event in a thread's stream on an accelerator, recorded by `Streams.record_event`.

    Attributes:
        streams: The `Streams` component of the framework.
        device: The device of the stream.
        wait: Makes the stream of the calling thread wait for the event, and returns immediately.
        synchronize: Blocks until all work before the event is done.
        is_done: Returns whether all work before the event is done.
    """

    streams: Streams
    device: Device
    wait: Callable[[], object]
    synchronize: Callable[[], object]
    is_done: Callable[[], bool]


class Streams:
    """Streams on accelerators, one per thread, and the order between them.

    This base class is for frameworks without streams, such as a CPU build of PyTorch.
    """

    #: Whether the framework has streams.
    has_streams: ClassVar[bool] = False

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context manager that queues the work of this thread on a separate stream.

        On entry, that stream waits for the current one. On exit, the current one waits for it.

        Args:
            device: The device of the stream.

        Returns:
            A context manager. It does nothing for a device without streams.
        """
        return nullcontext()

    def take_stream(self, device: Device) -> None:
        """Make this thread queue its work on a separate stream until the thread ends.

        The threads that run the stages of a pipeline call this method.

        Args:
            device: The device of the stream.
        """

    def record_event(self, device: Device) -> StreamEvent | None:
        """Record an event in this thread's stream.

        Args:
            device: The device of the stream.

        Returns:
            The event; None if the framework has no streams.
        """
        return None

    def handle(self, device: Device) -> int | None:
        """Return the CUDA handle of this thread's stream, for other frameworks.

        Args:
            device: The device of the stream.

        Returns:
            The handle. None if the framework has no streams, or for CUDA's per-thread default stream, whose
            handle denotes a different stream in each thread.
        """
        return None

    def wait_for(self, device: Device, handle: int) -> None:
        """Make this thread's stream wait for another stream on the same device.

        Args:
            device: The device of both streams.
            handle: The CUDA handle of the other stream.

        Raises:
            NotImplementedError: If the framework has no stream handles.
        """
        raise NotImplementedError(f"{type(self).__name__} has no stream handles")

    def take_over(self, x: Any) -> Any:
        """Make an array from another stream safe to use and free in this thread's stream, and return it.

        Args:
            x: An array of the framework. This thread's stream has already waited for the other stream.

        Returns:
            An array that shares the memory of ``x``. Arrays in host memory are returned unchanged.
        """
        return x
