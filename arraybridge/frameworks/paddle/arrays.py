"""PaddlePaddle: tensors on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import CPU, Framework, refuse
from arraybridge.frameworks.paddle import gradients as paddle_autodiff
from arraybridge.frameworks.parts import Holding
from arraybridge.types import Device

# No uint16: Paddle takes its numbers for bfloat16.
_DTYPES = hostmemory.PLAIN - {"uint16"} | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
# It has these dtypes, and no more than a cast for them: no slice and no sum.
_NO_KERNELS = ("uint32", "uint64")


class PaddleFramework(Framework):
    name = "paddle"
    modules = ("paddle",)
    dtypes = _DTYPES
    max_rank = 9  # phi::DDim::kMaxRank

    def __init__(self) -> None:
        self.autodiff = paddle_autodiff.AUTODIFF
        if paddle.is_compiled_with_cuda():
            self.dlpack_device = 2

    # -- which arrays, and what they hold ---------------------------------------------------------

    def owns(self, x: Any) -> bool:
        return isinstance(x, paddle.Tensor)

    def check(self, x: Any) -> None:
        if not x.is_dense():
            raise refuse(self, "a sparse tensor", "pass x.to_dense()")

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype).removeprefix("paddle.")

    def nbytes(self, x: Any) -> int:
        return int(x.size) * int(x.element_size())

    def strides(self, x: Any) -> tuple[int, ...]:
        return tuple(step * x.element_size() for step in x.strides)

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def requires_grad(self, x: Any) -> bool:
        return not x.stop_gradient

    def detach(self, x: Any) -> Any:
        return x.detach()

    # -- host memory ------------------------------------------------------------------------------

    def to_host(self, x: Any) -> np.ndarray:
        return hostmemory.fresh(self.host_view(x if x.place.is_cpu_place() else x.cpu()))

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        steps = [step for step, extent in zip(strides, shape, strict=True) if extent > 1]
        if any(step < 0 for step in steps):
            return "Paddle has no negative strides"
        return "its strides are no whole numbers of elements" if any(s % itemsize for s in steps) else ""

    # -- devices ----------------------------------------------------------------------------------

    def device_of(self, x: Any) -> Device:
        place = x.place
        return Device("gpu", place.gpu_device_id()) if place.is_gpu_place() else CPU

    def devices(self) -> tuple[Device, ...]:
        return (CPU, *(Device("gpu", i) for i in range(paddle.device.cuda.device_count())))

    def missing_device_reason(self) -> str:
        if not paddle.is_compiled_with_cuda():
            return "This Paddle is built for the CPU alone; install paddlepaddle-gpu."
        return "Paddle finds no CUDA device; is the card's driver installed?"

    def to_device(self, x: Any, device: Device) -> Any:
        return x._copy_to(_place(device), True)  # True: waits for it

    def settle(self, x: Any) -> None:
        if x.place.is_gpu_place():
            paddle.device.cuda.current_stream(x.place.gpu_device_id()).synchronize()

    @contextmanager
    def selected(self, device: Device) -> Iterator[None]:
        before = paddle.device.get_device()
        paddle.device.set_device(str(device))
        try:
            yield
        finally:
            paddle.device.set_device(before)

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: Any) -> Any:
        return self.to_device(x, self.device_of(x))

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(getattr(paddle, dtype))

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, (MemoryError, RuntimeError)) and "ResourceExhausted" in str(error)

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        if self.dtype_name(x) not in _NO_KERNELS:
            return super().part(x, axis, start, stop)
        rows = (slice(None),) * (axis % x.ndim) + (slice(start, stop),)
        return self.from_host(self.to_host(x)[rows], self.device_of(x))

    def is_started(self) -> bool:
        return paddle.device.cuda.device_count() > 0

    def usage(self) -> list[Holding]:
        rows = []
        for i in range(paddle.device.cuda.device_count()):
            used = paddle.device.cuda.memory_allocated(i)
            cached, peak = (
                paddle.device.cuda.memory_reserved(i) - used,
                paddle.device.cuda.max_memory_allocated(i),
            )
            rows.append(Holding(f"gpu:{i}", "paddle", used, cached, peak))
        return rows

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        before = sum(one.cached or 0 for one in self.usage())
        paddle.device.cuda.empty_cache()
        return max(before - sum(one.cached or 0 for one in self.usage()), 0)


def _place(device: Device) -> Any:
    return paddle.CUDAPlace(device.index) if device.kind == "gpu" else paddle.CPUPlace()
