"""Where a user's function runs: what its decorator says of it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from arraybridge.types import Device, GpuId

__all__ = ["Placement", "decorated", "placement"]


class Placement(NamedTuple):
    """Where a decorated function runs, as its decorator says.

    Attributes:
        framework: the framework that it runs in; None for `gpu`, which decides that on each call.
        gpu_id: the accelerator that was named, or ``"auto"``, or None.
        device: the device that was named instead, or None.
        converts: whether it brings its arrays there by itself; `memory_types` only declares.
    """

    framework: str | None
    gpu_id: GpuId = None
    device: Device | None = None
    converts: bool = True

    def __str__(self) -> str:
        name = self.framework or "the faster of cpu and gpu"
        if self.device is not None:
            return f"{name} on {self.device}"
        if self.gpu_id is not None:
            return f"{name} on {'the freest gpu' if self.gpu_id == 'auto' else f'gpu:{self.gpu_id}'}"
        return f"{name}, where its input is" if self.framework else name


def placement(fn: Any) -> Placement | None:
    """Where ``fn`` runs, or None for a function that says nothing of that and runs where its arrays are.

    >>> import functools, arraybridge
    >>> @arraybridge.torch(device="cpu")
    ... def scale(x, by):
    ...     return x * by
    >>> print(placement(functools.partial(scale, by=2)))
    torch on cpu
    """
    return getattr(decorated(fn), "_placement", None)


def decorated(fn: Any) -> Any:
    """The function in ``fn`` that one of the decorators made, or None.

    That is ``fn`` itself, or the one behind a partial, a bound method, an object whose ``__call__`` is
    decorated, and whatever has a ``__wrapped__``, as `functools.wraps` leaves it.
    """
    seen: set[int] = set()
    while fn is not None and id(fn) not in seen:
        seen.add(id(fn))
        for candidate in (fn, None if isinstance(fn, type) else type(fn).__call__):
            if isinstance(getattr(candidate, "_placement", None), Placement):
                return candidate
        fn = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
    return None
