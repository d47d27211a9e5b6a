"""Checks of the expressions in advice, and advice for objects that contain no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.advice import Advice

__all__ = ["NO_NUMBERS", "NUMBER_KINDS", "can_evaluate", "column_text", "gives_numbers"]

#: The kinds of NumPy dtypes that hold numbers.
NUMBER_KINDS = frozenset("biufc")
NO_NUMBERS = Advice("it holds no numbers; pass an object that does")


def column_text(*, is_plain: bool) -> str:
    """Return the advice to pass a column of a table, with ``{}`` in place of its expression.

    Args:
        is_plain: Whether the column can be converted as it is. If not, no column of the table can.
    """
    if is_plain:
        return "it holds several arrays; pass one of its columns, {}"
    return "none of its columns converts as it is; pass one as numbers, {}"


def gives_numbers(make: Callable[[], Any]) -> bool:
    """Return whether a function that evaluates an expression succeeds, and its result consists of numbers."""
    try:
        values = np.asarray(make())
    except Exception:  # noqa: BLE001  # third-party methods may raise anything
        return False
    return values.dtype.kind in NUMBER_KINDS


def can_evaluate(make: Callable[[], Any]) -> bool:
    """Return whether a function that evaluates an expression succeeds."""
    try:
        make()
    except Exception:  # noqa: BLE001  # third-party methods may raise anything
        return False
    return True
