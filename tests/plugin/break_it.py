"""Use the library together with the named plug-ins, which fail to load; print each result as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import arraybridge as ab


def calls(name: str) -> dict[str, Callable[[], object]]:
    """Return calls that request the plug-in by its name."""
    return {
        "convert_memory": lambda: ab.convert_memory(np.ones(2), name),
        "framework": lambda: ab.framework(name),
        "devices": lambda: ab.devices(name),
    }


class Mine:
    """A user's own object."""


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # any exception is reported
        return error
    raise AssertionError("nothing was raised")


def error_text(call: Callable[[], object]) -> list[str]:
    error = raised(call)
    return [type(error).__name__, str(error), type(error.__cause__).__name__]


mine = Mine()
OTHERS: dict[str, Callable[[], object]] = {
    "devices": lambda: [str(device) for device in ab.devices()],
    "object": lambda: type(raised(lambda: ab.detect_memory_type(mine))).__name__,
    "decorated": lambda: ab.numpy(lambda x, other: [x + 1, other])(np.ones(1), mine)[0].tolist(),
    "is_oom_error": lambda: [ab.is_oom_error(MemoryError()), ab.is_oom_error(ValueError())],
}

report: dict[str, Any] = {}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for name in sys.argv[1:]:
        importlib.import_module(f"{name}plug")  # after this, any object might belong to the plug-in
    report["others"] = {what: call() for what, call in OTHERS.items()}
    report["named"] = {
        name: {what: error_text(call) for what, call in calls(name).items()} for name in sys.argv[1:]
    }
    report["again"] = {what: call() for what, call in OTHERS.items()}
report["warnings"] = [f"{one.filename}: {one.category.__name__}: {one.message}" for one in seen]
print(json.dumps(report))
