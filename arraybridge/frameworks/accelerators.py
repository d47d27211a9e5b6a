"""Streams on accelerators, and the records in which frameworks report devices and memory.

`Streams` itself is for frameworks without streams, such as a PyTorch built for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

from arraybridge.types import Device

__all__ = ["DeviceDetails", "GpuMemory", "Holding", "StreamEvent", "Streams", "identity"]


def identity(x: Any) -> Any:
    return x


class StreamEvent(NamedTuple):
    """An event in a thread's stream on an accelerator, recorded by `Streams.mark`.

    ``wait`` makes the stream of the calling thread wait for it, and returns at once. ``synchronize`` blocks
    until it is reached. ``is_done`` returns whether it is reached.
    """

    streams: Streams
    device: Device
    wait: Callable[[], object]
    synchronize: Callable[[], object]
    is_done: Callable[[], bool]


class Streams:
    """Streams on accelerators, one per thread, and the order between them."""

    #: Whether the framework has streams.
    has_streams: ClassVar[bool] = False

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context in which this thread queues its work on a separate stream on ``device``.

        On entry, that stream waits for the current one. On exit, the current one waits for it. The context
        does nothing for a device without streams.
        """
        return nullcontext()

    def take_stream(self, device: Device) -> None:
        """Let this thread queue its work on a separate stream on ``device`` until it ends.

        For the threads that run the stages of a pipeline.
        """

    def record_event(self, device: Device) -> StreamEvent | None:
        """Record an event in this thread's stream on ``device``; None without streams."""
        return None

    def handle(self, device: Device) -> int | None:
        """Return the CUDA handle of this thread's stream on ``device``, for other frameworks; or None.

        None also for CUDA's per-thread default stream, whose handle means another stream in each thread.
        """
        return None

    def wait_for(self, device: Device, handle: int) -> None:
        """Make this thread's stream on ``device`` wait for another stream there, given by its handle."""
        raise NotImplementedError(f"{type(self).__name__} has no handles")

    def take_over(self, x: Any) -> Any:
        """Return ``x``, made on another stream, such that this thread's stream may use and free it.

        This thread's stream has already waited for the other one. Arrays on the host are unchanged.
        """
        return x


class DeviceDetails(NamedTuple):
    """What a framework knows of a device.

    Attributes:
        name: The name of the model; ``""`` if it is unknown.
        identity: The UUID or PCI address; ``""`` if it is unknown.
        total: The bytes of its memory; None if that is unknown.
    """

    name: str = ""
    identity: str = ""
    total: int | None = None


class GpuMemory(NamedTuple):
    """Free and total bytes of a GPU's memory."""

    free: int
    total: int


class Holding(NamedTuple):
    """Bytes that one holder uses on one device; None if they are not counted.

    Attributes:
        device: the device string, ``"cpu"`` or ``"gpu:0"``.
        holder: a framework's name, ``"this process"`` (on the host), ``"this process, otherwise"``,
            ``"other processes"``, or ``"everything else"``.
        used: bytes of live arrays; for a process, all bytes that it holds.
        cached: bytes that the framework keeps for future arrays.
        peak: the maximum of ``used``.
    """

    device: str
    holder: str
    used: int | None
    cached: int | None = None
    peak: int | None = None

    @property
    def reserved(self) -> int | None:
        """The bytes that the holder has allocated: ``used`` plus ``cached``; None if one is unknown."""
        return None if self.used is None or self.cached is None else self.used + self.cached

    @property
    def fragmentation(self) -> float | None:
        """The fraction of ``reserved`` that no live array uses, from 0 to 1; None if it is unknown.

        A high value after an out-of-memory error means that free memory is fragmented, or in the cache of
        another framework.
        """
        return None if self.reserved is None else (self.cached or 0) / max(1, self.reserved)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ``reserved`` and ``fragmentation``."""
        return {**self._asdict(), "reserved": self.reserved, "fragmentation": self.fragmentation}
