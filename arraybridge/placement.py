"""What this thread or task has chosen for the layers below: a default device, and where functions run."""

from __future__ import annotations

from contextvars import ContextVar

from arraybridge.types import Device, GpuId

__all__ = ["card_meant", "default_device", "only_card", "running_on", "workers"]

#: The choice of `set_device` and `use_device`; None where nobody chose.
default_device: ContextVar[Device | None] = ContextVar("arraybridge_default_device", default=None)

#: The workers of any thread; while there is none, nobody asks `running_on`.
workers: list[Device] = []

#: Where decorated functions run that name no device: the device of this worker of `device_map`.
running_on: ContextVar[Device | None] = ContextVar("arraybridge_running_on", default=None)

#: The number of the one card of this process, for which decorators then take every number: a worker of a Dask
#: cluster has one, and a function says ``gpu_id=1`` of the machine on which it was written.
only_card: int | None = None


def card_meant(gpu_id: GpuId) -> GpuId:
    """The card that the ``gpu_id`` of a decorator means in this process."""
    return gpu_id if gpu_id is None or only_card is None else only_card
