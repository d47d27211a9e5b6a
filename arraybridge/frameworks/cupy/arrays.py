"""CuPy: arrays on CUDA or ROCm cards; it has no host arrays."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np

from arraybridge.frameworks import driver, hostmemory, loans
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.cupy.memory import CupyPool, devices
from arraybridge.frameworks.cupy.streams import CupyStreams, on_card, on_loan
from arraybridge.types import Device

# CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED, CURAND_STATUS_ALLOCATION_FAILED, …
_OOM = re.compile(r"cudaErrorMemoryAllocation\b|[A-Z]+_\w*(?:ALLOC_FAILED|ALLOCATION_FAILED|OUT_OF_MEMORY)\b")

# kDLCUDAManaged: torch and JAX take no capsule of that kind (torch 2.11: "Unsupported device_type: 13").
_MANAGED = 13


class CupyFramework(Framework):
    name = "cupy"
    conforms = True
    has_host = False
    dtypes = hostmemory.PLAIN

    def __init__(self) -> None:
        self.dlpack_device = 10 if cupy.cuda.runtime.is_hip else 2
        self.pool = CupyPool()
        self.streams = CupyStreams()

    def owns(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def device_of(self, x: cupy.ndarray) -> Device:
        return Device("gpu", x.device.id)

    def strides(self, x: cupy.ndarray) -> tuple[int, ...]:
        return tuple(x.strides)

    def address(self, x: cupy.ndarray) -> int:
        return x.data.ptr

    # -- host memory ------------------------------------------------------------------------------

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        host = hostmemory.packed(x.shape, x.dtype)
        with on_card(x.device.id):
            # Blocks until the copy, ordered after this thread's current stream, has arrived.
            return x.get(out=host) if x.size else host

    def from_host(self, view: np.ndarray, device: Device) -> cupy.ndarray:
        with on_card(device.index):
            result = cupy.empty(view.shape, view.dtype.newbyteorder("="))
            # asarray, since ascontiguousarray makes an array of one axis out of one of none.
            result.set(np.asarray(view, dtype=result.dtype, order="C"))
            # .set() returns before the last bytes have left pinned or registered host memory.
            cupy.cuda.get_current_stream().synchronize()
            return result

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return devices()

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
        with on_card(x.device.id):
            # Between cards only block blocks travel.
            block = cupy.ascontiguousarray(x) if x.ndim else x
            reader = cupy.cuda.get_current_stream()
            ready = reader.record()
        with on_card(device.index):
            # The copy runs on this card's stream, which knows nothing of the work queued on the other.
            stream = cupy.cuda.get_current_stream()
            stream.wait_event(ready)
            result = block.copy()
            copied = stream.record()
        with on_card(x.device.id):
            # Nor does the other one know of the copy: what is freed there may be written to at once.
            reader.wait_event(copied)
        return result

    def adopt(self, x: Any, source: Framework, device: Device) -> cupy.ndarray:
        if not hasattr(type(x), "__dlpack__"):
            card = driver.card_at(x.__cuda_array_interface__["data"][0])
            # Ordered after the stream that the interface names. From any but the current card CuPy copies.
            with on_card(cupy.cuda.runtime.getDevice() if card is None else card):
                return cupy.asarray(x)
        if source.dlpack_device is None:  # whatever offers DLPack; nothing else is known of it
            with on_card(int(x.__dlpack_device__()[1])):
                return cupy.from_dlpack(x)
        loans.release()
        # torch refuses to lend from a card that is not the current one.
        with source.selected(device), on_card(device.index):
            return on_loan(
                cupy.from_dlpack(self._lent_by(source, x, device)), source.streams, self.streams, device
            )

    def _lent_by(self, source: Framework, x: Any, device: Device) -> Any:
        """The array as CuPy's import takes it, which hands it this thread's current stream."""
        handle = source.streams.handle(device)
        if handle is not None and self.streams.handle(device) is None:
            # torch lends to no such stream (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM): the order is made here.
            self.streams.wait_for(device, handle)
            return hostmemory.Exported(x.__dlpack__(stream=-1), (2, device.index))
        return source.exported(x, device)

    def settle(self, x: cupy.ndarray) -> None:
        with on_card(x.device.id):
            cupy.cuda.get_current_stream().synchronize()

    # -- values -----------------------------------------------------------------------------------

    def must_copy(self, x: cupy.ndarray) -> str:
        with on_card(x.device.id):  # the question opens the current one
            return "it lies in managed memory" if x.__dlpack_device__()[0] == _MANAGED else ""

    def copy(self, x: cupy.ndarray) -> cupy.ndarray:
        with on_card(x.device.id):
            if not self.must_copy(x):
                return x.copy()
            with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
                return x.copy()

    def cast(self, x: cupy.ndarray, dtype: str) -> cupy.ndarray:
        with on_card(x.device.id):
            return x.astype(dtype)

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            return True
        # CUDA, its libraries and its driver have classes of their own, and a name for each status.
        ours = type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends", "cupyx")
        return ours and isinstance(error, RuntimeError) and _OOM.match(str(error)) is not None

    def room(self, part: cupy.ndarray, shape: tuple[int, ...]) -> cupy.ndarray:
        with on_card(part.device.id):
            return cupy.empty(shape, part.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> cupy.ndarray:
        with on_card(device.index):
            return cupy.empty(shape, dtype)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return on_card(device.index)

    def beside(self, x: cupy.ndarray) -> AbstractContextManager[Any]:
        return on_card(x.device.id)

    def reshaped(self, memory: cupy.ndarray, shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        with on_card(memory.device.id):
            return cupy.ndarray(shape, hostmemory.np_dtype(dtype), memptr=memory.data)

    # -- running functions ------------------------------------------------------------------------

    def array_namespace(self) -> Any:
        import array_api_compat.cupy as namespace

        return namespace
