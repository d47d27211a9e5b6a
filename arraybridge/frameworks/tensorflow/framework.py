"""TensorFlow's eager tensors and variables on CPU and GPU."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from arraybridge.device import Device
from arraybridge.frameworks.numpy.framework import NumpyFramework
from arraybridge.frameworks.tensorflow import gradients as tensorflow_autodiff
from arraybridge.frameworks.tensorflow.sparse import TensorflowSparse
from arraybridge.host import buffers, dlpack_capsules, dtype_names, read_only_memory
from arraybridge.interface import keep_alives, resource_exhausted, unsupported
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import FastPath, Framework, NoPlanError, native_errors
from arraybridge.interface.interchange import Interchange, is_c_contiguous
from arraybridge.interface.memory import Holding, Memory
from arraybridge.interface.runtime import Runtime
from arraybridge.reasons import Cause, Reason

# TensorFlow supports neither DLPack nor bitcast nor buffers for float8 (2.21, tensorflow/tensorflow#61374),
# so float8 is converted through NumPy.
_FLOAT8 = tuple(f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz"))
_DTYPES = dtype_names.PLAIN | {"bfloat16", *_FLOAT8}

# DTypes are interned, and looking up an id is three times as fast as hashing a DType.
# Other DTypes take the slow path: string, resource and variant crash the process in __dlpack__ (2.21, no
# issue found), and quantized ones report int8.
_PLAIN_IDS = {id(tf.dtypes.as_dtype(name)): name for name in dtype_names.PLAIN}
_DLPACK_IDS = {**_PLAIN_IDS, id(tf.bfloat16): "bfloat16"}
del _DLPACK_IDS[id(tf.complex128)]  # PyTorch requires 16-byte alignment for it

_NOT_C_CONTIGUOUS = Cause(Reason.NOT_C_CONTIGUOUS)
_FLOAT8_COPIES = Cause(Reason.FLOAT8)

# type(tf.constant(0)) would initialize every GPU, and TensorFlow would then allocate all of their memory. The
# class has no public name (2.21, tensorflow/tensorflow#33264).
_EAGER = tf.__internal__.EagerTensor

# The end of the name of the first CPU device, regardless of the cluster.
_CPU = "/device:CPU:0"
_numpy = NumpyFramework()
_to_dlpack = tf.experimental.dlpack.to_dlpack
# tf.init_scope() has no effect in a tf.Graph that is not a tf.function.
_eager_mode = tf.__internal__.eager_context.eager_mode

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


class TensorflowInterchange(Interchange):
    """Export and import of TensorFlow tensors."""

    dlpack_device = 2 if tf.test.is_built_with_cuda() else None
    cast_expression = 'tf.cast({{x}}, "{dtype}")'
    reshape_expression = "tf.reshape({{x}}, {shape})"

    def address(self, x: Any) -> int:
        self.framework.check(x)  # a DLPack export of strings would crash the process
        return dlpack_capsules.capsule_address(_to_dlpack(x))

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        # TensorFlow imports only C-contiguous memory (2.21, tensorflow/tensorflow#42660).
        return None if is_c_contiguous(shape, strides, itemsize) else _NOT_C_CONTIGUOUS

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        keep_alives.release()
        # PyTorch exports only from the current GPU (pytorch/pytorch#195721). TensorFlow ignores streams, so
        # wait for the source.
        with source.devices.select(device):
            source.interchange.block_until_ready(x)
            capsule = source.interchange.export(x, device).__dlpack__()
            if device.kind != "cpu":
                capsule = dlpack_capsules.renumber(capsule, _logical_number(device))
            imported = tf.experimental.dlpack.from_dlpack(capsule)
        if device.kind != "cpu":
            run_last = functools.partial(_run_last, self.framework.devices.native_device(device))
            keep_alives.keep_until_done(imported, x, run_last, self.block_until_ready)
        return imported

    def export(self, x: Any, device: Device) -> Any:
        # TensorFlow's __dlpack__ raises for stream= (2.21, _EagerTensorBase in python/framework/ops.py); it
        # waits until the memory is ready.
        capsule = dlpack_capsules.renumber(_to_dlpack(x), device.index)
        return dlpack_capsules.Importable(capsule, (2, device.index))

    def block_until_ready(self, x: Any) -> None:
        if isinstance(x, _EAGER) and "CPU" in x.device:
            if id(x.dtype) in _PLAIN_IDS:
                memoryview(x)  # in asynchronous mode, only reading a tensor waits for it
        elif (device := self.framework.devices.device_of(x)).kind != "cpu":
            # TensorFlow has one stream per GPU (2.21, tensorflow/tensorflow#36970). sync_devices() would also
            # wait for all other GPUs.
            _run_last(self.framework.devices.native_device(device)).numpy()

    def check_copy(self, x: Any) -> None:
        self.framework.check(x)

    def check_castable(self, x: Any) -> None:
        if isinstance(x, tf.Variable):
            _check_readable(self.framework, x)
        _check_not_quantized(self.framework, x)

    def check_cast(self, source: str, dtype: str) -> None:
        if not _has_cast(source, dtype):
            expression = f"to_tensorflow(to_numpy({{x}}, dtype={dtype!r}))"
            raise unsupported.cast_error(
                self.framework, source, dtype, "Cast in NumPy first: {}.", expression
            )

    def is_plain(self, x: Any) -> bool:
        return not isinstance(x, tf.Variable)


class TensorflowDevices(Devices):
    """TensorFlow's logical CPU devices, and its GPUs by their physical numbers."""

    _is_started = False

    def device_of(self, x: Any) -> Device:
        if isinstance(x, _EAGER):  # first, because the other checks take six times as long
            return _parse_device(x.backing_device) if x.backing_device else CPU
        x = x.values if isinstance(x, tf.SparseTensor) else x
        name = x.device if isinstance(x, tf.Variable) else getattr(x, "backing_device", "")
        return _parse_device(name) if name else CPU

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
        with _isolate(self.native_device(device)):
            return tf.identity(x)

    def select(self, device: Device) -> AbstractContextManager[Any]:
        return tf.device(self.native_device(device))

    def native_device(self, device: Device) -> Any:
        return f"/device:{device.kind.upper()}:{_logical_number(device)}"

    def is_started(self) -> bool:
        if self._is_started or _devices.cache_info().currsize:  # saves 80 µs
            return True
        # Device queries would initialize the devices. Once they are initialized, setting the number of
        # threads raises (tensorflow/tensorflow#57812).
        threads = tf.config.threading.get_inter_op_parallelism_threads()
        try:
            tf.config.threading.set_inter_op_parallelism_threads(threads + (os.cpu_count() or 1))
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError:
            self._is_started = True  # no public function stops the devices
        return self._is_started

    def starts_with_next_array(self) -> bool:
        # Building a graph does not start TensorFlow.
        return tf.executing_eagerly() and not self.is_started()

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, (tf.config.LogicalDevice, tf.config.PhysicalDevice)):
            return None
        kind = "cpu" if x.device_type == "CPU" else "gpu"
        accelerator = "tpu" if x.device_type == "TPU" else ""
        if x.device_type == "GPU" and isinstance(x, tf.config.LogicalDevice):
            return _parse_device(x.name)
        return Device(kind, int(x.name.rpartition(":")[2]), accelerator=accelerator)

    def visible_devices(self) -> tuple[Device, ...]:
        if self.is_started():
            return self.available()
        cpus = (Device("cpu", i) for i in range(len(_physical_numbers("CPU"))))
        return (*cpus, *(Device("gpu", i) for i in dict.fromkeys(_physical_numbers("GPU"))))


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
        # TensorFlow neither reports nor releases the free memory of its pool (2.21,
        # tensorflow/tensorflow#36465).
        rows = []
        for i, number in enumerate(_physical_numbers("GPU") if self.framework.devices.is_started() else ()):
            info = tf.config.experimental.get_memory_info(f"GPU:{i}")
            rows.append(Holding(f"gpu:{number}", "tensorflow", info["current"], None, info["peak"]))
        return rows

    def synchronize(self) -> None:
        if self.framework.devices.is_started():
            tf.test.experimental.sync_devices()

    def reset_peak(self) -> None:
        for i in range(len(self.usage())):
            tf.config.experimental.reset_memory_stats(f"GPU:{i}")

    def oom_error(self) -> Exception:
        message = "OOM when allocating tensor with shape[536870912] and type float (simulated)"
        error: Exception = tf.errors.ResourceExhaustedError(None, None, message)
        return error


class TensorflowBatching(IndexedBatching):
    """Functions that split and join TensorFlow tensors on their device."""

    def _join(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        symbolic = [x for x in arrays if _is_symbolic(x)]
        # tf.concat and tf.stack support every dtype, unlike tf.experimental.numpy.
        with self.framework.runtime.device_guard((symbolic or arrays)[0]):
            return getattr(tf, name)(arrays, axis)


class TensorflowRuntime(Runtime):
    """TensorFlow's array classes and array namespace, and the properties of tensors that traces read."""

    is_asynchronous = True
    # TensorFlow has no conforming array API namespace (data-apis/array-api-compat#441). This module covers
    # most of the standard.
    namespace = "arraybridge.frameworks.tensorflow.namespace"

    def observe(self, x: Any) -> tuple[Any, int, int | None, Device]:
        self.framework.check(x)
        device = self.framework.devices.device_of(x)
        if device.kind != "cpu":
            return super().observe(x)
        view = self.framework.host_view(x)
        return view.dtype, view.nbytes, buffers.address(view), device

    def device_guard(self, x: Any) -> AbstractContextManager[Any]:
        if _is_symbolic(x):
            return nullcontext()  # the operation becomes part of the caller's graph
        devices = self.framework.devices
        return _isolate(devices.native_device(devices.device_of(x)))

    def array_classes(self) -> tuple[type, ...]:
        return (tf.Tensor, tf.Variable)


#: The exceptions of TensorFlow for tensors that it cannot export or import.
_ERRORS: tuple[type[Exception], ...] = (*native_errors(), tf.errors.OpError)


class TensorflowFastPath(FastPath):
    """Fast conversions of eager tensors on the CPU."""

    def fast_types(self) -> tuple[type, ...]:
        return (_EAGER,)

    def plan_key(self, x: Any, alignment: int) -> Hashable:
        if not x.backing_device.endswith(_CPU):
            raise NoPlanError
        memory = self.fast_view(x)
        is_shared_read_only = bool(read_only_memory.exported_ranges) and read_only_memory.is_shared_read_only(
            buffers.address(memory)
        )
        return _numpy.fast_path.plan_key(memory, alignment), is_shared_read_only

    def fast_view(self, x: Any) -> np.ndarray:
        if id(x.dtype) not in _PLAIN_IDS:
            raise NoPlanError
        try:
            return np.asarray(memoryview(x))
        except _ERRORS as error:
            raise NoPlanError from error

    def fast_export(self, x: Any) -> Any:
        if id(x.dtype) not in _DLPACK_IDS or not (_has_only_one_cpu() or x.backing_device.endswith(_CPU)):
            raise NoPlanError
        try:
            return _to_dlpack(x)
        except _ERRORS as error:
            raise NoPlanError from error

    fast_import = staticmethod(tf.experimental.dlpack.from_dlpack)


class TensorflowFramework(Framework):
    """TensorFlow, whose arrays are ``tf.Tensor`` objects."""

    name = "tensorflow"
    errors = (tf.errors.OpError,)
    # With a smaller alignment, most operations crash the process (TensorFlow 2.21, dmlc/dgl#995).
    alignment = buffers.ALIGNMENT
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
            raise unsupported.array_error(self, "a ragged TensorFlow tensor", *_advice_for_ragged(x))
        if isinstance(x, tf.SparseTensor):
            raise unsupported.sparse_array_error(self, x)
        if isinstance(x, tf.IndexedSlices):
            raise unsupported.array_error(
                self,
                "a TensorFlow IndexedSlices gradient",
                "it stores only some rows",
                "Pass the dense gradient, {}.",
                "tf.convert_to_tensor({x})",
            )
        _check_readable(self, x)
        _check_not_quantized(self, x)
        if x.dtype.name not in _DTYPES:
            what = f"a TensorFlow tensor of dtype {x.dtype.name}"
            raise unsupported.dtype_error(self, what, *_dtype_advice(x))

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype.name)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(_known_shape(x))

    def nbytes(self, x: Any) -> int:
        if not isinstance(x, _EAGER) and isinstance(x, tf.SparseTensor):
            return super().nbytes(x)
        # num_elements() is None for unknown shapes.
        return x.dtype.size * (_known_shape(x).num_elements() or 0)

    def host_view(self, x: Any) -> np.ndarray:
        if not isinstance(x, _EAGER) and isinstance(x, tf.Variable):  # the first check is six times as fast
            with self.runtime.device_guard(x):
                x = x.value()  # a snapshot: assignments do not change it
        if id(x.dtype) in _PLAIN_IDS:
            return np.asarray(memoryview(x))
        if x.shape.rank:
            memory = np.asarray(x).view()
        else:  # np.asarray would copy a 0-d tensor
            with self.runtime.device_guard(x):
                memory = np.asarray(tf.reshape(x, [1])).reshape(())
        memory.flags.writeable = False
        return memory

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        # For other logical CPU devices, the base class calls `to_device`. The tf.identity there shares the
        # buffer (tensorflow/tensorflow#11186).
        if device.kind != "cpu" or device.index:
            return super().from_host(view, device)
        if view.dtype.isbuiltin == 2 and dtype_names.name_of(view.dtype) in _FLOAT8:
            with _isolate(self.devices.native_device(device)):
                return tf.constant(view)
        return tf.experimental.dlpack.from_dlpack(dlpack_capsules.capsule(view))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        if dtype_names.name_of(view.dtype) in _FLOAT8:
            return _FLOAT8_COPIES
        return super().cannot_view(view)

    def copy(self, x: Any) -> Any:
        self.check(x)
        if isinstance(x, tf.Variable):
            with self.runtime.device_guard(x):
                value = self.copy(x.value())  # a copied variable would share memory until an assignment
                return tf.Variable(value, shape=x.shape, trainable=x.trainable)
        if self.devices.device_of(x).kind == "cpu":
            return super().copy(x)
        with self.runtime.device_guard(x):
            # tf.identity may return the same buffer (tensorflow/tensorflow#11186).
            return tf.raw_ops.DeepCopy(x=x)

    def cast(self, x: Any, dtype: str) -> Any:
        if isinstance(x, _EAGER) and x.dtype.name in _DTYPES and self.devices.device_of(x).kind == "cpu":
            memory = self.host_view(x)
            if memory.size and buffers.address(memory) % self.alignment:
                x = self.copy(x)  # tf.cast would crash the process on misaligned memory
        if isinstance(x, _EAGER) and tf.executing_eagerly():
            # Selecting the device takes as long as the cast, and is only necessary within tf.device.
            converted = tf.cast(x, dtype)
            if converted.backing_device == x.backing_device:
                return converted
        with self.runtime.device_guard(x):
            return tf.cast(x, dtype)


@contextmanager
def _isolate(device: str) -> Iterator[None]:
    """Let TensorFlow compute eagerly and on a device, regardless of the caller's graph and device."""
    with nullcontext() if tf.executing_eagerly() else _eager_mode(), tf.device(device):
        yield


def _is_symbolic(x: Any) -> bool:
    """Return whether a tensor, a variable or a sparse tensor belongs to a graph."""
    if isinstance(x, tf.SparseTensor):
        return not isinstance(x.values, _EAGER)
    return not isinstance(x, (_EAGER, tf.Variable))


def _check_readable(framework: Framework, x: Any) -> None:
    """Raise for a symbolic tensor, and for a variable in a ``tf.function``, which has no value yet."""
    if isinstance(x, _EAGER):
        return
    what = "a symbolic TensorFlow tensor"
    if isinstance(x, tf.Variable):
        if tf.executing_eagerly() or not tf.compat.v1.get_default_graph().building_function:
            return
        what = "a TensorFlow variable in a tf.function"
    raise unsupported.array_error(framework, what, "it has no value yet", "Convert outside tf.function.")


def _check_not_quantized(framework: Framework, x: Any) -> None:
    if x.dtype.is_quantized:
        raise unsupported.array_error(
            framework,
            "a quantized TensorFlow tensor",
            "no other framework has its quantized dtype",
            "Pass its integers without the scale, {}.",
            f'tf.bitcast({{x}}, "{x.dtype.name[1:]}")',
        )


def _dtype_advice(x: Any) -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for a dtype that other frameworks lack."""
    dtype = x.dtype
    if dtype == tf.string:
        if _are_numbers(x):
            return "its elements are strings", "Pass {}.", "tf.strings.to_number({x}, tf.float64)"
        advice = "Pass integers that identify the strings, {}."
        return "its elements are strings", advice, "tf.unique(tf.reshape({x}, [-1])).idx"
    if dtype in (tf.resource, tf.variant):
        return "its elements are handles, not numbers", "Pass the tensors to which they refer."
    return (
        "no other framework has this dtype",
        "Pass {}, which holds every value.",
        f'tf.cast({{x}}, "{unsupported.wider_dtype(dtype.name)}")',
    )


def _advice_for_ragged(x: Any) -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for a ragged tensor."""
    cause = "its rows have different lengths"
    if x.dtype == tf.string:
        strings = _dtype_advice(x.flat_values)
        return cause, strings[1], strings[2].replace("{x}", "{x}.flat_values")
    advice = "Pass {}, which pads with zeros, or {} without the row lengths."
    return cause, advice, "{x}.to_tensor()", "{x}.flat_values"


def _are_numbers(strings: Any) -> bool:
    """Return whether a tensor of strings can be converted to numbers."""
    try:
        with _isolate(strings.device):
            tf.strings.to_number(strings, tf.float64)
    except tf.errors.OpError:
        return False
    return True


def _run_last(device: str) -> Any:
    """Start a computation on a device, and return its result, which is ready after all earlier work."""
    with _isolate(device):
        return tf.zeros(()) + 1


def _known_shape(x: Any) -> tf.TensorShape:
    """Return the shape of a tensor, or of the value of a variable that was declared with unknown extents."""
    shape = x.shape
    if isinstance(x, tf.Variable) and not shape.is_fully_defined():
        return x.value().shape
    return shape


@functools.cache
def _parse_device(name: str) -> Device:
    kind, _, index = name.rpartition("/device:")[2].partition(":")
    number = int(index or 0)
    if kind == "GPU":
        number = dict(enumerate(_physical_numbers("GPU"))).get(number, number)
    if kind == "CPU":
        return Device("cpu", number) if number else CPU
    return Device("gpu", number)


def _logical_number(device: Device) -> int:
    """Return TensorFlow's number of a device: the first one for a GPU with several logical GPUs."""
    numbers = _physical_numbers("GPU") if device.kind == "gpu" else []
    return numbers.index(device.index) if device.index in numbers else device.index


def _physical_numbers(kind: str) -> list[int]:
    """Return the number of the physical device of each logical device, without initializing TensorFlow.

    TensorFlow's numbers differ after ``set_visible_devices``, and with several logical GPUs per physical one.
    """
    numbers: list[int] = []
    for physical in tf.config.get_visible_devices(kind):
        parts = tf.config.get_logical_device_configuration(physical) or [physical]
        numbers += [int(physical.name.rpartition(":")[2])] * len(parts)
    return numbers


@functools.cache  # after the first query, TensorFlow does not allow changes to its devices
def _devices() -> tuple[Device, ...]:
    cpus = (Device("cpu", i) for i in range(len(tf.config.list_logical_devices("CPU"))))
    gpus = len(tf.config.list_logical_devices("GPU"))
    return (*cpus, *(Device("gpu", i) for i in dict.fromkeys(_physical_numbers("GPU")[:gpus])))


@functools.cache
def _has_only_one_cpu() -> bool:
    return len(_devices()) == 1


@functools.cache
def _has_cast(source: str, dtype: str) -> bool:
    """Return whether TensorFlow can cast between two dtypes.

    TensorFlow 2.21 has few casts for float8 (tensorflow/tensorflow#60942) and int4.
    """
    if source == dtype:
        return True
    try:
        with _isolate("/device:CPU:0"):
            tf.cast(tf.zeros([0], tf.dtypes.as_dtype(source)), dtype)
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError, TypeError, ValueError):
        return False
    return True
