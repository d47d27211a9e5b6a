"""Code that type checkers must accept or reject; checked by mypy and pyright with the package, never run.

Rejections have an ignore comment; both checkers report unused ones.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch

import arraybridge
from arraybridge import DtypeConversion, MemoryType, memory_types
from arraybridge.benchmarking import Comparison
from arraybridge.conversion.device_resolution import Placement
from arraybridge.decorators.decorated_call import ConvertingCall
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.offload.decision import OffloadDecision
from arraybridge.route import Route
from arraybridge.tracing.events import Event


class Tensor:
    """A stand-in for the arrays of the decorator's framework."""


class Foreign:
    """A stand-in for the arrays of another framework."""


@arraybridge.torch
def bare(image: Tensor, sigma: float = 1.0) -> Tensor:
    return image


@arraybridge.torch(gpu_id=0, oom_recovery="split", dtype_conversion=DtypeConversion.UINT8)
def called(image: Tensor) -> Tensor:
    return image


@arraybridge.torch(output_type="input", device="cpu:1")
def given_back(image: Tensor) -> Tensor:
    return image


@arraybridge.pyclesperanto(dtype="float32", stream=False)
def cast(image: Tensor) -> Tensor:
    return image


@arraybridge.jax(grad="flow")
def flowing(image: Tensor) -> Tensor:
    return image


@memory_types("numpy", MemoryType.TORCH)
def declared(image: Tensor) -> Tensor:
    return image


@arraybridge.gpu(gpu_id=0)
def offloaded(image: Tensor) -> Tensor:
    return image


class Model:
    @arraybridge.gpu
    def offloaded(self, image: Tensor) -> Tensor:
        return image

    @arraybridge.jax
    def bare(self, image: Tensor) -> Tensor:
        return image

    @arraybridge.jax(output_type="numpy")
    def called(self, image: Tensor) -> Tensor:
        return image

    @staticmethod
    @arraybridge.jax
    def static(image: Tensor) -> Tensor:
        return image


# The framework's own arrays, and foreign ones.
assert_type(bare(Tensor(), sigma=2.0), Tensor)
assert_type(bare(Foreign()), Tensor)
assert_type(called(Foreign()), Tensor)
assert_type(given_back(Foreign()), Any)
assert_type(declared(Foreign()), Tensor)
assert_type(cast(Foreign()), Tensor)
assert_type(flowing(Foreign()), Tensor)
assert_type(Model().bare(Tensor()), Tensor)
assert_type(Model().bare(Foreign()), Tensor)
assert_type(Model().called(Foreign()), Any)
assert_type(Model().static(Foreign()), Tensor)
assert_type(bare.execution_memory_type, str)
assert_type(Model().bare.input_memory_type, str)
assert_type(offloaded(Tensor()), Tensor)
assert_type(offloaded.explain(Tensor()), OffloadDecision)
assert_type(Model().offloaded.explain(Tensor()), OffloadDecision)
bare.explain  # type: ignore[attr-defined]  # noqa: B018

# Options that do not exist or have the wrong type.
arraybridge.torch(gpuid=0)  # type: ignore[call-overload]
arraybridge.torch(grad="detatch")  # type: ignore[call-overload]
arraybridge.torch(strict="yes")  # type: ignore[call-overload]
arraybridge.torch(stream="yes")  # type: ignore[call-overload]
arraybridge.torch(dtype_conversion="unit8")  # type: ignore[call-overload]
arraybridge.torch(dtype_conversion="uint8")
arraybridge.torch(3)  # type: ignore[call-overload]
memory_types("numpy")  # type: ignore[call-arg]

# Misspelled options and placements, inside of the library.
options = DecoratorOptions(framework="torch", output_type="input", oom_recovery="split")
assert_type(options.max_retries, int)
assert_type(options.placement, Placement)
print(options.max_retires)  # type: ignore[attr-defined]
options.max_retries = 3  # type: ignore[misc]
DecoratorOptions(framework="torch", output_type="input", oom_recovry=True)  # type: ignore[call-arg]
call = ConvertingCall(abs, options)
assert_type(call.options, DecoratorOptions)
assert_type(call.placement, Placement)
placement = Placement("torch", gpu_id=0)
assert_type(placement.device, arraybridge.Device | None)
print(placement.gpuid)  # type: ignore[attr-defined]
Placement("torch", devcie=None)  # type: ignore[call-arg]

# Every call signature of convert_memory, and every kind of device argument.
data: Any = Foreign()
native: Any = arraybridge.get_device().native("torch")
arraybridge.convert_memory(data, "torch")
arraybridge.convert_memory(data, "torch", 0)
arraybridge.convert_memory(data, "torch", gpu_id=0)
arraybridge.convert_memory(data, "torch", gpu_id="auto", copy=None, dtype="float32", grad="detach")
arraybridge.convert_memory(data, "numpy", "torch", gpu_id=0)
arraybridge.convert_memory(data, source_type="numpy", target_type="torch", gpu_id=0)
arraybridge.convert_memory(data, "jax", device="cpu:2")
arraybridge.convert_memory(data, MemoryType.JAX, device=arraybridge.Device.parse("cpu"))
arraybridge.convert_memory(data, MemoryType.NUMPY, MemoryType.TORCH, device=native)
assert_type(arraybridge.convert_memory(data, "numpy"), np.ndarray[Any, Any])
assert_type(arraybridge.convert_memory(data, "torch", "numpy", 0, copy=True), np.ndarray[Any, Any])
assert_type(arraybridge.convert_memory(data, source_type="torch", target_type="numpy"), np.ndarray[Any, Any])
assert_type(arraybridge.to_numpy(data, copy=True), np.ndarray[Any, Any])
assert_type(arraybridge.convert_tree([Foreign()], "torch"), Any)
arraybridge.convert_memory(data, "torch", copi=True)  # type: ignore[call-overload]
assert_type(arraybridge.to_torch(data, gpu_id=0, device="cuda:1"), torch.Tensor)
arraybridge.to_torch(data, copi=True)  # type: ignore[call-arg]
assert_type(arraybridge.explain(data, "torch", 0), Route)
assert_type(arraybridge.explain(data, "numpy", "torch", gpu_id=0, copy=True), Route)
assert_type(arraybridge.explain(data, source_type="numpy", target_type="torch"), Route)
arraybridge.explain(data, "torch", copi=True)  # type: ignore[call-arg]

# Events of a trace.
with arraybridge.trace() as log:
    pass
assert_type(log.events[0].seconds, float)
log.events[0].reson  # type: ignore[attr-defined]  # noqa: B018
Event("call", "f", 0.0, 0.0, "main", "", "", 0, devise="cpu")  # type: ignore[call-arg]

# Devices, and functions that run on them.
assert_type(arraybridge.get_device(), arraybridge.Device)
assert_type(arraybridge.least_used_gpu(), int | None)
assert_type(arraybridge.gpu_available(), bool)
with arraybridge.use_device("cuda:1"):
    pass
for item in arraybridge.prefetch([data], "torch", 0, depth=3):
    assert_type(item, Any)
for _ in arraybridge.device_map(bare, [data], devices=["cpu:1", native], per_device=4, setup=Model):
    pass
assert_type(arraybridge.compare(bare, data), Comparison)
assert_type(arraybridge.BufferPool(1 << 20).take((2, 3), "float32", "numpy"), Any)

# Files.
arrays = arraybridge.load_safetensors("model.safetensors")
assert_type(arrays, dict[str, np.ndarray[Any, Any]])
arraybridge.load_safetensors(Path("model.safetensors"), mmap_mode=None)
arraybridge.load_safetensors("model.safetensors", "r+")  # type: ignore[arg-type]
arraybridge.save_safetensors(Path("model.safetensors"), arrays, {"format": "pt"})
arraybridge.save_safetensors("model.safetensors", {1: data})  # type: ignore[dict-item]
