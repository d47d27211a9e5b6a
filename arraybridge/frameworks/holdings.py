"""What this process and each framework hold, on which device."""

from __future__ import annotations

from arraybridge.frameworks.parts import Holding
from arraybridge.frameworks.registry import loaded
from arraybridge.machine import own_memory

__all__ = ["THIS_PROCESS", "holdings"]

#: The holder of the host's memory.
THIS_PROCESS = "this process"


def holdings() -> list[Holding]:
    """This process on the host, and each framework on each device that it has opened.

    Opens nothing, and costs next to nothing.
    """
    used, peak = own_memory()
    own = Holding("cpu", THIS_PROCESS, used, peak=peak)
    return [own, *(holding for one in loaded() for holding in one.pool.usage())]
