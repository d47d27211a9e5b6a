"""CuPy: arrays on CUDA or ROCm cards; it has no host arrays."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
import numpy as np

from arraybridge import machine
from arraybridge.frameworks import driver, hostmemory, loans
from arraybridge.frameworks.base import Framework, extended
from arraybridge.frameworks.parts import Mark, Pinning, Pool, Streams, Usage
from arraybridge.types import Device

__all__ = ["CupyFramework"]


# CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED, CURAND_STATUS_ALLOCATION_FAILED, …
_OOM = re.compile(r"cudaErrorMemoryAllocation\b|[A-Z]+_\w*(?:ALLOC_FAILED|ALLOCATION_FAILED|OUT_OF_MEMORY)\b")


class CupyFramework(Framework):
    name = "cupy"
    conforms = True
    has_host = False
    dtypes = frozenset(
        {
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        }
    )

    def __init__(self) -> None:
        self.dlpack_device = 10 if cupy.cuda.runtime.is_hip else 2
        self.pool = CupyPool()
        self.streams = CupyStreams()
        self.pinning = CupyPinning()

    def owns(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def device_of(self, x: cupy.ndarray) -> Device:
        return Device("gpu", x.device.id)

    def strides(self, x: cupy.ndarray) -> tuple[int, ...]:
        return tuple(x.strides)

    def address(self, x: cupy.ndarray) -> int:
        return x.data.ptr

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: cupy.ndarray) -> np.ndarray:
        raise NotImplementedError("CuPy has no host arrays")

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        host = hostmemory.packed(x.shape, x.dtype)
        with _on_card(x.device.id):
            # Blocks until the copy, ordered after this thread's current stream, has arrived.
            return x.get(out=host) if x.size else host

    def from_host(self, view: np.ndarray, device: Device) -> cupy.ndarray:
        with _on_card(device.index):
            result = cupy.empty(view.shape, view.dtype.newbyteorder("="))
            # asarray, since ascontiguousarray makes an array of one axis out of one of none.
            result.set(np.asarray(view, dtype=result.dtype, order="C"))
            # .set() returns before the last bytes have left pinned or registered host memory.
            cupy.cuda.get_current_stream().synchronize()
            return result

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return _devices()

    def default_device(self) -> Device:
        if not self.devices():
            return self.find_device(Device("gpu", 0))  # raises, with the reason
        return Device("gpu", cupy.cuda.Device().id)

    def missing_device_reason(self) -> str:
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CUDA answers {error}; an NVIDIA card and its driver are needed."
        return ""

    def to_device(self, x: cupy.ndarray, device: Device) -> cupy.ndarray:
        with _on_card(x.device.id):
            # Between cards only whole blocks travel.
            whole = cupy.ascontiguousarray(x) if x.ndim else x
            reader = cupy.cuda.get_current_stream()
            ready = reader.record()
        with _on_card(device.index):
            # The copy runs on this card's stream, which knows nothing of the work queued on the other.
            stream = cupy.cuda.get_current_stream()
            stream.wait_event(ready)
            result = whole.copy()
            copied = stream.record()
        # Nor does the other one know of the copy: what is freed there may be written to at once.
        reader.wait_event(copied)
        return result

    def adopt(self, x: Any, source: Framework, device: Device) -> cupy.ndarray:
        if not hasattr(type(x), "__dlpack__"):
            card = driver.card_at(x.__cuda_array_interface__["data"][0])
            # Ordered after the stream that the interface names. From any but the current card CuPy copies.
            with _on_card(cupy.cuda.runtime.getDevice() if card is None else card):
                return cupy.asarray(x)
        if source.dlpack_device is None:  # whatever offers DLPack; nothing else is known of it
            with _on_card(int(x.__dlpack_device__()[1])):
                return cupy.from_dlpack(x)
        loans.release()
        # torch refuses to lend from a card that is not the current one.
        with source.selected(device), _on_card(device.index):
            # This hands the producer this thread's current stream on the array's card.
            exported = _TensorflowProducer(x, device) if source.name == "tensorflow" else x
            return _on_loan(cupy.from_dlpack(exported), source.streams, self.streams, device)

    def settle(self, x: cupy.ndarray) -> None:
        with _on_card(x.device.id):
            cupy.cuda.get_current_stream().synchronize()

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: cupy.ndarray) -> cupy.ndarray:
        with _on_card(x.device.id):
            return x.copy()

    def cast(self, x: cupy.ndarray, dtype: str) -> cupy.ndarray:
        with _on_card(x.device.id):
            return x.astype(dtype)

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            return True
        # CUDA, its libraries and its driver have classes of their own, and a name for each status.
        ours = type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends", "cupyx")
        return ours and isinstance(error, RuntimeError) and _OOM.match(str(error)) is not None

    def part(self, x: cupy.ndarray, axis: int, start: int, stop: int) -> cupy.ndarray:
        with _on_card(x.device.id):
            return super().part(x, axis, start, stop)

    def concatenate(self, parts: list[cupy.ndarray], axis: int) -> cupy.ndarray:
        with _on_card(parts[0].device.id):
            return cupy.concatenate(parts, axis)

    def room(self, part: cupy.ndarray, axis: int, rows: int) -> cupy.ndarray:
        with _on_card(part.device.id):
            return cupy.empty(extended(part.shape, axis, rows), part.dtype)

    def write(self, room: cupy.ndarray, part: cupy.ndarray, axis: int, start: int) -> None:
        with _on_card(part.device.id):
            super().write(room, part, axis, start)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> cupy.ndarray:
        with _on_card(device.index):
            return cupy.empty(shape, dtype)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return _on_card(device.index)

    def stack(self, planes: list[cupy.ndarray]) -> cupy.ndarray:
        with _on_card(planes[0].device.id):
            return cupy.stack(planes)

    def reshaped(self, memory: cupy.ndarray, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        with _on_card(memory.device.id):
            return cupy.ndarray(shape, hostmemory.np_dtype(dtype), memptr=memory.data)

    # -- running functions ------------------------------------------------------------------------

    def array_namespace(self) -> Any:
        import array_api_compat.cupy as namespace

        return namespace


def _on_loan(x: cupy.ndarray, lender: Streams, borrower: Streams, device: Device) -> cupy.ndarray:
    """The same memory, in an array with whose end the loan ends in order."""
    if not x.size:
        return x
    owner = loans.Loan(x, lender, borrower, device)
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.data.mem.size or x.nbytes, owner, device.index)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


class CupyPool(Pool):
    def native_device(self, device: Device) -> Any:
        return cupy.cuda.Device(device.index)

    def is_started(self) -> bool:
        return bool(self._opened(None))

    def _opened(self, device: Device | None) -> list[int]:
        """Numbers of the cards on which this process has a context; selecting another would create one."""
        if device is not None and device.kind != "gpu":
            return []
        if not (cupy.cuda.runtime.is_hip or driver.is_awake()):
            return []
        numbers = [d.index for d in _devices() if device is None or d == device]
        return [i for i in numbers if _has_context(i)]

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        opened = self._opened(device)
        for i in opened:
            with _on_card(i):
                if compiled:
                    cupy.fft.config.clear_plan_cache()
                pool = cupy.get_default_memory_pool()
                before = pool.total_bytes()
                pool.free_all_blocks()
                freed += before - pool.total_bytes()
        if opened:
            cupy.get_default_pinned_memory_pool().free_all_blocks()  # it counts blocks, not bytes
        return int(freed)

    def usage(self) -> list[Usage]:
        found = []
        for i in self._opened(None):
            with _on_card(i):
                pool = cupy.get_default_memory_pool()
                used = int(pool.used_bytes())
                found.append(Usage(Device("gpu", i), used, int(pool.total_bytes()) - used, None))
        return found

    def synchronize(self) -> None:
        for i in self._opened(None):
            cupy.cuda.Device(i).synchronize()

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        if device.index not in self._opened(device):
            return None
        with _on_card(device.index):
            return cupy.cuda.runtime.memGetInfo()

    def read_device(self, x: Any) -> Device | None:
        return Device("gpu", x.id) if isinstance(x, cupy.cuda.Device) else None

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        facts = cupy.cuda.runtime.getDeviceProperties(device.index)
        pci = machine.pci_address(facts["pciDomainID"], facts["pciBusID"], facts["pciDeviceID"])
        return facts["name"].decode(errors="replace"), pci, int(facts["totalGlobalMem"])

    def visible_devices(self) -> tuple[Device, ...] | None:
        # CUDA's own count initialises the driver, after which this process can't be forked.
        if cupy.cuda.runtime.is_hip or driver.is_awake():
            return None
        return tuple(Device("gpu", card.index) for card in machine.cards())

    def free_memory_of(self, device: Device) -> int:
        known = None if cupy.cuda.runtime.is_hip else machine.free_memory(device.index)
        if known is not None:
            return known
        with _on_card(device.index):
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        held = sum((usage.used or 0) + (usage.cached or 0) for usage in self.usage())
        if held:
            raise RuntimeError(f"CuPy holds {held} bytes in its own pool already")

        def malloc(size: int, device: int) -> int:
            return allocate(size, device, cupy.cuda.get_current_stream().ptr)

        def release(address: int, device: int) -> None:
            free(address)

        shared = cupy.cuda.PythonFunctionAllocator(malloc, release)
        cupy.cuda.set_allocator(shared.malloc)

    def oom_error(self) -> Exception:
        return cupy.cuda.memory.OutOfMemoryError(2 << 30, 0)


class CupyStreams(Streams):
    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return _side_stream(device.index)

    def take_stream(self, device: Device) -> None:
        with _on_card(device.index):
            stream = _own_stream("lane", device.index)
            # Entered and never left: to a stream that was chosen with use(), CuPy does not come back from a
            # `with` in the user's function.
            stream.__enter__()

    def mark(self, device: Device) -> Mark | None:
        with _on_card(device.index):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream())

        def wait() -> None:
            with _on_card(device.index):
                cupy.cuda.get_current_stream().wait_event(event)

        return Mark(self, device, wait, event.synchronize, lambda: event.done)

    def handle(self, device: Device) -> int:
        with _on_card(device.index):
            return int(cupy.cuda.get_current_stream().ptr)

    def wait_for(self, device: Device, handle: int) -> None:
        with _on_card(device.index):
            stream = cupy.cuda.get_current_stream()
            if stream.ptr != handle:
                # By the runtime's own call: CuPy 14.2 warns of ExternalStream, and older ones have no other.
                reached = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(reached.ptr, handle)
                stream.wait_event(reached)

    def take_over(self, x: cupy.ndarray) -> cupy.ndarray:
        # CuPy's pool knows only the stream on which a block was allocated, and may give it away again there
        # while this thread still reads it: the block is left when the copy is done.
        with _on_card(x.device.id):
            copy = x.copy()
            cupy.cuda.get_current_stream().synchronize()
            return copy


class CupyPinning(Pinning):
    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not _devices():
            return None
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def is_pinned(self, memory: np.ndarray) -> bool:
        try:
            found = cupy.cuda.runtime.pointerGetAttributes(hostmemory.address(memory))
        except cupy.cuda.runtime.CUDARuntimeError:
            return False  # what some versions answer for memory that they do not know
        return found.type == cupy.cuda.runtime.memoryTypeHost


def _devices() -> tuple[Device, ...]:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ()  # no driver, or one too old; missing_device_reason says which
    return tuple(Device("gpu", i) for i in range(count))


# -- streams -------------------------------------------------------------------------------------------


# Streams that no thread uses now. A stream that is destroyed leaves its part of CuPy's pool behind, which is
# keyed by the handle, so that streams are used again by the threads to come. By card.
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)


class _OwnStream:
    """A stream for as long as a thread lives."""

    def __init__(self, index: int) -> None:
        self._idle = _idle[index]
        try:
            self.stream = self._idle.popleft()
        except IndexError:
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def __del__(self) -> None:
        stream = getattr(self, "stream", None)  # none where the card could not make one
        if stream is not None:
            self._idle.append(stream)


_streams = threading.local()


def _own_stream(use: str, index: int) -> Any:
    """This thread's stream for that use on the card, which is the current one."""
    own: dict[Any, _OwnStream] = _streams.__dict__
    if (use, index) not in own:
        own[use, index] = _OwnStream(index)
    return own[use, index].stream


@contextmanager
def _side_stream(index: int) -> Iterator[None]:
    """This thread's own stream on the card, as `Streams.stream` describes."""
    with _on_card(index):
        side = _own_stream("function", index)
        outer = cupy.cuda.get_current_stream()
        side.wait_event(outer.record())
        last = side
        try:
            with side:
                try:
                    yield
                finally:
                    last = cupy.cuda.get_current_stream()
        finally:
            # On leaving `with`, CuPy goes back to the stream that was entered last, and not to one that was
            # chosen with use().
            outer.use()
            outer.wait_event(side.record())
            if last != side:  # the function has chosen one of its own
                outer.wait_event(last.record())


# -- cards ---------------------------------------------------------------------------------------------


@contextmanager
def _on_card(index: int) -> Iterator[None]:
    """Make the card the current one of this thread for a while.

    `cupy.cuda.Device` does the same, but with CUDA 12 and later it opens the card that it goes back to: a
    process that uses the second card alone would hold memory on the first, too.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    if before == index:
        yield
        return
    library = None if runtime.is_hip or _has_context(before) else driver.driver()
    if library is None:
        with cupy.cuda.Device(index):
            yield
        return
    context, left = ctypes.c_void_p(), ctypes.c_void_p()
    # The card stays open, as it does after cudaSetDevice: the context is not released.
    if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) or library.cuCtxPushCurrent_v2(context):
        with cupy.cuda.Device(index):
            yield
        return
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(left))
        if runtime.getDevice() != before:
            runtime.setDevice(before)


def _has_context(index: int) -> bool:
    """Whether this process has a context on the card; asking creates none, and does not wake the driver."""
    library = driver.driver()
    if library is None:
        return False
    flags, active = ctypes.c_uint(), ctypes.c_int()
    failed = library.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return not failed and active.value == 1


class _TensorflowProducer:
    """TensorFlow's ``__dlpack__`` takes no ``stream``; it waits until the memory is ready."""

    def __init__(self, x: Any, device: Device) -> None:
        self._x = x
        self._index = device.index

    def __dlpack__(self, **_: Any) -> Any:
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._index)
