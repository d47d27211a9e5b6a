"""What a framework answers with: its queues of work on accelerators, marks in them, and what it holds there.

`Streams` as it stands here is the answer of a framework without queues. A framework decides for each of its
instances: torch built for the CPU has none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from arraybridge.types import Device

__all__ = ["DeviceDetails", "GpuMemory", "Holding", "Mark", "Streams", "itself"]


def itself(x: Any) -> Any:
    return x


class Mark(NamedTuple):
    """A point in a thread's queue of work on an accelerator, as `Streams.mark` makes it.

    ``wait`` lets the queue of the calling thread wait for it, without waiting itself; ``synchronize`` waits;
    ``is_done`` looks.
    """

    streams: Streams
    device: Device
    wait: Callable[[], object]
    synchronize: Callable[[], object]
    is_done: Callable[[], bool]


class Streams:
    """Queues of work on accelerators, one a thread, and the order between them."""

    #: Whether there are any.
    has_queues: ClassVar[bool] = False

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        """A context in which this thread queues its work on a stream of its own on ``device``.

        The stream waits for what the current one holds on entry, and the current one waits for it on exit.
        A device without streams has a context that does nothing.
        """
        return nullcontext()

    def take_stream(self, device: Device) -> None:
        """From now on this thread queues its work on ``device`` on a stream of its own.

        For threads that run a stage of a pipeline, and end.
        """

    def mark(self, device: Device) -> Mark | None:
        """The point that this thread's queue of work on ``device`` has reached; None without such queues."""
        return None

    def handle(self, device: Device) -> int | None:
        """CUDA's handle of this thread's queue of work on ``device``, which others can wait for; or None.

        The handle for the default stream of whichever thread uses it is another one in each, and so is none.
        """
        return None

    def wait_for(self, device: Device, handle: int) -> None:
        """Let this thread's queue on ``device`` wait for what another one there holds, by its handle."""
        raise NotImplementedError(f"{type(self).__name__} has no handles")

    def take_over(self, x: Any) -> Any:
        """``x``, made on another stream, safe to be used and freed on the present one of this thread.

        The present one has waited for the other since ``x`` was made. Arrays on the host are as they were.
        """
        return x


@dataclass(frozen=True, slots=True)
class DeviceDetails:
    """What a framework knows of a device.

    Attributes:
        name: The name of the model; ``""`` if it is unknown.
        identity: The UUID or PCI address; ``""`` if it is unknown.
        total: The bytes of its memory; None if that is unknown.
    """

    name: str = ""
    identity: str = ""
    total: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU's memory: those that are free, and all."""

    free: int
    total: int


class Holding(NamedTuple):
    """Bytes that one holder has on one device; None where nobody counts them.

    Attributes:
        device: the device in words, ``"cpu"`` or ``"gpu:0"``.
        holder: a framework's name, ``"this process"`` (on the host), ``"this process, otherwise"``,
            ``"other processes"``, or ``"everything else"``.
        used: held by live arrays (by a process: all that it holds).
        cached: kept by the framework for arrays to come.
        peak: the most that ``used`` has been.
    """

    device: str
    holder: str
    used: int | None
    cached: int | None = None
    peak: int | None = None

    @property
    def reserved(self) -> int | None:
        """What the holder has taken from the device: ``used`` and ``cached``; None where it does not tell."""
        return None if self.used is None or self.cached is None else self.used + self.cached

    @property
    def fragmentation(self) -> float | None:
        """The part of what is reserved that no live array uses, from 0 to 1; None where it does not tell.

        Much of it beside an error of memory that has run out says that free memory lies in pieces, or in
        another framework's cache.
        """
        return None if self.reserved is None else (self.cached or 0) / max(1, self.reserved)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ``reserved`` and ``fragmentation``."""
        return {**self._asdict(), "reserved": self.reserved, "fragmentation": self.fragmentation}
