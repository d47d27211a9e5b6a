"""What ``pyclesperanto`` and ``pyclesperanto_prototype`` do differently: two libraries with one role."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks.facts import BUILT_IN
from arraybridge.frameworks.presence import can_find
from arraybridge.frameworks.pyclesperanto import opencl

__all__ = ["MAX_RANK", "OPEN", "PACKAGES", "Package", "opened", "selected"]

PACKAGES = BUILT_IN["pyclesperanto"].packages
MAX_RANK = 3


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

    def write(self, x: Any, source: np.ndarray) -> None:
        x.set(source)

    def wait(self, x: Any) -> None:
        """Wait until the kernels that were queued before are done."""
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element

    def select(self, index: int) -> None:
        self._cle.select_device(*self._places[index])

    def map(self, x: Any, write: bool) -> AbstractContextManager[np.ndarray] | None:
        """The array's memory on a CPU device, mapped into this process; None where that cannot be."""
        if x.mtype != "buffer" or self.has_cuda or not can_find("pyopencl"):
            return None
        if not write:
            self.wait(x)
        return opencl.map_capsule(x, write)

    # A region is copied byte for byte. The kernels behind indexing, paste() and copy_slice() compute in
    # float32, in which an int32 loses its last digits.

    def _copied(self, x: Any, start: list[int], result: Any, place: list[int], shape: list[int]) -> Any:
        """``result``, with the region of ``x`` that begins at ``start`` from ``place`` on."""
        starts, places = ((*[0] * (MAX_RANK - len(at)), *at) for at in (start, place))
        x.copy(result, starts, places, (*[1] * (MAX_RANK - len(shape)), *shape))
        return result

    def stack(self, planes: list[Any]) -> Any:
        x, shape = planes[0], list(planes[0].shape)
        result = self.empty((len(planes), *shape), np.dtype(x.dtype), self.index_of(x))
        for i, plane in enumerate(planes):
            self._copied(plane, [], result, [i, *[0] * len(shape)], shape)
        return result

    def unstack(self, x: Any) -> list[Any]:
        shape = list(x.shape[1:])
        planes = (self.empty(tuple(shape), np.dtype(x.dtype), self.index_of(x)) for _ in range(x.shape[0]))
        return [self._copied(x, [i, *[0] * len(shape)], plane, [], shape) for i, plane in enumerate(planes)]

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        shape, origin, axis = list(x.shape), [0] * len(x.shape), axis % len(x.shape)
        shape[axis], origin[axis] = len(range(*slice(start, stop).indices(shape[axis]))), start
        result = self.empty(tuple(shape), np.dtype(x.dtype), self.index_of(x))
        return self._copied(x, origin, result, [], shape)


class _Prototype(_Shared):
    """The package ``pyclesperanto_prototype``, on top of pyopencl."""

    def __init__(self) -> None:
        self._cl = importlib.import_module("pyopencl")
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
        # By number and not by name, which several devices may share; its order has no public call.
        order = importlib.import_module("pyclesperanto_prototype._tier0._device").filter_devices()
        self._cle.select_device(device_index=order.index(self.devices[index]))

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

    def map(self, x: Any, write: bool) -> AbstractContextManager[np.ndarray] | None:
        """The array's memory on a CPU device, mapped into this process; None where that cannot be."""
        if not x.flags.c_contiguous:
            return None
        return opencl.map_buffer(x.base_data, x.queue, x.offset, tuple(x.shape), x.dtype, write)


Package = _Modern | _Prototype
OPEN: dict[str, Package] = {}


@contextmanager
def selected(package: Package, index: int) -> Iterator[None]:
    """The device is the package's current one."""
    previous = package.current_index()
    package.select(index)
    try:
        yield
    finally:
        package.select(previous)


def opened(name: str) -> Package:
    if name not in OPEN:
        # Of two threads that open it at once, both get the first.
        OPEN.setdefault(name, _Modern() if name == "pyclesperanto" else _Prototype())
    return OPEN[name]
