"""What recovery from out-of-memory did in this process, counted and told to Dask's log."""

from __future__ import annotations

import logging
import threading

from arraybridge.dask.workers import this_worker
from arraybridge.memory import recovery

__all__ = ["recoveries"]

_counts = {"retry": 0, "split": 0}
_counts_lock = threading.Lock()
# Below "distributed.worker", whose messages `client.get_worker_logs()` shows.
_log = logging.getLogger("distributed.worker.arraybridge")


def _note(step: str, message: str) -> None:
    if step in _counts:
        with _counts_lock:
            _counts[step] += 1
    if this_worker() is not None:
        _log.info(message)


recovery.watchers.append(_note)


def recoveries() -> dict[str, int]:
    """How often, in this process, something ran out of memory and was tried again, whole or in halves.

    On a cluster, ``client.run(recoveries)`` asks every worker; the steps stand in
    ``client.get_worker_logs()``.

    Returns:
        ``{"retry": …, "split": …}``, counted since `arraybridge.dask` was imported.

    >>> sorted(recoveries())
    ['retry', 'split']
    """
    with _counts_lock:
        return dict(_counts)
