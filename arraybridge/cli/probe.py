"""Frameworks looked at in a process apart: what `arraybridge doctor` runs.

    python -m arraybridge.cli.probe 90 torch jax   # imports and uses them in turn, 90 seconds each

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import arraybridge
from arraybridge.errors import DeviceNotFoundError, MemoryConversionError, error_text
from arraybridge.frameworks import registry
from arraybridge.frameworks.pyclesperanto.opencl import lacks_platform
from arraybridge.frameworks.registry import can_find
from arraybridge.reasons import Reason

Json = dict[str, Any]


#: Packages that are no frameworks, and crash the process in some orders of imports. They are only imported.
#: PyTorch's CUDA build brings Triton and imports it late.
COMPANIONS = ("triton",)


def _imported(name: str) -> ModuleType:
    packages = (name,) if name in COMPANIONS else registry.metadata_of(name).packages
    return importlib.import_module(next(filter(can_find, packages), packages[0]))


# -- what is tried with a framework's own functions ----------------------------------------------------
# The packages may be half broken. The functions take them as modules, and use nothing else.


def _nothing(module: ModuleType) -> None:
    pass


def _for_cpu(module: ModuleType) -> str:
    return "CPU"


@dataclass(frozen=True, slots=True)
class Probe:
    """The functions that inspect one package, each with the imported package as its argument.

    Attributes:
        built_for: returns ``"CUDA 13.0"``, ``"ROCm 7"``, ``"OpenCL"`` or ``"CPU"``.
        compute: runs a computation that raises if a driver cannot compile it.
        use: does the least work, which may crash the process: arraybridge raises before a known crash.
    """

    built_for: Callable[[ModuleType], str] = _for_cpu
    compute: Callable[[ModuleType], object] = _nothing
    use: Callable[[ModuleType], object] = _nothing


def _build(*, cuda: object = None, rocm: object = None) -> str:
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {rocm}" if rocm else "CPU"


def _torch_build(torch: Any) -> str:
    return _build(cuda=torch.version.cuda, rocm=torch.version.hip)


def _tensorflow_build(tf: Any) -> str:
    info = tf.sysconfig.get_build_info()
    return _build(cuda=info.get("cuda_version"), rocm=info.get("rocm_version"))


def _cupy_build(cupy: Any) -> str:
    version = cupy.cuda.runtime.runtimeGetVersion()
    if cupy.cuda.runtime.is_hip:
        return _build(rocm=version)
    return _build(cuda=f"{version // 1000}.{version % 1000 // 10}")


def _jax_build(jax: Any) -> str:
    plugins = [major for major in (12, 13, 14) if can_find(f"jax_cuda{major}_plugin")]
    return _build(cuda=max(plugins, default=None))


def _opencl_build(cle: Any) -> str:
    return "OpenCL"


def _add_in_opencl(cle: Any) -> None:
    cle.add_image_and_scalar(cle.push(_sample()), scalar=1)


def _push(cle: Any) -> None:
    cle.push(np.zeros((2, 2), np.float32))


def _zero(module: Any) -> None:
    module.zeros(1)


def _zero_in_jax(jax: ModuleType) -> None:
    importlib.import_module(f"{jax.__name__}.numpy").zeros(1).block_until_ready()


_PROBES = {
    "torch": Probe(_torch_build, use=_zero),
    "jax": Probe(_jax_build, use=_zero_in_jax),
    "tensorflow": Probe(_tensorflow_build, use=_zero),
    "cupy": Probe(_cupy_build),
    "pyclesperanto": Probe(_opencl_build, compute=_add_in_opencl, use=_push),
}
_OTHER = Probe()


def _sample() -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(2, 3)


# -- inspecting ----------------------------------------------------------------------------------------


def _look(name: str, seen: Json) -> None:
    """Import a framework and send an array there and back; what is learnt goes into ``seen`` at once."""
    started = time.perf_counter()
    module = _imported(name)
    seen["seconds"] = time.perf_counter() - started
    seen["version"] = str(getattr(module, "__version__", "")) or None
    seen["origin"] = str(Path(module.__file__).resolve()) if module.__file__ else None
    if name in COMPANIONS:
        return
    probe = _PROBES.get(name, _OTHER)
    seen["built_for"] = probe.built_for(module)
    devices = arraybridge.framework(name).devices.available()
    seen["devices"] = [{"device": str(device), "name": device.name} for device in devices]
    values = _sample()
    if not np.array_equal(arraybridge.to_numpy(arraybridge.convert_memory(values, name, copy=True)), values):
        raise ValueError("an array came back with other values")
    probe.compute(module)


def _lacks_device(error: Exception) -> bool:
    """Return whether a framework works, but has no device to work on."""
    if isinstance(error, DeviceNotFoundError) or lacks_platform(error):
        return True
    return isinstance(error, MemoryConversionError) and error.code == Reason.NO_DEVICE


def _use(name: str) -> None:
    """Do the least work with the framework's own functions."""
    module = _imported(name)
    _PROBES.get(name, _OTHER).use(module)


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
            seen |= {"state": state, "error": error_text(error)}
        say(name, **seen)
        with suppress(Exception):  # what only raises is no crash, and was told above
            _use(name)
        say(name, done=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _look_at_each(float(sys.argv[1]), sys.argv[2:])
