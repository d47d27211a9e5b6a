"""What CuPy holds on the cards, and page-locked memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from arraybridge import machine
from arraybridge.frameworks import driver
from arraybridge.frameworks.cupy.streams import on_card
from arraybridge.frameworks.parts import Holding, Pool
from arraybridge.types import Device

__all__ = ["devices"]


def devices() -> tuple[Device, ...]:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ()  # no driver, or one too old; missing_device_reason says which
    return tuple(Device("gpu", i) for i in range(count))


def _opened() -> list[int]:
    """Numbers of the cards on which this process has a context; selecting another would create one."""
    if not driver.is_awake():  # which asking CuPy would wake
        return []
    return [device.index for device in devices() if driver.has_context(device.index)]


def _pools() -> list[Any]:
    """CuPy's own pool, and the one from which the user has it take memory."""
    own = cupy.get_default_memory_pool()
    current = getattr(cupy.cuda.get_allocator(), "__self__", own)
    return [own, *([current] if current is not own and hasattr(current, "free_all_blocks") else [])]


class CupyPool(Pool):
    def native_device(self, device: Device) -> Any:
        return cupy.cuda.Device(device.index)

    def is_started(self) -> bool:
        return bool(_opened())

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        cards = [i for i in _opened() if device is None or device == Device("gpu", i)]
        for i in cards:
            with on_card(i):
                if compiled:
                    cupy.fft.config.clear_plan_cache()
                for pool in _pools():
                    before = pool.total_bytes()
                    pool.free_all_blocks()
                    freed += before - pool.total_bytes()
        if cards:
            cupy.get_default_pinned_memory_pool().free_all_blocks()  # it counts blocks, not bytes
        return int(freed)

    def usage(self) -> list[Holding]:
        rows = []
        for i in _opened():
            with on_card(i):
                used = sum(int(pool.used_bytes()) for pool in _pools())
                total = sum(int(pool.total_bytes()) for pool in _pools())
                rows.append(Holding(f"gpu:{i}", "cupy", used, total - used))
        return rows

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not devices():
            return None
        cards = _opened() or [cupy.cuda.runtime.getDevice()]
        with on_card(cards[0]):  # memory is locked for all cards, by way of one that is open
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def synchronize(self) -> None:
        for i in _opened():
            with on_card(i):
                cupy.cuda.runtime.deviceSynchronize()

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        with on_card(device.index):
            return cupy.cuda.runtime.memGetInfo()

    def read_device(self, x: Any) -> Device | None:
        return Device("gpu", x.id) if isinstance(x, cupy.cuda.Device) else None

    def visible_devices(self) -> tuple[Device, ...] | None:
        # CUDA's own count initialises the driver, after which this process can't be forked.
        if cupy.cuda.runtime.is_hip or driver.is_awake():
            return None
        return tuple(Device("gpu", card.index) for card in machine.cards())

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        nbytes = sum((usage.used or 0) + (usage.cached or 0) for usage in self.usage())
        if nbytes:
            raise RuntimeError(f"CuPy holds {nbytes} bytes in its own pool already")

        def malloc(size: int, device: int) -> int:
            return allocate(size, device, cupy.cuda.get_current_stream().ptr)

        def release(address: int, device: int) -> None:
            free(address)

        shared = cupy.cuda.PythonFunctionAllocator(malloc, release)
        cupy.cuda.set_allocator(shared.malloc)

    def oom_error(self) -> Exception:
        return cupy.cuda.memory.OutOfMemoryError(2 << 30, 0)
