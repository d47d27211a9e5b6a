"""CuPy: arrays on CUDA or ROCm GPUs, their memory and their streams."""

from __future__ import annotations

import re
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import cupy
import numpy as np

from arraybridge import cuda_driver, hardware
from arraybridge.device import Device, gpu_device
from arraybridge.frameworks.cupy.current_gpu import on_gpu
from arraybridge.frameworks.cupy.sparse import CupyxSparse, is_sparse
from arraybridge.host import buffers, dlpack_capsules, dtype_names
from arraybridge.interface import keep_alives
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import Devices
from arraybridge.interface.framework import Framework
from arraybridge.interface.installation import package_of
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import GpuMemory, Holding, Memory
from arraybridge.interface.runtime import Runtime
from arraybridge.interface.streams import StreamEvent, Streams
from arraybridge.interface.unsupported import sparse_array_error
from arraybridge.reasons import Cause, Reason


def _is_capturing() -> bool:
    """Return whether the current stream of this thread is capturing a CUDA graph."""
    return bool(cupy.cuda.get_current_stream().is_capturing())


keep_alives.captures.append(_is_capturing)

# Matches status names such as CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED and
# CURAND_STATUS_ALLOCATION_FAILED.
_OOM = re.compile(r"cudaErrorMemoryAllocation\b|[A-Z]+_\w*(?:ALLOC_FAILED|ALLOCATION_FAILED|OUT_OF_MEMORY)\b")

# The DLPack device type kDLCUDAManaged, which neither PyTorch (pytorch/pytorch#96318) nor JAX imports
# (PyTorch 2.11: "Unsupported device_type: 13").
_MANAGED = 13


class CupyDevices(Devices):
    """The GPUs that CuPy can use."""

    def device_of(self, x: cupy.ndarray) -> Device:
        values = x.data if is_sparse(x) else x
        return gpu_device(values.device.id)

    # -- devices ----------------------------------------------------------------------------------

    def available(self) -> tuple[Device, ...]:
        # Counting GPUs initializes the driver, so they are counted only if NVML lists no GPU, as on Jetson.
        return self.visible_devices() or self._list_devices()

    def visible_devices(self) -> tuple[Device, ...]:
        if not _is_driver_uninitialized():
            return self._list_devices()
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
        return tuple(Device("gpu", gpu.index) for gpu in hardware.gpus_for(cuda))

    def _list_devices(self) -> tuple[Device, ...]:
        """Return the GPUs that CUDA or ROCm lists. This initializes the driver."""
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:
            return ()  # the driver is missing or too old; missing_device_reason reports which
        return tuple(Device("gpu", i) for i in range(count))

    def default_device(self) -> Device:
        if not self.available():
            return self.find_device(Device("gpu", 0))  # raises an error that states the reason
        # Before the driver is initialized, no thread has selected a device.
        return Device("gpu", 0 if _is_driver_uninitialized() else cupy.cuda.Device().id)

    def missing_device_reason(self) -> str:
        if self.visible_devices():
            return ""
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CUDA reports {error}. CuPy needs an NVIDIA GPU and its driver."
        return ""

    def to_device(self, x: cupy.ndarray, device: Device) -> cupy.ndarray:
        def copy(block: cupy.ndarray) -> cupy.ndarray:
            result = cupy.empty(block.shape, block.dtype)
            result.data.copy_from_device_async(block.data, block.nbytes, cupy.cuda.get_current_stream())
            return result

        return _read_on(device, x, copy)

    def select(self, device: Device) -> AbstractContextManager[Any]:
        return on_gpu(device.index)

    def native_device(self, device: Device) -> Any:
        return cupy.cuda.Device(device.index)

    def is_started(self) -> bool:
        return bool(self.framework.devices_with_context())

    def read_device(self, x: Any) -> Device | None:
        return Device("gpu", x.id) if isinstance(x, cupy.cuda.Device) else None


class CupyInterchange(Interchange):
    """Exchange of GPU memory with CuPy."""

    def strides(self, x: cupy.ndarray) -> tuple[int, ...]:
        return tuple(x.strides)

    def address(self, x: cupy.ndarray) -> int:
        return x.data.ptr

    def import_from(self, x: Any, source: Framework, device: Device) -> cupy.ndarray:
        if not hasattr(type(x), "__dlpack__"):
            # CuPy waits for the stream that __cuda_array_interface__ specifies. The GPU of the memory is made
            # current, because CuPy copies memory that is on any other GPU.
            with on_gpu(_device_at(x.__cuda_array_interface__["data"][0])):
                return cupy.asarray(x)
        if source.interchange.dlpack_device is None:  # a DLPack producer from an unknown library
            with on_gpu(int(x.__dlpack_device__()[1])):
                return cupy.from_dlpack(x)
        keep_alives.release()
        # PyTorch exports only from the current GPU (pytorch/pytorch#195721).
        with on_gpu(device.index), source.devices.select(device):
            imported = source.interchange.export(x, device)
            handle = source.streams.handle(device)
            if handle is not None and self.framework.streams.handle(device) is None:
                # PyTorch does not export to per-thread default streams (pytorch/pytorch#150217)
                # (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM), so the streams are ordered here.
                self.framework.streams.wait_for(device, handle)
                imported = dlpack_capsules.Importable(x.__dlpack__(stream=-1), (2, device.index))
            return _with_keep_alive(
                cupy.from_dlpack(imported), source.streams, self.framework.streams, device
            )

    def block_until_ready(self, x: cupy.ndarray) -> None:
        with on_gpu(x.device.id):
            cupy.cuda.get_current_stream().synchronize()

    def can_read_into(self, x: cupy.ndarray, view: np.ndarray) -> bool:
        return bool(view.flags.c_contiguous) and view.dtype.isnative

    def read_into(self, x: cupy.ndarray, view: np.ndarray) -> None:
        with on_gpu(x.device.id):
            _copy_to_host(x, view)

    def copy_reason(self, x: cupy.ndarray) -> Cause | None:
        with on_gpu(x.device.id):  # __dlpack_device__ creates a context on the current GPU
            is_managed = x.__dlpack_device__()[0] == _MANAGED
        return Cause(Reason.MANAGED_MEMORY) if is_managed else None


class CupyMemory(Memory):
    """The interface to CuPy's memory pools and out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            return True
        # CuPy has separate exception classes for CUDA's runtime, driver and libraries, and each of these has
        # its own status names.
        is_from_cupy = package_of(type(error)) in ("cupy", "cupy_backends", "cupyx")
        return is_from_cupy and isinstance(error, RuntimeError) and self.is_oom_text(str(error))

    def is_oom_text(self, text: str) -> bool:
        return _OOM.match(text) is not None

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        gpus = [
            i for i in self.framework.devices_with_context() if device is None or device == Device("gpu", i)
        ]
        for i in gpus:
            with on_gpu(i):
                if compiled:
                    cupy.fft.config.clear_plan_cache()
                for pool in _pools():
                    before = pool.total_bytes()
                    pool.free_all_blocks()
                    freed += before - pool.total_bytes()
        if gpus:
            # The pool of pinned memory counts blocks, not bytes (CuPy docs, cupy.cuda.PinnedMemoryPool), so
            # `freed` does not include it.
            cupy.get_default_pinned_memory_pool().free_all_blocks()
        return int(freed)

    def usage(self) -> list[Holding]:
        rows = []
        for i in self.framework.devices_with_context():
            with on_gpu(i):
                used = sum(int(pool.used_bytes()) for pool in _pools())
                total = sum(int(pool.total_bytes()) for pool in _pools())
                rows.append(Holding(f"gpu:{i}", "cupy", used, total - used))
        return rows

    def allocate_pinned(self, nbytes: int) -> np.ndarray | None:
        if not self.framework.devices.available():
            return None
        gpus = self.framework.devices_with_context() or [cupy.cuda.runtime.getDevice()]
        with on_gpu(gpus[0]):  # the memory is pinned for all GPUs, so any existing context will do
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def synchronize(self) -> None:
        for i in self.framework.devices_with_context():
            with on_gpu(i):
                cupy.cuda.runtime.deviceSynchronize()

    def device_memory(self, device: Device) -> GpuMemory | None:
        with on_gpu(device.index):
            return GpuMemory(*cupy.cuda.runtime.memGetInfo())

    def oom_error(self) -> Exception:
        return cupy.cuda.memory.OutOfMemoryError(2 << 30, 0)


class CupyBatching(IndexedBatching):
    """Functions that split and join CuPy arrays."""

    def output_buffer(self, part: cupy.ndarray, shape: tuple[int, ...]) -> cupy.ndarray:
        with on_gpu(part.device.id):
            return cupy.empty(shape, part.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> cupy.ndarray:
        with on_gpu(device.index):
            return cupy.empty(shape, dtype)

    def reinterpret(self, memory: cupy.ndarray, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        with on_gpu(memory.device.id):
            return cupy.ndarray(shape, dtype_names.np_dtype(dtype), memptr=memory.data)


class CupyRuntime(Runtime):
    """The current device and the array API namespace of CuPy."""

    has_strides = True
    namespace = "array_api_compat.cupy"

    def device_guard(self, x: cupy.ndarray) -> AbstractContextManager[Any]:
        return on_gpu(x.device.id)


class CupyFramework(Framework):
    """CuPy, whose arrays are always on a GPU."""

    name = "cupy"
    has_host = False
    dtypes = dtype_names.PLAIN
    devices = component(CupyDevices)
    interchange = component(CupyInterchange)
    memory = component(CupyMemory)
    batching = component(CupyBatching)
    runtime = component(CupyRuntime)
    sparse = CupyxSparse()

    def __init__(self) -> None:
        self.interchange.dlpack_device = 10 if cupy.cuda.runtime.is_hip else 2
        self.streams = CupyStreams()

    def owns(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray) or is_sparse(x)

    def check(self, x: Any) -> None:
        if is_sparse(x):
            raise sparse_array_error(self, x)

    # -- host memory ------------------------------------------------------------------------------
    # The methods set(), get() and copy() of CuPy's arrays call cudaSetDevice (CuPy 14.2). To select the
    # previous GPU again, `on_gpu` would then have to open it. The copies of memory pointers do not call it.

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        host = buffers.allocate_aligned(x.shape, x.dtype)
        with on_gpu(x.device.id):
            _copy_to_host(x, host)
        return host

    def from_host(self, view: np.ndarray, device: Device) -> cupy.ndarray:
        with on_gpu(device.index):
            result = cupy.empty(view.shape, view.dtype.newbyteorder("="))
            _copy_from_host(result, view)
            return result

    def copy(self, x: cupy.ndarray) -> cupy.ndarray:
        with on_gpu(x.device.id):
            is_managed = self.interchange.copy_reason(x)
            pool = cupy.get_default_memory_pool().malloc if is_managed else cupy.cuda.get_allocator()
            with cupy.cuda.using_allocator(pool):
                if not x.flags.c_contiguous:
                    return cupy.ascontiguousarray(x)
                result = cupy.empty(x.shape, x.dtype)
            result.data.copy_from_device_async(x.data, x.nbytes, cupy.cuda.get_current_stream())
            return result

    def write(self, out: cupy.ndarray, x: cupy.ndarray | np.ndarray) -> None:
        if not out.size:
            return
        device = Device("gpu", out.device.id)
        with on_gpu(device.index):
            if isinstance(x, np.ndarray):
                if out.dtype == x.dtype.newbyteorder("=") and out.flags.c_contiguous:
                    _copy_from_host(out, x)
                    return
                x = self.from_host(x, device)
            elif x.device.id != device.index:
                _read_on(device, x, partial(cupy.copyto, out, casting="unsafe"))
                return
            cupy.copyto(out, x.copy() if cupy.may_share_memory(out, x) else x, casting="unsafe")

    def cast(self, x: cupy.ndarray, dtype: str) -> cupy.ndarray:
        with on_gpu(x.device.id):
            return x.astype(dtype)

    def devices_with_context(self) -> list[int]:
        """Return the numbers of the GPUs with a context. Selecting any other GPU would create a context."""
        if not cuda_driver.is_driver_initialized():  # CuPy's queries would initialize the driver
            return []
        return [device.index for device in self.devices.available() if cuda_driver.has_context(device.index)]

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        """Make CuPy allocate memory from another pool from now on.

        Args:
            allocate: A function that takes the size in bytes, the number of the GPU and the stream handle,
                and returns the address of the allocated memory.
            free: A function that takes the address of memory and frees it.

        Raises:
            RuntimeError: If CuPy already holds memory in its own pool.
        """
        nbytes = sum((usage.used or 0) + (usage.cached or 0) for usage in self.memory.usage())
        if nbytes:
            raise RuntimeError(f"CuPy already holds {nbytes} bytes in its own pool")

        def malloc(size: int, device: int) -> int:
            return allocate(size, device, cupy.cuda.get_current_stream().ptr)

        def release(address: int, device: int) -> None:
            free(address)

        shared = cupy.cuda.PythonFunctionAllocator(malloc, release)
        cupy.cuda.set_allocator(shared.malloc)


def _read_on(device: Device, x: cupy.ndarray, read: Callable[[cupy.ndarray], Any]) -> Any:
    """Call a function that reads an array of another GPU on this GPU, in stream order.

    Args:
        device: The GPU on which the function runs.
        x: An array on another GPU.
        read: A function of an array with the values of ``x``, in contiguous memory on that GPU.

    Returns:
        The result of the function.
    """
    with on_gpu(x.device.id):
        # Copies between GPUs require contiguous memory (cupy/cupy#2075).
        block = cupy.ascontiguousarray(x) if x.ndim else x
        source_stream = cupy.cuda.get_current_stream()
        ready = source_stream.record()
    with on_gpu(device.index):
        # The copy runs on this GPU's stream, which is not ordered after the work on the source GPU.
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(ready)
        result = read(block)
        copied = stream.record()
    with on_gpu(x.device.id):
        # Memory freed on the source GPU may be reused immediately, so its stream waits for the copy.
        source_stream.wait_event(copied)
    return result


# These functions run on the GPU of the array, and do not call cudaSetDevice; see `CupyFramework`.


def _copy_to_host(x: cupy.ndarray, memory: np.ndarray) -> None:
    """Copy an array to contiguous host memory in the order of this thread's stream, and wait."""
    block = cupy.ascontiguousarray(x)
    stream = cupy.cuda.get_current_stream()
    block.data.copy_to_host_async(buffers.address(memory), memory.nbytes, stream)
    stream.synchronize()


def _copy_from_host(out: cupy.ndarray, view: np.ndarray) -> None:
    """Copy host memory to a contiguous array in the order of this thread's stream, and wait."""
    values = np.ascontiguousarray(view, out.dtype)
    stream = cupy.cuda.get_current_stream()
    out.data.copy_from_host_async(buffers.address(values), values.nbytes, stream)
    stream.synchronize()


def _is_driver_uninitialized() -> bool:
    """Return whether CUDA's driver is uninitialized, in which case this process can still be forked.

    Most CUDA queries initialize the driver, including the query for the number of GPUs.
    """
    return not cupy.cuda.runtime.is_hip and not cuda_driver.is_driver_initialized()


def _device_at(address: int) -> int:
    """Return the device whose memory is at this address; the current device for unknown memory."""
    runtime = cupy.cuda.runtime
    index = None
    if not runtime.is_hip:
        index = cuda_driver.device_at(address)
    elif address:
        index = runtime.pointerGetAttributes(address).device
    return runtime.getDevice() if index is None else index


def _with_keep_alive(x: cupy.ndarray, exporter: Streams, importer: Streams, device: Device) -> cupy.ndarray:
    """Return an array that shares the memory of ``x`` and, when collected, releases it in stream order."""
    if not x.size:
        return x
    owner = keep_alives.keep_alive(x, exporter, importer, device)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.data.mem.size or x.nbytes, owner, device.index)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


def _pools() -> list[Any]:
    """Return CuPy's default pool, and the pool that the user has set for CuPy if it is a different one."""
    own = cupy.get_default_memory_pool()
    current = getattr(cupy.cuda.get_allocator(), "__self__", own)
    return [own, *([current] if current is not own and hasattr(current, "free_all_blocks") else [])]


# The handle of CUDA's per-thread default stream, cudaStreamPerThread.
_PER_THREAD_STREAM = 2


class CupyStreams(Streams):
    """CuPy's streams, one per thread and GPU."""

    has_streams = True

    @contextmanager
    def stream(self, device: Device) -> Iterator[None]:
        with on_gpu(device.index):
            side = _own_stream(device.index)
            outer = cupy.cuda.get_current_stream()
            side.wait_event(outer.record())
            try:
                with side:
                    try:
                        yield
                    finally:
                        # The code in the block may have selected another stream or GPU. An event belongs to
                        # the GPU that is current when it is created, and only that GPU's streams can record
                        # it.
                        chosen = cupy.cuda.get_current_stream().record()
                        with on_gpu(device.index):
                            outer.wait_event(side.record())
                            outer.wait_event(chosen)
            finally:
                # At the end of `with`, CuPy restores the stream that was entered last, not one that was
                # selected with use() (CuPy 14.2, cupy/cupy#8377).
                with on_gpu(device.index):
                    outer.use()

    def take_stream(self, device: Device) -> None:
        with on_gpu(device.index):
            # The stream is entered and never exited, because after a `with` in the user's function, CuPy does
            # not restore a stream that was selected with use().
            _own_stream(device.index).__enter__()

    def record_event(self, device: Device) -> StreamEvent:
        with on_gpu(device.index):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream())

        def wait() -> None:
            with on_gpu(device.index):
                cupy.cuda.get_current_stream().wait_event(event)

        def is_done() -> bool:
            return bool(event.done)

        return StreamEvent(self, device, wait, event.synchronize, is_done)

    def handle(self, device: Device) -> int | None:
        with on_gpu(device.index):
            handle = int(cupy.cuda.get_current_stream().ptr)
            return None if handle == _PER_THREAD_STREAM else handle

    def wait_for(self, device: Device, handle: int) -> None:
        with on_gpu(device.index):
            stream = cupy.cuda.get_current_stream()
            if stream.ptr != handle:
                # The event is recorded through the CUDA runtime, because CuPy 14.2 deprecates ExternalStream
                # (cupy/cupy#9567), and older releases have no replacement for that class.
                reached = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(reached.ptr, handle)
                stream.wait_event(reached)

    def take_over(self, x: cupy.ndarray) -> cupy.ndarray:
        # CuPy's pool may reuse a block on the stream on which it was allocated while this thread still reads
        # it (cupy/cupy#8068), so the block is kept alive until this thread's work is done.
        keep_alives.release()
        return _with_keep_alive(x, Streams(), self, Device("gpu", x.device.id))


# Unused streams, by GPU. They are reused, because CuPy's pool has an arena per stream handle that it keeps
# after the stream is destroyed (cupy/cupy#8068).
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)
_streams = threading.local()


def _own_stream(index: int) -> Any:
    """Return this thread's own stream on a GPU, which must be the current one."""
    own: dict[Any, Any] = _streams.__dict__  # maps GPUs to streams
    if index not in own:
        try:
            own[index] = _idle[index].popleft()
        except IndexError:
            own[index] = cupy.cuda.Stream(non_blocking=True)
        thread = threading.current_thread()
        weakref.finalize(thread, _idle[index].append, own[index]).atexit = False
    return own[index]
