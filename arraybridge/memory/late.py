"""What waits for a result, so that an allocation which failed behind the caller's back (JAX) shows itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.frameworks.parts import Running
from arraybridge.types import TypeMemo

__all__ = ["find_wait", "waits"]


def _wait_for_all(results: Iterable[Any]) -> None:
    # So many arrays settle the question; a list of a million numbers costs no time.
    for one in islice(results, 100):
        wait = waits[type(one)] if type(one) in waits else find_wait(one)
        if wait is not None:
            wait(one)


# Type of a result → what waits for it, or None where there is nothing to wait for.
waits: TypeMemo[Callable[[Any], object] | None] = TypeMemo()


def find_wait(result: Any) -> Callable[[Any], object] | None:
    if isinstance(result, dict):
        return waits.keep(type(result), lambda results: _wait_for_all(results.values()))
    if isinstance(result, (tuple, list)):
        return waits.keep(type(result), _wait_for_all)
    try:
        owner = registry.find_owner(result)
    except FrameworkNotInstalledError:  # something else of a framework that does not work here
        owner = None
    return waits.keep(
        type(result), None if owner is None else (owner.running or Running()).late_errors(type(result))
    )


registry.on_register.append(waits.clear)
