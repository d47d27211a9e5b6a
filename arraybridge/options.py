"""Settings of a thread or task, and the environment variables behind them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal

from arraybridge.types import above

__all__ = ["MissingGpu", "missing_gpu", "settings"]

MissingGpu = Literal["error", "host"]
Profiler = Literal["torch", "jax", "nvtx"]

_missing_gpu: ContextVar[MissingGpu | None] = ContextVar("arraybridge_missing_gpu", default=None)


def missing_gpu() -> MissingGpu:
    """What to do when a GPU that was asked for is missing, in this thread or task."""
    chosen = _missing_gpu.get() or os.environ.get("ARRAYBRIDGE_MISSING_GPU") or "error"
    checked: MissingGpu = _checked(chosen, "ARRAYBRIDGE_MISSING_GPU", "error", "host")
    return checked


def _checked(value: object, name: str, *choices: str) -> Any:
    if not isinstance(value, str) or value not in choices:  # an array would be compared value by value
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
    if missing_gpu is not None:
        _checked(missing_gpu, "missing_gpu", "error", "host")
    if annotate is not None:
        _checked(annotate, "annotate", "torch", "jax", "nvtx")
    token = _missing_gpu.set(missing_gpu or _missing_gpu.get())
    try:
        with nullcontext() if annotate is None else above["annotate"](annotate):
            yield
    finally:
        with suppress(ValueError):  # it is closed in another thread or task, whose own setting stays
            _missing_gpu.reset(token)
