"""Arrays between NumPy, CuPy, PyTorch, JAX, TensorFlow and pyclesperanto: exact, and shared where it can be.

>>> import numpy as np, arraybridge
>>> arraybridge.convert_memory(np.arange(3), "torch")
tensor([0, 1, 2])
"""

from arraybridge.conversion.convert import convert_memory as convert_memory
from arraybridge.conversion.convert import convert_tree as convert_tree
from arraybridge.conversion.convert import detect_memory_type as detect_memory_type
from arraybridge.conversion.convert import device_of as device_of
from arraybridge.conversion.convert import explain as explain
from arraybridge.conversion.convert import to_cpu as to_cpu
from arraybridge.conversion.convert import to_cupy as to_cupy
from arraybridge.conversion.convert import to_gpu as to_gpu
from arraybridge.conversion.convert import to_jax as to_jax
from arraybridge.conversion.convert import to_numpy as to_numpy
from arraybridge.conversion.convert import to_pyclesperanto as to_pyclesperanto
from arraybridge.conversion.convert import to_tensorflow as to_tensorflow
from arraybridge.conversion.convert import to_torch as to_torch
from arraybridge.conversion.routes import Route as Route
from arraybridge.conversion.trace import TraceLog as TraceLog
from arraybridge.conversion.trace import trace as trace
from arraybridge.errors import ArrayNotSupportedError as ArrayNotSupportedError
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
from arraybridge.frameworks.registry import framework as framework
from arraybridge.frameworks.registry import register as register
from arraybridge.options import settings as settings
from arraybridge.types import Device as Device
from arraybridge.types import MemoryType as MemoryType

__all__ = [
    "ArrayNotSupportedError",
    "CopyRequiredError",
    "Device",
    "DeviceNotFoundError",
    "DtypeNotSupportedError",
    "Framework",
    "FrameworkNotInstalledError",
    "GradientError",
    "MemoryConversionError",
    "MemoryType",
    "MissingGpuWarning",
    "Route",
    "SourceMismatchError",
    "TraceLog",
    "UnknownArrayError",
    "UnknownFrameworkError",
    "convert_memory",
    "convert_tree",
    "detect_memory_type",
    "device_of",
    "explain",
    "framework",
    "register",
    "settings",
    "to_cpu",
    "to_cupy",
    "to_gpu",
    "to_jax",
    "to_numpy",
    "to_pyclesperanto",
    "to_tensorflow",
    "to_torch",
    "trace",
]

__version__ = "1.0.0"
