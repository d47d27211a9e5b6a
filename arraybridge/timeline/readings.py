"""How much memory is in use, where a reading costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from arraybridge.frameworks.holdings import THIS_PROCESS, holdings

__all__ = ["memory"]


def memory() -> Iterator[tuple[str, int]]:
    """Device and bytes: of this process on the host, and of the arrays of each framework on its cards."""
    for row in holdings():
        if row.used is not None:
            yield row.device if row.holder == THIS_PROCESS else f"{row.device} {row.holder}", row.used
