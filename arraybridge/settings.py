"""Settings of a thread, a task or the process, and the environment variables that set their defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import NoneType
from typing import Any, Literal

from arraybridge.device import Device
from arraybridge.formatting import either
from arraybridge.hooks import hooks
from arraybridge.validation import add_hints

MissingGpu = Literal["error", "host"]
Profiler = Literal["torch", "jax", "nvtx"]

_missing_gpu: ContextVar[MissingGpu | None] = ContextVar("arraybridge_missing_gpu", default=None)


def missing_gpu() -> MissingGpu:
    """Return the ``missing_gpu`` setting of this thread or task."""
    chosen = _missing_gpu.get() or os.environ.get("ARRAYBRIDGE_MISSING_GPU") or "error"
    checked: MissingGpu = _check_missing_gpu(chosen, "ARRAYBRIDGE_MISSING_GPU", "error", "host")
    return checked


def _check_missing_gpu(value: object, name: str, *choices: str | None) -> Any:
    if not isinstance(value, (str, NoneType)) or value not in choices:  # arrays would compare elementwise
        raise ValueError(f"{name}={value!r} must be {either(choices)}.")
    return value


@add_hints
def settings(
    *, missing_gpu: MissingGpu | None = None, annotate: Profiler | None = None
) -> AbstractContextManager[None]:
    """Change settings within a ``with`` block, only for this thread or task.

    Args:
        missing_gpu: ``"error"`` raises `DeviceNotFoundError` for a missing GPU. ``"host"`` places the array
            on the host instead and emits one warning with the reason. Defaults to the environment variable
            ``ARRAYBRIDGE_MISSING_GPU``, otherwise to ``"error"``.
        annotate: The profiler that shows conversions, decorated calls, stages and items under the names that
            `trace` uses: ``"torch"`` (``torch.profiler``), ``"jax"`` (``jax.profiler``) or ``"nvtx"``
            (Nsight Systems). Defaults to None: no profiler.

    Returns:
        A context manager, which may also decorate a function.

    Raises:
        ValueError: An option has a value that is not listed above.
        FrameworkNotInstalledError: The package of the profiler is not installed.

    >>> import arraybridge
    >>> with arraybridge.settings(missing_gpu="host"):
    ...     pass
    """
    _check_missing_gpu(missing_gpu, "missing_gpu", None, "error", "host")
    _check_missing_gpu(annotate, "annotate", None, "torch", "jax", "nvtx")
    return _changed_settings(missing_gpu, annotate)


@contextmanager
def _changed_settings(missing_gpu: MissingGpu | None, annotate: Profiler | None) -> Iterator[None]:
    token = _missing_gpu.set(missing_gpu or _missing_gpu.get())
    try:
        with nullcontext() if annotate is None else hooks.annotate(annotate):
            yield
    finally:
        with suppress(ValueError):  # the block ended in another thread or task, whose setting stays
            _missing_gpu.reset(token)


# -- devices -------------------------------------------------------------------------------------------

#: The device that `set_device` or `use_device` chose, or None.
default_device: ContextVar[Device | None] = ContextVar("arraybridge_default_device", default=None)

#: The devices of all running workers of `device_map`. While this list is empty, decorated calls do not
#: read `worker_device` to choose a device, which saves time.
busy_workers: list[Device] = []

#: The device of this worker of `device_map`, for decorated functions without a device option.
worker_device: ContextVar[Device | None] = ContextVar("arraybridge_worker_device", default=None)


def device_setting() -> Device | None:
    """Return the default device of this thread or task, otherwise that in ``ARRAYBRIDGE_DEVICE``, or None.

    Raises:
        ValueError: ``ARRAYBRIDGE_DEVICE`` is not a device string.
    """
    text = os.environ.get("ARRAYBRIDGE_DEVICE")
    if default_device.get() is not None or not text:
        return default_device.get()
    try:
        return Device.parse(text)
    except ValueError as error:
        raise ValueError(f"ARRAYBRIDGE_DEVICE: {error}") from None
