"""Run one array, one kernel and one transfer per framework: ``python tools/gpu_smoke.py NAME...``.

With several names, all frameworks are imported into one process first, in which conflicts between their
libraries show, and each also runs a convolution (cuDNN). Each step prints a line before it runs, so that the
last line names the step that failed. The last line on success is JSON: versions and GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np

EMULATED = bool(os.environ.get("ARRAYBRIDGE_EMULATED_GPU"))
HOST = np.arange(1024, dtype=np.float32)


class NoGpuError(Exception):
    """A framework that is installed finds no GPU."""


def gpus_of(name: str, module: Any) -> list[str]:
    """Return the GPUs that a framework lists by its own calls."""
    if name == "cupy":
        count = module.cuda.runtime.getDeviceCount()
        properties = [module.cuda.runtime.getDeviceProperties(i) for i in range(count)]
        return [one["name"].decode() for one in properties]
    if name == "torch":
        return [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
    if name == "jax":
        return [device.device_kind for device in module.devices() if device.platform != "cpu"]
    details = module.config.experimental.get_device_details
    return [details(one).get("device_name", one.name) for one in module.config.list_physical_devices("GPU")]


def array_of(name: str, module: Any) -> Any:
    """Transfer the values to the first GPU by the framework's own call."""
    if name == "cupy":
        return module.asarray(HOST)
    if name == "torch":
        return module.from_numpy(HOST).to("cuda:0")
    if name == "jax":
        return module.device_put(HOST, module.devices("gpu")[0])
    with module.device("/GPU:0"):
        return module.identity(module.constant(HOST))


def host_of(name: str, x: Any) -> np.ndarray:
    """Transfer an array to the host by the framework's own call."""
    if name == "torch":
        x = x.cpu()
    return np.asarray(x.get() if name == "cupy" else x)


def convolve(name: str, module: Any) -> float:
    """Return the sum of a convolution of ones, which is 36 * 9. It needs cuDNN."""
    ones = np.ones((1, 1, 8, 8), np.float32)
    kernel = np.ones((1, 1, 3, 3), np.float32)
    if name == "torch":
        x, k = (module.from_numpy(one).to("cuda:0") for one in (ones, kernel))
        return float(module.nn.functional.conv2d(x, k).sum())
    if name == "jax":
        return float(module.lax.conv(ones, kernel, (1, 1), "VALID").sum())
    x, k = ones.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)
    return float(module.reduce_sum(module.nn.conv2d(x, k, 1, "VALID")))


def step(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def check(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def main(names: list[str]) -> None:
    """Run all steps of all frameworks."""
    found: dict[str, Any] = {}
    modules = {}
    for name in names:
        step(name, "import")
        modules[name] = importlib.import_module(name)
    for name, module in modules.items():
        step(name, "list GPUs")
        found[name] = {"version": module.__version__, "gpus": gpus_of(name, module)}
        if not found[name]["gpus"]:
            raise NoGpuError(f"{name} {module.__version__} finds no GPU")
        step(name, "transfer to the GPU")
        x = array_of(name, module)
        if EMULATED and name != "cupy":
            step(name, "transfer to the host")
            check(np.array_equal(host_of(name, x), HOST), "wrong values")
        else:
            step(name, "kernel, and transfer to the host")
            check(np.array_equal(host_of(name, x * 2), HOST * 2), "wrong values")
    import arraybridge

    for name, module in modules.items():
        step(name, "arraybridge")
        x = arraybridge.convert_memory(HOST, name, 0)
        check(str(arraybridge.device_of(x)) == "gpu:0", f"it is on {arraybridge.device_of(x)}")
        check(np.array_equal(arraybridge.to_numpy(x), HOST), "wrong values")
        found[name]["arraybridge"] = [str(device) for device in arraybridge.devices(name)]
        if len(names) > 1 and name != "cupy" and not EMULATED:
            step(name, "convolution")
            check(convolve(name, module) == 36 * 9, "wrong values")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
