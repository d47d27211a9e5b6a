"""Functions that worker processes import."""

from __future__ import annotations

from typing import Any

from tests.sparse.arrays import read


def parts_of(x: Any) -> Any:
    """Return the layout and the sum of the values."""
    contents = read(x)
    return contents.layout, contents.values.tolist()


def doubled(x: Any) -> Any:
    return x * 2


def same(x: Any) -> Any:
    return x
