"""What a framework may have besides its core: each part is an object that answers these questions.

`Framework` has an attribute for each. The classes here are the parts of a framework that lacks them: no
queues, no cache, nothing locked. A framework decides for each of its instances which parts it has: torch
built for the CPU has no streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from arraybridge import machine
from arraybridge.types import Device

__all__ = ["Holding", "Mark", "Streams"]


class Fast:
    """Functions for arrays that need no care, made once for each pair of types.

    They raise for an array that needs care: NotImplementedError or another error of Python's, or one of
    ``errors``; no user sees that.
    """

    #: What else the framework raises for an array that it does not take.
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def types(self) -> tuple[type, ...]:
        """Types for which they hold; a subclass takes the careful path."""
        return ()

    def facts(self, alignment: int) -> Callable[[Any], Hashable] | None:
        """A function that tells of a host array what its way to such a target depends on, or None.

        Of two arrays with equal facts, `check`, `device_of`, `must_copy`, `requires_grad`, `supports` and
        `cannot_view` say the same. It raises for an array that is not simply there, in the host's memory.
        """
        return None

    def view(self) -> Callable[[Any], np.ndarray] | None:
        """A function from a host array to its NumPy view, or None."""
        return None

    def into(self, take: Callable[[np.ndarray], Any]) -> Callable[[Any], Any] | None:
        """A function from a host array to what ``take`` makes of its NumPy view, or None."""
        look = self.view()
        return None if look is None else lambda x: take(look(x))

    def from_view(self) -> Callable[[np.ndarray], Any] | None:
        """A function from the NumPy view of a NumPy array to an array, faster than DLPack, or None."""
        return None

    def export(self, alignment: int) -> Callable[[Any], Any] | None:
        """A function from a host array, aligned to ``alignment`` bytes, to a DLPack capsule, or None."""
        return None

    def adopt(self, immutable: bool) -> Callable[[Any], Any] | None:
        """A function from a DLPack capsule of host memory to an array, or None.

        ``immutable``: the producer's arrays are immutable, so that a 0-d array has to be copied
        by a mutable consumer (frameworks cache scalars).
        """
        return None


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


class Pool:
    """The cards as the framework sees them, and the memory that it holds there.

    No question opens a card, but for `card_memory` and `free_memory_of`.
    """

    def is_started(self) -> bool:
        """Whether the framework has opened its accelerators; what it holds is asked only of one that has."""
        return False

    def visible_devices(self) -> tuple[Device, ...] | None:
        """The devices as far as they can be told where `Framework.devices` would open some; else None."""
        return None

    def is_scattered(self, x: Any) -> bool:
        """Whether the array's memory is spread over several devices, so that there is nothing to share."""
        return False

    def read_device(self, x: Any) -> Device | None:
        """The device that an object of the framework stands for, as ``torch.device``; None for any other."""
        return None

    def native_device(self, device: Device) -> Any:
        """The framework's own object, or name, for a device that it has; None where it has no such thing."""
        return None

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        """Name, identity (UUID or PCI address) and bytes of a device; ``""`` and None for the unknown."""
        return device.name, "", None

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        """Free and total bytes of a card; None where the framework cannot tell."""
        return None

    def free_memory_of(self, device: Device) -> int:
        """Bytes that the framework could still take on a card, its cache included; 0 where nobody tells."""
        free = machine.free_memory(device.index) if device.kind == "gpu" else None
        if free is None:
            free, _ = self.card_memory(device) or (0, 0)
        return free + sum(one.cached or 0 for one in self.usage() if one.device == device)

    def usage(self) -> list[Holding]:
        """What the framework holds, one entry for each device that it has opened."""
        return []

    def reset_peak(self) -> None:
        """Start the count of `Holding.peak` anew on every device, where that can be."""

    def oom_error(self) -> Exception:
        """An error as the framework raises it when memory runs out, for rehearsals of that."""
        return MemoryError("Unable to allocate: a rehearsal")

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        """Give cached memory on ``device`` (None: on all) back to the system; returns bytes given back.

        ``compiled``: compiled programs as well. 0 for a device that it does not have.
        """
        return 0

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        """Page-locked host memory, uint8 ``(nbytes,)``; None where there is no card to lock it for."""
        return None

    def synchronize(self) -> None:
        """Wait until all is done that this process has queued, on every device that it has opened."""

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        """Its allocator: ``allocate(bytes, card, stream)``, an address, and ``free(address)``."""
        raise NotImplementedError(f"{type(self).__name__} lends no memory")

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        """Take memory from another framework's pool from now on.

        Raises:
            RuntimeError: it holds memory of its own already.
        """
        raise NotImplementedError(f"{type(self).__name__} takes memory from no other pool")
