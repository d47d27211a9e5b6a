"""Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto: exact, and shared where it can be.

>>> import numpy as np, arraybridge
>>> arraybridge.convert(np.arange(3), "torch")
tensor([0, 1, 2])
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from arraybridge.batches import fixed
from arraybridge.carriers.carrier import Carrier
from arraybridge.carriers.registry import register_carrier
from arraybridge.conversion.convert import (
    convert,
    convert_memory,
    convert_tree,
    detect_memory_type,
    device_of,
    explain,
    to_cpu,
    to_cupy,
    to_gpu,
    to_jax,
    to_numpy,
    to_pyclesperanto,
    to_tensorflow,
    to_torch,
)
from arraybridge.conversion.trace import trace
from arraybridge.devices.default import get_device, set_device, use_device
from arraybridge.devices.inventory import device_info, devices, gpu_available
from arraybridge.errors import (
    ArrayNotSupportedError,
    CannotSplitError,
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
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.hostmemory import aligned
from arraybridge.frameworks.pyclesperanto.opencl import use_pocl_wheel as _use_pocl_wheel
from arraybridge.frameworks.registry import framework, register
from arraybridge.functions.decorators import cupy as cupy
from arraybridge.functions.decorators import jax as jax
from arraybridge.functions.decorators import memory_types
from arraybridge.functions.decorators import numpy as numpy
from arraybridge.functions.decorators import pyclesperanto as pyclesperanto
from arraybridge.functions.decorators import tensorflow as tensorflow
from arraybridge.functions.decorators import torch as torch
from arraybridge.options import settings
from arraybridge.types import Device
from arraybridge.types import MemoryType as MemoryType

if _TYPE_CHECKING:
    from arraybridge.carriers.chunks import chunks
    from arraybridge.devices.inventory import least_used_gpu as least_used_gpu
    from arraybridge.devices.namespaces import array_namespace
    from arraybridge.functions.dtypes import DtypeConversion
    from arraybridge.functions.slices import process_slices, stack_slices, unstack_slices
    from arraybridge.lines.device_map import device_map
    from arraybridge.lines.pipeline import Pipeline
    from arraybridge.lines.prefetch import prefetch
    from arraybridge.measure import benchmark, compare
    from arraybridge.memory.cleanup import coexist, free_memory, gpu_context
    from arraybridge.memory.pools import BufferPool, pinned
    from arraybridge.memory.recovery import is_oom_error, run_with_oom_recovery, split_and_retry
    from arraybridge.memory.shared import shared
    from arraybridge.memory.stats import memory_stats
    from arraybridge.offload.decorator import gpu

# In the order in which people need them. The decorators that are named after a framework are missing, so that
# `from arraybridge import *` does not replace the modules `numpy` and `torch`; import them by name.
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
    # know what happened
    "explain",
    "trace",
    # run a function in its framework
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
    # many at a time
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
    "CopyRequiredError",
    "DeviceNotFoundError",
    "DtypeNotSupportedError",
    "FrameworkNotInstalledError",
    "GradientError",
    "MissingGpuWarning",
    "SourceMismatchError",
    "UnknownArrayError",
    "UnknownFrameworkError",
    # settings, frameworks of your own
    "settings",
    "framework",
    "register",
    "Framework",
    "register_carrier",
    "Carrier",
]

__version__ = "1.0.0"

# So that a later `import pyclesperanto` finds OpenCL, too.
_use_pocl_wheel()

# Loaded when first asked for, since together they take three times as long as all above. What is not in
# `__all__` comes out of a call, is an error, or is needed by few; it is named in its module.
_MODULES = {
    "carriers.chunks": "chunks",
    "conversion.convert": "to_mlx to_paddle",
    "timeline.route": "Route",
    "conversion.trace": "TraceLog",
    "devices.inventory": "FoundDevice least_used_gpu",
    "devices.namespaces": "array_namespace",
    "functions.decorators": "mlx paddle",
    "functions.dtypes": "DtypeConversion",
    "functions.slices": "process_slices stack_slices unstack_slices",
    "lines.device_map": "device_map",
    "lines.pipeline": "Pipeline PipelineReport StageReport",
    "lines.prefetch": "prefetch",
    "lines.processes": "ProcessDiedError",
    "measure": "benchmark Timing compare Comparison SizeComparison",
    "memory.cleanup": "coexist Coexistence free_memory gpu_context SharedPoolError share_gpu_memory"
    " cleanup_all_gpu_frameworks"
    " cleanup_cupy_gpu cleanup_jax_gpu cleanup_pyclesperanto_gpu cleanup_tensorflow_gpu cleanup_torch_gpu",
    "memory.pools": "BufferPool PoolLimitError pinned",
    "memory.recovery": "is_oom_error run_with_oom_recovery split_and_retry",
    "memory.shared": "shared SharedMemoryGoneError",
    "memory.stats": "MemoryCollector MemoryStats gpu_utilization memory_peak memory_stats",
    "offload.decorator": "gpu stay_on_gpu",
    "reasons": "Reason",
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module 'arraybridge' has no attribute {name!r}")
    return getattr(_importlib.import_module(f"arraybridge.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
