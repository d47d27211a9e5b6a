"""TensorFlow: immutable eager tensors and variables on CPU and GPU."""

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

from arraybridge.frameworks import (
    dlpack_capsules,
    dtype_names,
    gpu_memory,
    host_memory,
    protocols,
    read_only,
    resource_exhausted,
)
from arraybridge.frameworks.accelerators import Holding
from arraybridge.frameworks.base import (
    CPU,
    Devices,
    FastPath,
    Framework,
    IndexedBatching,
    Interchange,
    Memory,
    Observation,
    Runtime,
    component,
    is_c_contiguous,
    unsupported_array_error,
    unsupported_cast_error,
    unsupported_dtype_error,
    wider_dtype,
)
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.tensorflow import gradients as tensorflow_autodiff
from arraybridge.reasons import Cause, Reason
from arraybridge.types import Device

# Float8 has neither DLPack nor a bitcast nor the buffer protocol here, and goes through NumPy (ml_dtypes).
_FLOAT8 = tuple(f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz"))
_DTYPES = dtype_names.PLAIN | {"bfloat16", *_FLOAT8}

# DTypes are interned, and looking up an id is three times as fast as hashing a DType.
# A DType that is not in here (string, resource and variant end the process in __dlpack__; quantized
# ones call themselves int8) takes the careful path.
_PLAIN_IDS = {id(tf.dtypes.as_dtype(name)): name for name in dtype_names.PLAIN}
_DLPACK_IDS = {**_PLAIN_IDS, id(tf.bfloat16): "bfloat16"}
del _DLPACK_IDS[id(tf.complex128)]  # torch minds its alignment

_NOT_C_CONTIGUOUS = Cause(Reason.NOT_C_CONTIGUOUS)
_FLOAT8_COPIES = Cause(Reason.FLOAT8)

# Not type(tf.constant(0)): that opens every card, which TensorFlow then takes whole.
_EAGER = tf.__internal__.EagerTensor

# How the name of the host's first device ends, whatever the cluster's.
_CPU = "/device:CPU:0"
_numpy = NumpyFramework()
_to_dlpack = tf.experimental.dlpack.to_dlpack

# InternalErrors and UnknownErrors for out of memory: of copies to the GPU, and of CUDA and its libraries.
_OOM = re.compile(
    r"Dst tensor is not initialized|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED"
    r"|[Ff]ailed to allocate|Status: out of memory|Out of memory while trying to allocate"
)
# How the message of a ResourceExhaustedError begins inside a wrapper that raises another class.
_OOM_TEXT = re.compile(
    r"(?:\{\{[^\n]*?\}\} ?)?(?:OOM when allocating|[Ff]ailed to allocate"
    r"|Out of memory while trying to allocate"
    r"|Failed copying input tensor .*(?:Dst tensor is not initialized|Status: out of memory)"
    r"|RET_CHECK failure .*Out of memory while trying to allocate|CUDNN_STATUS_ALLOC_FAILED)",
    re.DOTALL,
)


class TensorflowObservation(Observation):
    is_asynchronous = True

    def read(self, owner: Framework, x: Any) -> tuple[Any, int, int | None, Device]:
        owner.check(x)
        device = owner.devices.device_of(x)
        if device.kind != "cpu":
            return super().read(owner, x)
        view = owner.host_view(x)
        return view.dtype, view.nbytes, host_memory.address(view), device


class TensorflowInterchange(Interchange):
    dlpack_device = 2 if tf.test.is_built_with_cuda() else None

    def address(self, x: Any) -> int:
        self.framework.check(x)  # a capsule of strings ends the process
        return dlpack_capsules.capsule_address(x.__dlpack__())

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        return None if is_c_contiguous(shape, strides, itemsize) else _NOT_C_CONTIGUOUS

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        gpu_memory.release()
        # torch refuses to lend from a card that is not the current one; this import knows no stream.
        with source.devices.selected(device):
            source.interchange.block_until_ready(x)
            imported = tf.experimental.dlpack.from_dlpack(source.interchange.export(x, device).__dlpack__())
        if device.kind != "cpu":
            _export_to_tensorflow(x, imported, self.framework.devices.native_device(device))
        return imported

    def export(self, x: Any, device: Device) -> Any:
        # Its __dlpack__ knows no stream=, and waits until the memory is ready.
        return protocols.Importable(x.__dlpack__(), (2, device.index))

    def block_until_ready(self, x: Any) -> None:
        if isinstance(x, _EAGER) and "CPU" in x.device:
            if id(x.dtype) in _PLAIN_IDS:
                memoryview(x)  # in asynchronous mode, only reading waits for one tensor
        elif self.framework.devices.device_of(x).kind != "cpu":
            tf.test.experimental.sync_devices()

    def check_copy(self, x: Any) -> None:
        self.framework.check(x)

    def check_cast(self, source: str, dtype: str) -> None:
        if not _has_cast(source, dtype):
            instead = f"Cast in NumPy first: to_tensorflow(to_numpy(x, dtype={dtype!r}))."
            raise unsupported_cast_error(self.framework, source, dtype, instead)

    def is_plain(self, x: Any) -> bool:
        return not isinstance(x, tf.Variable)


class TensorflowDevices(Devices):
    def device_of(self, x: Any) -> Device:
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
            return "This TensorFlow is built for the CPU alone; install tensorflow[and-cuda]."
        return "TensorFlow finds no GPU; is the card's driver installed?"

    def to_device(self, x: Any, device: Device) -> Any:
        with self.selected(device):
            return tf.identity(x)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return tf.device(self.native_device(device))

    def native_device(self, device: Device) -> Any:
        return f"/device:{device.kind.upper()}:{device.index}"

    def is_started(self) -> bool:
        # The questions open the devices. A setting of theirs is refused once they are open.
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
        return Device(x.device_type.lower(), int(x.name.rpartition(":")[2]))

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
        # What is free inside TensorFlow's own pool it does not tell; nor does it ever give any of it back.
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
        for one in self.usage():
            tf.config.experimental.reset_memory_stats(one.device.upper())

    def oom_error(self) -> Exception:
        message = "OOM when allocating tensor with shape[536870912] and type float (a rehearsal)"
        error: Exception = tf.errors.ResourceExhaustedError(None, None, message)
        return error


class TensorflowBatching(IndexedBatching):
    def _joined(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        with self.framework.devices.selected(
            self.framework.devices.device_of(arrays[0])
        ):  # every dtype, as tf.experimental.numpy has not
            return getattr(tf, name)(arrays, axis)


class TensorflowRuntime(Runtime):
    observation = TensorflowObservation()

    def array_classes(self) -> tuple[type, ...]:
        return (tf.Tensor, tf.Variable)

    def array_namespace(self) -> Any:
        # Much of the array API, though not all of it: TensorFlow has no namespace that conforms.
        from arraybridge.frameworks.tensorflow import namespace as tensorflow_namespace

        return tensorflow_namespace


class TensorflowFastPath(FastPath):
    def fast_types(self) -> tuple[type, ...]:
        return (_EAGER,)

    def plan_key(self, x: Any, alignment: int) -> Hashable:
        if not x.backing_device.endswith(_CPU):
            raise NotImplementedError
        memory = self.fast_view(x)
        is_shared_read_only = bool(read_only.exported_ranges) and read_only.is_shared_read_only(
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
    name = "tensorflow"
    errors = (tf.errors.OpError,)
    alignment = host_memory.ALIGNMENT  # most operations end the process on memory with less
    mutable = False
    dtypes = _DTYPES
    autodiff = tensorflow_autodiff.AUTODIFF
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
            raise unsupported_array_error(self, "a sparse tensor", "pass {}", "tf.sparse.to_dense({x})")
        if isinstance(x, tf.IndexedSlices):
            raise unsupported_array_error(
                self, "an IndexedSlices gradient", "pass {}", "tf.convert_to_tensor({x})"
            )
        if not isinstance(x, (_EAGER, tf.Variable)):
            raise unsupported_array_error(
                self, "a symbolic tensor", "it has no values yet; convert outside tf.function"
            )
        if x.dtype.name not in _DTYPES:
            raise unsupported_dtype_error(self, x.dtype.name, *_instead_of(x))

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype.name)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(_known_shape(x))

    def nbytes(self, x: Any) -> int:
        return x.dtype.size * (_known_shape(x).num_elements() or 0)  # None: ragged, or not known yet

    def host_view(self, x: Any) -> np.ndarray:
        if isinstance(x, tf.Variable):
            x = x.value()  # an assignment that follows copies, while this snapshot is held
        if id(x.dtype) in _PLAIN_IDS:
            return np.asarray(memoryview(x))
        # A 0-d tensor would turn into a scalar, which is a copy.
        memory = np.asarray(x) if x.shape.rank else np.asarray(tf.reshape(x, [1])).reshape(())
        memory = memory.view()
        memory.flags.writeable = False
        return memory

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        # Between the CPU's logical devices tf.identity hands on the buffer.
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
            value = self.copy(x.value())  # a copy of the variable itself shares until one is assigned
            return tf.Variable(value, shape=x.shape, trainable=x.trainable)
        if self.devices.device_of(x).kind == "cpu":
            return super().copy(x)
        return tf.raw_ops.DeepCopy(x=x)  # tf.identity may hand back the same buffer

    def cast(self, x: Any, dtype: str) -> Any:
        if isinstance(x, _EAGER) and x.dtype.name in _DTYPES and self.devices.device_of(x).kind == "cpu":
            memory = self.host_view(x)
            if memory.size and host_memory.address(memory) % self.alignment:
                x = self.copy(x)  # tf.cast ends the process on memory that was imported misaligned
        return tf.cast(x, dtype)


def _instead_of(x: Any) -> tuple[str, ...]:
    """Return the advice for a dtype that other frameworks lack, and its expressions."""
    dtype = x.dtype
    if dtype == tf.string:
        try:
            tf.strings.to_number(x)
        except tf.errors.OpError:
            return "its strings are not numbers; number them, {}", "tf.unique(tf.reshape({x}, [-1])).idx"
        return "its strings stand for numbers: pass {}", "tf.strings.to_number({x}, tf.float64)"
    if dtype.is_quantized:
        return "pass its integers without the scale, {}", f'tf.bitcast({{x}}, "{dtype.name[1:]}")'
    if dtype in (tf.resource, tf.variant):
        return ("it holds a handle, not numbers; pass the tensors that it refers to",)
    return "pass {}, which holds every value", f'tf.cast({{x}}, "{wider_dtype(dtype.name)}")'


def _export_to_tensorflow(x: Any, imported: Any, device: str) -> None:
    """Keep what it was lent until TensorFlow has done what was queued when its tensor went."""

    def begin() -> Any:
        with tf.init_scope(), tf.device(device):  # also where a function is being traced
            return tf.zeros(()) + 1

    def wait(y: Any) -> None:
        y.numpy()

    gpu_memory.keep_until_done(imported, x, begin, wait)


def _known_shape(x: Any) -> tf.TensorShape:
    """Return the shape of a tensor; of a variable that was declared with unknown extents, its value's."""
    shape = x.shape
    if isinstance(x, tf.Variable) and not shape.is_fully_defined():
        return x.value().shape
    return shape


@functools.cache
def _named_device(name: str) -> Device:
    kind, _, index = name.rpartition("/device:")[2].partition(":")
    return Device("cpu" if kind == "CPU" else "gpu", int(index or 0))


@functools.cache  # TensorFlow refuses to change them once they are asked for
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
    """Return whether TensorFlow has a cast; its float8 dtypes and 4-bit integers have few (2.21)."""
    if source == dtype:
        return True
    try:
        tf.cast(tf.zeros([0], tf.dtypes.as_dtype(source)), dtype)
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError, TypeError, ValueError):
        return False
    return True
