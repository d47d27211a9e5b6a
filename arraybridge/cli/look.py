"""Frameworks looked at in a process apart: what `arraybridge doctor` runs.

    python -m arraybridge.cli.look 90 torch jax   # imports and uses them in turn, 90 seconds each

Before each, ``{"name": "torch"}`` goes to stdout; then the same with what was seen; then, when it was used by
its own means as well, ``{"name": "torch", "done": true}``. What the frameworks print goes to stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import arraybridge
from arraybridge.errors import DeviceNotFoundError, MemoryConversionError, told
from arraybridge.frameworks import registry
from arraybridge.frameworks.pyclesperanto.opencl import lacks_platform
from arraybridge.frameworks.registry import can_find
from arraybridge.reasons import Reason

Json = dict[str, Any]


#: Packages that are no frameworks, and crash the process in some orders of imports. They are only imported.
#: PyTorch's CUDA build brings Triton and imports it late.
COMPANIONS = ("triton",)


def _imported(name: str) -> ModuleType:
    packages = (name,) if name in COMPANIONS else registry.facts(name).packages
    return importlib.import_module(next(filter(can_find, packages), packages[0]))


def _built_for(name: str, module: ModuleType) -> str:
    """``"CUDA 13.0"``, ``"ROCm 7"``, ``"OpenCL"`` or ``"CPU"``; of the package, which may be half broken."""
    cuda = rocm = None
    if name == "torch":
        cuda, rocm = module.version.cuda, module.version.hip
    elif name == "tensorflow":
        build = module.sysconfig.get_build_info()
        cuda, rocm = build.get("cuda_version"), build.get("rocm_version")
    elif name == "cupy":
        version = module.cuda.runtime.runtimeGetVersion()
        if module.cuda.runtime.is_hip:
            rocm = version
        else:
            cuda = f"{version // 1000}.{version % 1000 // 10}"
    elif name == "jax":
        cuda = max((n for n in (12, 13, 14) if can_find(f"jax_cuda{n}_plugin")), default=None)
    elif name == "pyclesperanto":
        return "OpenCL"
    return f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"


def _look(name: str, seen: Json) -> None:
    """Import a framework and send an array there and back; what is learnt goes into ``seen`` at once."""
    started = time.perf_counter()
    module = _imported(name)
    seen["seconds"] = time.perf_counter() - started
    seen["version"] = str(getattr(module, "__version__", "")) or None
    seen["origin"] = str(Path(module.__file__).resolve()) if module.__file__ else None
    if name in COMPANIONS:
        return
    seen["built_for"] = _built_for(name, module)
    devices = arraybridge.framework(name).devices()
    seen["devices"] = [{"device": str(device), "name": device.name} for device in devices]
    probe = np.arange(6, dtype=np.float32).reshape(2, 3)
    if not np.array_equal(arraybridge.to_numpy(arraybridge.convert_memory(probe, name, copy=True)), probe):
        raise ValueError("an array came back with other values")
    if name == "pyclesperanto":  # whose driver may fail to compile
        module.add_image_and_scalar(module.push(probe), scalar=1)


def _lacks_device(error: Exception) -> bool:
    """Return whether a framework works, but has no device to work on."""
    if isinstance(error, DeviceNotFoundError) or lacks_platform(error):
        return True
    return isinstance(error, MemoryConversionError) and error.code == Reason.NO_DEVICE


def _use(name: str) -> None:
    """The least work by its own means: arraybridge refuses what is known to end the process."""
    module = _imported(name)
    if name == "jax":
        importlib.import_module(f"{name}.numpy").zeros(1).block_until_ready()
    elif name in ("torch", "tensorflow"):
        module.zeros(1)
    elif name == "pyclesperanto":
        module.push(np.zeros((2, 2), np.float32))


def _look_at_each(seconds: float, names: list[str]) -> None:
    """Answer on what was stdout when the process started; stdout itself goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(name: str, **more: Any) -> None:
        print(json.dumps({"name": name, **more}), file=answers, flush=True)

    for name in names:
        faulthandler.dump_traceback_later(seconds, exit=True)
        say(name)
        seen: Json = {"devices": [], "state": "works", "error": None}
        try:
            _look(name, seen)
        except Exception as error:  # noqa: BLE001  # a broken package may raise anything, and this reports it
            state = "no device" if _lacks_device(error) else "broken"
            seen |= {"state": state, "error": told(error)}
        say(name, **seen)
        with suppress(Exception):  # what only raises is no crash, and was told above
            _use(name)
        say(name, done=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _look_at_each(float(sys.argv[1]), sys.argv[2:])
