"""What this process and each framework hold, on which device."""

from __future__ import annotations

from typing import Any, NamedTuple

from arraybridge.frameworks.registry import loaded
from arraybridge.machine import own_memory

__all__ = ["THIS_PROCESS", "Holding", "holdings"]

#: The holder of the host's memory.
THIS_PROCESS = "this process"


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


def holdings() -> list[Holding]:
    """This process on the host, and each framework on each device that it has opened.

    Opens nothing, and costs next to nothing.
    """
    used, peak = own_memory()
    own = Holding("cpu", THIS_PROCESS, used, None, peak)
    usages = [(one.name, usage) for one in loaded() for usage in one.pool.usage()]
    return [own, *(Holding(str(u.device), name, u.used, u.cached, u.peak) for name, u in usages)]
