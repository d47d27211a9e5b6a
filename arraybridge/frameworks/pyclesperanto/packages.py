"""What ``pyclesperanto`` and ``pyclesperanto_prototype`` do differently: two libraries with one role."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.facts import BUILT_IN, can_find
from arraybridge.frameworks.pyclesperanto import opencl

PACKAGES = BUILT_IN["pyclesperanto"].packages
MAX_RANK = 3
# From this many bytes on it pays to map what lies in memory of the host (benchmarks/conversion.py).
_MAP_FROM = 1 << 25


class _Shared:
    """What the two packages do alike. Devices go by their number: GPUs first, then CPUs."""

    #: Whether its arrays lie in CUDA's memory, and not in OpenCL's or Metal's.
    has_cuda = False
    #: The package's own objects.
    devices: list[Any]
    _cle: Any

    def device_names(self) -> list[str]:
        return [device.name for device in self.devices]

    def read(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def adopt(self, producer: Any, index: int) -> Any:
        """An array in the CUDA memory that a producer of DLPack shows, on the same device."""
        return self._cle.from_dlpack(producer, device=self.devices[index], copy=False)


def _no_device() -> FrameworkNotInstalledError:
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device. Install your GPU's driver, or"
        ' run pip install "pyopencl[pocl]" for OpenCL on the CPU, and start Python anew;'
        " import arraybridge before pyclesperanto, so that the PoCL wheel is found.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
    )


class _Modern(_Shared):
    """The package ``pyclesperanto``, with the backend that is selected when it is opened."""

    def __init__(self) -> None:
        import pyclesperanto

        self._cle = pyclesperanto
        try:
            current = self._cle.get_device()
        except (AttributeError, RuntimeError):  # without a device, the package imports half
            current = None
        if current is None:
            raise _no_device()
        self.has_cuda = self._cle.get_backend_name() == "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that there are none of a kind
            names = {kind: self._cle.list_available_devices(kind) for kind in ("gpu", "cpu")}
        #: How `select_device` calls each: its number among those of its kind.
        self._places = [(i, kind) for kind, of_kind in names.items() for i in range(len(of_kind))]
        self.devices = [self._cle.select_device(*place) for place in self._places]
        self.select(self._index(current))

    def _index(self, device: Any) -> int:
        facts = (device.index, device.type, device.name)
        return next((i for i, own in enumerate(self.devices) if (own.index, own.type, own.name) == facts), 0)

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cle.Array)

    def index_of(self, x: Any) -> int:
        return self._index(x.device)

    def current_index(self) -> int:
        return self._index(self._cle.get_device())

    def is_cpu(self, index: int) -> bool:
        return self._places[index][1] == "cpu"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        return self._cle.create(shape, dtype, device=self.devices[index])

    def _is_mapped(self, x: Any) -> bool:
        """Whether it is large and lies in memory of the host, where mapping it takes a third of the time."""
        large = x.nbytes >= _MAP_FROM and x.mtype == "buffer"
        return large and self.is_cpu(self.index_of(x)) and can_find("pyopencl")

    def read(self, x: Any) -> np.ndarray:
        if not self._is_mapped(x):
            return super().read(x)
        self.wait(x)
        with opencl.mapped(x, write=False) as memory:
            return hostmemory.fresh(memory)

    def write(self, x: Any, source: np.ndarray) -> None:
        if not self._is_mapped(x):
            x.set(source)
            return
        with opencl.mapped(x, write=True) as memory:
            np.copyto(memory, source)

    def wait(self, x: Any) -> None:
        """Wait until the kernels that were queued before are done."""
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element

    def select(self, index: int) -> None:
        self._cle.select_device(*self._places[index])

    # A region is copied byte for byte. The kernels behind indexing, paste() and copy_slice() compute in
    # float32, in which an int32 loses its last digits.

    def _region(self, x: Any, start: Sequence[int], extents: Sequence[int], shape: Sequence[int]) -> Any:
        """The elements of ``x`` from ``start`` on, so many along each axis, as an array of that shape."""
        result = self.empty(tuple(shape), np.dtype(x.dtype), self.index_of(x))
        x.copy(result, _of_three(start, 0), _of_three((), 0), _of_three(extents, 1))
        return result

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        origin, extents, axis = [0] * len(x.shape), list(x.shape), axis % len(x.shape)
        origin[axis], extents[axis] = start, len(range(*slice(start, stop).indices(extents[axis])))
        return self._region(x, origin, extents, extents)

    def unstack(self, x: Any) -> list[Any]:
        zeros, plane = [0] * (len(x.shape) - 1), x.shape[1:]
        return [self._region(x, (i, *zeros), (1, *plane), plane) for i in range(x.shape[0])]

    def stack(self, planes: list[Any]) -> Any:
        shape, zeros = planes[0].shape, [0] * len(planes[0].shape)
        result = self.empty((len(planes), *shape), np.dtype(planes[0].dtype), self.index_of(planes[0]))
        for i, plane in enumerate(planes):
            plane.copy(result, _of_three((), 0), _of_three((i, *zeros), 0), _of_three(shape, 1))
        return result


def _of_three(numbers: Sequence[int], fill: int) -> tuple[int, ...]:
    return (*[fill] * (MAX_RANK - len(numbers)), *numbers)


class _Prototype(_Shared):
    """The package ``pyclesperanto_prototype``, on top of pyopencl."""

    def __init__(self) -> None:
        import pyopencl

        self._cl = pyopencl
        try:
            self.devices = [device for p in self._cl.get_platforms() for device in p.get_devices()]
        except self._cl.Error as error:  # PLATFORM_NOT_FOUND_KHR
            raise _no_device() from error
        if not self.devices:
            raise _no_device()
        import pyclesperanto_prototype

        self._cle = pyclesperanto_prototype
        self.devices.sort(key=lambda device: device.type != self._cl.device_type.GPU)
        self._queues: dict[int, Any] = {}

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cl.array.Array)

    def index_of(self, x: Any) -> int:
        return self.devices.index(x.queue.device)

    def current_index(self) -> int:
        return self.devices.index(self._cle.get_device().device)

    def is_cpu(self, index: int) -> bool:
        return bool(self.devices[index].type == self._cl.device_type.CPU)

    def _queue(self, index: int) -> Any:
        current = self._cle.get_device()
        if current.device == self.devices[index]:
            return current.queue
        if index not in self._queues:
            self._queues[index] = self._cl.CommandQueue(self._cl.Context([self.devices[index]]))
        return self._queues[index]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        return type(self._cle.create((1,)))(self._queue(index), shape, dtype)

    def write(self, x: Any, source: np.ndarray) -> None:
        x.set(source, queue=x.queue)

    def wait(self, x: Any) -> None:
        x.queue.finish()

    def select(self, index: int) -> None:
        # The one with the highest score, and not by name, which several devices may share.
        self._cle.select_device(score_key=lambda device: device == self.devices[index])

    # Slices and stacks come by way of float32 there, so that they are made on the host.

    def _made(self, values: np.ndarray, like: Any) -> Any:
        result = self.empty(values.shape, values.dtype, self.index_of(like))
        self.write(result, np.ascontiguousarray(values))
        return result

    def stack(self, planes: list[Any]) -> Any:
        return self._made(np.stack([self.read(plane) for plane in planes]), planes[0])

    def unstack(self, x: Any) -> list[Any]:
        return [self._made(plane, x) for plane in self.read(x)]

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        rows = (slice(None),) * (axis % len(x.shape)) + (slice(start, stop),)
        return self._made(self.read(x)[rows], x)


Package = _Modern | _Prototype


@cache
def opened(name: str) -> Package:
    return _Modern() if name == "pyclesperanto" else _Prototype()


@contextmanager
def selected(package: Package, index: int) -> Iterator[None]:
    """The device is the package's current one."""
    previous = package.current_index()
    package.select(index)
    try:
        yield
    finally:
        package.select(previous)
