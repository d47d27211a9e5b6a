"""Start and prepare Dask workers, and count their out-of-memory recoveries."""

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
from arraybridge.conversion import device_resolution
from arraybridge.dask import array_registration, worker_shared_memory
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.memory import gpu_sharing, oom_recovery
from arraybridge.validation import add_hints, bool_option, whole_number


@dataclass
class WorkerSetup(WorkerPlugin):  # type: ignore[misc]
    """The worker plug-in of `prepare`; its fields are the arguments of `prepare`."""

    environment: Mapping[str, str]
    share_memory: bool
    own_gpu: bool | None
    reaches: Collection[str]

    name = "arraybridge"

    def setup(self, worker: Any) -> None:
        """Set up a worker that has started; called by Dask."""
        os.environ.update(self.environment)
        array_registration.register_transport()
        worker_shared_memory.register_memory(worker, self.reaches)
        own = "dask_cuda" in sys.modules if self.own_gpu is None else self.own_gpu
        device_resolution.only_gpu = 0 if own else None
        if self.share_memory:
            gpu_sharing.share_gpu_memory("torch")


@add_hints
def cluster(
    n_workers: int | None = None,
    *,
    gpus: bool | None = None,
    share_memory: bool = False,
    fraction: float | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Start workers on this machine: one per NVIDIA GPU, or CPU workers if there is no GPU.

    Each worker is a process with the settings of `coexist` and support for arrays of every framework. The
    processes are spawned, so call this function under ``if __name__ == "__main__":`` in a script.

    Args:
        n_workers: The number of workers, at most one per GPU. Defaults to one per GPU; the default for CPU
            workers is that of ``LocalCluster``.
        gpus: Whether to start GPU workers. Defaults to True if there is a GPU.
        share_memory: Whether PyTorch and CuPy allocate from one pool; see `share_gpu_memory`. Requires a GPU.
        fraction: As for `coexist`.
        env: More environment variables for the workers. They are set after a worker has imported the script
            that calls this function. Set variables that a package reads on import in ``os.environ`` instead.
        **options: Options of ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``, such as
            ``threads_per_worker``.

    Returns:
        A ``LocalCUDACluster`` or ``LocalCluster``. Close it, or use it in a ``with`` statement.

    Raises:
        FrameworkNotInstalledError: If there is a GPU, but dask-cuda is not installed.
        DeviceNotFoundError: If ``share_memory`` is set without a GPU.
        TypeError: If ``n_workers`` is not an int, ``gpus`` or ``share_memory`` is not a bool,
            or ``env`` is not a mapping.
        ValueError: If ``n_workers`` is less than 1.

    Example::

        with cluster() as workers, Client(workers):
            map_blocks(row_sums, images, drop_axis=1).compute()
    """
    if n_workers is not None:
        n_workers = whole_number("n_workers", n_workers, least=1)
    bool_option("gpus", gpus, optional=True)
    bool_option("share_memory", share_memory)
    _check_env(env)
    on_gpus = bool(hardware.gpus()) if gpus is None else gpus
    environment = {**gpu_sharing.coexistence(fraction), **(env or {})}
    cluster_class = _cuda_cluster() if on_gpus else LocalCluster
    started = cluster_class(n_workers=n_workers, **options)
    with ExitStack() as undone:
        undone.callback(started.close)
        with Client(started, set_as_default=False) as client:
            prepare(client, share_memory=share_memory, own_gpu=on_gpus, env=environment)
        undone.pop_all()
    return started


def _check_env(env: Any) -> None:
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env={env!r} must be a dict of environment variables, such as {{'NAME': 'value'}}.")


def _cuda_cluster() -> Any:
    """Return the cluster class of dask-cuda."""
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        # Raised even if only the bindings from its extras cu12 and cu13 are missing
        # (rapidsai/dask-cuda#1549).
        raise FrameworkNotInstalledError(
            "cluster() needs dask-cuda to start workers on NVIDIA GPUs.",
            reason=str(error),
            advice='Run pip install "dask-cuda[cu13]" (or [cu12], for CUDA 12), or pass gpus=False for'
            " CPU workers.",
        ) from error
    return LocalCUDACluster


@add_hints
def prepare(
    client: Any,
    *,
    share_memory: bool = False,
    own_gpu: bool | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Prepare the workers of a cluster that was not started by `cluster`.

    Call this function before sending data. From then on, this process serializes arrays for prepared workers.
    Other clients of the cluster must call `prepare` too.

    Args:
        client: A ``distributed.Client``. Workers that join later are prepared as well.
        share_memory: Whether PyTorch and CuPy allocate from one pool in the workers.
        own_gpu: Whether every ``gpu_id`` of a decorator means the first GPU that a worker sees. Defaults to
            True for workers started by dask-cuda, which puts the GPU of each worker first.
        env: Environment variables to set in the workers, such as those that `coexist` returns.

    Raises:
        TypeError: If ``client`` is not a client, ``share_memory`` or ``own_gpu`` is not a bool, or ``env`` is
            not a mapping.

    Example::

        with Client("scheduler:8786") as client:
            prepare(client)
    """
    if not isinstance(client, Client):
        raise TypeError(
            f"prepare() expected a distributed.Client, got {type(client).__name__}. Connect to the cluster"
            " first, as in prepare(Client(cluster))."
        )
    bool_option("share_memory", share_memory)
    bool_option("own_gpu", own_gpu, optional=True)
    _check_env(env)
    reaches = {worker_shared_memory.reach(), *client.run(worker_shared_memory.reach).values()}
    client.register_plugin(WorkerSetup(env or {}, share_memory, own_gpu, reaches))
    array_registration.register_transport()


# -- recoveries ----------------------------------------------------------------------------------------


def on_this_worker() -> str:
    """Return ``" on worker <address>"`` for messages; ``""`` outside of a worker."""
    try:
        return f" on worker {get_worker().address}"
    except ValueError:  # not in a worker
        return ""


_counts = {"retry": 0, "split": 0}
_counts_lock = threading.Lock()
# A child of the logger "distributed.worker", whose messages `client.get_worker_logs()` returns.
_log = logging.getLogger("distributed.worker.arraybridge")


def _note(step: str, message: str) -> None:
    with _counts_lock:
        _counts[step] += 1
    if on_this_worker():
        _log.info(message)


oom_recovery.watchers.append(_note)


def recoveries() -> dict[str, int]:
    """Return how often this process ran out of memory and then retried a call or split its input.

    On a cluster, ``client.run(recoveries)`` returns the counts of every worker, and
    ``client.get_worker_logs()`` the individual steps.

    Returns:
        ``{"retry": …, "split": …}``, counted since this module was imported.

    >>> sorted(recoveries())
    ['retry', 'split']
    """
    with _counts_lock:
        return dict(_counts)


array_registration.register_tokens()
array_registration.register_joining()
