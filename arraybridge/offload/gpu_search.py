"""Search for a GPU for functions decorated with `gpu`, and for the first framework that can use it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.caches import new_cache, remember
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.device import Device
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.hardware import driver, gpus
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.installation import is_imported
from arraybridge.interface.registry import BUILT_IN
from arraybridge.offload import records

#: The number of seconds for which a measurement of free GPU memory is reused.
FREE_MEMORY_SECONDS = 0.5


class BackendGpu:
    """A GPU, used through one framework.

    Attributes:
        transfer_rate: The highest measured rate of a transfer to the GPU, in bytes per second; 0 if there was
            none.
    """

    def __init__(self, framework: Framework, device: Device) -> None:
        self.framework = framework
        self.device = device
        self.backend = framework.name
        self.name = f"{framework.name} {device}"
        self.transfer_rate = 0.0
        self._free = 0
        self._measured_at = -FREE_MEMORY_SECONDS

    def contains(self, x: Any) -> bool:
        """Return whether an array of any framework is on this GPU."""
        if type(x) is np.ndarray:
            return False
        owner, data = source_of(x)
        return owner.devices.device_of(data) == self.device

    def put(self, x: Any) -> Any:
        """Return an array converted to the framework and this GPU, and measure the rate of the transfer."""
        started = records.clock()
        result = convert_memory(x, self.backend, device=self.device)  # the copy is complete on return
        seconds = records.clock() - started
        if type(x) is np.ndarray and seconds:
            self.transfer_rate = max(self.transfer_rate, x.nbytes / seconds)
        return result

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call ``fn()`` on this GPU, in a stream of this thread, and return the result."""
        framework = self.framework
        device = self.device
        with (
            framework.devices.select(device),
            framework.runtime.x64_context(),
            framework.streams.stream(device),
        ):
            return fn()

    def free(self) -> int:
        """Return the number of bytes the framework can still allocate, including its cache; 0 if unknown."""
        now = records.clock()
        if now - self._measured_at >= FREE_MEMORY_SECONDS:
            self._measured_at = now
            self._free = self.framework.memory.free_memory_of(self.device)
        return self._free


#: Framework name (None for any framework) and GPU index → the GPU, or the reason why it was not found.
found_gpus: dict[tuple[str | None, int], BackendGpu | str] = new_cache()


def find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    """Return the GPU with this index, or the reason why it was not found.

    If ``backend`` is None, use the first framework that finds the GPU.
    """
    gpu = found_gpus.get((backend, index))
    return gpu or remember(found_gpus, (backend, index), _find_gpu(backend, index))


def _find_gpu(backend: str | None, index: int) -> BackendGpu | str:
    device = Device("gpu", index)
    reasons: list[str] = []
    for name in _names_to_probe(backend):
        try:
            framework = registry.framework(name)
            devices = framework.devices.available()
        except (FrameworkNotInstalledError, RuntimeError) as error:  # drivers raise RuntimeError
            reasons.append(f"{name} finds no GPU ({getattr(error, 'reason', error)})")
            continue
        if device in devices:
            return BackendGpu(framework, device)
        numbers = ", ".join(str(d) for d in devices if d.kind == "gpu")
        reason = framework.devices.missing_device_reason() or f"{name} has no GPU"
        reasons.append(f"{name} has no {device} (it has {numbers})" if numbers else reason)
    if reasons:
        text = "; ".join(reason.removesuffix(".") for reason in reasons)
        return f"the device {device} was not found: {text}"
    reason = driver().reason or "the driver reports no GPU to this process (see CUDA_VISIBLE_DEVICES)"
    return f"no framework can use a GPU: {reason}"


def _names_to_probe(backend: str | None) -> list[str]:
    """Return the names of the frameworks in which to search for a GPU.

    Without a GPU driver, only search plug-ins and frameworks that are already imported.
    """
    names = registry.numpy_like_names() if backend is None else [backend]
    if sys.platform == "darwin":
        has_driver = platform.machine() == "arm64"
    else:  # an AMD or an NVIDIA GPU
        has_driver = os.path.exists("/dev/kfd") or bool(gpus())  # noqa: PTH110  # importing pathlib costs 3 ms
    return [name for name in names if has_driver or name not in BUILT_IN or is_imported(name)]
