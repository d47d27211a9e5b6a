"""OpenCL (or CUDA, Metal) images of one to three axes: what both packages of pyclesperanto have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from arraybridge.errors import DeviceNotFoundError, FrameworkNotInstalledError
from arraybridge.frameworks.base import Framework, cannot_hold
from arraybridge.frameworks.parts import Pool
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.machine import cards
from arraybridge.types import Device

# The kernels know these and no others: push() turns float64 into float32, int64 into int32, bool into
# uint8 and complex64 into its real part, and the prototype turns everything into float32.
_DTYPES = frozenset({"float32", "int8", "int16", "int32", "uint8", "uint16", "uint32"})
MAX_RANK = 3


class ImageFramework(Framework):
    name = "pyclesperanto"
    all_pickle = False
    has_host = False
    dtypes = _DTYPES
    #: What its devices are called: with CUDA beneath, they are the cards that other frameworks count.
    kind = "opencl"
    #: The package's own objects for its devices, and how many of them, the first ones, are GPUs.
    natives: list[Any]
    gpus: int

    @abstractmethod
    def select(self, device: Device) -> None:
        """Make the device the package's current one."""

    @abstractmethod
    def fill(self, x: Any, values: np.ndarray) -> None:
        """Set all elements to those of a C-contiguous array of the same shape and dtype."""

    # -- arrays -----------------------------------------------------------------------------------

    def nbytes(self, x: Any) -> int:
        return np.dtype(x.dtype).itemsize * math.prod(x.shape)

    def to_host(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        values = np.ascontiguousarray(view, dtype=view.dtype.newbyteorder("="))
        result = self.empty(view.shape, values.dtype.name, device)
        self.fill(result, values)
        return result

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        super().supports(dtype, shape)
        if not 1 <= len(shape) <= MAX_RANK or 0 in shape:
            has = f"it has one to {MAX_RANK} axes and at least one element"
            instead = f"{has}; reshape the array, or convert it plane by plane"
            raise cannot_hold(self, f"an array of shape {shape}", instead)

    def is_oom(self, error: BaseException) -> bool:
        return opencl.is_oom(error)

    def array_classes(self) -> tuple[type, ...]:
        # The public class is a front: isinstance() knows its arrays, which are of a class of the backend.
        return (type(self.empty((1,), "float32", self.default_device())),)

    # -- devices, GPUs first and CPUs after them --------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(self.kind, i, native.name) for i, native in enumerate(self.natives))

    def accelerator(self, index: int) -> Device:
        if self.kind == "gpu":
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
        names, seen = [native.name for native in self.natives], opencl.described()
        return seen if [name for name, _, _ in seen] == names else [(name, "", None) for name in names]

    def find_device(self, device: Device) -> Device:
        if self.kind == "gpu" and device.kind == "opencl":
            device = Device("gpu", device.index)
        # "gpu:0" in words is accepted where OpenCL's device of that number really is a GPU.
        elif device.kind == "gpu" and device.index < len(self.natives):
            card = self.accelerator(device.index)
            if card.index < self.gpus:
                device = card
        return super().find_device(device)

    def missing_device_reason(self) -> str:
        return "Its devices are counted GPUs first and CPU devices after them, as opencl:0, opencl:1, …"

    @contextmanager
    def selected(self, device: Device) -> Iterator[None]:
        previous = self.default_device()
        self.select(device)
        try:
            yield
        finally:
            self.select(previous)


class ImagePool(Pool):
    """Neither package keeps memory in a pool, so that there is no cache to free."""

    def __init__(self, owner: ImageFramework) -> None:
        self._owner = owner

    def is_started(self) -> bool:
        return True

    def native_device(self, device: Device) -> Any:
        return self._owner.natives[device.index]

    def synchronize(self) -> None:
        owner = self._owner  # its packages work on the current device alone
        owner.settle(owner.empty((1, 1, 1), "float32", owner.default_device()))

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        return self._owner.described()[device.index]

    def oom_error(self) -> Exception:
        message = "Error: Failed to allocate. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)"
        return RuntimeError(message)


def no_device() -> FrameworkNotInstalledError:
    """The error for a package that is there, and has no device to work on."""
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device. Install your GPU's driver, or"
        ' run pip install "pyopencl[pocl]" for OpenCL on the CPU, and start Python anew;'
        " import arraybridge before pyclesperanto, so that the PoCL wheel is found.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
    )
