"""JAX's devices, and the memory that it holds on accelerators."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import jax
import numpy as np
from jax.extend import backend as jax_backend

from arraybridge import machine
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.parts import Holding, Pool
from arraybridge.frameworks.registry import can_find
from arraybridge.types import Device

_next = jax.jit(lambda x: x + 1)


def local_devices() -> list[Any]:
    """JAX's own objects for the devices of this process, of all its backends."""
    return [device for backend in jax_backend.backends().values() for device in backend.local_devices()]


class JaxPool(Pool):
    def native_device(self, device: Device) -> Any:
        return jax_device(device)

    def is_started(self) -> bool:
        try:  # a private interface, since the public calls open JAX's devices
            from jax._src import xla_bridge

            return xla_bridge.backends_are_initialized()
        except (ImportError, AttributeError):
            return True  # so that JAX itself is asked

    def _opened(self) -> list[Any]:
        if not self.is_started():
            return []
        return [device for device in local_devices() if device.platform != "cpu"]

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        # XLA's allocator keeps what it has taken from the card; what can go is compiled programs.
        if not compiled or not self.is_started():
            return 0
        cards = [d for d in self._opened() if device is None or as_device(d) == device]
        before = sum(_held(d) for d in cards)
        jax.clear_caches()
        return max(0, before - sum(_held(d) for d in cards))

    def synchronize(self) -> None:
        if not self.is_started():
            return
        # A device works on one thing after the other; there is no call that waits for all of it.
        jax.block_until_ready([_next(jax.device_put(np.float32(0), device)) for device in local_devices()])
        for x in jax.live_arrays():
            if not x.is_deleted():
                x.block_until_ready()

    def is_scattered(self, x: jax.Array) -> bool:
        return len(x.sharding.device_set) > 1

    def usage(self) -> list[Holding]:
        rows = []
        for device in self._opened():
            stats = device.memory_stats()
            if stats:
                used, pool = stats["bytes_in_use"], stats.get("pool_bytes")
                cached = None if pool is None else max(0, pool - used)
                peak = stats.get("peak_bytes_in_use")
                rows.append(Holding(str(as_device(device)), "jax", used, cached, peak))
        return rows

    def visible_devices(self) -> tuple[Device, ...] | None:
        # Opening JAX takes a context, and by default most of the memory, on every card.
        # Of TPUs, say, and AMD's cards nobody can tell but JAX.
        if self.is_started() or can_find("libtpu") or any("cuda" not in name for name in _plugins()):
            return None
        cpus = (Device("cpu", i) for i in range(_cpu_count()))
        return (*cpus, *(Device("gpu", card.index) for card in (machine.cards() if _plugins() else ())))

    def read_device(self, x: Any) -> Device | None:
        return as_device(x) if isinstance(x, jax.Device) else None

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        if device.kind == "cpu" or not self.is_started():
            return "", "", None
        return str(jax_device(device).device_kind), "", None

    def free_memory_of(self, device: Device) -> int:
        stats = jax_device(device).memory_stats() or {}
        allowed = int(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))
        # What JAX may take is a part of the card, of which others may have taken more than the rest.
        return min(allowed, super().free_memory_of(device) or allowed)

    def oom_error(self) -> Exception:
        return jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes. (a rehearsal)"
        )


def cpu_alone() -> bool:
    """Whether no array of this process can live anywhere but on its one CPU device."""
    return [device.platform for device in local_devices()] == ["cpu"]


def jax_device(device: Device) -> Any:
    """JAX's own object for a device that `find_device` has seen."""
    if device is CPU:
        return jax.local_devices(backend="cpu")[0]
    return next(native for native in local_devices() if as_device(native) == device)


@cache
def _plugins() -> list[str]:
    """What brings JAX its accelerators."""
    return [one.name for one in entry_points(group="jax_plugins")]


def _cpu_count() -> int:
    """How many CPU devices JAX will have."""
    count = jax.config.jax_num_cpu_devices
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return count if count > 0 else int(flag.group(1)) if flag else 1


def _held(device: Any) -> int:
    return int((device.memory_stats() or {}).get("bytes_in_use", 0))


@cache
def as_device(device: Any) -> Device:
    if device.platform == "cpu":
        return Device("cpu", device.id)
    return Device("gpu", device.local_hardware_id if device.local_hardware_id is not None else device.id)
