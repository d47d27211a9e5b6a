"""Convert arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto.

Conversions preserve every value and dtype, and share memory if possible.

>>> import numpy as np, arraybridge
>>> arraybridge.convert(np.arange(3), "torch")
tensor([0, 1, 2])
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from arraybridge.carriers.carrier import Carrier
from arraybridge.carriers.registry import register_carrier
from arraybridge.conversion.convert import convert, convert_memory, explain
from arraybridge.decorators.framework_decorators import cupy as cupy
from arraybridge.decorators.framework_decorators import jax as jax
from arraybridge.decorators.framework_decorators import memory_types
from arraybridge.decorators.framework_decorators import numpy as numpy
from arraybridge.decorators.framework_decorators import pyclesperanto as pyclesperanto
from arraybridge.decorators.framework_decorators import tensorflow as tensorflow
from arraybridge.decorators.framework_decorators import torch as torch
from arraybridge.device import Device
from arraybridge.devices.default_device import get_device, set_device, use_device
from arraybridge.devices.inventory import device_info, devices, gpu_available
from arraybridge.errors import (
    ArrayNotSupportedError,
    CannotSplitError,
    CheckpointError,
    CopyRequiredError,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    MissingGpuWarning,
    SourceMismatchError,
    UnknownArrayError,
    UnknownFrameworkError,
)
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel as _use_pocl_wheel
from arraybridge.host.buffers import aligned
from arraybridge.interface.framework import Framework
from arraybridge.interface.registry import framework, register
from arraybridge.settings import settings
from arraybridge.tracing.trace_log import trace
from arraybridge.types import MemoryType as MemoryType

if _TYPE_CHECKING:
    from arraybridge.batches import fixed
    from arraybridge.benchmarking import Comparison as Comparison
    from arraybridge.benchmarking import Timing as Timing
    from arraybridge.benchmarking import benchmark, compare
    from arraybridge.carriers.chunks import chunks
    from arraybridge.conversion.detection import detect_memory_type, device_of
    from arraybridge.conversion.short_forms import (
        to_cpu,
        to_cupy,
        to_gpu,
        to_jax,
        to_numpy,
        to_pyclesperanto,
        to_tensorflow,
        to_torch,
    )
    from arraybridge.conversion.short_forms import to_mlx as to_mlx
    from arraybridge.conversion.short_forms import to_paddle as to_paddle
    from arraybridge.conversion.tree_conversion import convert_tree
    from arraybridge.decorators.dtype_conversion import DtypeConversion
    from arraybridge.decorators.framework_decorators import mlx as mlx
    from arraybridge.decorators.framework_decorators import paddle as paddle
    from arraybridge.decorators.slices import process_slices, stack_slices, unstack_slices
    from arraybridge.devices.found_device import FoundDevice as FoundDevice
    from arraybridge.devices.inventory import least_used_gpu as least_used_gpu
    from arraybridge.devices.namespaces import array_namespace
    from arraybridge.memory.cleanup import cleanup_all_gpu_frameworks as cleanup_all_gpu_frameworks
    from arraybridge.memory.cleanup import cleanup_cupy_gpu as cleanup_cupy_gpu
    from arraybridge.memory.cleanup import cleanup_jax_gpu as cleanup_jax_gpu
    from arraybridge.memory.cleanup import cleanup_pyclesperanto_gpu as cleanup_pyclesperanto_gpu
    from arraybridge.memory.cleanup import cleanup_tensorflow_gpu as cleanup_tensorflow_gpu
    from arraybridge.memory.cleanup import cleanup_torch_gpu as cleanup_torch_gpu
    from arraybridge.memory.cleanup import free_memory
    from arraybridge.memory.gpu_context import gpu_context
    from arraybridge.memory.gpu_load import gpu_utilization as gpu_utilization
    from arraybridge.memory.gpu_sharing import Coexistence as Coexistence
    from arraybridge.memory.gpu_sharing import SharedPoolError as SharedPoolError
    from arraybridge.memory.gpu_sharing import coexist
    from arraybridge.memory.gpu_sharing import share_gpu_memory as share_gpu_memory
    from arraybridge.memory.memory_collector import MemoryCollector as MemoryCollector
    from arraybridge.memory.memory_peak import memory_peak as memory_peak
    from arraybridge.memory.oom_recovery import is_oom_error, run_with_oom_recovery, split_and_retry
    from arraybridge.memory.pinned_memory import pinned
    from arraybridge.memory.pools import BufferPool
    from arraybridge.memory.pools import PoolLimitError as PoolLimitError
    from arraybridge.memory.segments import SharedMemoryGoneError as SharedMemoryGoneError
    from arraybridge.memory.shared_memory import shared
    from arraybridge.memory.stats import MemoryStats as MemoryStats
    from arraybridge.memory.stats import memory_stats
    from arraybridge.offload.gpu_decorator import gpu
    from arraybridge.parallel.device_map import device_map
    from arraybridge.parallel.pipeline import Pipeline
    from arraybridge.parallel.pipeline import PipelineReport as PipelineReport
    from arraybridge.parallel.pipeline import StageReport as StageReport
    from arraybridge.parallel.prefetch import prefetch
    from arraybridge.parallel.worker_processes import ProcessDiedError as ProcessDiedError
    from arraybridge.reasons import Reason as Reason
    from arraybridge.route import Route as Route
    from arraybridge.safetensors import load_safetensors, save_safetensors
    from arraybridge.tracing.trace_log import TraceLog as TraceLog

# Decorators that are named after a framework are left out: `from arraybridge import *` must not replace the
# modules `numpy` and `torch`.
__all__ = [
    # convert
    "convert",
    "convert_memory",
    "convert_tree",
    "to_numpy",
    "to_torch",
    "to_jax",
    "to_tensorflow",
    "to_cupy",
    "to_pyclesperanto",
    "to_cpu",
    "to_gpu",
    "detect_memory_type",
    "aligned",
    # files
    "load_safetensors",
    "save_safetensors",
    # inspect conversions
    "explain",
    "trace",
    # decorators
    "gpu",
    "memory_types",
    "DtypeConversion",
    "stack_slices",
    "unstack_slices",
    "process_slices",
    # devices
    "Device",
    "devices",
    "device_of",
    "use_device",
    "set_device",
    "get_device",
    "gpu_available",
    "device_info",
    "array_namespace",
    # parallel execution and benchmarks
    "device_map",
    "Pipeline",
    "prefetch",
    "shared",
    "chunks",
    "benchmark",
    "compare",
    # memory
    "run_with_oom_recovery",
    "split_and_retry",
    "fixed",
    "is_oom_error",
    "free_memory",
    "memory_stats",
    "gpu_context",
    "coexist",
    "BufferPool",
    "pinned",
    # errors
    "MemoryConversionError",
    "ArrayNotSupportedError",
    "CannotSplitError",
    "CheckpointError",
    "CopyRequiredError",
    "DeviceNotFoundError",
    "DtypeNotSupportedError",
    "FrameworkNotInstalledError",
    "GradientError",
    "MissingGpuWarning",
    "SourceMismatchError",
    "UnknownArrayError",
    "UnknownFrameworkError",
    # settings, plug-ins
    "settings",
    "framework",
    "register",
    "Framework",
    "register_carrier",
    "Carrier",
]

__version__ = "1.0.0"

# This makes the OpenCL driver of the PoCL wheel available to a later `import pyclesperanto`.
_use_pocl_wheel()

# These names are loaded on first access, because their modules take three times as long to import as those
# above. Names that are not in `__all__` are result types or rarely needed.
_MODULES = {
    "batches": "fixed",
    "carriers.chunks": "chunks",
    "conversion.detection": "detect_memory_type device_of",
    "conversion.short_forms": "to_cpu to_cupy to_gpu to_jax to_numpy to_pyclesperanto to_tensorflow to_torch"
    " to_mlx to_paddle",
    "conversion.tree_conversion": "convert_tree",
    "route": "Route",
    "tracing.trace_log": "TraceLog",
    "devices.found_device": "FoundDevice",
    "devices.inventory": "least_used_gpu",
    "devices.namespaces": "array_namespace",
    "decorators.framework_decorators": "mlx paddle",
    "decorators.dtype_conversion": "DtypeConversion",
    "decorators.slices": "process_slices stack_slices unstack_slices",
    "parallel.device_map": "device_map",
    "parallel.pipeline": "Pipeline PipelineReport StageReport",
    "parallel.prefetch": "prefetch",
    "parallel.worker_processes": "ProcessDiedError",
    "benchmarking": "benchmark Timing compare Comparison",
    "memory.gpu_sharing": "coexist Coexistence SharedPoolError share_gpu_memory",
    "memory.gpu_context": "gpu_context",
    "memory.cleanup": "free_memory cleanup_all_gpu_frameworks"
    " cleanup_cupy_gpu cleanup_jax_gpu cleanup_pyclesperanto_gpu cleanup_tensorflow_gpu cleanup_torch_gpu",
    "memory.pools": "BufferPool PoolLimitError",
    "memory.pinned_memory": "pinned",
    "memory.oom_recovery": "is_oom_error run_with_oom_recovery split_and_retry",
    "memory.segments": "SharedMemoryGoneError",
    "memory.shared_memory": "shared",
    "memory.stats": "MemoryStats memory_stats",
    "memory.gpu_load": "gpu_utilization",
    "memory.memory_peak": "memory_peak",
    "memory.memory_collector": "MemoryCollector",
    "offload.gpu_decorator": "gpu",
    "reasons": "Reason",
    "safetensors": "load_safetensors save_safetensors",
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}


# Public subpackages that are imported on first access.
_PACKAGES = ("dask", "interface", "testing")
# Public names that are neither in `__all__` nor loaded later.
_OTHERS = ("MemoryType", "cupy", "jax", "numpy", "pyclesperanto", "tensorflow", "torch")


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"arraybridge.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'arraybridge' has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"arraybridge.{_LATER[name]}"), name)
    setattr(_importlib.import_module("arraybridge"), name, value)  # later accesses skip `__getattr__`
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, *_OTHERS, *_PACKAGES})
