"""TensorFlow's eager tensors and variables on CPU and GPU."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from arraybridge.device import Device
from arraybridge.frameworks import (
    dlpack_capsules,
    dtype_names,
    host_memory,
    keep_alives,
    read_only_memory,
    resource_exhausted,
)
from arraybridge.frameworks.accelerator_memory import Holding, Memory
from arraybridge.frameworks.base import FastPath, Framework, nbytes_of_parts
from arraybridge.frameworks.batching import IndexedBatching
from arraybridge.frameworks.component import component
from arraybridge.frameworks.device_access import CPU, Devices
from arraybridge.frameworks.interchange import Interchange, is_c_contiguous
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.runtime import Observation, Runtime
from arraybridge.frameworks.tensorflow import gradients as tensorflow_autodiff
from arraybridge.frameworks.tensorflow.sparse import TensorflowSparse
from arraybridge.frameworks.unsupported import (
    sparse_array_error,
    unsupported_array_error,
    unsupported_cast_error,
    unsupported_dtype_error,
    wider_dtype,
)
from arraybridge.reasons import Cause, Reason

# TensorFlow supports neither DLPack nor bitcast nor buffers for float8, so float8 is converted through NumPy.
_FLOAT8 = tuple(f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz"))
_DTYPES = dtype_names.PLAIN | {"bfloat16", *_FLOAT8}

# DTypes are interned, and looking up an id is three times as fast as hashing a DType.
# Other DTypes take the slow path: string, resource and variant crash the process in __dlpack__, and
# quantized ones report int8.
_PLAIN_IDS = {id(tf.dtypes.as_dtype(name)): name for name in dtype_names.PLAIN}
_DLPACK_IDS = {**_PLAIN_IDS, id(tf.bfloat16): "bfloat16"}
del _DLPACK_IDS[id(tf.complex128)]  # PyTorch requires 16-byte alignment for it

_NOT_C_CONTIGUOUS = Cause(Reason.NOT_C_CONTIGUOUS)
_FLOAT8_COPIES = Cause(Reason.FLOAT8)

# type(tf.constant(0)) would initialize every GPU, and TensorFlow would then allocate all of their memory.
_EAGER = tf.__internal__.EagerTensor

# The end of the name of the first CPU device, regardless of the cluster.
_CPU = "/device:CPU:0"
_numpy = NumpyFramework()
_to_dlpack = tf.experimental.dlpack.to_dlpack

# Out-of-memory messages of InternalError and UnknownError, from copies to the GPU and from CUDA libraries.
_OOM = re.compile(
    r"Dst tensor is not initialized|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED"
    r"|[Ff]ailed to allocate|Status: out of memory|Out of memory while trying to allocate"
)
# The beginnings of ResourceExhaustedError messages, for wrappers that raise the error as another class.
_OOM_TEXT = re.compile(
    r"(?:\{\{[^\n]*?\}\} ?)?(?:OOM when allocating|[Ff]ailed to allocate"
    r"|Out of memory while trying to allocate"
    r"|Failed copying input tensor .*(?:Dst tensor is not initialized|Status: out of memory)"
    r"|RET_CHECK failure .*Out of memory while trying to allocate|CUDNN_STATUS_ALLOC_FAILED)",
    re.DOTALL,
)


class TensorflowObservation(Observation):
    """The dtype, size, address and device of TensorFlow tensors."""

    is_asynchronous = True

    def read(self, owner: Framework, x: Any) -> tuple[Any, int, int | None, Device]:
        owner.check(x)
        device = owner.devices.device_of(x)
        if device.kind != "cpu":
            return super().read(owner, x)
        view = owner.host_view(x)
        return view.dtype, view.nbytes, host_memory.address(view), device


class TensorflowInterchange(Interchange):
    """Export and import of TensorFlow tensors."""

    dlpack_device = 2 if tf.test.is_built_with_cuda() else None

    def address(self, x: Any) -> int:
        self.framework.check(x)  # a DLPack export of strings would crash the process
        return dlpack_capsules.capsule_address(x.__dlpack__())

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        return None if is_c_contiguous(shape, strides, itemsize) else _NOT_C_CONTIGUOUS

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        keep_alives.release()
        # PyTorch exports only from the current GPU. TensorFlow ignores streams, so wait for the source.
        with source.devices.selected(device):
            source.interchange.block_until_ready(x)
            imported = tf.experimental.dlpack.from_dlpack(source.interchange.export(x, device).__dlpack__())
        if device.kind != "cpu":
            _keep_for_tensorflow(x, imported, self.framework.devices.native_device(device))
        return imported

    def export(self, x: Any, device: Device) -> Any:
        # TensorFlow's __dlpack__ does not accept stream=; it waits until the memory is ready.
        return dlpack_capsules.Importable(x.__dlpack__(), (2, device.index))

    def block_until_ready(self, x: Any) -> None:
        if isinstance(x, _EAGER) and "CPU" in x.device:
            if id(x.dtype) in _PLAIN_IDS:
                memoryview(x)  # in asynchronous mode, only reading a tensor waits for it
        elif self.framework.devices.device_of(x).kind != "cpu":
            tf.test.experimental.sync_devices()

    def check_copy(self, x: Any) -> None:
        self.framework.check(x)

    def check_castable(self, x: Any) -> None:
        _check_not_quantized(self.framework, x)

    def check_cast(self, source: str, dtype: str) -> None:
        if not _has_cast(source, dtype):
            expression = f"to_tensorflow(to_numpy({{x}}, dtype={dtype!r}))"
            raise unsupported_cast_error(
                self.framework, source, dtype, "Cast in NumPy first: {}.", expression
            )

    def is_plain(self, x: Any) -> bool:
        return not isinstance(x, tf.Variable)


class TensorflowDevices(Devices):
    """TensorFlow's logical devices."""

    def device_of(self, x: Any) -> Device:
        if isinstance(x, _EAGER):  # first, because the other checks take six times as long
            return _named_device(x.backing_device) if x.backing_device else CPU
        x = x.values if isinstance(x, tf.SparseTensor) else x
        name = x.device if isinstance(x, tf.Variable) else getattr(x, "backing_device", "")
        return _named_device(name) if name else CPU

    def available(self) -> tuple[Device, ...]:
        return _devices()

    def accelerators(self) -> tuple[str, ...]:
        if tf.test.is_built_with_rocm():
            return ("rocm",)
        return ("mps",) if sys.platform == "darwin" else ("cuda",)

    def missing_device_reason(self) -> str:
        if not tf.test.is_built_with_cuda():
            return "This TensorFlow is built for the CPU only. Install tensorflow[and-cuda]."
        return "TensorFlow finds no GPU. Check that the GPU driver is installed."

    def to_device(self, x: Any, device: Device) -> Any:
        with self.selected(device):
            return tf.identity(x)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return tf.device(self.native_device(device))

    def native_device(self, device: Device) -> Any:
        return f"/device:{device.kind.upper()}:{device.index}"

    def is_started(self) -> bool:
        # Device queries would initialize the devices. Once they are initialized, setting the number of
        # threads raises.
        threads = tf.config.threading.get_inter_op_parallelism_threads()
        try:
            tf.config.threading.set_inter_op_parallelism_threads(threads + (os.cpu_count() or 1))
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError:
            return True
        return False

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, (tf.config.LogicalDevice, tf.config.PhysicalDevice)):
            return None
        kind = "cpu" if x.device_type == "CPU" else "gpu"
        accelerator = "tpu" if x.device_type == "TPU" else ""
        return Device(kind, int(x.name.rpartition(":")[2]), accelerator=accelerator)

    def visible_devices(self) -> tuple[Device, ...]:
        if self.is_started():
            return self.available()
        devices: list[Device] = []
        for kind in ("cpu", "gpu"):
            physical = tf.config.get_visible_devices(kind.upper())
            logical = (tf.config.get_logical_device_configuration(device) or [device] for device in physical)
            devices += (Device(kind, i) for i in range(sum(map(len, logical))))
        return tuple(devices)


class TensorflowMemory(Memory):
    """TensorFlow's memory allocators and out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, tf.errors.ResourceExhaustedError):
            return resource_exhausted.is_memory(str(error))
        if not isinstance(error, (tf.errors.InternalError, tf.errors.UnknownError)):
            return False
        text = str(error)
        return _OOM.search(text) is not None and not resource_exhausted.is_other(text)

    def is_oom_text(self, text: str) -> bool:
        return _OOM_TEXT.match(text) is not None and not resource_exhausted.is_other(text)

    def usage(self) -> list[Holding]:
        # TensorFlow neither reports nor releases the free memory of its pool.
        rows = []
        for device in _devices() if self.framework.devices.is_started() else ():
            if device.kind == "gpu":
                info = tf.config.experimental.get_memory_info(f"GPU:{device.index}")
                rows.append(Holding(str(device), "tensorflow", info["current"], None, info["peak"]))
        return rows

    def synchronize(self) -> None:
        if self.framework.devices.is_started():
            tf.test.experimental.sync_devices()

    def reset_peak(self) -> None:
        for holding in self.usage():
            tf.config.experimental.reset_memory_stats(holding.device.upper())

    def oom_error(self) -> Exception:
        message = "OOM when allocating tensor with shape[536870912] and type float (simulated)"
        error: Exception = tf.errors.ResourceExhaustedError(None, None, message)
        return error


class TensorflowBatching(IndexedBatching):
    """Functions that split and join TensorFlow tensors on their device."""

    def _joined(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        # tf.concat and tf.stack support every dtype, unlike tf.experimental.numpy.
        with self.framework.devices.selected(self.framework.devices.device_of(arrays[0])):
            return getattr(tf, name)(arrays, axis)


class TensorflowRuntime(Runtime):
    """TensorFlow's array classes and array namespace."""

    observation = TensorflowObservation()

    def array_classes(self) -> tuple[type, ...]:
        return (tf.Tensor, tf.Variable)

    def array_namespace(self) -> Any:
        # TensorFlow has no conforming array API namespace. The module below covers most of the standard.
        from arraybridge.frameworks.tensorflow import namespace as tensorflow_namespace

        return tensorflow_namespace


class TensorflowFastPath(FastPath):
    """Fast conversions of eager tensors on the CPU."""

    def fast_types(self) -> tuple[type, ...]:
        return (_EAGER,)

    def plan_key(self, x: Any, alignment: int) -> Hashable:
        if not x.backing_device.endswith(_CPU):
            raise NotImplementedError
        memory = self.fast_view(x)
        is_shared_read_only = bool(read_only_memory.exported_ranges) and read_only_memory.is_shared_read_only(
            host_memory.address(memory)
        )
        return _numpy.fast_path.plan_key(memory, alignment), is_shared_read_only

    def fast_view(self, x: Any) -> np.ndarray:
        if id(x.dtype) in _PLAIN_IDS:
            return np.asarray(memoryview(x))
        raise NotImplementedError

    def fast_export(self, x: Any) -> Any:
        if id(x.dtype) not in _DLPACK_IDS or not (_has_only_one_cpu() or x.backing_device.endswith(_CPU)):
            raise NotImplementedError
        return _to_dlpack(x)

    fast_import = staticmethod(tf.experimental.dlpack.from_dlpack)


class TensorflowFramework(Framework):
    """TensorFlow, whose arrays are ``tf.Tensor`` objects."""

    name = "tensorflow"
    errors = (tf.errors.OpError,)
    alignment = host_memory.ALIGNMENT  # with a smaller alignment, most operations crash the process
    mutable = False
    dtypes = _DTYPES
    autodiff = tensorflow_autodiff.AUTODIFF
    sparse = TensorflowSparse()
    interchange = component(TensorflowInterchange)
    devices = component(TensorflowDevices)
    memory = component(TensorflowMemory)
    batching = component(TensorflowBatching)
    runtime = component(TensorflowRuntime)
    fast_path = component(TensorflowFastPath)

    def owns(self, x: Any) -> bool:
        return isinstance(x, (tf.Tensor, tf.Variable, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))

    def check(self, x: Any) -> None:
        if isinstance(x, _EAGER) and id(x.dtype) in _PLAIN_IDS:
            return
        if isinstance(x, tf.RaggedTensor):
            instead = "pass {}, which pads with zeros, or {} without the row lengths"
            raise unsupported_array_error(
                self, "a ragged tensor", instead, "{x}.to_tensor()", "{x}.flat_values"
            )
        if isinstance(x, tf.SparseTensor):
            raise sparse_array_error(self, x)
        if isinstance(x, tf.IndexedSlices):
            raise unsupported_array_error(
                self,
                "an IndexedSlices gradient",
                "it stores only some rows; pass the dense gradient, {}",
                "tf.convert_to_tensor({x})",
            )
        if not isinstance(x, (_EAGER, tf.Variable)):
            raise unsupported_array_error(
                self, "a symbolic tensor", "it has no values yet. Convert outside tf.function"
            )
        _check_not_quantized(self, x)
        if x.dtype.name not in _DTYPES:
            raise unsupported_dtype_error(self, x.dtype.name, *_dtype_advice(x))

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype.name)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(_known_shape(x))

    def nbytes(self, x: Any) -> int:
        if not isinstance(x, _EAGER) and isinstance(x, tf.SparseTensor):
            return nbytes_of_parts(self, x)
        # num_elements() is None for unknown shapes.
        return x.dtype.size * (_known_shape(x).num_elements() or 0)

    def host_view(self, x: Any) -> np.ndarray:
        if isinstance(x, tf.Variable):
            x = x.value()  # a snapshot: assignments do not change it
        if id(x.dtype) in _PLAIN_IDS:
            return np.asarray(memoryview(x))
        # np.asarray would copy a 0-d tensor.
        memory = np.asarray(x) if x.shape.rank else np.asarray(tf.reshape(x, [1])).reshape(())
        memory = memory.view()
        memory.flags.writeable = False
        return memory

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        # For other logical CPU devices, the base class calls `to_device`. The tf.identity there shares the
        # buffer.
        if device.kind != "cpu" or device.index:
            return super().from_host(view, device)
        if view.dtype.isbuiltin == 2 and dtype_names.name_of(view.dtype) in _FLOAT8:
            return tf.constant(view)
        return tf.experimental.dlpack.from_dlpack(dlpack_capsules.capsule(view))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        if dtype_names.name_of(view.dtype) in _FLOAT8:
            return _FLOAT8_COPIES
        return super().cannot_view(view)

    def copy(self, x: Any) -> Any:
        self.check(x)
        if isinstance(x, tf.Variable):
            value = self.copy(x.value())  # a copied variable would share memory until an assignment
            return tf.Variable(value, shape=x.shape, trainable=x.trainable)
        if self.devices.device_of(x).kind == "cpu":
            return super().copy(x)
        return tf.raw_ops.DeepCopy(x=x)  # tf.identity may return the same buffer

    def cast(self, x: Any, dtype: str) -> Any:
        if isinstance(x, _EAGER) and x.dtype.name in _DTYPES and self.devices.device_of(x).kind == "cpu":
            memory = self.host_view(x)
            if memory.size and host_memory.address(memory) % self.alignment:
                x = self.copy(x)  # tf.cast would crash the process on misaligned memory
        return tf.cast(x, dtype)


def _check_not_quantized(framework: Framework, x: Any) -> None:
    if x.dtype.is_quantized:
        raise unsupported_array_error(
            framework,
            "a quantized tensor",
            "no other framework has its quantized dtype; pass its integers without the scale, {}",
            f'tf.bitcast({{x}}, "{x.dtype.name[1:]}")',
        )


def _dtype_advice(x: Any) -> tuple[str, ...]:
    """Return advice for a dtype that other frameworks lack: the text, then the expressions in the text."""
    dtype = x.dtype
    if dtype == tf.string:
        try:
            tf.strings.to_number(x)
        except tf.errors.OpError:
            return (
                "their strings are not numbers. Pass integers that identify the strings, {}",
                "tf.unique(tf.reshape({x}, [-1])).idx",
            )
        return "their strings contain numbers. Pass {}", "tf.strings.to_number({x}, tf.float64)"
    if dtype in (tf.resource, tf.variant):
        return ("their elements are handles, not numbers. Pass the tensors to which they refer",)
    return (
        "no other framework has this dtype; pass {}, which holds every value",
        f'tf.cast({{x}}, "{wider_dtype(dtype.name)}")',
    )


def _keep_for_tensorflow(x: Any, imported: Any, device: str) -> None:
    """Keep ``x`` alive until TensorFlow finishes the work that is pending when ``imported`` is freed."""

    def begin() -> Any:
        with tf.init_scope(), tf.device(device):  # runs eagerly, even inside tf.function
            return tf.zeros(()) + 1

    def wait(y: Any) -> None:
        y.numpy()

    keep_alives.keep_until_done(imported, x, begin, wait)


def _known_shape(x: Any) -> tf.TensorShape:
    """Return the shape of a tensor, or of the value of a variable that was declared with unknown extents."""
    shape = x.shape
    if isinstance(x, tf.Variable) and not shape.is_fully_defined():
        return x.value().shape
    return shape


@functools.cache
def _named_device(name: str) -> Device:
    kind, _, index = name.rpartition("/device:")[2].partition(":")
    return Device("cpu" if kind == "CPU" else "gpu", int(index or 0))


@functools.cache  # after the first query, TensorFlow does not allow changes to its devices
def _devices() -> tuple[Device, ...]:
    return tuple(
        Device(kind, int(native.name.rpartition(":")[2]))
        for kind in ("cpu", "gpu")
        for native in tf.config.list_logical_devices(kind.upper())
    )


@functools.cache
def _has_only_one_cpu() -> bool:
    return len(_devices()) == 1


@functools.cache
def _has_cast(source: str, dtype: str) -> bool:
    """Return whether TensorFlow can cast between two dtypes; 2.21 has few casts for float8 and int4."""
    if source == dtype:
        return True
    try:
        tf.cast(tf.zeros([0], tf.dtypes.as_dtype(source)), dtype)
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError, TypeError, ValueError):
        return False
    return True
