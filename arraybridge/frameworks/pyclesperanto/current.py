"""The package ``pyclesperanto``, with the backend that is selected when it is first used."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyclesperanto as cle

from arraybridge.frameworks import hostmemory, loans
from arraybridge.frameworks.base import Framework, is_c_contiguous
from arraybridge.frameworks.facts import can_find
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.frameworks.pyclesperanto.images import (
    MAX_RANK,
    ImageFramework,
    ImagePool,
    no_device,
)
from arraybridge.types import Device

# From this many bytes on it pays to map what lies in memory of the host (benchmarks/conversion.py).
_MAP_FROM = 1 << 25


class CurrentFramework(ImageFramework):
    def __init__(self) -> None:
        try:
            current = cle.get_device()
        except (AttributeError, RuntimeError):  # without a device, the package imports half
            current = None
        if current is None:
            raise no_device()
        if cle.get_backend_name() == "cuda":
            self.kind, self.dlpack_device = "gpu", 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that there are none of a kind
            gpus, cpus = (range(len(cle.list_available_devices(kind))) for kind in ("gpu", "cpu"))
        #: How `select_device` calls each: its number among those of its kind.
        self._places = [*((i, "gpu") for i in gpus), *((i, "cpu") for i in cpus)]
        self.gpus = len(gpus)
        self.natives = [cle.select_device(*place) for place in self._places]
        cle.select_device(*self._places[self.natives.index(current)])
        self.pool = ImagePool(self)

    def owns(self, x: Any) -> bool:
        return isinstance(x, cle.Array)

    def device_of(self, x: Any) -> Device:
        return Device(self.kind, self.natives.index(x.device))

    def default_device(self) -> Device:
        return Device(self.kind, self.natives.index(cle.get_device()))

    def select(self, device: Device) -> None:
        cle.select_device(*self._places[device.index])

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.supports(dtype, shape)
        return cle.create(shape, np.dtype(dtype), device=self.natives[device.index])

    def fill(self, x: Any, values: np.ndarray) -> None:
        if values.nbytes >= _MAP_FROM and self.device_of(x).index >= self.gpus and can_find("pyopencl"):
            opencl.fill_mapped(x, values)
        else:
            x.set(values)

    def settle(self, x: Any) -> None:
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element, after the kernels queued before

    # -- regions, which are copied byte for byte --------------------------------------------------

    # The kernels behind indexing, paste() and copy_slice() compute in float32, in which an int32 loses its
    # last digits.

    def _region(self, x: Any, start: Sequence[int], extents: Sequence[int], shape: Sequence[int]) -> Any:
        """The elements of ``x`` from ``start`` on, so many along each axis, as an array of that shape."""
        result = self.empty(tuple(shape), self.dtype_name(x), self.device_of(x))
        x.copy(result, _of_three(start, 0), _of_three((), 0), _of_three(extents, 1))
        return result

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        origin, extents = [0] * len(x.shape), list(x.shape)
        origin[axis], extents[axis] = start, min(stop, extents[axis]) - start
        return self._region(x, origin, extents, extents)

    def unstack(self, x: Any) -> list[Any]:
        zeros, plane = [0] * (len(x.shape) - 1), x.shape[1:]
        return [self._region(x, (i, *zeros), (1, *plane), plane) for i in range(x.shape[0])]

    def stack(self, planes: list[Any]) -> Any:
        shape, zeros = planes[0].shape, [0] * len(planes[0].shape)
        result = self.empty((len(planes), *shape), self.dtype_name(planes[0]), self.device_of(planes[0]))
        for i, plane in enumerate(planes):
            plane.copy(result, _of_three((), 0), _of_three((i, *zeros), 0), _of_three(shape, 1))
        return result

    # -- with CUDA beneath: device memory, contiguous, and no queue that others could be told of --

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        return "" if is_c_contiguous(shape, strides, itemsize) else "it is not C-contiguous"

    def exported(self, x: Any, device: Device) -> Any:
        self.settle(x)
        # Its own __dlpack__(stream, version) knows no max_version= (pyclesperanto 0.25).
        return hostmemory.Exported(x.__dlpack__(), (2, device.index))

    def adopt(self, x: Any, source: Framework, device: Device) -> Any:
        loans.release()
        with source.selected(device):
            source.settle(x)
            native = self.natives[device.index]
            lent = cle.from_dlpack(source.exported(x, device), device=native, copy=False)
        loans.keep_after(lent, x, lambda: self.empty((1, 1, 1), "float32", device), self.settle)
        return lent


def _of_three(numbers: Sequence[int], fill: int) -> tuple[int, ...]:
    return (*[fill] * (MAX_RANK - len(numbers)), *numbers)
