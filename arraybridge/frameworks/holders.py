"""Who holds an array besides those who ask."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["held_by_one", "is_kept", "kept_among"]


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
