"""Workers of Dask: how they are started and prepared, and what they tell."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from distributed import Client, LocalCluster, WorkerPlugin, get_worker

from arraybridge import hardware
from arraybridge.conversion import placement
from arraybridge.dask import array_registration
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.memory import cleanup, oom_recovery


@dataclass
class WorkerSetup(WorkerPlugin):  # type: ignore[misc]
    """The plugin that `prepare` gives to workers; its fields are what `prepare` takes."""

    environment: Mapping[str, str]
    share_memory: bool
    own_gpu: bool | None
    reaches: Collection[str]

    name = "arraybridge"

    def setup(self, worker: Any) -> None:
        """Called by Dask when the worker has started."""
        os.environ.update(self.environment)
        array_registration.register_transport()
        array_registration.register_memory(worker, self.reaches)
        own = "dask_cuda" in sys.modules if self.own_gpu is None else self.own_gpu
        placement.only_gpu = 0 if own else None
        if self.share_memory:
            cleanup.share_gpu_memory("torch")


def cluster(
    n_workers: int | None = None,
    *,
    gpus: bool | None = None,
    share_memory: bool = False,
    fraction: float | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Workers on this machine: one for each NVIDIA card, or, where there is none, for its processors.

    Each worker is a process that has the settings of `coexist` before its first task, and that knows arrays
    of every framework.

    Args:
        n_workers: how many; None: one for each card, or as Dask sees fit. No more than there are cards.
        gpus: False: workers for the processors, on a machine with cards too. None: for the cards if there
            are any.
        share_memory: whether torch and CuPy take memory from one pool, see `share_gpu_memory`. Needs cards.
        fraction: as for `coexist`.
        env: more environment variables of the workers. They are set when a worker has imported the script
            that started it; what a package reads while that script imports it belongs into ``os.environ``.
        **options: for ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``, as
            ``threads_per_worker``.

    Returns:
        a ``LocalCUDACluster`` or a ``LocalCluster``: close it, or use it in a ``with`` statement. The workers
        are spawned: in a script this belongs under ``if __name__ == "__main__":``.

    Raises:
        FrameworkNotInstalledError: there are cards, and dask-cuda is missing.
        DeviceNotFoundError: ``share_memory`` without a card.
    """
    on_gpus = bool(hardware.gpus()) if gpus is None else gpus
    environment = {**cleanup.coexistence(fraction), **(env or {})}
    started = (_cuda_cluster() if on_gpus else LocalCluster)(n_workers=n_workers, **options)
    with ExitStack() as undone:
        undone.callback(started.close)
        with Client(started, set_as_default=False) as client:
            prepare(client, share_memory=share_memory, own_gpu=on_gpus, env=environment)
        undone.pop_all()
    return started


def _cuda_cluster() -> Any:
    """The class of dask-cuda."""
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:  # it imports half where the bindings of its extras cu12 and cu13 are missing
        raise FrameworkNotInstalledError(
            "There are NVIDIA cards, for which cluster() needs dask-cuda.",
            reason=str(error),
            advice='Run pip install "dask-cuda[cu13]" (or [cu12], for CUDA 12), or pass cards=False for'
            " workers without cards.",
        ) from error
    return LocalCUDACluster


def prepare(
    client: Any,
    *,
    share_memory: bool = False,
    own_gpu: bool | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Do for the workers of a cluster that was started otherwise what `cluster` does for its own.

    Prepare a cluster before anything is sent to it: from then on this process writes arrays as prepared
    workers read them. Other clients of that cluster have to `prepare` it too.

    Args:
        client: a ``distributed.Client``. Workers that join later are prepared as well.
        share_memory: whether torch and CuPy take memory from one pool in the workers.
        own_gpu: whether every ``gpu_id`` of a decorator means the first card that a worker sees. None: where
            dask-cuda started the worker, which makes that card its own.
        env: environment variables of the workers, such as those that `coexist` returns.
    """
    reaches = {array_registration.reach(), *client.run(array_registration.reach).values()}
    client.register_plugin(WorkerSetup(env or {}, share_memory, own_gpu, reaches))
    array_registration.register_transport()


# -- what they tell ------------------------------------------------------------------------------------


def on_this_worker() -> str:
    """Which worker this is, in words for an error; ``""`` outside of one."""
    try:
        return f" on worker {get_worker().address}"
    except ValueError:  # what it raises outside a worker
        return ""


_counts = {"retry": 0, "split": 0}
_counts_lock = threading.Lock()
# Below "distributed.worker", whose messages `client.get_worker_logs()` shows.
_log = logging.getLogger("distributed.worker.arraybridge")


def _note(step: str, message: str) -> None:
    with _counts_lock:
        _counts[step] += 1
    if on_this_worker():
        _log.info(message)


oom_recovery.watchers.append(_note)


def recoveries() -> dict[str, int]:
    """How often, in this process, something ran out of memory and was tried again, whole or in halves.

    On a cluster, ``client.run(recoveries)`` asks every worker; the steps stand in
    ``client.get_worker_logs()``.

    Returns:
        ``{"retry": …, "split": …}``, counted since this name was first used.

    >>> sorted(recoveries())
    ['retry', 'split']
    """
    with _counts_lock:
        return dict(_counts)


array_registration.register_tokens()
