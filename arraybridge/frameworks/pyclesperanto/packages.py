"""What ``pyclesperanto`` and ``pyclesperanto_prototype`` do differently: two libraries with one role."""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks.facts import BUILT_IN
from arraybridge.frameworks.presence import can_find
from arraybridge.frameworks.pyclesperanto import opencl

__all__ = ["MAX_RANK", "OPEN", "PACKAGES", "Package", "opened"]

PACKAGES = BUILT_IN["pyclesperanto"].packages
MAX_RANK = 3


class Package(ABC):
    """What the two packages do differently. Devices go by their number: GPUs first, then CPUs."""

    #: Whether its arrays lie in CUDA's memory, and not in OpenCL's or Metal's.
    has_cuda = False
    #: The package's own objects.
    devices: list[Any]

    @abstractmethod
    def owns(self, x: Any) -> bool: ...

    @abstractmethod
    def index_of(self, x: Any) -> int: ...

    @abstractmethod
    def current_index(self) -> int: ...

    @abstractmethod
    def is_cpu(self, index: int) -> bool: ...

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any: ...

    @abstractmethod
    def write(self, x: Any, source: np.ndarray) -> None: ...

    @abstractmethod
    def map(self, x: Any, write: bool) -> AbstractContextManager[np.ndarray] | None:
        """The array's memory on a CPU device, mapped into this process; None where that cannot be."""

    @abstractmethod
    def wait(self, x: Any) -> None:
        """Wait until the kernels that were queued before are done."""

    @abstractmethod
    def select(self, index: int) -> None: ...

    def adopt(self, producer: Any, index: int) -> Any:
        """An array in the CUDA memory that a producer of DLPack shows, on the same device."""
        raise NotImplementedError("it has no CUDA")

    def read(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def device_names(self) -> list[str]:
        return [device.name for device in self.devices]

    @contextmanager
    def selected(self, index: int) -> Iterator[None]:
        previous = self.current_index()
        self.select(index)
        try:
            yield
        finally:
            self.select(previous)

    def stack(self, planes: list[Any]) -> Any:
        """The arrays along a new first axis, natively; None where this package has no exact way."""
        return None

    def unstack(self, x: Any) -> list[Any] | None:
        """The arrays along the first axis, natively; None where this package has no exact way."""
        return None

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """``x[start:stop]`` along the axis, natively; None where this package has no exact way."""
        return None  # slices come by way of float32


def _no_device() -> FrameworkNotInstalledError:
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device. Install your GPU's driver, or"
        ' run pip install "pyopencl[pocl]" for OpenCL on the CPU, and start Python anew; convert'
        " before you import pyclesperanto yourself, so that the PoCL wheel can be set up.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
    )


class _Modern(Package):
    """The package ``pyclesperanto``, with the backend that is selected when it is opened."""

    def __init__(self) -> None:
        import pyclesperanto

        self._cle: Any = pyclesperanto
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
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element

    def select(self, index: int) -> None:
        self._cle.select_device(*self._places[index])

    def adopt(self, producer: Any, index: int) -> Any:
        return self._cle.from_dlpack(producer, device=self.devices[index], copy=False)

    def map(self, x: Any, write: bool) -> AbstractContextManager[np.ndarray] | None:
        if x.mtype != "buffer" or self.has_cuda or not can_find("pyopencl"):
            return None
        if not write:
            self.wait(x)
        return opencl.map_capsule(x, write)

    # A region is copied byte for byte. The kernels behind indexing, paste() and copy_slice() compute in
    # float32, in which an int32 loses its last digits.

    def stack(self, planes: list[Any]) -> Any:
        shape = planes[0].shape
        result = self.empty((len(planes), *shape), np.dtype(planes[0].dtype), self.index_of(planes[0]))
        for i, plane in enumerate(planes):
            plane.copy(result, (0, 0, 0), _region_origin(i, shape), _region(shape))
        return result

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        shape, axis = list(x.shape), axis % len(x.shape)
        shape[axis] = len(range(*slice(start, stop).indices(shape[axis])))
        origin = [0] * MAX_RANK
        origin[MAX_RANK - len(shape) + axis] = start
        result = self.empty(tuple(shape), np.dtype(x.dtype), self.index_of(x))
        x.copy(result, tuple(origin), (0, 0, 0), _region(tuple(shape)))
        return result

    def unstack(self, x: Any) -> list[Any]:
        shape = tuple(x.shape[1:])
        planes = [self.empty(shape, np.dtype(x.dtype), self.index_of(x)) for _ in range(x.shape[0])]
        for i, plane in enumerate(planes):
            x.copy(plane, _region_origin(i, shape), (0, 0, 0), _region(shape))
        return planes


def _region(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The extent of an array with one or two axes, as one with three."""
    return (*(1,) * (MAX_RANK - len(shape)), *shape)


def _region_origin(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where, in a stack of such arrays, the one of this number begins."""
    return (*(0,) * (MAX_RANK - 1 - len(shape)), index, *(0,) * len(shape))


class _Prototype(Package):
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

        self._cle: Any = pyclesperanto_prototype
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

    def map(self, x: Any, write: bool) -> AbstractContextManager[np.ndarray] | None:
        if not x.flags.c_contiguous:
            return None
        return opencl.map_buffer(x.base_data, x.queue, x.offset, tuple(x.shape), x.dtype, write)


OPEN: dict[str, Package] = {}


def opened(name: str) -> Package:
    if name not in OPEN:
        # Of two threads that open it at once, both get the first.
        OPEN.setdefault(name, _Modern() if name == "pyclesperanto" else _Prototype())
    return OPEN[name]
