"""Where a decorated function runs, by the options of its decorator."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

__all__ = ["decorated", "place_in_words", "placement"]


def placement(fn: Any) -> Any:
    """The options of the decorator that ``fn`` has, which say where it runs; None where it has none.

    ``framework`` is None for `gpu`, which decides that on each call, and ``converts`` is false where the
    decorator only declares.
    """
    return getattr(decorated(fn), "_placement", None)


def place_in_words(fn: Any) -> str:
    """Where ``fn`` runs, as its decorator says.

    >>> import functools, arraybridge
    >>> @arraybridge.torch(device="cpu")
    ... def scale(x, by):
    ...     return x * by
    >>> place_in_words(functools.partial(scale, by=2))
    'torch on cpu'
    """
    placed = placement(fn)
    if placed is None:
        return "where its input is"
    name = placed.framework or "the faster of cpu and gpu"
    if placed.device is not None:
        return f"{name} on {placed.device}"
    if placed.gpu_id is not None:
        return f"{name} on {'the freest gpu' if placed.gpu_id == 'auto' else f'gpu:{placed.gpu_id}'}"
    return f"{name}, where its input is" if placed.framework else name


def decorated(fn: Any) -> Any:
    """The function in ``fn`` that one of the decorators made, or None.

    That is ``fn`` itself, or the one behind a partial, a bound method, an object whose ``__call__`` is
    decorated, and whatever has a ``__wrapped__``, as `functools.wraps` leaves it.
    """
    seen: set[int] = set()
    while fn is not None and id(fn) not in seen:
        seen.add(id(fn))
        for candidate in (fn, None if isinstance(fn, type) else type(fn).__call__):
            if isinstance(getattr(candidate, "_placement", None), SimpleNamespace):
                return candidate
        fn = fn.func if isinstance(fn, partial) else getattr(fn, "__wrapped__", None)
    return None
