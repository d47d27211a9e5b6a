"""How much memory is in use, where a reading costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from arraybridge.frameworks.hostmemory import own_memory
from arraybridge.frameworks.registry import loaded

__all__ = ["memory"]


def memory() -> Iterator[tuple[str, int]]:
    """Device and bytes: of this process on the host, and of the arrays of each framework on its cards."""
    used, _ = own_memory()
    if used is not None:
        yield "cpu", used
    for one in loaded():
        for usage in one.pool.usage():
            if usage.used is not None:
                yield f"{usage.device} {one.name}", usage.used
