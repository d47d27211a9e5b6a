"""CuPy: arrays on CUDA or ROCm cards; it has no host arrays."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import Framework
from arraybridge.types import Device

__all__ = ["CupyFramework"]


class CupyFramework(Framework):
    name = "cupy"
    modules = ("cupy",)
    extra = "cupy-cuda13x"
    has_host = False
    dtypes = frozenset(
        {
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        }
    )

    def __init__(self) -> None:
        self.dlpack_device = 10 if cupy.cuda.runtime.is_hip else 2

    def owns(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def device_of(self, x: cupy.ndarray) -> Device:
        return Device("gpu", x.device.id)

    def strides(self, x: cupy.ndarray) -> tuple[int, ...]:
        return tuple(x.strides)

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: cupy.ndarray) -> np.ndarray:
        raise NotImplementedError("CuPy has no host arrays")

    def to_host(self, x: cupy.ndarray) -> np.ndarray:
        host = hostmemory.packed(x.shape, x.dtype)
        with x.device:
            # Blocks until the copy, ordered after this thread's current stream, has arrived.
            return x.get(out=host) if x.size else host

    def from_host(self, view: np.ndarray, device: Device) -> cupy.ndarray:
        with cupy.cuda.Device(device.index):
            result = cupy.empty(view.shape, view.dtype.newbyteorder("="))
            result.set(np.ascontiguousarray(view, dtype=result.dtype))
            # .set() returns before the last bytes have left pinned or registered host memory.
            cupy.cuda.get_current_stream().synchronize()
            return result

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:
            return ()  # no driver, or one too old; missing_device_reason says which
        return tuple(Device("gpu", i) for i in range(count))

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

    def free_memory_of(self, device: Device) -> int:
        with cupy.cuda.Device(device.index):
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def to_device(self, x: cupy.ndarray, device: Device) -> cupy.ndarray:
        with x.device:
            done = cupy.cuda.get_current_stream().record()
        with cupy.cuda.Device(device.index):
            # The copy runs on this card's stream, which knows nothing of the work queued on the other.
            cupy.cuda.get_current_stream().wait_event(done)
            return x.copy()

    def adopt(self, x: Any, source: Framework, device: Device) -> cupy.ndarray:
        # cupy.from_dlpack hands the producer this thread's current stream on the array's card.
        if source.name == "tensorflow":
            return cupy.from_dlpack(_TensorflowProducer(x, device))
        if not hasattr(type(x), "__dlpack__"):
            return cupy.asarray(x)  # __cuda_array_interface__, ordered after the stream that it names
        return cupy.from_dlpack(x)

    def settle(self, x: cupy.ndarray) -> None:
        with x.device:
            cupy.cuda.get_current_stream().synchronize()

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: cupy.ndarray) -> cupy.ndarray:
        with x.device:
            return x.copy()

    def cast(self, x: cupy.ndarray, dtype: str) -> cupy.ndarray:
        with x.device:
            return x.astype(dtype)

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, cupy.cuda.memory.OutOfMemoryError)


class _TensorflowProducer:
    """TensorFlow's ``__dlpack__`` takes no ``stream``; it waits until the memory is ready."""

    def __init__(self, x: Any, device: Device) -> None:
        self._x = x
        self._index = device.index

    def __dlpack__(self, **_: Any) -> Any:
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._index)
