"""A worker of Dask, from the inside: what it is told when it starts, and which one this is."""

from __future__ import annotations

import sys
from typing import Any

from distributed import WorkerPlugin, get_worker

from arraybridge import placement
from arraybridge.dask import arrays
from arraybridge.memory import cleanup

__all__ = ["WorkerSetup", "arrive", "on_this_worker", "this_worker"]


class WorkerSetup(WorkerPlugin):  # type: ignore[misc]
    """The plugin that `cluster` and `prepare` give to workers.

    Args:
        share_memory: whether torch and CuPy take memory from one pool in the worker.
        own_card: whether every ``gpu_id`` of a decorator means the worker's first card, which dask-cuda makes
            its own. None: where dask-cuda started the worker.
    """

    name = "arraybridge"

    def __init__(self, *, share_memory: bool = False, own_card: bool | None = None) -> None:
        self.share_memory = share_memory
        self.own_card = own_card

    def __repr__(self) -> str:
        return f"WorkerSetup(share_memory={self.share_memory}, own_card={self.own_card})"

    def setup(self, worker: Any) -> None:
        """Called by Dask when the worker has started. The import of this module has registered the arrays."""
        global _arrived
        if worker is not None:
            arrays.agree(worker.scheduler.address)
        _arrived = True  # the first block has nothing to find out any more
        self.take_card()
        if self.share_memory:
            cleanup.share_gpu_memory("torch")

    def take_card(self) -> None:
        own = "dask_cuda" in sys.modules if self.own_card is None else self.own_card
        placement.only_card = 0 if own else None


def this_worker() -> Any:
    """The Dask worker on which this runs, or None."""
    try:
        return get_worker()
    except ValueError:  # what it raises outside a worker
        return None


def on_this_worker() -> str:
    worker = this_worker()
    return "" if worker is None else f" on worker {worker.address}"


_arrived = False


def arrive() -> None:
    """Before the first block of a process: one that dask-cuda started takes the card meant for it."""
    global _arrived
    if not _arrived:
        if this_worker() is not None:
            WorkerSetup().take_card()
        _arrived = True


# A worker imports this when it is told of its setup, before the first array comes.
arrays.register()
