"""CuPy: arrays on CUDA or ROCm cards, their memory and their streams; it has no host arrays."""

from __future__ import annotations

import re
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
import numpy as np

from arraybridge import hardware
from arraybridge.frameworks import dtype_names, gpu_memory, host_memory, protocols
from arraybridge.frameworks.accelerators import GpuMemory, Holding, StreamEvent, Streams
from arraybridge.frameworks.base import (
    Devices,
    Framework,
    IndexedBatching,
    Interchange,
    Memory,
    Observation,
    Runtime,
    component,
)
from arraybridge.reasons import Cause, Reason
from arraybridge.types import Device


def _is_capturing() -> bool:
    return bool(cupy.cuda.get_current_stream().is_capturing())


gpu_memory.captures.append(_is_capturing)

# CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED, CURAND_STATUS_ALLOCATION_FAILED, …
_OOM = re.compile(r"cudaErrorMemoryAllocation\b|[A-Z]+_\w*(?:ALLOC_FAILED|ALLOCATION_FAILED|OUT_OF_MEMORY)\b")

# kDLCUDAManaged: torch and JAX take no capsule of that kind (torch 2.11: "Unsupported device_type: 13").
_MANAGED = 13


class CupyObservation(Observation):
    has_strides = True


class CupyDevices(Devices):
    framework: CupyFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    def device_of(self, x: cupy.ndarray) -> Device:
        return Device("gpu", x.device.id)

    # -- devices ----------------------------------------------------------------------------------

    def available(self) -> tuple[Device, ...]:
        # CUDA itself is queried only if NVML lists no GPU, as on Jetson: the query would wake the driver.
        return self.visible_devices() or self._counted()

    def visible_devices(self) -> tuple[Device, ...]:
        if not _is_driver_uninitialized():
            return self._counted()
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
        return tuple(Device("gpu", gpu.index) for gpu in hardware.gpus_for(cuda))

    def _counted(self) -> tuple[Device, ...]:
        """Return the GPUs that CUDA or ROCm counts. Wakes the driver."""
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:
            return ()  # no driver, or one too old; missing_device_reason says which
        return tuple(Device("gpu", i) for i in range(count))

    def default_device(self) -> Device:
        if not self.available():
            return self.find_device(Device("gpu", 0))  # raises, with the reason
        # As long as the driver sleeps, no thread has selected a device.
        return Device("gpu", 0 if _is_driver_uninitialized() else cupy.cuda.Device().id)

    def missing_device_reason(self) -> str:
        if self.visible_devices():
            return ""
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CUDA answers {error}; an NVIDIA card and its driver are needed."
        return ""

    def to_device(self, x: cupy.ndarray, device: Device) -> cupy.ndarray:
        with on_gpu(x.device.id):
            # Between cards only block blocks travel.
            block = cupy.ascontiguousarray(x) if x.ndim else x
            reader = cupy.cuda.get_current_stream()
            ready = reader.record()
        with on_gpu(device.index):
            # The copy runs on this card's stream, which knows nothing of the work queued on the other.
            stream = cupy.cuda.get_current_stream()
            stream.wait_event(ready)
            result = block.copy()
            copied = stream.record()
        with on_gpu(x.device.id):
            # Nor does the other one know of the copy: what is freed there may be written to at once.
            reader.wait_event(copied)
        return result

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return on_gpu(device.index)

    def native_device(self, device: Device) -> Any:
        return cupy.cuda.Device(device.index)

    def is_started(self) -> bool:
        return bool(self.framework._devices_with_context())

    def read_device(self, x: Any) -> Device | None:
        return Device("gpu", x.id) if isinstance(x, cupy.cuda.Device) else None


class CupyInterchange(Interchange):
    def strides(self, x: cupy.ndarray) -> tuple[int, ...]:
        return tuple(x.strides)

    def address(self, x: cupy.ndarray) -> int:
        return x.data.ptr

    def import_from(self, x: Any, source: Framework, device: Device) -> cupy.ndarray:
        if not hasattr(type(x), "__dlpack__"):
            # Ordered after the stream that the interface names. From any but the current card CuPy copies.
            with on_gpu(_device_at(x.__cuda_array_interface__["data"][0])):
                return cupy.asarray(x)
        if source.interchange.dlpack_device is None:  # whatever offers DLPack; nothing else is known of it
            with on_gpu(int(x.__dlpack_device__()[1])):
                return cupy.from_dlpack(x)
        gpu_memory.release()
        # torch refuses to lend from a card that is not the current one.
        with on_gpu(device.index), source.devices.selected(device):
            imported = source.interchange.export(x, device)
            handle = source.streams.handle(device)
            if handle is not None and self.framework.streams.handle(device) is None:
                # torch lends to no such stream (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM): the order is made here.
                self.framework.streams.wait_for(device, handle)
                imported = protocols.Importable(x.__dlpack__(stream=-1), (2, device.index))
            return _with_keep_alive(
                cupy.from_dlpack(imported), source.streams, self.framework.streams, device
            )

    def block_until_ready(self, x: cupy.ndarray) -> None:
        with on_gpu(x.device.id):
            cupy.cuda.get_current_stream().synchronize()

    # -- values -----------------------------------------------------------------------------------

    def copy_reason(self, x: cupy.ndarray) -> Cause | None:
        with on_gpu(x.device.id):  # the question opens the current one
            is_managed = x.__dlpack_device__()[0] == _MANAGED
        return Cause(Reason.MANAGED_MEMORY) if is_managed else None


class CupyMemory(Memory):
    framework: CupyFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            return True
        # CUDA, its libraries and its driver have classes of their own, and a name for each status.
        ours = type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends", "cupyx")
        return ours and isinstance(error, RuntimeError) and self.is_oom_text(str(error))

    def is_oom_text(self, text: str) -> bool:
        return _OOM.match(text) is not None

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        gpus = [
            i for i in self.framework._devices_with_context() if device is None or device == Device("gpu", i)
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
            cupy.get_default_pinned_memory_pool().free_all_blocks()  # it counts blocks, not bytes
        return int(freed)

    def usage(self) -> list[Holding]:
        rows = []
        for i in self.framework._devices_with_context():
            with on_gpu(i):
                used = sum(int(pool.used_bytes()) for pool in _pools())
                total = sum(int(pool.total_bytes()) for pool in _pools())
                rows.append(Holding(f"gpu:{i}", "cupy", used, total - used))
        return rows

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not self.framework.devices.available():
            return None
        gpus = self.framework._devices_with_context() or [cupy.cuda.runtime.getDevice()]
        with on_gpu(gpus[0]):  # memory is locked for all cards, by way of one that is open
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def synchronize(self) -> None:
        for i in self.framework._devices_with_context():
            with on_gpu(i):
                cupy.cuda.runtime.deviceSynchronize()

    def device_memory(self, device: Device) -> GpuMemory | None:
        with on_gpu(device.index):
            free, total = cupy.cuda.runtime.memGetInfo()
        return GpuMemory(free, total)

    def oom_error(self) -> Exception:
        return cupy.cuda.memory.OutOfMemoryError(2 << 30, 0)


class CupyBatching(IndexedBatching):
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
    observation = CupyObservation()

    def device_guard(self, x: cupy.ndarray) -> AbstractContextManager[Any]:
        return on_gpu(x.device.id)

    # -- running functions ------------------------------------------------------------------------

    def array_namespace(self) -> Any:
        import array_api_compat.cupy as namespace

        return namespace


class CupyFramework(Framework):
    name = "cupy"
    has_host = False
    dtypes = dtype_names.PLAIN
    devices = component(CupyDevices)
    interchange = component(CupyInterchange)
    memory = component(CupyMemory)
    batching = component(CupyBatching)
    runtime = component(CupyRuntime)

    def __init__(self) -> None:
        self.interchange.dlpack_device = 10 if cupy.cuda.runtime.is_hip else 2
        self.streams = CupyStreams()

    def owns(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    # -- host memory ------------------------------------------------------------------------------

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        host = host_memory.aligned_empty(x.shape, x.dtype)
        with on_gpu(x.device.id):
            # Blocks until the copy, ordered after this thread's current stream, has arrived.
            return x.get(out=host) if x.size else host

    def from_host(self, view: np.ndarray, device: Device) -> cupy.ndarray:
        with on_gpu(device.index):
            result = cupy.empty(view.shape, view.dtype.newbyteorder("="))
            # asarray, since ascontiguousarray makes an array of one axis out of one of none.
            result.set(np.asarray(view, dtype=result.dtype, order="C"))
            # .set() returns before the last bytes have left pinned or registered host memory.
            cupy.cuda.get_current_stream().synchronize()
            return result

    def copy(self, x: cupy.ndarray) -> cupy.ndarray:
        with on_gpu(x.device.id):
            if not self.interchange.copy_reason(x):
                return x.copy()
            with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
                return x.copy()

    def cast(self, x: cupy.ndarray, dtype: str) -> cupy.ndarray:
        with on_gpu(x.device.id):
            return x.astype(dtype)

    def _devices_with_context(self) -> list[int]:
        """Numbers of the cards on which this process has a context; selecting another would create one."""
        if not gpu_memory.is_driver_initialized():  # which asking CuPy would wake
            return []
        return [device.index for device in self.devices.available() if gpu_memory.has_context(device.index)]

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        """Take memory from now on as torch's `allocator` does; a RuntimeError where it holds its own."""
        nbytes = sum((usage.used or 0) + (usage.cached or 0) for usage in self.memory.usage())
        if nbytes:
            raise RuntimeError(f"CuPy holds {nbytes} bytes in its own pool already")

        def malloc(size: int, device: int) -> int:
            return allocate(size, device, cupy.cuda.get_current_stream().ptr)

        def release(address: int, device: int) -> None:
            free(address)

        shared = cupy.cuda.PythonFunctionAllocator(malloc, release)
        cupy.cuda.set_allocator(shared.malloc)


def _is_driver_uninitialized() -> bool:
    """Whether CUDA's driver has not been initialized; after that, this process cannot be forked.

    Most of CUDA's queries initialize it, among them the count of GPUs.
    """
    return not cupy.cuda.runtime.is_hip and not gpu_memory.is_driver_initialized()


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Make the card the current one of this thread for a while.

    `cupy.cuda.Device` does the same, but with CUDA 12 and later it opens the card that it goes back to: a
    process that uses the second card alone would hold memory on the first, too.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == index:
        yield
    elif runtime.is_hip or gpu_memory.has_context(before):
        with cupy.cuda.Device(index):
            yield
    else:
        try:
            with gpu_memory.primary_context(index):
                yield
        finally:
            if runtime.getDevice() != before:
                runtime.setDevice(before)


def _device_at(address: int) -> int:
    """Return the device whose memory is at this address; the current device for unknown memory."""
    runtime = cupy.cuda.runtime
    known = None
    if not runtime.is_hip:
        known = gpu_memory.device_at(address)
    elif address:
        known = runtime.pointerGetAttributes(address).device
    return runtime.getDevice() if known is None else known


def _with_keep_alive(x: cupy.ndarray, exporter: Streams, importer: Streams, device: Device) -> cupy.ndarray:
    """The same memory, in an array with whose end the loan ends in order."""
    if not x.size:
        return x
    owner = gpu_memory.keep_alive(x, exporter, importer, device)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.data.mem.size or x.nbytes, owner, device.index)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


def _pools() -> list[Any]:
    """CuPy's own pool, and the one from which the user has it take memory."""
    own = cupy.get_default_memory_pool()
    current = getattr(cupy.cuda.get_allocator(), "__self__", own)
    return [own, *([current] if current is not own and hasattr(current, "free_all_blocks") else [])]


# CUDA's handle for the default stream of whichever thread uses it.
_OF_EACH_THREAD = 2


class CupyStreams(Streams):
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
                        # The function may have chosen another stream, or another card. An event is of the
                        # card that is current when it is made, and only that card's streams record it.
                        chosen = cupy.cuda.get_current_stream().record()
                        with on_gpu(device.index):
                            outer.wait_event(side.record())
                            outer.wait_event(chosen)
            finally:
                # On leaving `with`, CuPy goes back to the stream that was entered last, and not to one that
                # was chosen with use().
                with on_gpu(device.index):
                    outer.use()

    def take_stream(self, device: Device) -> None:
        with on_gpu(device.index):
            # Entered and never left: to a stream that was chosen with use(), CuPy does not come back from a
            # `with` in the user's function.
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
            return None if handle == _OF_EACH_THREAD else handle

    def wait_for(self, device: Device, handle: int) -> None:
        with on_gpu(device.index):
            stream = cupy.cuda.get_current_stream()
            if stream.ptr != handle:
                # By the runtime's own call: CuPy 14.2 warns of ExternalStream, and older ones have no other.
                reached = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(reached.ptr, handle)
                stream.wait_event(reached)

    def take_over(self, x: cupy.ndarray) -> cupy.ndarray:
        # CuPy's pool knows only the stream on which a block was allocated, and may give it away again there
        # while this thread still reads it: the block is kept until this thread's work is done.
        gpu_memory.release()
        return _with_keep_alive(x, Streams(), self, Device("gpu", x.device.id))


# Streams that no thread uses now. A stream that is destroyed leaves its part of CuPy's pool behind, which is
# keyed by the handle, so that streams are used again by the threads to come. By card.
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)
_streams = threading.local()


def _own_stream(index: int) -> Any:
    """This thread's stream on the card, which is the current one."""
    own: dict[Any, Any] = _streams.__dict__  # card → stream
    if index not in own:
        try:
            own[index] = _idle[index].popleft()
        except IndexError:
            own[index] = cupy.cuda.Stream(non_blocking=True)
        thread = threading.current_thread()
        weakref.finalize(thread, _idle[index].append, own[index]).atexit = False
    return own[index]
