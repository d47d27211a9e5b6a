"""Settings of a thread or task, and the environment variables behind them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from arraybridge.errors import MissingGpuWarning, warn
from arraybridge.types import above

__all__ = [
    "ANY",
    "OneWarning",
    "Settings",
    "after_warnings",
    "already_told",
    "hold",
    "in_force",
    "missing_gpu",
    "settings",
    "warn_of_missing_gpu",
]

MissingGpu = Literal["error", "host"]
Profiler = Literal["torch", "jax", "nvtx"]

# A list of one, which a block that is closed in another thread or task sets back; never the default.
_UNSET: list[MissingGpu | None] = [None]
_missing_gpu: ContextVar[list[MissingGpu | None]] = ContextVar("arraybridge_missing_gpu", default=_UNSET)


def missing_gpu() -> MissingGpu:
    """What to do when a GPU that was asked for is missing, in this thread or task."""
    chosen = _missing_gpu.get()[0] or os.environ.get("ARRAYBRIDGE_MISSING_GPU") or "error"
    checked: MissingGpu = _checked(chosen, "ARRAYBRIDGE_MISSING_GPU", "error", "host")
    return checked


#: The missing GPUs of which the present call has warned, where it may come to them again; None for other
#: calls.
already_told: ContextVar[dict[str, object] | None] = ContextVar("arraybridge_already_told", default=None)
#: Stands for the messages about every missing GPU.
ANY = ""


class OneWarning:
    """A block that is one call to the user: it warns of a missing GPU once, for however many arrays."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        messages = already_told.get()
        self._token = already_told.set({} if messages is None else messages)

    def __exit__(self, *_: object) -> None:
        already_told.reset(self._token)


def warn_of_missing_gpu(message: str) -> None:
    """Say that the host stands in for a GPU, unless this call has said so before."""
    messages, mine = already_told.get(), object()
    # Several threads may work for one call: the first one warns.
    if messages is None or (ANY not in messages and messages.setdefault(message, mine) is mine):
        warn(message, MissingGpuWarning)


@contextmanager
def after_warnings(messages: Sequence[str]) -> Iterator[None]:
    """A block that does not say these messages again; after `ANY` it says none."""
    before = already_told.get()
    token = already_told.set({**(before or {}), **dict.fromkeys(messages, "")} if messages else before)
    try:
        yield
    finally:
        already_told.reset(token)


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
    (before,) = _missing_gpu.get()
    chosen: list[MissingGpu | None] = [missing_gpu or before]
    token = _missing_gpu.set(chosen)
    try:
        with nullcontext() if annotate is None else above["annotate"](annotate):
            yield
    finally:
        try:
            _missing_gpu.reset(token)
        except ValueError:  # it is closed in another thread or task
            chosen[0] = before


class Settings(NamedTuple):
    """What a thread or task has set, as another process can be told: all but ``annotate``."""

    missing_gpu: MissingGpu | None
    warnings: tuple[str, ...]


def in_force() -> Settings:
    """What this thread or task has set, for `hold` in another process."""
    return Settings(_missing_gpu.get()[0], tuple(already_told.get() or ()))


@contextmanager
def hold(chosen: Settings) -> Iterator[None]:
    """Work for the call of another process, whose settings hold, and which warns once."""
    with settings(missing_gpu=chosen.missing_gpu), after_warnings(chosen.warnings):
        yield
