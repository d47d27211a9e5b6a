"""The component `Memory`: a framework's memory on accelerators, its caches and its out-of-memory errors."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from arraybridge.device import Device
from arraybridge.interface.component import Component

__all__ = ["DeviceDetails", "GpuMemory", "Holding", "Memory"]


class Memory(Component):
    """The interface to a framework's memory on accelerators and to its out-of-memory errors.

    Attributes:
        waits_for_copies: Whether freed memory of `allocate_pinned` is reused only after the framework's own
            asynchronous copies from it are done.
    """

    waits_for_copies: ClassVar[bool] = False

    def is_oom(self, error: BaseException) -> bool:
        """Return whether an exception is an out-of-memory error of this framework.

        Args:
            error: Any exception. Its cause is not considered.

        Returns:
            By default, whether the exception is a ``MemoryError``.
        """
        return isinstance(error, MemoryError)

    def is_oom_text(self, text: str) -> bool:
        """Return whether a message quoted by another exception is an out-of-memory message of this framework.

        Args:
            text: The message. The class of the quoted exception is unknown.

        Returns:
            True only for messages that begin like the framework's own.
        """
        return False

    def device_details(self, device: Device) -> DeviceDetails:
        """Return the name, identity and memory size of a device, if the framework knows them.

        Args:
            device: One of the available devices.

        Returns:
            The details.
        """
        return DeviceDetails(device.name)

    def device_memory(self, device: Device) -> GpuMemory | None:
        """Return the free and total memory of a GPU.

        Args:
            device: One of the available devices.

        Returns:
            Both sizes in bytes; None if the framework does not know them.
        """
        return None

    def free_memory_of(self, device: Device) -> int:
        """Return the memory that the framework can still allocate on a GPU, including its cache.

        Args:
            device: One of the available devices.

        Returns:
            The size in bytes; 0 if it is unknown.
        """
        from arraybridge import hardware  # takes 1 ms; not needed by `import arraybridge`

        free = hardware.free_memory(device.index) if device.kind == "gpu" else None
        if free is None:
            memory = self.device_memory(device)
            free = 0 if memory is None else memory.free
        return free + sum(one.cached or 0 for one in self.usage() if one.device == device)

    def usage(self) -> list[Holding]:
        """Return the memory that the framework holds, with one entry per device that it has initialized."""
        return []

    def reset_peak(self) -> None:
        """Reset `Holding.peak` on all devices, if the framework tracks it."""

    def oom_error(self) -> Exception:
        """Return an error like those that the framework raises when memory runs out, for simulations."""
        return MemoryError("Unable to allocate memory (simulated)")

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        """Release cached memory.

        Args:
            device: The device; None for all devices.
            compiled: Whether to release compiled programs too. Defaults to False.

        Returns:
            The released size in bytes; 0 for a device that the framework does not have.
        """
        return 0

    def allocate_pinned(self, nbytes: int) -> np.ndarray | None:
        """Allocate page-locked host memory.

        Args:
            nbytes: The size in bytes.

        Returns:
            A uint8 array of shape ``(nbytes,)``; None if there is no GPU.
        """
        return None

    def synchronize(self) -> None:
        """Wait for all work that this process has queued, on every device that it has initialized."""


class DeviceDetails(NamedTuple):
    """The details of a device that a framework reports.

    Attributes:
        name: The name of the model; ``""`` if it is unknown.
        identity: The UUID or PCI address; ``""`` if it is unknown.
        total: The size of the device's memory in bytes; None if it is unknown.
    """

    name: str = ""
    identity: str = ""
    total: int | None = None


class GpuMemory(NamedTuple):
    """The memory of a GPU.

    Attributes:
        free: The free memory in bytes.
        total: The total memory in bytes.
    """

    free: int
    total: int


class Holding(NamedTuple):
    """The memory that a framework or process uses on one device. Sizes are in bytes; None means unknown.

    Attributes:
        device: The device string, ``"cpu"`` or ``"gpu:0"``.
        holder: The name of a framework, ``"this process"`` (on the host), ``"this process, otherwise"``
            (memory of this process that no framework reports), ``"other processes"``, or ``"everything
            else"``.
        used: The size of live arrays; for a process, all memory that it holds.
        cached: The memory that the framework reserves for future arrays.
        peak: The maximum of ``used``.
    """

    device: str
    holder: str
    used: int | None
    cached: int | None = None
    peak: int | None = None

    @property
    def reserved(self) -> int | None:
        """The allocated memory in bytes: ``used`` plus ``cached``, or None if either is unknown."""
        return None if self.used is None or self.cached is None else self.used + self.cached

    @property
    def fragmentation(self) -> float | None:
        """The fraction of ``reserved`` that no live array uses, from 0 to 1; None if it is unknown.

        A high value after an out-of-memory error means that free memory is fragmented, or in the cache of
        another framework.
        """
        return None if self.reserved is None else (self.cached or 0) / max(1, self.reserved)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ``reserved`` and ``fragmentation`` as a dictionary."""
        return {**self._asdict(), "reserved": self.reserved, "fragmentation": self.fragmentation}
