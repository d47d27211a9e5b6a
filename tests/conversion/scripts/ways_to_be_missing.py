"""Hide the frameworks, request each of them, and print the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

NAMES = ("cupy", "torch", "jax", "tensorflow", "pyclesperanto", "mlx", "paddle")
HIDDEN = {*NAMES, "jaxlib", "pyclesperanto_prototype", "pyopencl", "torchvision"}
sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]

import numpy as np  # noqa: E402

import arraybridge as ab  # noqa: E402

x = np.ones((2, 2), np.float32)
ASKED: dict[str, Callable[[str], object]] = {
    "convert_memory": lambda name: ab.convert_memory(x, name),
    "short form": lambda name: getattr(ab, f"to_{name}")(x),
    "decorator": lambda name: getattr(ab, name)(lambda y: y)(x),
    "explain": lambda name: ab.explain(x, name),
    "devices": lambda name: ab.devices(name),
    "native": lambda name: ab.Device("gpu", 0).native(name),
}
GOES_ON: dict[str, Callable[[], object]] = {
    "convert_memory": lambda: ab.convert_memory(x, "numpy") is x,
    "devices": lambda: [str(device) for device in ab.devices()],
    "device_info": lambda: [str(ab.device_info()), ab.least_used_gpu(), ab.gpu_available()],
    "memory": lambda: [str(ab.memory_stats()), ab.free_memory(), *map(ab.free_memory, NAMES)],
    "is_oom_error": lambda: [ab.is_oom_error(MemoryError()), ab.is_oom_error(ValueError())],
    "gpu": lambda: ab.gpu(lambda y: y + 1)(x).tolist(),
    "array_namespace": lambda: ab.array_namespace(x).__name__,
}


def answer(call: Callable[..., object], *arguments: Any) -> dict[str, Any]:
    try:
        return {"result": call(*arguments)}
    except Exception as error:  # noqa: BLE001  # any exception is reported
        return {"class": type(error).__name__, "message": str(error), "cause": repr(error.__cause__)}


report = {
    "answers": {name: {what: answer(call, name) for what, call in ASKED.items()} for name in NAMES},
    "goes on": {what: answer(call) for what, call in GOES_ON.items()},
}
print(json.dumps(report, default=repr))
