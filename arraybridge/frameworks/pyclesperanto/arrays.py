"""pyclesperanto: OpenCL (or CUDA, Metal) images of one to three axes, served by either of two packages.

``pyclesperanto`` and ``pyclesperanto_prototype`` are two libraries with one role. Both may be imported;
arrays of either are welcome as sources, and new arrays belong to the one that the process has imported.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from arraybridge.errors import DeviceNotFoundError
from arraybridge.frameworks import hostmemory, loans
from arraybridge.frameworks.base import Framework, cannot_hold, is_c_contiguous
from arraybridge.frameworks.facts import can_find, is_imported
from arraybridge.frameworks.parts import Pool
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.frameworks.pyclesperanto.driver import use_pocl_wheel
from arraybridge.frameworks.pyclesperanto.packages import MAX_RANK, PACKAGES, Package, opened, selected
from arraybridge.machine import cards
from arraybridge.types import Device

# The kernels know these and no others: push() turns float64 into float32, int64 into int32, bool into
# uint8 and complex64 into its real part, and the prototype turns everything into float32.
_DTYPES = frozenset({"float32", "int8", "int16", "int32", "uint8", "uint16", "uint32"})


class PyclesperantoFramework(Framework):
    name = "pyclesperanto"
    all_pickle = False
    has_host = False
    dtypes = _DTYPES
    #: What its devices are called: with CUDA beneath, they are the cards that other frameworks count.
    _kind = "opencl"

    def __init__(self) -> None:
        opencl.refuse_deadly_import_order(PACKAGES)
        use_pocl_wheel()
        imported = [name for name in PACKAGES if is_imported(name)]
        installed = [name for name in PACKAGES if can_find(name)]
        if not installed:
            raise ImportError("neither pyclesperanto nor pyclesperanto_prototype is installed")
        main = (imported or installed)[0]
        self._main, self._others = opened(main), [name for name in PACKAGES if name != main]
        if self._main.has_cuda:
            self._kind, self.dlpack_device = "gpu", 2
        self.pool = PyclesperantoPool(self)

    def _packages(self) -> list[Package]:
        """The package that makes new arrays, and the other one if the process has imported it since."""
        return [self._main, *map(opened, filter(is_imported, self._others))]

    def _package(self, x: Any) -> Package:
        return next(p for p in self._packages() if p.owns(x))

    def owns(self, x: Any) -> bool:
        return any(p.owns(x) for p in self._packages())

    def nbytes(self, x: Any) -> int:
        return np.dtype(x.dtype).itemsize * math.prod(x.shape)

    def device_of(self, x: Any) -> Device:
        return Device(self._kind, self._package(x).index_of(x))

    # -- host memory ------------------------------------------------------------------------------

    def to_host(self, x: Any) -> np.ndarray:
        return self._package(x).read(x)

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        values = np.ascontiguousarray(view, dtype=view.dtype.newbyteorder("="))
        result = self._main.empty(view.shape, values.dtype, device.index)
        self._main.write(result, values)
        return result

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(self._kind, i, name) for i, name in enumerate(self._main.device_names()))

    def accelerator(self, index: int) -> Device:
        if self._kind == "gpu":
            return Device("gpu", index)
        order = self._in_cuda_order()
        place = order[index] if index < len(order) else index
        if place is None:
            raise DeviceNotFoundError(
                f"pyclesperanto has OpenCL GPUs here, but CUDA's card {index} ({cards()[index].name}) is"
                " not among them; pass one of them in words, as device='opencl:0'",
                target_type=self.name,
                reason=f"no OpenCL device is card {index}",
            )
        return Device("opencl", place)

    def _in_cuda_order(self) -> list[int | None]:
        """The number of the OpenCL device that is each card of CUDA (None: none is), and after them the rest.

        Where nothing can be compared, the devices in their own order.
        """
        described = self.described()
        places = {address: i for i, (_, address, _) in enumerate(described) if address}
        order = [places.get(card.pci) for card in cards()] if places else []
        return [*order, *(i for i in range(len(described)) if i not in order)]

    def described(self) -> list[tuple[str, str, int | None]]:
        """Name, PCI address or ``""``, and bytes of its devices, where pyopencl sees the same ones."""
        names, seen = self._main.device_names(), opencl.devices()
        return seen if [name for name, _, _ in seen] == names else [(name, "", None) for name in names]

    def settle(self, x: Any) -> None:
        self._package(x).wait(x)

    # With CUDA beneath: device memory, contiguous, and no queue that others could be told of.

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
            lent = self._main.adopt(source.exported(x, device), device.index)
        loans.keep_after(lent, x, lambda: self.empty((1, 1, 1), "float32", device), self.settle)
        return lent

    def default_device(self) -> Device:
        return Device(self._kind, self._main.current_index())

    def find_device(self, device: Device) -> Device:
        if self._kind == "gpu" and device.kind == "opencl":
            device = Device("gpu", device.index)
        # "gpu:0" in words is accepted where OpenCL's device of that number really is a GPU.
        elif device.kind == "gpu" and device.index < len(self.devices()):
            card = self.accelerator(device.index)
            if not self._main.is_cpu(card.index):
                device = card
        return super().find_device(device)

    def missing_device_reason(self) -> str:
        return "Its devices are counted GPUs first and CPU devices after them, as opencl:0, opencl:1, …"

    # -- values -----------------------------------------------------------------------------------

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        super().supports(dtype, shape)
        if not 1 <= len(shape) <= MAX_RANK or 0 in shape:
            has = f"it has one to {MAX_RANK} axes and at least one element"
            instead = f"{has}; reshape the array, or convert it plane by plane"
            raise cannot_hold(self, f"an array of shape {shape}", instead)

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        return opencl.is_oom(error)

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        return self._package(x).part(x, axis, start, stop)

    # Its arrays are not written to in part: the whole is made in memory of the host.

    def room(self, part: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, self.dtype_name(part))

    def write(self, room: np.ndarray, rows: tuple[slice, ...], part: Any) -> None:
        room[rows] = self.to_host(part)

    def filled(self, room: np.ndarray, device: Device) -> Any:
        return self.from_host(room, device)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.supports(dtype, shape)
        return self._main.empty(shape, np.dtype(dtype), device.index)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        return selected(self._main, device.index)

    def stack(self, planes: list[Any]) -> Any:
        return self._package(planes[0]).stack(planes)

    def unstack(self, x: Any) -> list[Any]:
        return self._package(x).unstack(x)

    def array_classes(self) -> tuple[type, ...]:
        # The public class is a front: isinstance() knows its arrays, which are of a class of the backend.
        float32 = np.dtype("float32")
        return tuple(type(p.empty((1,), float32, p.current_index())) for p in self._packages())


class PyclesperantoPool(Pool):
    """Neither package keeps memory in a pool, so that there is no cache to free."""

    def __init__(self, owner: PyclesperantoFramework) -> None:
        self._owner = owner

    def is_started(self) -> bool:
        return True

    def native_device(self, device: Device) -> Any:
        return self._owner._main.devices[device.index]

    def synchronize(self) -> None:
        owner = self._owner  # its packages work on the current device alone
        owner.settle(owner.empty((1, 1, 1), "float32", owner.default_device()))

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        return self._owner.described()[device.index]

    def oom_error(self) -> Exception:
        message = "Error: Failed to allocate. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)"
        return RuntimeError(message)
