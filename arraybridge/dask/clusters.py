"""Clusters of this machine, and the preparation of those that were started otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask
from distributed import LocalCluster

from arraybridge.dask import arrays
from arraybridge.dask.workers import WorkerSetup
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.memory import cleanup

__all__ = ["cluster", "prepare", "prepared"]


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
    from arraybridge.machine import cards as cards_of_cuda

    on_cards = bool(cards_of_cuda()) if cards is None else cards
    environment = {**cleanup.coexistence(fraction), **(env or {})}
    plugins = [
        *options.pop("plugins", ()),
        WorkerSetup(share_memory=share_memory and on_cards, own_card=on_cards),
    ]
    if threads_per_worker is not None:
        options["threads_per_worker"] = threads_per_worker
    if share_memory and not on_cards:
        registry.framework("torch").find_device(registry.framework("torch").accelerator(0))  # raises
    # `env` reaches a worker once it has imported the script that started it, which may import frameworks;
    # these are there before. Workers that are added later get them by `env`.
    early = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **environment}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": early}), _environment_kept(early):
        if on_cards:
            started = _cuda_cluster(environment, plugins, n_workers=n_workers, **options)
        else:
            started = LocalCluster(n_workers=n_workers, env=environment, plugins=plugins, **options)
    arrays.agree(started.scheduler_address)
    return started


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
            return prepared(super().new_worker_spec(), environment, plugins)

    Cluster.__name__ = LocalCUDACluster.__name__
    return Cluster(**options)


def prepared(spec: dict[Any, Any], environment: Mapping[str, str], plugins: list[Any]) -> dict[Any, Any]:
    """The specification of workers with this environment, where it says nothing itself, and more plugins."""
    for worker in spec.values():
        options = worker["options"]
        options["env"] = {**environment, **options.get("env", {})}
        options["plugins"] = [*options.get("plugins", ()), *plugins]
    return spec


def prepare(client: Any, *, share_memory: bool = False, own_card: bool | None = None) -> None:
    """Do for the workers of a cluster that was started otherwise what `cluster` does for its own.

    `map_blocks` runs without this; but then arrays of torch, JAX and TensorFlow that travel by themselves, as
    results of ``client.submit``, are pickled, and those of pyclesperanto cannot travel. Other clients of that
    cluster have to `prepare` it too.

    Args:
        client: a ``distributed.Client``. Workers that join later are prepared as well.
        share_memory: whether torch and CuPy take memory from one pool in the workers.
        own_card: whether every ``gpu_id`` of a decorator means the first card that a worker sees. None: where
            dask-cuda started the worker, which makes that card its own.
    """
    client.register_plugin(WorkerSetup(share_memory=share_memory, own_card=own_card))
    arrays.agree(client.scheduler.address)
