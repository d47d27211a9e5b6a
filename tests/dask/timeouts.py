"""Clusters of the tests may take as long to close as a busy machine wants."""

from __future__ import annotations

from distributed import Nanny


def let_workers_end() -> None:
    """Let a worker process take two minutes to end; Dask waits 5 seconds, kills it, and may raise then."""
    Nanny.close.__defaults__ = (120, "nanny-close")
