"""Timeouts of test clusters, which may close slowly on a busy machine."""

from __future__ import annotations

from distributed import Nanny


def let_workers_end() -> None:
    """Let a worker process take two minutes to end.

    By default, Dask waits 5 seconds, kills the process, and may then raise.
    """
    Nanny.close.__defaults__ = (120, "nanny-close")
