"""Where a decorated function runs, by the options of its decorator."""

from __future__ import annotations

from functools import partial
from typing import Any

from arraybridge.conversion.placement import Placement

__all__ = ["decorated", "placement_text", "placement"]


def placement(fn: Any) -> Placement | None:
    """Return where the decorator of ``fn`` lets it run; None if it has no decorator."""
    return getattr(decorated(fn), "_placement", None)


def placement_text(fn: Any) -> str:
    """Where ``fn`` runs, as its decorator says.

    >>> import functools, arraybridge
    >>> @arraybridge.torch(device="cpu")
    ... def scale(x, by):
    ...     return x * by
    >>> place_in_words(functools.partial(scale, by=2))
    'torch on cpu'
    """
    placed = placement(fn)
    return "where its input is" if placed is None else str(placed)


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
        fn = fn.func if isinstance(fn, partial) else getattr(fn, "__wrapped__", None)
    return None
