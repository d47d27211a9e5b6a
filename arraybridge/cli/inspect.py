"""Frameworks looked at in a process apart: what `arraybridge doctor` runs.

    python -m arraybridge.cli.inspect torch jax   # imports and uses them in turn; lines on stdout

The lines are ``start torch``, ``found {…}`` with what was seen as JSON, and ``done torch``. What the
frameworks print goes to stderr. One of them may end this process; that is why it is one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import arraybridge
from arraybridge.errors import DeviceNotFoundError, text_of, told
from arraybridge.frameworks import registry


def _torch(torch: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = {"cuda": torch.version.cuda, "rocm": getattr(torch.version, "hip", None)}
    if found["cuda"]:
        found["cudnn"] = str(torch.backends.cudnn.version() or "") or None
        if torch.cuda.is_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _tensorflow(tensorflow: ModuleType) -> dict[str, Any]:
    build = tensorflow.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return {"cuda": None, "rocm": build.get("rocm_version")}
    return {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}


def _cupy(cupy: ModuleType) -> dict[str, Any]:
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return {"cuda": None, "rocm": str(runtime.runtimeGetVersion())}
    return {"cuda": _dotted(runtime.runtimeGetVersion())}


def _dotted(version: int) -> str:
    """CUDA's 13020 as ``"13.2"``."""
    return f"{version // 1000}.{version % 1000 // 10}"


#: What a package says of its build, asked of itself: one that is half broken has no framework to ask. JAX's
#: is known by its plug-ins, which the caller sees.
_BUILDS: dict[str, Callable[[ModuleType], dict[str, Any]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "cupy": _cupy,
}


def _import(name: str) -> ModuleType:
    packages = registry.facts(name).packages
    for package in packages[:-1]:
        try:
            return importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
    return importlib.import_module(packages[-1])


def inspect(name: str) -> dict[str, Any]:
    """What is to be known of a framework; ``error`` says why it does not work, ``stage`` where it failed."""
    found: dict[str, Any] = {"stage": "import", "devices": [], "error": None}
    started = time.perf_counter()
    try:
        if name == "pyclesperanto":
            # Sets up the PoCL wheel where there is no other OpenCL, which has to be done before the import.
            found["stage"] = "use"
            arraybridge.framework(name)
        module = _import(name)
        found["seconds"] = time.perf_counter() - started
        found["version"] = str(getattr(module, "__version__", "")) or None
        found["origin"] = str(Path(module.__file__).resolve()) if module.__file__ else None
        found["stage"] = "build"
        if name in _BUILDS:
            found |= _BUILDS[name](module)
        found["stage"] = "use"
        framework = arraybridge.framework(name)
        found["devices"] = [{"device": str(d), "name": d.name} for d in framework.devices()]
        probe = np.arange(6, dtype=np.float32).reshape(2, 3)
        there = arraybridge.convert_memory(probe, name, copy=True)
        if not np.array_equal(arraybridge.to_numpy(there), probe):
            found["error"] = "an array came back with other values"
        else:
            found["stage"] = "done"
    except DeviceNotFoundError as error:
        found["stage"], found["error"] = "device", str(error)
    except Exception as error:  # noqa: BLE001  # a broken package may raise anything, and this reports it
        found["error"] = told(error)
        # pyclesperanto without a device imports half; the error says so.
        if getattr(error, "reason", "") == "no OpenCL device" or "PLATFORM_NOT_FOUND" in (
            text_of(error) or ""
        ):
            found["stage"] = "device"
    return found


def _use(name: str, module: ModuleType) -> None:
    """The least work that makes a framework load all that it has."""
    if name == "jax":
        importlib.import_module(f"{name}.numpy").zeros(1).block_until_ready()
    elif name in ("torch", "tensorflow"):
        module.zeros(1)
    elif name == "pyclesperanto":
        module.push(np.zeros((2, 2), np.float32))


def look(names: list[str], say: Callable[[str], None]) -> None:
    """Look at the frameworks in turn; ``say`` hears of each before and after."""
    for name in names:
        say(f"start {name}")
        say(f"found {json.dumps(inspect(name))}")
        try:
            # By its own means as well: arraybridge refuses what is known to end the process.
            _use(name, _import(name))
        except Exception as error:  # noqa: BLE001  # what only raises is no crash, and was told above
            print(f"{name}: {told(error)}", file=sys.stderr)
        say(f"done {name}")


def main(names: list[str]) -> None:
    """Answer on what was stdout when the process started; stdout itself goes to stderr from now on."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: str) -> None:
        print(line, file=answer, flush=True)

    look(names, say)


if __name__ == "__main__":
    main(sys.argv[1:])
