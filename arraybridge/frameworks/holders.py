"""Who holds memory besides an array: what the array is a view of says so."""

from __future__ import annotations

import array
import ctypes
import sys
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["ONE_HOLDER", "held_by_one", "held_through_views", "holders_of", "is_kept", "kept_among"]


def holders_of(x: Any, name: str) -> int:
    """What `sys.getrefcount` says of an attribute; `ONE_HOLDER` where ``x`` alone holds it."""
    return sys.getrefcount(getattr(x, name))


ONE_HOLDER = holders_of(SimpleNamespace(base=object()), "base")


def held_through_views(x: Any, cls: type) -> bool | None:
    """Whether somebody holds what ``x`` is a view of, by ``x.base``; None where that is of another class."""
    if weakref.getweakrefcount(x):
        return True
    while x.base is not None:
        if isinstance(x.base, memoryview):
            return True if isinstance(x.base.obj, _BUFFERS) else None
        if not isinstance(x.base, (cls, _STRIDED, *_BUFFERS)):
            return None
        if holders_of(x, "base") > ONE_HOLDER:
            return True
        if isinstance(x.base, _BUFFERS):
            return False
        x = x.base
        if weakref.getweakrefcount(x):
            return True
    return False


#: Memory of Python's own, which whoever made it an array may write to.
_BUFFERS = (bytearray, array.array, ctypes.Array)
#: What NumPy's as_strided puts between an array and what it is a view of.
_STRIDED: Any = type(np.lib.stride_tricks.as_strided(np.zeros(1)).base)


def _references(x: Any) -> int:
    return sys.getrefcount(x)


def held_by_one() -> int:
    """What `sys.getrefcount` says in `Autodiff.is_held` of an object that only the one who asks holds.

    Asked each time: torch.compile, once it was used, has Python hold arguments once more.
    """
    x = object()
    return _references(x)


def is_kept(x: Any, lists: Sequence[list[Any]]) -> bool:
    """Whether anybody else than whoever asks, and these lists, holds ``x``."""
    return sys.getrefcount(x) > held_by_one() + sum(y is x for known in lists for y in known)


def kept_among(leaves: list[Any], *lists: list[Any]) -> frozenset[int]:
    """The places of what anybody else than ``leaves`` and ``lists`` holds."""
    found = set()
    for i in range(len(leaves)):  # `enumerate` would hold them, too
        x = leaves[i]
        if hasattr(x, "dtype") and is_kept(x, [leaves, *lists]):
            found.add(i)
    return frozenset(found)
