"""What the scripts share: raw probes and a one-line report for each case."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from arraybridge import MemoryConversionError


def report(case: str, outcome: object) -> None:
    """Print one line for the test to compare, flushed: the next step may end the process."""
    print(f"{case}: {outcome}", flush=True)


def outcome_of(call: Callable[[], Any]) -> str:
    """What the call returned, or `refused` for one of the library's own errors."""
    try:
        return str(call())
    except MemoryConversionError:
        return "refused"


def strict_warnings() -> None:
    """From here on (after the frameworks' imports) a warning is an error."""
    warnings.simplefilter("error")
