"""Selection of a thread's current device, in arraybridge and in every loaded framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from arraybridge.device import Device
from arraybridge.interface.registry import loaded
from arraybridge.parallel.workers import Worker
from arraybridge.settings import busy_workers, default_device, worker_device

__all__ = ["working_on"]


@contextmanager
def working_on(device: Device, worker: Worker | None = None) -> Iterator[None]:
    """Select a device within a ``with`` block, for decorated functions and in every loaded framework.

    Only this thread is affected. A ``worker`` also gets a separate stream per framework on the device.
    """
    with ExitStack() as stack:
        for variable in (worker_device, default_device):
            stack.callback(variable.reset, variable.set(device))
        busy_workers.append(device)
        stack.callback(busy_workers.remove, device)
        # pyclesperanto selects devices for the whole process, so its functions get the device as an argument.
        for framework in loaded() if device.kind != "opencl" else ():
            if framework.devices.selects_per_thread and device in framework.devices.visible_devices():
                if worker is not None:
                    worker.use_stream(framework.streams, device)
                stack.enter_context(framework.devices.select(device))
        yield
