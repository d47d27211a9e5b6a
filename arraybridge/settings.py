"""What a thread, a task, the process or a decorator has chosen, and the environment variables behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import NoneType
from typing import Any, Literal

from arraybridge.types import Device, hooks

MissingGpu = Literal["error", "host"]
Profiler = Literal["torch", "jax", "nvtx"]

_missing_gpu: ContextVar[MissingGpu | None] = ContextVar("arraybridge_missing_gpu", default=None)


def missing_gpu() -> MissingGpu:
    """What to do when a GPU that was asked for is missing, in this thread or task."""
    chosen = _missing_gpu.get() or os.environ.get("ARRAYBRIDGE_MISSING_GPU") or "error"
    checked: MissingGpu = _check_missing_gpu(chosen, "ARRAYBRIDGE_MISSING_GPU", "error", "host")
    return checked


def _check_missing_gpu(value: object, name: str, *choices: str | None) -> Any:
    if not isinstance(value, (str, NoneType)) or value not in choices:  # an array compares value by value
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


@contextmanager
def settings(*, missing_gpu: MissingGpu | None = None, annotate: Profiler | None = None) -> Iterator[None]:
    """Change arraybridge's settings inside a ``with`` block, for this thread or task alone.

    Args:
        missing_gpu: ``"error"`` (the default of the library) refuses a GPU that is not there;
            ``"host"`` places the array on the host instead, with one warning that carries the reason.
            The environment variable ``ARRAYBRIDGE_MISSING_GPU`` does the same for a whole process.
        annotate: names conversions, decorated calls, stages and items in another profiler, as `trace` names
            them: ``"torch"`` (``torch.profiler``), ``"jax"`` (``jax.profiler``) or ``"nvtx"`` (Nsight
            Systems).

    Raises:
        ValueError: another value.
        FrameworkNotInstalledError: the package of the profiler is missing.

    >>> import arraybridge
    >>> with arraybridge.settings(missing_gpu="host"):
    ...     pass
    """
    _check_missing_gpu(missing_gpu, "missing_gpu", None, "error", "host")
    _check_missing_gpu(annotate, "annotate", None, "torch", "jax", "nvtx")
    token = _missing_gpu.set(missing_gpu or _missing_gpu.get())
    try:
        with nullcontext() if annotate is None else hooks.annotate(annotate):
            yield
    finally:
        with suppress(ValueError):  # it is closed in another thread or task, whose own setting stays
            _missing_gpu.reset(token)


# -- devices -------------------------------------------------------------------------------------------

#: The choice of `set_device` and `use_device`; None where nobody chose.
default_device: ContextVar[Device | None] = ContextVar("arraybridge_default_device", default=None)

#: The devices of the workers of `device_map` in any thread; while there is none, nobody asks `worker_device`.
busy_workers: list[Device] = []

#: The device of this worker of `device_map`: decorated functions run there that name none.
worker_device: ContextVar[Device | None] = ContextVar("arraybridge_worker_device", default=None)


def chosen_device() -> Device | None:
    """The default device that somebody chose: this thread or task, or ``ARRAYBRIDGE_DEVICE`` for the process.

    Raises:
        ValueError: the environment names no device.
    """
    words = os.environ.get("ARRAYBRIDGE_DEVICE")
    if default_device.get() is not None or not words:
        return default_device.get()
    try:
        return Device.parse(words)
    except ValueError as error:
        raise ValueError(f"ARRAYBRIDGE_DEVICE: {error}") from None
