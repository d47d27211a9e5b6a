"""Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto: exact, and shared where it can be.

>>> import numpy as np, arraybridge
>>> arraybridge.convert_memory(np.arange(3), "torch")
tensor([0, 1, 2])
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# Before all of ours, since NumPy's own import takes 15 ms longer from inside the modules below (Python 3.11).
import numpy as _numpy  # noqa: F401

from arraybridge.batches import fixed as fixed
from arraybridge.conversion.convert import convert_memory as convert_memory
from arraybridge.conversion.convert import convert_tree as convert_tree
from arraybridge.conversion.convert import detect_memory_type as detect_memory_type
from arraybridge.conversion.convert import device_of as device_of
from arraybridge.conversion.convert import explain as explain
from arraybridge.conversion.convert import to_cpu as to_cpu
from arraybridge.conversion.convert import to_cupy as to_cupy
from arraybridge.conversion.convert import to_gpu as to_gpu
from arraybridge.conversion.convert import to_jax as to_jax
from arraybridge.conversion.convert import to_mlx as to_mlx
from arraybridge.conversion.convert import to_numpy as to_numpy
from arraybridge.conversion.convert import to_paddle as to_paddle
from arraybridge.conversion.convert import to_pyclesperanto as to_pyclesperanto
from arraybridge.conversion.convert import to_tensorflow as to_tensorflow
from arraybridge.conversion.convert import to_torch as to_torch
from arraybridge.conversion.explanation import Route as Route
from arraybridge.conversion.trace import TraceLog as TraceLog
from arraybridge.conversion.trace import trace as trace
from arraybridge.devices.context import array_namespace as array_namespace
from arraybridge.devices.context import get_device as get_device
from arraybridge.devices.context import set_device as set_device
from arraybridge.devices.context import use_device as use_device
from arraybridge.devices.discovery import DeviceMismatchError as DeviceMismatchError
from arraybridge.devices.discovery import FoundDevice as FoundDevice
from arraybridge.devices.discovery import device_info as device_info
from arraybridge.devices.discovery import devices as devices
from arraybridge.devices.discovery import gpu_available as gpu_available
from arraybridge.devices.discovery import least_used_gpu as least_used_gpu
from arraybridge.errors import ArrayNotSupportedError as ArrayNotSupportedError
from arraybridge.errors import CannotSplitError as CannotSplitError
from arraybridge.errors import CopyRequiredError as CopyRequiredError
from arraybridge.errors import DeviceNotFoundError as DeviceNotFoundError
from arraybridge.errors import DtypeNotSupportedError as DtypeNotSupportedError
from arraybridge.errors import FrameworkNotInstalledError as FrameworkNotInstalledError
from arraybridge.errors import GradientError as GradientError
from arraybridge.errors import MemoryConversionError as MemoryConversionError
from arraybridge.errors import MissingGpuWarning as MissingGpuWarning
from arraybridge.errors import SourceMismatchError as SourceMismatchError
from arraybridge.errors import UnknownArrayError as UnknownArrayError
from arraybridge.errors import UnknownFrameworkError as UnknownFrameworkError
from arraybridge.frameworks.base import Framework as Framework
from arraybridge.frameworks.hostmemory import aligned as aligned
from arraybridge.frameworks.registry import framework as framework
from arraybridge.frameworks.registry import register as register
from arraybridge.functions.decorators import cupy as cupy
from arraybridge.functions.decorators import jax as jax
from arraybridge.functions.decorators import memory_types as memory_types
from arraybridge.functions.decorators import mlx as mlx
from arraybridge.functions.decorators import numpy as numpy
from arraybridge.functions.decorators import paddle as paddle
from arraybridge.functions.decorators import pyclesperanto as pyclesperanto
from arraybridge.functions.decorators import tensorflow as tensorflow
from arraybridge.functions.decorators import torch as torch
from arraybridge.functions.dtypes import DtypeConversion as DtypeConversion
from arraybridge.functions.slices import process_slices as process_slices
from arraybridge.functions.slices import stack_slices as stack_slices
from arraybridge.functions.slices import unstack_slices as unstack_slices
from arraybridge.memory.cleanup import Coexistence as Coexistence
from arraybridge.memory.cleanup import SharedPoolError as SharedPoolError
from arraybridge.memory.cleanup import cleanup_all_gpu_frameworks as cleanup_all_gpu_frameworks
from arraybridge.memory.cleanup import cleanup_cupy_gpu as cleanup_cupy_gpu
from arraybridge.memory.cleanup import cleanup_jax_gpu as cleanup_jax_gpu
from arraybridge.memory.cleanup import cleanup_pyclesperanto_gpu as cleanup_pyclesperanto_gpu
from arraybridge.memory.cleanup import cleanup_tensorflow_gpu as cleanup_tensorflow_gpu
from arraybridge.memory.cleanup import cleanup_torch_gpu as cleanup_torch_gpu
from arraybridge.memory.cleanup import coexist as coexist
from arraybridge.memory.cleanup import free_memory as free_memory
from arraybridge.memory.cleanup import gpu_context as gpu_context
from arraybridge.memory.cleanup import share_gpu_memory as share_gpu_memory
from arraybridge.memory.recognise import is_oom_error as is_oom_error
from arraybridge.memory.recovery import run_with_oom_recovery as run_with_oom_recovery
from arraybridge.memory.recovery import split_and_retry as split_and_retry
from arraybridge.options import settings as settings
from arraybridge.types import Device as Device
from arraybridge.types import MemoryType as MemoryType

if _TYPE_CHECKING:
    from arraybridge.lines.device_map import device_map as device_map
    from arraybridge.lines.pipeline import Pipeline as Pipeline
    from arraybridge.lines.prefetch import prefetch as prefetch
    from arraybridge.lines.report import PipelineReport as PipelineReport
    from arraybridge.lines.report import StageReport as StageReport
    from arraybridge.measure.benchmark import Timing as Timing
    from arraybridge.measure.benchmark import benchmark as benchmark
    from arraybridge.measure.compare import Comparison as Comparison
    from arraybridge.measure.compare import SizeComparison as SizeComparison
    from arraybridge.measure.compare import compare as compare
    from arraybridge.memory.peaks import memory_peak as memory_peak
    from arraybridge.memory.pools import BufferPool as BufferPool
    from arraybridge.memory.pools import PoolLimitError as PoolLimitError
    from arraybridge.memory.pools import pinned as pinned
    from arraybridge.memory.shared import shared as shared
    from arraybridge.memory.stats import MemoryCollector as MemoryCollector
    from arraybridge.memory.stats import MemoryStats as MemoryStats
    from arraybridge.memory.stats import gpu_utilization as gpu_utilization
    from arraybridge.memory.stats import memory_stats as memory_stats
    from arraybridge.offload.decorator import gpu as gpu
    from arraybridge.offload.decorator import stay_on_gpu as stay_on_gpu

__all__ = [
    "ArrayNotSupportedError",
    "BufferPool",
    "CannotSplitError",
    "Coexistence",
    "Comparison",
    "CopyRequiredError",
    "Device",
    "DeviceMismatchError",
    "DeviceNotFoundError",
    "DtypeConversion",
    "DtypeNotSupportedError",
    "FoundDevice",
    "Framework",
    "FrameworkNotInstalledError",
    "GradientError",
    "MemoryCollector",
    "MemoryConversionError",
    "MemoryStats",
    "MemoryType",
    "MissingGpuWarning",
    "Pipeline",
    "PipelineReport",
    "PoolLimitError",
    "Route",
    "SharedPoolError",
    "SizeComparison",
    "SourceMismatchError",
    "StageReport",
    "Timing",
    "TraceLog",
    "UnknownArrayError",
    "UnknownFrameworkError",
    "aligned",
    "array_namespace",
    "benchmark",
    "cleanup_all_gpu_frameworks",
    "cleanup_cupy_gpu",
    "cleanup_jax_gpu",
    "cleanup_pyclesperanto_gpu",
    "cleanup_tensorflow_gpu",
    "cleanup_torch_gpu",
    "coexist",
    "compare",
    "convert_memory",
    "convert_tree",
    "cupy",
    "detect_memory_type",
    "device_info",
    "device_map",
    "device_of",
    "devices",
    "explain",
    "fixed",
    "framework",
    "free_memory",
    "get_device",
    "gpu",
    "gpu_available",
    "gpu_context",
    "gpu_utilization",
    "is_oom_error",
    "jax",
    "least_used_gpu",
    "memory_peak",
    "memory_stats",
    "memory_types",
    "mlx",
    "numpy",
    "paddle",
    "pinned",
    "prefetch",
    "process_slices",
    "pyclesperanto",
    "register",
    "run_with_oom_recovery",
    "set_device",
    "settings",
    "share_gpu_memory",
    "split_and_retry",
    "stack_slices",
    "stay_on_gpu",
    "tensorflow",
    "to_cpu",
    "to_cupy",
    "to_gpu",
    "to_jax",
    "to_mlx",
    "to_numpy",
    "to_paddle",
    "to_pyclesperanto",
    "to_tensorflow",
    "to_torch",
    "torch",
    "trace",
    "unstack_slices",
    "use_device",
]

__version__ = "1.0.0"

# Loaded when first asked for: a quarter of what the import of this package would cost.
_LATER = {
    "device_map": "arraybridge.lines.device_map",
    "Comparison": "arraybridge.measure.compare",
    "Timing": "arraybridge.measure.benchmark",
    "benchmark": "arraybridge.measure.benchmark",
    "compare": "arraybridge.measure.compare",
    "Pipeline": "arraybridge.lines.pipeline",
    "prefetch": "arraybridge.lines.prefetch",
    "PipelineReport": "arraybridge.lines.report",
    "StageReport": "arraybridge.lines.report",
    "SizeComparison": "arraybridge.measure.compare",
    "shared": "arraybridge.memory.shared",
    "memory_peak": "arraybridge.memory.peaks",
    "BufferPool": "arraybridge.memory.pools",
    "PoolLimitError": "arraybridge.memory.pools",
    "pinned": "arraybridge.memory.pools",
    "MemoryCollector": "arraybridge.memory.stats",
    "MemoryStats": "arraybridge.memory.stats",
    "gpu_utilization": "arraybridge.memory.stats",
    "memory_stats": "arraybridge.memory.stats",
    "gpu": "arraybridge.offload.decorator",
    "stay_on_gpu": "arraybridge.offload.decorator",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module 'arraybridge' has no attribute {name!r}")
    return getattr(_importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
