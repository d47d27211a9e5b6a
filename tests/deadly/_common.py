"""What the scripts share: a one-line report for each case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraybridge import MemoryConversionError


def report(case: str, outcome: object) -> None:
    """Print one line for the test to compare, flushed: the next step may end the process."""
    print(f"{case}: {outcome}", flush=True)


def report_right(case: str, condition: object) -> None:
    """Report ``right`` where the condition holds."""
    report(case, "right" if condition else "WRONG")


def outcome_of(call: Callable[[], Any]) -> str:
    """What the call returned, or `refused` for one of the library's own errors."""
    try:
        return str(call())
    except MemoryConversionError:
        return "refused"
