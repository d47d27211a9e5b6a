"""The package ``pyclesperanto_prototype``, on top of pyopencl."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyclesperanto_prototype as cle
import pyopencl as cl
from pyopencl.array import Array

from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.frameworks.pyclesperanto.images import ImageFramework, ImagePool
from arraybridge.types import Device


class PrototypeFramework(ImageFramework):
    def __init__(self) -> None:
        self.natives = opencl.devices()
        self.gpus = sum(native.type == cl.device_type.GPU for native in self.natives)
        self.pool = ImagePool(self)

    def owns(self, x: Any) -> bool:
        return isinstance(x, Array)

    def device_of(self, x: Any) -> Device:
        return Device(self.kind, self.natives.index(x.queue.device))

    def default_device(self) -> Device:
        return Device(self.kind, self.natives.index(cle.get_device().device))

    def select(self, device: Device) -> None:
        # The one with the highest score, and not by name, which several devices may share.
        cle.select_device(score_key=lambda native: native == self.natives[device.index])

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.supports(dtype, shape)
        current, native = cle.get_device(), self.natives[device.index]
        queue = current.queue if current.device == native else _queue_beside(native)
        return type(cle.create((1,)))(queue, shape, np.dtype(dtype))

    def fill(self, x: Any, values: np.ndarray) -> None:
        x.set(values, queue=x.queue)

    def settle(self, x: Any) -> None:
        x.queue.finish()

    # Slices come by way of float32 there, so that they are made on the host.

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        rows = (slice(None),) * (axis % len(x.shape)) + (slice(start, stop),)
        return self.from_host(self.to_host(x)[rows], self.device_of(x))

    def unstack(self, x: Any) -> list[Any]:
        return [self.from_host(plane, self.device_of(x)) for plane in self.to_host(x)]


@cache
def _queue_beside(native: Any) -> Any:
    """A queue on a device that is not the current one; to select it would give that one another context."""
    return cl.CommandQueue(cl.Context([native]))
