"""Probe frameworks in a separate process, for `arraybridge doctor`.

    python -m arraybridge.cli.probe 90 torch jax  # imports and uses each in turn, for at most 90 seconds each

The process writes up to three JSON lines per framework to stdout: ``{"name": "torch"}`` before the import,
the same with the findings, and ``{"name": "torch", "done": true}`` after the framework's own functions have
been used. The output of the frameworks goes to stderr.
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
from typing import Any

import numpy as np

import arraybridge
from arraybridge.errors import DeviceNotFoundError, MemoryConversionError, error_text
from arraybridge.frameworks.pyclesperanto.opencl import lacks_platform
from arraybridge.interface import registry
from arraybridge.interface.installation import can_find
from arraybridge.reasons import Reason

Json = dict[str, Any]


#: Packages that are not frameworks, but crash the process in some import orders
#: (tensorflow/tensorflow#124205). They are only imported. The CUDA build of PyTorch includes Triton and
#: imports it late.
COMPANIONS = ("triton",)


def _import_package(name: str) -> Any:
    packages = (name,) if name in COMPANIONS else registry.metadata_of(name).packages
    return importlib.import_module(next(filter(can_find, packages), packages[0]))


# -- calls to the frameworks themselves ------------------------------------------------------------------
# arraybridge may be unable to load a broken package, so these functions use only the package itself.


def _built_for(name: str, module: Any) -> str:
    """Return the platform of a build: ``"CUDA 13.0"``, ``"ROCm 7"``, ``"OpenCL"`` or ``"CPU"``."""
    match name:
        case "torch":
            return _platform(cuda=module.version.cuda, rocm=module.version.hip)
        case "jax":
            plugins = [major for major in (12, 13, 14) if can_find(f"jax_cuda{major}_plugin")]
            return _platform(cuda=max(plugins, default=None))
        case "tensorflow":
            info = module.sysconfig.get_build_info()
            return _platform(cuda=info.get("cuda_version"), rocm=info.get("rocm_version"))
        case "cupy":
            version = module.cuda.runtime.runtimeGetVersion()
            if module.cuda.runtime.is_hip:
                return _platform(rocm=version)
            return _platform(cuda=f"{version // 1000}.{version % 1000 // 10}")
        case "pyclesperanto":
            return "OpenCL"
    return "CPU"


def _platform(*, cuda: object = None, rocm: object = None) -> str:
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {rocm}" if rocm else "CPU"


def _use(name: str) -> None:
    """Make an array without arraybridge's checks against known crashes, so it may crash the process."""
    module = _import_package(name)
    match name:
        case "torch" | "tensorflow":
            module.zeros(1)
        case "jax":
            module.numpy.zeros(1).block_until_ready()
        case "pyclesperanto":
            module.push(np.zeros((2, 2), np.float32))


# -- probing -------------------------------------------------------------------------------------------


def _probe(name: str, findings: Json) -> None:
    """Import a framework and convert an array to it and back; add each finding as soon as it is known."""
    started = time.perf_counter()
    module = _import_package(name)
    findings["seconds"] = time.perf_counter() - started
    findings["version"] = str(getattr(module, "__version__", "")) or None
    findings["origin"] = str(Path(module.__file__).resolve()) if module.__file__ else None
    if name in COMPANIONS:
        return
    findings["built_for"] = _built_for(name, module)
    devices = arraybridge.framework(name).devices.available()
    findings["devices"] = [{"device": str(device), "name": device.name} for device in devices]
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    if not np.array_equal(arraybridge.to_numpy(arraybridge.convert_memory(values, name, copy=True)), values):
        raise ValueError("an array had different values after it was converted to the framework and back")
    if name == "pyclesperanto":  # an OpenCL driver may be unable to compile for this CPU
        module.add_image_and_scalar(module.push(values), scalar=1)


def _lacks_device(error: Exception) -> bool:
    """Return whether an error means that the framework works, but has no device."""
    if isinstance(error, DeviceNotFoundError) or lacks_platform(error):
        return True
    return isinstance(error, MemoryConversionError) and error.code == Reason.NO_DEVICE


def _probe_all(seconds: float, names: list[str]) -> None:
    """Probe frameworks in turn and write the findings to stdout. Redirect all other output to stderr."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(name: str, **findings: Any) -> None:
        print(json.dumps({"name": name, **findings}), file=results, flush=True)

    for name in names:
        faulthandler.dump_traceback_later(seconds, exit=True)
        report(name)
        findings: Json = {"devices": [], "state": "works", "error": None}
        try:
            _probe(name, findings)
        except Exception as error:  # noqa: BLE001  # a broken package may raise anything, which is reported
            state = "no device" if _lacks_device(error) else "broken"
            findings |= {"state": state, "error": error_text(error)}
        report(name, **findings)
        with suppress(Exception):  # only crashes matter here; exceptions are reported above
            _use(name)
        report(name, done=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _probe_all(float(sys.argv[1]), sys.argv[2:])
