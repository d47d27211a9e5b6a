"""Use the library beside a plug-in that does not load, named ``myarr``; print each answer as JSON.

Argument: ``imported`` where the plug-in's package is imported before.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import arraybridge as ab

NAMED: dict[str, Callable[[], object]] = {
    "convert_memory": lambda: ab.convert_memory(np.ones(2), "myarr"),
    "source": lambda: ab.convert_memory(np.ones(2), "numpy", "myarr", gpu_id=0),
    "explain": lambda: ab.explain(np.ones(2), "myarr"),
    "convert_tree": lambda: ab.convert_tree([np.ones(2)], "myarr"),
    "framework": lambda: ab.framework("myarr"),
    "devices": lambda: ab.devices("myarr"),
    "stack_slices": lambda: ab.stack_slices([np.ones((2, 2))], "myarr"),
    "native": lambda: ab.Device("cpu").native("myarr"),
}


class Mine:
    """An object of the user's own."""


class Exporting:
    """An array of nobody that arraybridge knows."""

    def __init__(self) -> None:
        self.values = np.ones(2)

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def refused(call: Callable[[], object]) -> str:
    try:
        return repr(call())
    except ab.UnknownArrayError as error:
        return type(error).__name__


mine = Mine()
OTHERS: dict[str, Callable[[], object]] = {
    "devices": lambda: [str(device) for device in ab.devices()],
    "convert_memory": lambda: ab.convert_memory(np.ones(2), "numpy").tolist(),
    "list": lambda: refused(lambda: ab.detect_memory_type([1])),
    "object": lambda: refused(lambda: ab.detect_memory_type(mine)),
    "exporting": lambda: ab.convert_memory(Exporting(), "numpy").tolist(),
    "convert_tree": lambda: ab.convert_tree([mine, np.ones(1)], "numpy")[0] is mine,
    "decorated": lambda: ab.numpy(lambda x, other: [x + 1, other])(np.ones(1), mine)[0].tolist(),
    "result": lambda: ab.numpy(lambda x: mine)(np.ones(1)) is mine,
    "free_memory": ab.free_memory,
    "memory_stats": lambda: str(ab.memory_stats()).split()[0],
    "device_info": lambda: ab.device_info()["available"],
    "is_oom_error": lambda: [ab.is_oom_error(MemoryError()), ab.is_oom_error(ValueError())],
    "benchmark": lambda: ab.benchmark(lambda: mine, runs=2).median >= 0,
    "gpu": lambda: ab.gpu(lambda x: x + 1)(np.ones(1)).tolist(),
    "unknown": lambda: "myarr" in str(raised(lambda: ab.framework("myar"))),
}


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        return error
    raise AssertionError("nothing was raised")


def answer(call: Callable[[], object]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        return f"{type(error).__name__}: {error}"


def told(call: Callable[[], object]) -> list[str]:
    error = raised(call)
    return [type(error).__name__, str(error), type(error.__cause__).__name__]


report: dict[str, Any] = {}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    if sys.argv[1:] == ["imported"]:
        import brokenplug

        arrays = [brokenplug.Array(), brokenplug.Odd()]
        # What is no array, and comes from that package, is nobody's business.
        report["setting"] = answer(lambda: ab.convert_tree([arrays[1], np.ones(1)], "numpy")[0] is arrays[1])
        report["its arrays"] = {
            "detect": told(lambda: ab.detect_memory_type(arrays[0])),
            "detect odd": told(lambda: ab.detect_memory_type(arrays[1])),
            "convert odd": told(lambda: ab.convert_memory(arrays[1], "numpy")),
            "convert": told(lambda: ab.convert_memory(arrays[0], "numpy")),
            "tree": told(lambda: ab.convert_tree({"a": arrays[0]}, "numpy")),
            "decorated": told(lambda: ab.numpy(lambda x: x)(arrays[0])),
            "device_of": told(lambda: ab.device_of(arrays[0])),
        }
    report["others"] = {what: answer(call) for what, call in OTHERS.items()}
    report["named"] = {what: told(call) for what, call in NAMED.items()}
    report["again"] = {what: answer(call) for what, call in OTHERS.items()}
report["warnings"] = [f"{one.filename}: {one.category.__name__}: {one.message}" for one in seen]
print(json.dumps(report, default=repr))
