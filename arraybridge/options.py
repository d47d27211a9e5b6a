"""Settings of a thread or task, and the environment variables behind them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

__all__ = ["MissingGpu", "missing_gpu", "settings"]

MissingGpu = Literal["error", "host"]

_missing_gpu: ContextVar[MissingGpu | None] = ContextVar("arraybridge_missing_gpu", default=None)


def missing_gpu() -> MissingGpu:
    """What to do when a GPU that was asked for is missing, in this thread or task."""
    chosen = _missing_gpu.get() or os.environ.get("ARRAYBRIDGE_MISSING_GPU") or "error"
    return _checked(chosen, "ARRAYBRIDGE_MISSING_GPU")


def _checked(value: str, what: str) -> MissingGpu:
    if value == "error":
        return "error"
    if value == "host":
        return "host"
    raise ValueError(f"{what} is {value!r}; it must be 'error' or 'host'")


@contextmanager
def settings(*, missing_gpu: MissingGpu | None = None) -> Iterator[None]:
    """Change arraybridge's settings inside a ``with`` block, for this thread or task alone.

    Args:
        missing_gpu: ``"error"`` (the default of the library) refuses a GPU that is not there;
            ``"host"`` places the array on the host instead, with one warning that carries the reason.
            The environment variable ``ARRAYBRIDGE_MISSING_GPU`` does the same for a whole process.

    Raises:
        ValueError: another value.

    >>> import arraybridge
    >>> with arraybridge.settings(missing_gpu="host"):
    ...     pass
    """
    chosen = _missing_gpu.get() if missing_gpu is None else _checked(missing_gpu, "missing_gpu")
    token = _missing_gpu.set(chosen)
    try:
        yield
    finally:
        _missing_gpu.reset(token)
