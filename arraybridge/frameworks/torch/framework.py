"""PyTorch tensors on the CPU and on the accelerators of ``torch.accelerator`` (CUDA, ROCm, XPU, MPS).

PyTorch has no read-only tensors (pytorch/pytorch#44027), so conversions to PyTorch copy read-only memory (see
`arraybridge.conversion.decision`).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

# Users register their container classes in this module, which has no public name (torch 2.14; proposed in
# pytorch/pytorch#175082).
from torch.utils import _pytree as pytree
from torch.utils import dlpack as torch_dlpack

from arraybridge import cuda_driver, hardware
from arraybridge.device import Device, gpu_device
from arraybridge.frameworks.torch import gradients as torch_autodiff
from arraybridge.frameworks.torch.sparse import TorchSparse
from arraybridge.frameworks.torch.streams import TorchStreams, on_device
from arraybridge.frameworks.torch.surroundings import count_modes, guard, isolate
from arraybridge.host import buffers, dlpack_capsules, dtype_names, protocols, read_only_memory
from arraybridge.host.buffers import ALIGNMENT
from arraybridge.interface import autodiff, keep_alives, unsupported
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import FastPath, Framework, NoPlanError, native_errors
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import GpuMemory, Holding, Memory
from arraybridge.interface.runtime import OneLevel, Pytree, Runtime
from arraybridge.interface.streams import Streams
from arraybridge.reasons import Cause, Reason

#: NumPy's dtype names → PyTorch's dtypes.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *dtype_names.PLAIN,
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)  # float8_e8m0fnu: torch >= 2.7, pytorch/pytorch#147466
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The major version of CUDA for which this PyTorch was built; 0 for other builds.
_CUDA = int((torch.version.cuda or "0").partition(".")[0])

#: The real dtypes that NumPy has too, for which the fast path calls .numpy().
_REAL_DTYPES = frozenset(DTYPES[name] for name in dtype_names.PLAIN if not name.startswith("complex"))
#: NumPy dtypes that PyTorch views at any alignment.
_VIEWABLE_DTYPES = frozenset(map(np.dtype, dtype_names.PLAIN - {"complex128"}))

#: Maps bfloat16 and float8 dtypes to integer dtypes of the same size. Exports use the integers, because
#: neither NumPy nor CUDA's array interface has names for bfloat16 and float8 (pytorch/pytorch#110285).
_EXPORT_DTYPES = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in DTYPES.items()
    if name in dtype_names.EXTENDED
}

# Calling these names takes 30 ns less than looking them up in `torch`.
_from_numpy = torch.from_numpy
_Tensor = torch.Tensor
_increment_version = torch.autograd.graph.increment_version
# The function behind `torch.jit.is_tracing`, which takes three times as long.
_is_tracing = torch._C._is_tracing  # noqa: SLF001  # see above

# A private name (pytorch/pytorch#92012): within any public context manager, reading a tensor may call
# `__torch_function__` of its class or the program's function modes. PyTorch's guide to subclasses uses a
# similar private name.
_unseen = getattr(getattr(torch, "_C", None), "DisableTorchFunction", nullcontext)

# Quantized dtypes whose elements are smaller than one byte.
_QUANTIZED_SUB_BYTE = (torch.quint4x2, torch.quint2x4)

# Reasons without details, created once.
_LAZY_VALUES = Cause(Reason.LAZY_VALUES)
_NEGATIVE_STRIDES = Cause(Reason.NEGATIVE_STRIDES, framework="torch")
_STRIDE_MULTIPLES = Cause(Reason.STRIDE_MULTIPLES)

# The beginnings of out-of-memory messages in plain RuntimeErrors and AcceleratorErrors.
_OOM = re.compile(
    r"(?:\[enforce fail at .*)?DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|(?:CUDA|HIP|MPS|XPU|cu[A-Za-z]+|hip[a-z]+)(?: driver| backend)?(?: error:)?"
    r" (?:out of memory|\w+_ALLOC(?:ATION)?_FAILED)"
    r"|(?:CUDA error: |cusparse error: )?CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
    r"|CUDA error: resource allocation failed"
    # The CUDA allocator queries NVML only to report that memory has run out. Here, that query failed
    # (pytorch/pytorch#122068).
    r'|NVML_SUCCESS == r INTERNAL ASSERT FAILED at "[^"]*CUDACachingAllocator\.cpp"'
    r"|Native API failed\. Native API returns: -?\d+ \(\w+_OUT_OF_(?:DEVICE|HOST)_MEMORY\)"
    # MPS: exceeds the limit of a buffer, but a part may fit (pytorch/pytorch#141909).
    r"|Invalid buffer size: [\d.]+ \w*B\b"
    r"|Triton Error \[\w+\]: (?: Code: \d+, Mess+age: )?out of memory"  # Triton 3 for HIP misspells "Message"
    r"|unable to mmap \d+ bytes from file <[^\n]*>: Cannot allocate memory \(12\)",
    re.DOTALL,
)


def _autocast(kind: str) -> tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]:
    """Return functions that get and set the autocast dtype of a device type; None means no autocast."""

    def current() -> torch.dtype | None:
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def context(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return torch.autocast(kind, dtype, enabled=dtype is not None)

    return current, context


def _dlpack_device() -> int | None:
    """Return the DLPack device type of the GPUs of this PyTorch build (pytorch/pytorch#40123)."""
    if torch.version.cuda:
        return 2
    return 10 if torch.version.hip else None


_DLPACK_DEVICE = _dlpack_device()


_NO_DTYPE = "no other framework has this dtype"


def _dtype_advice(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the cause, the advice and its expressions for a dtype that other frameworks lack."""
    if dtype is torch.complex32:
        return _NO_DTYPE, "Pass {}, which holds every value.", "{x}.to(torch.complex64)"
    # PyTorch casts neither sub-byte integers nor bits nor packed float4 (torch 2.13, pytorch/pytorch#74627).
    return f"{_NO_DTYPE}, and PyTorch cannot cast it", "Pass the packed bytes, {}.", "{x}.view(torch.uint8)"


def _check_not_wrapper(framework: Framework, x: torch.Tensor) -> None:
    """Raise an error if the class of ``x`` wraps another tensor, with the expression that unwraps it."""
    methods = {
        "MaskedTensor": (
            "its mask would be lost",
            "Pass {}, with a fill value of your choice.",
            "{x}.to_tensor(0)",
        ),
        "AsyncCollectiveTensor": ("its values have not arrived yet", "Pass {}.", "{x}.wait()"),
    }
    for cls in type(x).__mro__:
        if cls.__name__ in methods and cls.__module__.startswith("torch."):
            raise unsupported.array_error(framework, f"a PyTorch {cls.__name__}", *methods[cls.__name__])


class TorchInterchange(Interchange):
    """Export and import of PyTorch tensors."""

    dlpack_device = _DLPACK_DEVICE
    cast_expression = "{{x}}.to(torch.{dtype})"

    def strides(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(step * x.element_size() for step in x.stride())

    def address(self, x: torch.Tensor) -> int:
        return x.data_ptr()

    def copy_reason(self, x: torch.Tensor) -> Cause | None:
        # PyTorch records conjugation and negation as bits (pytorch/pytorch#57110), and computes the values
        # later.
        return _LAZY_VALUES if x.is_conj() or x.is_neg() else None

    def check_copy(self, x: torch.Tensor) -> None:
        _check_one_array(self.framework, x)
        _check_storage(self.framework, x)

    def check_castable(self, x: torch.Tensor) -> None:
        self.check_copy(x)
        if x.is_mkldnn:
            raise _layout_error(self.framework, x)

    def check_cast(self, source: str, dtype: str) -> None:
        if source not in DTYPES and not _has_cast(source, dtype):
            instead = "Pass its bytes instead: {}."
            raise unsupported.cast_error(self.framework, source, dtype, instead, "{x}.view(torch.uint8)")

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        for axis, stride in enumerate(strides):
            if (stride < 0 or stride % itemsize) and shape[axis] != 1:
                # torch.from_dlpack would crash the process (torch <= 2.13, pytorch/pytorch#188023).
                return _NEGATIVE_STRIDES if stride < 0 else _STRIDE_MULTIPLES
        return None

    def import_from(self, x: Any, source: Framework, device: Device) -> torch.Tensor:
        if not hasattr(type(x), "__dlpack__"):
            return _from_interface(x, self.framework.streams)
        has_streams = self.framework.streams.has_streams
        if source.interchange.dlpack_device is None and has_streams:
            # The array comes from an unknown library. Some libraries order the export after the stream of the
            # current device and create a context on that device, as CuPy does.
            with on_device(int(x.__dlpack_device__()[1])):
                return torch.from_dlpack(x)
        if device.kind != "gpu" or not has_streams:
            return torch.from_dlpack(x)
        keep_alives.release()
        # CuPy makes the consumer wait for CuPy's stream on the current GPU, even if the array is on another
        # GPU.
        with source.devices.select(device), on_device(device.index):
            # PyTorch passes its current stream on this device to the producer.
            imported = torch.from_dlpack(source.interchange.export(x, device))
            return _with_keep_alive(imported, source.streams, self.framework.streams, device)

    def normalize_bools(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bool or not x.numel():
            return x
        bits = x.view(torch.uint8)
        return bits != 0 if bits.max() > 1 else x

    def can_read_into(self, x: torch.Tensor, view: np.ndarray) -> bool:
        return self.framework.cannot_view(view) is None

    def read_into(self, x: torch.Tensor, view: np.ndarray) -> None:
        _copy_values(self.framework.from_host(view, CPU), x)

    def fill(self, out: torch.Tensor, write: Callable[[np.ndarray], object]) -> None:
        write(self.framework.host_view(out.detach() if out.requires_grad else out))
        self.record_write(out)

    def record_write(self, out: torch.Tensor) -> None:
        if not out.is_inference():
            _increment_version(out)  # autograd does not notice writes through NumPy, pytorch/pytorch#96852

    def block_until_ready(self, x: torch.Tensor) -> None:
        if not x.is_cpu:  # six times as fast as x.device.type
            torch.accelerator.current_stream(x.device).synchronize()

    def is_plain(self, x: torch.Tensor) -> bool:
        return type(x) is torch.Tensor and not x.__dict__


class TorchRuntime(Runtime):
    """PyTorch's gradient and autocast settings, pytrees and array namespace, and what traces read."""

    has_strides = True
    namespace = "array_api_compat.torch"
    settings = (
        (torch.is_inference_mode_enabled, torch.inference_mode),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        *map(_autocast, ("cpu", "cuda")),
    )

    def observe(self, x: torch.Tensor) -> tuple[Any, int, int | None, Device]:
        nbytes = x.nbytes
        address = x.data_ptr()
        if nbytes and not address:
            raise ValueError("meta tensors have no memory")
        # Most tensors are on the CPU, and this check saves a call.
        device = CPU if x.is_cpu else self.framework.devices.device_of(x)
        return x.dtype, nbytes, address, device

    def is_idle(self) -> bool:
        # PyTorch computes synchronously on the CPU. Reading the device of a tensor would take 3 µs.
        return not torch.cuda.is_initialized()

    def pause_observation(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _unseen()
        return context

    def open_pytree(self, x: Any) -> Pytree | None:
        if pytree.tree_is_leaf(x):
            return None
        children, structure = pytree.tree_flatten(x, is_leaf=OneLevel())
        places = [f"[{i}]" for i in range(len(children))]
        return Pytree(children, places, structure, structure.unflatten)

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    def device_guard(self, x: torch.Tensor) -> AbstractContextManager[Any]:
        return guard(x)

    def isolate(self) -> AbstractContextManager[Any]:
        return isolate()


class TorchDevices(Devices):
    """The CPU and the devices of ``torch.accelerator``."""

    def device_of(self, x: torch.Tensor) -> Device:
        if x.is_cpu or x.is_meta:  # six times as fast as x.device.type
            return CPU
        return gpu_device(x.device.index or 0)

    def available(self) -> tuple[Device, ...]:
        if _is_driver_uninitialized() and len(listed := self.visible_devices()) > 1:
            return listed
        # Counting initializes the driver. If it is not yet initialized, counting is only necessary if NVML
        # lists no GPU, as on Jetson.
        return self._list_devices()

    def visible_devices(self) -> tuple[Device, ...]:
        if not _is_driver_uninitialized():
            return self._list_devices()
        return (CPU, *(Device("gpu", gpu.index) for gpu in hardware.gpus_for(_CUDA)))

    def _list_devices(self) -> tuple[Device, ...]:
        """Return the CPU and the accelerators that PyTorch lists. This initializes the CUDA driver."""
        if not torch.accelerator.is_available():
            return (CPU,)
        return (CPU, *(Device("gpu", i) for i in range(torch.accelerator.device_count())))

    def accelerators(self) -> tuple[str, ...]:
        found = torch.accelerator.current_accelerator()
        own = (found.type,) if found is not None else ()
        return (*super().accelerators(), *own)

    def missing_device_reason(self) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"PyTorch {torch.__version__} is built for the CPU only. Install a CUDA or ROCm build."
        if len(self.visible_devices()) > 1:
            return ""
        return "torch.accelerator finds no device. Check that the driver is installed."

    def to_device(self, x: torch.Tensor, device: Device) -> torch.Tensor:
        return x.to(self.native_device(device))

    def select(self, device: Device) -> AbstractContextManager[Any]:
        if device.kind != "gpu":
            return nullcontext()
        if torch.version.cuda or torch.version.hip:
            return on_device(device.index)
        return torch.accelerator.device_index(device.index)  # torch >= 2.8, pytorch/pytorch#148864

    def native_device(self, device: Device) -> Any:
        accelerator = None if device.kind == "cpu" else torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, device.index)

    def is_started(self) -> bool:
        # CUDA and ROCm builds do not call is_available(), which initializes the driver
        # (pytorch/pytorch#83973). Afterwards, this process could not be forked.
        has_others = torch.version.cuda is None and torch.version.hip is None
        return torch.cuda.is_initialized() or (has_others and torch.accelerator.is_available())

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, torch.device):
            return None
        if x.type == "meta":
            raise ValueError(f"{x!r} has no memory. Pass a device with memory, such as 'cpu'.")
        if x.type == "cpu":
            return CPU
        index = x.index
        if index is None:
            # Before the driver is initialized, no thread has selected a device.
            is_selected = not _is_driver_uninitialized() and torch.accelerator.is_available()
            index = torch.accelerator.current_device_index() if is_selected else 0
        # PyTorch calls both CUDA and ROCm "cuda".
        return Device("gpu", index, accelerator="" if x.type == "cuda" else x.type)


class TorchMemory(Memory):
    """PyTorch's memory allocators and out-of-memory errors."""

    # The allocator of pinned memory records an event after each copy, even of a tensor that was made from its
    # address by other means (torch 2.13, CachingHostAllocator::record_event).
    waits_for_copies = True

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and self.is_oom_text(str(error))

    def is_oom_text(self, text: str) -> bool:
        return _OOM.match(text) is not None

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        # PyTorch empties the caches of all GPUs at once (torch 2.14, no issue found), so the freed bytes
        # of all are added.
        gpus = _gpu_numbers() if _gpu_numbers(device) else []
        before = sum(map(torch.cuda.memory_reserved, gpus))
        if gpus:
            torch.cuda.empty_cache()
        # torch >= 2.9, pytorch/pytorch#152932
        elif self.framework.devices.is_started() and hasattr(torch.accelerator, "empty_cache"):
            torch.accelerator.empty_cache()
        freed = before - sum(map(torch.cuda.memory_reserved, gpus))
        if gpus and hasattr(torch.accelerator, "empty_host_cache"):  # torch >= 2.12, pytorch/pytorch#186260
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            torch.accelerator.empty_host_cache()
            freed += int(pinned - torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        return freed

    def usage(self) -> list[Holding]:
        rows = []
        for i in _gpu_numbers():
            stats = torch.cuda.memory_stats_as_nested_dict(i)
            if stats:
                used, reserved = (stats[k]["all"] for k in ("allocated_bytes", "reserved_bytes"))
                cached = reserved["current"] - used["current"]
                rows.append(Holding(f"gpu:{i}", "torch", used["current"], cached, used["peak"]))
        return rows

    def device_memory(self, device: Device) -> GpuMemory | None:
        return GpuMemory(*torch.cuda.mem_get_info(device.index)) if torch.cuda.is_available() else None

    def reset_peak(self) -> None:
        for i in _gpu_numbers():
            torch.cuda.reset_peak_memory_stats(i)

    def allocate_pinned(self, nbytes: int) -> np.ndarray | None:
        if not torch.cuda.is_available():
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def synchronize(self) -> None:
        if torch.cuda.is_initialized():
            for i in _gpu_numbers():
                # Synchronizing would create a missing context (pytorch/pytorch#25752).
                if torch.version.hip or cuda_driver.has_context(i):
                    torch.cuda.synchronize(i)
        elif self.framework.devices.is_started():
            torch.accelerator.synchronize()

    def oom_error(self) -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (simulated)")


class TorchBatching(IndexedBatching):
    """Functions that split PyTorch tensors, join the parts, and allocate output buffers."""

    def slice_axis(self, x: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
        if _is_distributed(x):
            what = "a distributed PyTorch tensor (DTensor)"
            raise unsupported.cannot_split_error(self.framework, what, "{x}.to_local()")
        return super().slice_axis(x, axis, start, stop)

    def output_buffer(self, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
        plain = type(part) is torch.Tensor and part.layout is torch.strided and not part.is_quantized
        if not plain or part.is_nested or part.requires_grad:
            return None
        with guard(part):
            return torch.empty(shape, dtype=part.dtype, device=part.device)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> torch.Tensor:
        # Inference tensors cannot be modified outside of inference mode (pytorch/pytorch#53343).
        with torch.inference_mode(False):
            return torch.empty(
                shape, dtype=DTYPES[dtype], device=self.framework.devices.native_device(device)
            )

    def reinterpret(self, memory: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        # Autograd does not treat the result as a view of `memory`, although they share memory. In-place
        # operations on one tensor therefore change neither the graph nor the version of the other.
        with torch.inference_mode(False):
            if isinstance(memory, np.ndarray):  # host memory
                return self.framework.from_host(np.ndarray(shape, dtype_names.np_dtype(dtype), memory), CPU)
            empty = torch.empty(0, dtype=DTYPES[dtype], device=memory.device)
            return empty.set_(memory.untyped_storage(), 0, shape)


#: The exceptions of PyTorch for tensors that it cannot export or import. FakeTensorMode raises the last one.
_ERRORS: tuple[type[Exception], ...] = (*native_errors(), AssertionError)


class TorchFastPath(FastPath):
    """Fast conversions of plain tensors on the CPU."""

    def fast_types(self) -> tuple[type, ...]:
        return (torch.Tensor, torch.nn.Parameter)

    def plan_key(self, x: torch.Tensor, alignment: int) -> Hashable:
        if not x.is_cpu or x.is_nested or _is_tracing() or count_modes():
            raise NoPlanError
        if x.layout is not torch.strided and self.framework.sparse.layout(x):
            return x.layout, x.requires_grad
        try:
            address = x.data_ptr()  # 0 for functional tensors
            is_whole = _contains(len(x.untyped_storage()), x)
        except _ERRORS as error:  # a tensor without memory
            raise NoPlanError from error
        if not address or not is_whole:
            raise NoPlanError
        layout = x.ndim if x.is_contiguous() else (x.shape, x.stride())
        for_alignment = _key_for_alignment(x, address, alignment)
        return x.dtype, x.requires_grad, x.is_conj() | x.is_neg(), layout, for_alignment

    def fast_view(self, x: torch.Tensor) -> np.ndarray:
        # .numpy() raises for other devices, other layouts, and lazy conjugation or negation. Such an error
        # takes as long as 20 successful calls, so complex and extended dtypes are rejected first. For tensors
        # that require grad, .numpy() raises only while gradients are recorded. For tensors of
        # torch.func.functionalize, whose address is 0, it reads invalid memory (torch 2.13, no issue found).
        if x.dtype not in _REAL_DTYPES or x.requires_grad or _is_tracing() or count_modes():
            raise NoPlanError
        try:
            if not x.data_ptr():
                raise NoPlanError
            view = x.numpy()
        except _ERRORS as error:
            raise NoPlanError from error
        # Most tensors fill their storage, and the exact test takes 0.3 µs. This one, of 0.1 µs, misses a view
        # whose storage was shortened to the size of the view.
        available = len(x.untyped_storage())
        if available != view.nbytes and _end(view, x.storage_offset()) > available:
            raise NoPlanError
        return view

    def fast_from_view(self, view: np.ndarray) -> torch.Tensor:
        # These checks take less time than an exception from PyTorch. They reject read-only arrays, negative
        # strides and other dtypes, including complex128, which must be aligned.
        flags = view.flags
        if not flags.carray and (not flags.writeable or min(view.strides, default=0) < 0):
            raise NoPlanError
        if view.dtype not in _VIEWABLE_DTYPES:
            raise NoPlanError
        try:
            tensor: torch.Tensor = _from_numpy(view)
        except _ERRORS as error:
            raise NoPlanError from error
        if type(tensor) is _Tensor:
            return tensor
        raise NoPlanError  # FakeTensorMode is active

    def fast_export(self, x: torch.Tensor) -> Any:
        view = self.fast_view(x)
        if x.data_ptr() % ALIGNMENT or (x.dtype is torch.bool and buffers.has_other_bools(view)):
            raise NoPlanError
        return view.__dlpack__()

    def fast_import(self, capsule: Any) -> torch.Tensor:
        tensor: torch.Tensor = torch_dlpack.from_dlpack(capsule)
        # Read-only memory has to be copied.
        if read_only_memory.exported_ranges and read_only_memory.is_shared_read_only(tensor.data_ptr()):
            raise NoPlanError
        if tensor.ndim:
            return tensor
        tensor = tensor.clone()
        if type(tensor) is _Tensor:
            return tensor
        raise NoPlanError  # FakeTensorMode is active


class TorchFramework(Framework):
    """PyTorch, whose arrays are ``torch.Tensor`` objects."""

    name = "torch"
    errors = (AssertionError,)  # raised by FakeTensorMode for real tensors
    dtypes = frozenset(DTYPES)
    streams = TorchStreams() if _DLPACK_DEVICE else Streams()
    autodiff = torch_autodiff.AUTODIFF
    sparse = TorchSparse()
    interchange = component(TorchInterchange)
    runtime = component(TorchRuntime)
    devices = component(TorchDevices)
    memory = component(TorchMemory)
    batching = component(TorchBatching)
    fast_path = component(TorchFastPath)

    def owns(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def check(self, x: torch.Tensor) -> None:
        _check_one_array(self, x)
        _check_not_recording(self, x)
        if x.layout is not torch.strided:
            raise unsupported.sparse_array_error(self, x) if self.sparse.layout(x) else _layout_error(self, x)
        if x.is_meta:  # six times as fast as x.device.type
            raise unsupported.array_error(
                self, "a PyTorch meta tensor", "it has no values", "Pass a tensor on a real device."
            )
        if _is_distributed(x):
            raise unsupported.array_error(
                self,
                "a distributed PyTorch tensor (DTensor)",
                "its parts are in several processes",
                "Pass {}, the part of this process, or {}, the whole tensor.",
                "{x}.to_local()",
                "{x}.full_tensor()",
            )
        if x.dtype not in NAMES:
            what = f"a PyTorch tensor of dtype {self.dtype_name(x)}"
            raise unsupported.dtype_error(self, what, *_dtype_advice(x.dtype))
        _check_storage(self, x)
        if not _has_memory(x):
            _check_not_wrapper(self, x)
            raise unsupported.array_error(
                self,
                "a traced, fake or batched PyTorch tensor",
                "it has no memory",
                "Convert outside torch.compile, torch.export, FakeTensorMode and torch.func transforms. Use a"
                " loop instead of vmap, is_grads_batched=True or vectorize=True.",
            )

    def dtype_name(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def nbytes(self, x: torch.Tensor) -> int:
        if x.layout is not torch.strided and self.sparse.layout(x):
            return super().nbytes(x)
        if torch.nn.parameter.is_lazy(x):
            return 0
        return x.numel() * x.element_size()  # x.nbytes raises for symbolic shapes

    def host_view(self, x: torch.Tensor) -> np.ndarray:
        # .numpy() makes the storage non-resizable (tensor_numpy.cpp in torch 2.13), so a later x.resize_()
        # raises instead of freeing memory that the consumer reads. A DLPack export does not prevent that.
        export_dtype = _EXPORT_DTYPES.get(x.dtype)
        if export_dtype is None:
            return x.numpy()
        return x.view(export_dtype).numpy().view(dtype_names.np_dtype(NAMES[x.dtype]))

    def to_host(self, x: torch.Tensor) -> np.ndarray:
        if self.interchange.copy_reason(x):
            return self.host_view(self.copy(x).cpu())
        return super().to_host(x) if x.is_cpu else self.host_view(x.cpu())

    def from_host(self, view: np.ndarray, device: Device) -> torch.Tensor:
        if device.kind != "cpu":
            return super().from_host(view, device)
        if not count_modes():  # make_fx copies the result of from_numpy (torch 2.13, no issue found)
            try:
                return self.fast_path.fast_from_view(view)
            except NoPlanError:
                pass
        # from_numpy rejects some strides along axes of length 1, and some C types that are equivalent to
        # those it supports (torch 2.13, no issue found).
        return torch_dlpack.from_dlpack(dlpack_capsules.capsule(view))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        # PyTorch loads complex128 with instructions that crash the process on unaligned memory (torch 2.13,
        # pytorch/pytorch#190043).
        if view.dtype.itemsize == 16 and view.size and buffers.address(view) % 16:
            return Cause(Reason.MISALIGNED_ELEMENTS, framework=self.name, dtype=view.dtype.name, alignment=16)
        return super().cannot_view(view)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        _check_storage(self, x)
        if count_modes():  # FakeTensorMode rejects tensors with values, except scalars and empty tensors
            with guard(x):
                return _copy(x)
        return _copy(x)

    def write(self, out: torch.Tensor, x: torch.Tensor | np.ndarray) -> None:
        if out.dtype is torch.complex128 and _is_misaligned(out):
            values = x if isinstance(x, np.ndarray) else self.to_host(x)
            if out.is_conj():
                out = out.conj()
                values = np.asarray(values.conj())  # without axes, NumPy returns a scalar
            super().write(out, values)
            return
        if isinstance(x, np.ndarray):
            x = self.from_host(buffers.copy_aligned(x) if self.cannot_view(x) else x, CPU)
        _copy_values(out, x)

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        _check_storage(self, x)
        if _is_misaligned(x):
            x = self.copy(x)  # see cannot_view: the cast would crash the process
        if count_modes():  # as in `copy`
            with guard(x):
                return x.to(DTYPES[dtype])
        return x.to(DTYPES[dtype])

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        """Return the functions ``allocate(bytes, gpu, stream) -> address`` and ``free(address)``."""
        return torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a C-contiguous copy of a tensor."""
    if _is_misaligned(x):  # PyTorch copies its real numbers without a crash
        plain = x.conj() if x.is_conj() else x
        copied = torch.view_as_complex(_copy(torch.view_as_real(plain)))
        return _copy(copied.conj()) if x.is_conj() else copied
    if x.is_conj() or x.is_neg():
        return x.resolve_conj().resolve_neg().contiguous()
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return x.clone()
    if x.itemsize == 1 and x.dtype not in NAMES:
        # PyTorch has no copy kernel for sub-byte dtypes (uint1 to uint7; torch 2.13, pytorch/pytorch#117208).
        return x.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(x.dtype)
    return x.clone(memory_format=torch.contiguous_format)


def _key_for_alignment(x: torch.Tensor, address: int, alignment: int) -> tuple[int, bool] | None:
    """Return the part of a plan key for a target that requires alignment and misreads some bools."""
    if alignment == 1:
        return None
    return address % ALIGNMENT, x.dtype is torch.bool and buffers.has_other_bools(x.numpy())


def _is_driver_uninitialized() -> bool:
    """Return whether this is a CUDA build and CUDA's driver has not been initialized.

    After initialization, this process cannot be forked. Most queries, such as ``is_available``, initialize
    the driver (pytorch/pytorch#83973).
    """
    return _CUDA > 0 and not cuda_driver.is_driver_initialized()


def _gpu_numbers(device: Device | None = None) -> list[int]:
    """Return the indices of all GPUs, or of ``device`` only; ``[]`` if PyTorch has not initialized CUDA."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [i for i in range(count) if device is None or device == Device("gpu", i)]


def _is_distributed(x: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(type(x), "full_tensor")


def _has_memory(x: torch.Tensor) -> bool:
    """Return whether a tensor has memory; fake, functional and batched tensors have none."""
    if hasattr(x, "fake_mode"):  # data_ptr() of a fake tensor warns (pytorch/pytorch#122309)
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:
        return False


def _check_storage(framework: Framework, x: torch.Tensor) -> None:
    """Raise an error if the storage of a tensor is too small; reading it crashes (pytorch/pytorch#171676)."""
    is_fake = type(x) is not _Tensor and hasattr(x, "fake_mode")
    if x.layout is not torch.strided or not x.numel() or x.is_nested or is_fake:
        return
    try:
        available = len(x.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return
    is_whole = available > 0 if x.dtype in _QUANTIZED_SUB_BYTE else _contains(available, x)
    if not is_whole:
        raise unsupported.array_error(
            framework,
            "a PyTorch tensor",
            "it has freed or truncated storage",
            "Restore its storage first (with FSDP, inside summon_full_params()), or create a new tensor.",
        )


def _contains(available: int, x: torch.Tensor) -> bool:
    """Return whether a storage of ``available`` bytes contains all elements of its strided tensor ``x``.

    It does not if it was resized to fewer bytes. FSDP, for example, frees memory by resizing to 0 bytes
    (pytorch/pytorch#195862).
    """
    if x.is_contiguous():
        return x.storage_offset() * x.itemsize + x.nbytes <= available
    last = sum((extent - 1) * step for extent, step in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.itemsize <= available


def _end(view: np.ndarray, offset: int) -> int:
    """Return the number of bytes that a storage needs for the NumPy view of a tensor with this offset.

    Inspecting the view takes half as long as inspecting the tensor.
    """
    itemsize = view.itemsize
    if view.flags.c_contiguous:
        return offset * itemsize + view.nbytes
    end = (offset + 1) * itemsize
    shape = view.shape
    for axis, step in enumerate(view.strides):
        end += (shape[axis] - 1) * step
    return end


def _is_misaligned(x: torch.Tensor) -> bool:
    """Return whether PyTorch crashes the process if it computes with this tensor, see `cannot_view`."""
    return x.dtype is torch.complex128 and x.is_cpu and bool(x.numel()) and x.data_ptr() % 16 != 0


def _extent(x: torch.Tensor) -> autodiff.Extent:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.nbytes
    last = sum((extent - 1) * step for extent, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _copy_values(out: torch.Tensor, x: torch.Tensor) -> None:
    """Copy the values of a tensor to another tensor of the same shape, on any device, with a cast."""
    # PyTorch ignores the overlap of tensors with different storages, such as imported ones (torch 2.13, no
    # issue found).
    if autodiff.overlaps(_extent(out), (_extent(x),)) or _is_misaligned(x):
        x = _copy(x)
    if out.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            out.copy_(x)
    else:
        out.copy_(x)


def _check_not_recording(framework: Framework, x: torch.Tensor) -> None:
    """Raise an error if PyTorch records the operations on a tensor, whose values would become constants."""
    if _is_tracing() or _has_proxy(x):
        raise unsupported.array_error(
            framework,
            "a tensor in torch.jit.trace or make_fx",
            "its values would become constants",
            "Convert outside of these functions, or use torch.compile.",
        )


def _has_proxy(x: torch.Tensor) -> bool:
    """Return whether make_fx records the operations on a tensor (private functions of torch 2.6 to 2.13)."""
    proxies: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is None:
        return False
    mode = proxies.get_proxy_mode()
    return mode is not None and proxies.has_proxy_slot(x, mode.tracer)


def _check_one_array(framework: Framework, x: torch.Tensor) -> None:
    """Raise an error for tensors that are not a single array of numbers."""
    if torch.nn.parameter.is_lazy(x):
        raise unsupported.array_error(
            framework,
            f"a PyTorch {type(x).__name__}",
            "it has no shape before its module is called",
            "Call the module once with a batch.",
        )
    if x.is_nested:
        raise unsupported.array_error(
            framework,
            "a nested PyTorch tensor",
            "it holds several arrays",
            "Pass {}, with a padding value of your choice, or its parts, such as {}.",
            "{x}.to_padded_tensor(0)",
            "{x}.unbind()[0]",
        )
    if x.is_quantized:
        raise unsupported.array_error(
            framework,
            "a quantized PyTorch tensor",
            "no other framework has its quantized dtype",
            "Pass {}, or its integers {} with its scale.",
            "{x}.dequantize()",
            "{x}.int_repr()",
        )


def _layout_error(framework: Framework, x: torch.Tensor) -> Exception:
    layout = str(x.layout).removeprefix("torch.")
    cause = "its memory layout is internal to PyTorch"
    return unsupported.array_error(
        framework, f"a PyTorch {layout} tensor", cause, "Pass {}.", "{x}.to_dense()"
    )


@functools.cache
def _has_cast(source: str, dtype: str) -> bool:
    """Return whether PyTorch can cast a dtype that other frameworks lack, such as complex32, to ``dtype``."""
    try:
        torch.empty(1, dtype=getattr(torch, source), device="cpu").to(DTYPES[dtype])
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _with_keep_alive(
    imported: torch.Tensor, exporter: Streams, importer: Streams, device: Device
) -> torch.Tensor:
    """Return a tensor that shares the memory of ``imported`` and releases it in stream order when freed."""
    if not imported.numel():
        return imported
    named = imported.view(_EXPORT_DTYPES.get(imported.dtype, imported.dtype))
    interface = {
        "shape": tuple(named.shape),
        "strides": tuple(step * named.element_size() for step in named.stride()),
        "typestr": np.dtype(NAMES[named.dtype]).str,
        "data": (named.data_ptr(), False),
        "version": 2,
    }
    owner = keep_alives.keep_alive(imported, exporter, importer, device)
    exported = protocols.Exported(owner, __cuda_array_interface__=interface)
    return torch.as_tensor(exported, device=imported.device).view(imported.dtype)


def _from_interface(x: Any, streams: Streams) -> torch.Tensor:
    """Return a tensor that shares the memory of an object with ``__cuda_array_interface__``.

    PyTorch ignores the stream in the interface (torch 2.13, pytorch/pytorch#20584), so this function orders
    the streams. It would raise for read-only memory (pytorch/pytorch#32868), which the caller copies if
    necessary.
    """
    interface = x.__cuda_array_interface__
    address, _ = interface["data"]
    writable = protocols.Exported(x, __cuda_array_interface__={**interface, "data": (address, False)})
    index = cuda_driver.device_at(address)
    # Pass the device that the memory is on. PyTorch would copy the memory to any other device, such as the
    # caller's default device (pytorch/pytorch#54139), and "cuda" would create a context on the current one.
    tensor = torch.as_tensor(writable, device="cuda" if index is None else f"cuda:{index}")
    stream = interface.get("stream")
    if stream is not None:  # 1 denotes the default stream
        streams.wait_for(Device("gpu", tensor.device.index), 0 if stream == 1 else int(stream))
    return tensor
