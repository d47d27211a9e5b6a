"""What ``pyclesperanto`` and ``pyclesperanto_prototype`` do differently: two libraries with one role."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
    """What the two packages do differently."""

    @abstractmethod
    def owns(self, x: Any) -> bool: ...

    @abstractmethod
    def device_names(self) -> list[str]:
        """Names of the OpenCL devices, GPUs first and CPUs after them."""

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
    def read(self, x: Any) -> np.ndarray: ...

    def stack(self, planes: list[Any]) -> Any:
        """The arrays along a new first axis, natively; None where this package has no exact way."""
        return None

    def unstack(self, x: Any) -> list[Any] | None:
        """The arrays along the first axis, natively; None where this package has no exact way."""
        return None

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """``x[start:stop]`` along the axis, natively; None where this package has no exact way."""
        return None  # slices come by way of float32

    @abstractmethod
    def map(self, x: Any, write: bool) -> contextlib.AbstractContextManager[np.ndarray] | None:
        """The array's memory on a CPU device, mapped into this process; None where that cannot be."""

    @abstractmethod
    def wait(self, x: Any) -> None:
        """Wait until the kernels that were queued before are done."""

    #: The package's own objects, GPUs first.
    _devices: list[Any]

    def device(self, index: int) -> Any:
        return self._devices[index]

    @abstractmethod
    def select(self, index: int) -> None: ...

    @contextlib.contextmanager
    def selected(self, index: int) -> Iterator[None]:
        previous = self.current_index()
        self.select(index)
        try:
            yield
        finally:
            self.select(previous)


def _no_device() -> FrameworkNotInstalledError:
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device. Install your GPU's driver, or"
        ' run pip install "pyopencl[pocl]" for OpenCL on the CPU, and start Python anew; convert'
        " before you import pyclesperanto yourself, so that the PoCL wheel can be set up.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
    )


class _Modern(Package):
    """The package ``pyclesperanto``."""

    def __init__(self) -> None:
        import pyclesperanto

        self.cle: Any = pyclesperanto
        try:
            has_device = self.cle.get_device() is not None
        except (AttributeError, RuntimeError):  # without a device, the package imports half
            has_device = False
        if not has_device:
            raise _no_device()
        # The device list has no public call that leaves the current device alone.
        core = importlib.import_module("pyclesperanto._core")
        self._backend = core._get_backend_manager().get_backend()
        self._kinds = [kind for kind in ("gpu", "cpu") for _ in self._backend.getDevicesList(type=kind)]
        self._devices = [
            self._backend.getDeviceFromIndex(i, kind)
            for kind in ("gpu", "cpu")
            for i in range(self._kinds.count(kind))
        ]

    def owns(self, x: Any) -> bool:
        return isinstance(x, self.cle.Array)

    def device_names(self) -> list[str]:
        return [d.name for d in self._devices]

    def _index(self, device: Any) -> int:
        for i, known in enumerate(self._devices):
            if known.index == device.index and known.type == device.type and known.name == device.name:
                return i
        return 0

    def index_of(self, x: Any) -> int:
        return self._index(x.device)

    def current_index(self) -> int:
        return self._index(self.cle.get_device())

    def is_cpu(self, index: int) -> bool:
        return self._kinds[index] == "cpu"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        return self.cle.create(shape, dtype, device=self._devices[index])

    def write(self, x: Any, source: np.ndarray) -> None:
        x.set(source)

    def read(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def wait(self, x: Any) -> None:
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element

    def select(self, index: int) -> None:
        kind = self._kinds[index]
        self.cle.select_device(index - self._kinds.index(kind), kind)

    def map(self, x: Any, write: bool) -> contextlib.AbstractContextManager[np.ndarray] | None:
        if x.mtype != "buffer" or not can_find("pyopencl"):
            return None
        if not write:
            x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element: kernels queued before are done
        return opencl.map_capsule(x, write)

    def stack(self, planes: list[Any]) -> Any:
        shape = planes[0].shape
        result = self.empty((len(planes), *shape), np.dtype(planes[0].dtype), self.index_of(planes[0]))
        # A region is copied byte for byte. The kernels behind indexing, paste() and copy_slice() compute in
        # float32, in which an int32 loses its last digits.
        for i, plane in enumerate(planes):
            plane.copy(result, (0, 0, 0), _region_origin(i, shape), _region(shape))
        return result

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        # Slices come by way of float32 here, too; a region does not.
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
            found = [d for p in self._cl.get_platforms() for d in p.get_devices()]
        except self._cl.Error as error:  # PLATFORM_NOT_FOUND_KHR
            raise _no_device() from error
        if not found:
            raise _no_device()
        import pyclesperanto_prototype

        self.cle: Any = pyclesperanto_prototype
        self._devices = sorted(found, key=lambda d: d.type != self._cl.device_type.GPU)
        self._queues: dict[int, Any] = {}

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cl.array.Array)

    def device_names(self) -> list[str]:
        return [d.name for d in self._devices]

    def index_of(self, x: Any) -> int:
        return self._devices.index(x.queue.device)

    def current_index(self) -> int:
        return self._devices.index(self.cle.get_device().device)

    def is_cpu(self, index: int) -> bool:
        return bool(self._devices[index].type == self._cl.device_type.CPU)

    def _queue(self, index: int) -> Any:
        current = self.cle.get_device()
        if current.device == self._devices[index]:
            return current.queue
        if index not in self._queues:
            self._queues[index] = self._cl.CommandQueue(self._cl.Context([self._devices[index]]))
        return self._queues[index]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        return type(self.cle.create((1,)))(self._queue(index), shape, dtype)

    def write(self, x: Any, source: np.ndarray) -> None:
        x.set(source, queue=x.queue)

    def read(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def wait(self, x: Any) -> None:
        x.queue.finish()

    def select(self, index: int) -> None:
        # By number and not by name, which several devices may share.
        order = importlib.import_module("pyclesperanto_prototype._tier0._device").filter_devices()
        self.cle.select_device(device_index=order.index(self._devices[index]))

    def map(self, x: Any, write: bool) -> contextlib.AbstractContextManager[np.ndarray] | None:
        if not x.flags.c_contiguous:
            return None
        return opencl.map_buffer(x.base_data, x.queue, x.offset, tuple(x.shape), x.dtype, write)


OPEN: dict[str, Package] = {}


def opened(name: str) -> Package:
    if name not in OPEN:
        # Of two threads that open it at once, both get the first.
        OPEN.setdefault(name, _Modern() if name == "pyclesperanto" else _Prototype())
    return OPEN[name]
