"""Workers of Dask: how they are started and prepared, and what they tell."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask
from distributed import LocalCluster, WorkerPlugin, get_worker

from arraybridge import machine, placement
from arraybridge.dask import arrays
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.memory import cleanup, recovery


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
        """Called by Dask when the worker has started."""
        arrays.register_transport()
        own = "dask_cuda" in sys.modules if self.own_card is None else self.own_card
        placement.only_card = 0 if own else None
        if self.share_memory:
            cleanup.share_gpu_memory("torch")


def cluster(
    n_workers: int | None = None,
    *,
    threads_per_worker: int | None = None,
    cards: bool | None = None,
    share_memory: bool = False,
    fraction: float | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Workers on this machine: one for each NVIDIA card, or, where there is none, for its processors.

    Each worker is a process that starts with the settings of `coexist`, before any framework is imported
    there, and that knows arrays of every framework.

    Args:
        n_workers: how many; None: one for each card, or as Dask sees fit. No more than there are cards.
        threads_per_worker: None: one on a card, or as Dask sees fit.
        cards: False: workers for the processors, on a machine with cards too. None: for the cards if there
            are any.
        share_memory: whether torch and CuPy take memory from one pool, see `share_gpu_memory`. Needs cards.
        fraction: as for `coexist`.
        env: more environment variables of the workers. A worker that Dask restarts later leaves them in this
            process, too.
        **options: for ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``.

    Returns:
        a ``LocalCUDACluster`` or a ``LocalCluster``: close it, or use it in a ``with`` statement. The workers
        are spawned: in a script this belongs under ``if __name__ == "__main__":``.

    Raises:
        FrameworkNotInstalledError: there are cards, and dask-cuda is missing.
        DeviceNotFoundError: ``share_memory`` without a card.
    """
    on_cards = bool(machine.cards()) if cards is None else cards
    if share_memory and not on_cards:
        registry.framework("torch").find_device(registry.framework("torch").accelerator(0))  # raises
    environment = {**cleanup.coexistence(fraction), **(env or {})}
    setup = WorkerSetup(share_memory=share_memory and on_cards, own_card=on_cards)
    plugins = [*options.pop("plugins", ()), setup]
    if threads_per_worker is not None:
        options["threads_per_worker"] = threads_per_worker
    arrays.register_transport()
    # `env` reaches a worker once it has imported the script that started it, which may import frameworks;
    # these are there before. Workers that are added later get them by `env`.
    early = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **environment}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": early}), _environment_kept(early):
        if on_cards:
            return _cuda_cluster(environment, plugins, n_workers=n_workers, **options)
        return LocalCluster(n_workers=n_workers, env=environment, plugins=plugins, **options)


@contextmanager
def _environment_kept(names: Iterable[str]) -> Iterator[None]:
    """Put these variables of this process back: Dask sets them here so that its workers inherit them."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cuda_cluster(environment: dict[str, str], plugins: list[Any], **options: Any) -> Any:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:  # it imports half where the bindings of its extras cu12 and cu13 are missing
        raise FrameworkNotInstalledError(
            "There are NVIDIA cards, for which cluster() needs dask-cuda; run pip install"
            ' "dask-cuda[cu13]" (or [cu12], for CUDA 12), or pass cards=False for workers'
            " without cards.",
            reason=str(error),
        ) from error

    class Cluster(LocalCUDACluster):  # type: ignore[misc]
        """Its own environment and plugins take the place of ours, so that ours are added to each worker's."""

        def new_worker_spec(self) -> dict[Any, Any]:
            spec: dict[Any, Any] = super().new_worker_spec()
            for worker in spec.values():
                options = worker["options"]
                options["env"] = {**environment, **options.get("env", {})}
                options["plugins"] = [*options.get("plugins", ()), *plugins]
            return spec

    Cluster.__name__ = LocalCUDACluster.__name__
    return Cluster(**options)


def prepare(client: Any, *, share_memory: bool = False, own_card: bool | None = None) -> None:
    """Do for the workers of a cluster that was started otherwise what `cluster` does for its own.

    Prepare a cluster before anything is sent to it: from then on this process writes arrays as prepared
    workers read them. Other clients of that cluster have to `prepare` it too.

    Args:
        client: a ``distributed.Client``. Workers that join later are prepared as well.
        share_memory: whether torch and CuPy take memory from one pool in the workers.
        own_card: whether every ``gpu_id`` of a decorator means the first card that a worker sees. None: where
            dask-cuda started the worker, which makes that card its own.
    """
    client.register_plugin(WorkerSetup(share_memory=share_memory, own_card=own_card))
    arrays.register_transport()


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
    if step in _counts:
        with _counts_lock:
            _counts[step] += 1
    if on_this_worker():
        _log.info(message)


recovery.watchers.append(_note)


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


arrays.register_tokens()
