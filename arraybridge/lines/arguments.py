"""Checks of the arguments that `device_map`, `Pipeline` and `prefetch` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def whole_number(name: str, value: Any, least: int | None = 1) -> None:
    """Refuse what is no number of something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}")


def source_of_items(who: str, items: Any) -> Iterator[Any]:
    """What is read item by item."""
    try:
        return iter(items)
    except TypeError:
        raise TypeError(f"{who} takes items to iterate over, not {items!r}") from None
