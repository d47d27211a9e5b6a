"""Checks of the arguments that `device_map`, `Pipeline` and `prefetch` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def source_of_items(who: str, items: Any) -> Iterator[Any]:
    """What is read item by item."""
    try:
        return iter(items)
    except TypeError:
        raise TypeError(f"{who} takes items to iterate over, not {items!r}") from None
