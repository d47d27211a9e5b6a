"""Where a result is to live and a function to run: what a call, a decorator, and this thread have chosen."""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from typing import Any, NamedTuple

from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework, find_or_host
from arraybridge.types import Device, DeviceLike, GpuId, check_gpu_id

__all__ = [
    "Placement",
    "busy_workers",
    "card_meant",
    "chosen_device",
    "decorated",
    "default_device",
    "only_card",
    "placement",
    "shares_cards",
    "target_device",
    "worker_device",
]

#: The choice of `set_device` and `use_device`; None where nobody chose.
default_device: ContextVar[Device | None] = ContextVar("arraybridge_default_device", default=None)

#: The devices of the workers of `device_map` in any thread; while there is none, nobody asks `worker_device`.
busy_workers: list[Device] = []

#: The device of this worker of `device_map`: decorated functions run there that name none.
worker_device: ContextVar[Device | None] = ContextVar("arraybridge_worker_device", default=None)

#: The number of the one card of this process, for which decorators then take every number: a worker of a Dask
#: cluster has one, and a function says ``gpu_id=1`` of the machine on which it was written.
only_card: int | None = None


def chosen_device() -> Device | None:
    """The default device that somebody chose: this thread or task, or ``ARRAYBRIDGE_DEVICE`` for the process.

    Raises:
        ValueError: the environment names no device.
    """
    words = os.environ.get("ARRAYBRIDGE_DEVICE")
    if default_device.get() is not None or not words:
        return default_device.get()
    try:
        return Device.parse(words)
    except ValueError as error:
        raise ValueError(f"ARRAYBRIDGE_DEVICE: {error}") from None


def card_meant(gpu_id: GpuId) -> GpuId:
    """The card that the ``gpu_id`` of a decorator means in this process."""
    return gpu_id if gpu_id is None or only_card is None else only_card


class Placement(NamedTuple):
    """Where a decorated function runs, as its decorator says.

    Attributes:
        framework: the framework that it runs in; None for `gpu`, which decides that on each call.
        gpu_id: the accelerator that was named, or ``"auto"``, or None.
        device: the device that was named instead, or None.
        converts: whether it brings its arrays there by itself; `memory_types` only declares.
    """

    framework: str | None
    gpu_id: GpuId = None
    device: Device | None = None
    converts: bool = True

    def __str__(self) -> str:
        name = self.framework or "the faster of cpu and gpu"
        if self.device is not None:
            return f"{name} on {self.device}"
        if self.gpu_id is not None:
            return f"{name} on {'the freest gpu' if self.gpu_id == 'auto' else f'gpu:{self.gpu_id}'}"
        return f"{name}, where its input is" if self.framework else name

    def named_device(self) -> Device | None:
        """The device that the decorator names, as its framework has it; None where it names none for certain.

        Raises:
            DeviceNotFoundError: the framework has no such device.
        """
        gpu_id = card_meant(self.gpu_id)
        if self.framework is None or (self.device is None and not isinstance(gpu_id, int)):
            return None
        framework = registry.framework(self.framework)
        return target_device(framework, framework, CPU, gpu_id, self.device)


def placement(fn: Any) -> Placement | None:
    """Where ``fn`` runs, or None for a function that says nothing of that and runs where its arrays are.

    >>> import functools, arraybridge
    >>> @arraybridge.torch(device="cpu")
    ... def scale(x, by):
    ...     return x * by
    >>> print(placement(functools.partial(scale, by=2)))
    torch on cpu
    """
    return getattr(decorated(fn), "_placement", None)


def decorated(fn: Any) -> Any:
    """The function in ``fn`` that one of the decorators made, or None.

    That is ``fn`` itself, or the one behind a partial, a bound method, an object whose ``__call__`` is
    decorated, and whatever has a ``__wrapped__``, as `functools.wraps` leaves it.
    """
    seen: set[int] = set()
    while fn is not None and id(fn) not in seen:
        seen.add(id(fn))
        for candidate in (fn, None if isinstance(fn, type) else type(fn).__call__):
            if isinstance(getattr(candidate, "_placement", None), Placement):
                return candidate
        fn = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
    return None


# -- arrays --------------------------------------------------------------------------------------------


def target_device(
    source: Framework, target: Framework, source_device: Device, gpu_id: GpuId, device: DeviceLike | None
) -> Device:
    """The device that a call names, or else the one where the array stays.

    Raises:
        DeviceNotFoundError: the target has no such device.
        ValueError: ``gpu_id`` is no number of a GPU, or stands beside ``device``.
    """
    number = check_gpu_id(gpu_id)
    if device is not None:
        if number is not None:
            raise ValueError(f"pass gpu_id={gpu_id!r} or device={device!r}, not both")
        return find_or_host(target, Device.parse(device))
    if number is None or target.name == "numpy":
        return _nearest(source, target, source_device)
    if number == "auto":
        return freest_device(target) or find_or_host(target, target.accelerator(0))
    return find_or_host(target, target.accelerator(number))


def _nearest(source: Framework, target: Framework, source_device: Device) -> Device:
    """The device of the array where the target has that one, else the target's host, else its default."""
    if source is target:
        return source_device
    if source_device == CPU:
        return CPU if target.has_host else target.default_device()
    reachable = source_device.kind == "cpu" or shares_cards(source, target)
    if reachable and source_device in target.devices():
        return source_device
    return CPU if target.has_host and source_device.kind != "cpu" else target.default_device()


def shares_cards(source: Framework, target: Framework) -> bool:
    """Whether both can see each other's memory on an accelerator."""
    return source.dlpack_device is not None and source.dlpack_device == target.dlpack_device


def freest_device(framework: Framework) -> Device | None:
    """The accelerator with the most free memory, the first of equals; None where it has none."""
    accelerators = [device for device in framework.devices() if device.kind != "cpu"]
    return max(accelerators, key=framework.pool.free_memory_of, default=None)
