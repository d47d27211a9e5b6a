"""The device on which a decorated function runs, according to the options of its decorator."""

from __future__ import annotations

from functools import partial
from typing import Any

from arraybridge.conversion.device_resolution import Placement

__all__ = ["find_decorated", "placement", "placement_text"]


def placement(fn: Any) -> Placement | None:
    """Return the placement that the decorator of ``fn`` sets, or None if ``fn`` is not decorated."""
    return getattr(find_decorated(fn), "_placement", None)


def placement_text(fn: Any) -> str:
    """Describe where ``fn`` runs, according to its decorator.

    >>> import functools, arraybridge
    >>> @arraybridge.torch(device="cpu")
    ... def scale(x, by):
    ...     return x * by
    >>> placement_text(functools.partial(scale, by=2))
    'torch on cpu'
    """
    placed = placement(fn)
    return "device of its input" if placed is None else str(placed)


def find_decorated(fn: Any) -> Any:
    """Return the decorated function that ``fn`` is or wraps, or None if there is none.

    It is ``fn`` itself, or the function behind a partial, a bound method, an object with a decorated
    ``__call__``, or a ``__wrapped__`` attribute of `functools.wraps`.
    """
    seen: set[int] = set()
    while fn is not None and id(fn) not in seen:
        seen.add(id(fn))
        for candidate in (fn, None if isinstance(fn, type) else type(fn).__call__):
            if isinstance(getattr(candidate, "_placement", None), Placement):
                return candidate
        fn = fn.func if isinstance(fn, partial) else getattr(fn, "__wrapped__", None)
    return None
