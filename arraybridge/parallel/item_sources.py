"""Validation of the items that `device_map`, `Pipeline` and `prefetch` iterate over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def source_of_items(who: str, items: Any) -> Iterator[Any]:
    """Return an iterator over the items.

    Raises:
        TypeError: The items are not iterable; the message names the function ``who``.
    """
    try:
        return iter(items)
    except TypeError:
        raise TypeError(f"{who} expected an iterable of items, got {items!r}.") from None
