"""pyclesperanto: OpenCL (or CUDA, Metal) images of one to three axes, served by either of two packages.

``pyclesperanto``, with the backend that is selected when it is first used, or ``pyclesperanto_prototype``, on
top of pyopencl: the one that the process has imported, else the first that is installed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from arraybridge import hardware
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import gpu_memory, protocols
from arraybridge.frameworks.accelerators import DeviceDetails
from arraybridge.frameworks.base import (
    Batching,
    Devices,
    Framework,
    Interchange,
    Memory,
    Runtime,
    component,
    is_c_contiguous,
    no_counterpart_error,
)
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.frameworks.registry import BUILT_IN, can_find, is_imported
from arraybridge.reasons import Cause, Reason
from arraybridge.types import Device

# The kernels know these and no others: push() turns float64 into float32, int64 into int32, bool into
# uint8 and complex64 into its real part, and the prototype turns everything into float32.
_DTYPES = frozenset({"float32", "int8", "int16", "int32", "uint8", "uint16", "uint32"})
_MAX_RANK = 3
_NOT_C_CONTIGUOUS = Cause(Reason.NOT_C_CONTIGUOUS)


def installed_framework() -> ImageFramework:
    """Return the framework for the package that the process has imported, or else for the installed one."""
    opencl.check_import_order()
    opencl.use_pocl_wheel()
    packages = BUILT_IN["pyclesperanto"].packages
    imported, installed = (list(filter(test, packages)) for test in (is_imported, can_find))
    if next(iter(imported or installed or packages)) == "pyclesperanto":
        return ImageFramework()
    if not opencl.devices():  # the prototype cannot even be imported
        raise _no_device()
    return PrototypeFramework()


class ImageInterchange(Interchange):
    framework: ImageFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again
    all_pickle = False

    def block_until_ready(self, x: Any) -> None:
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element, after the kernels queued before

    # -- with CUDA beneath: device memory, contiguous, and no queue that others could be told of --

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        return None if is_c_contiguous(shape, strides, itemsize) else _NOT_C_CONTIGUOUS

    def export(self, x: Any, device: Device) -> Any:
        self.block_until_ready(x)
        # Its own __dlpack__(stream, version) knows no max_version= (pyclesperanto 0.25).
        return protocols.Importable(x.__dlpack__(), (2, device.index))

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        gpu_memory.release()
        with source.devices.selected(device):
            source.interchange.block_until_ready(x)
            native = self.framework.natives[device.index]
            exported = source.interchange.export(x, device)
            imported = self.framework._cle.from_dlpack(exported, device=native, copy=False)
        begin = partial(self.framework.batching.empty, (1, 1, 1), "float32", device)
        gpu_memory.keep_until_done(imported, x, begin, self.block_until_ready)
        return imported


class ImageDevices(Devices):
    framework: ImageFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again
    selects_per_thread = False

    def device_of(self, x: Any) -> Device:
        return Device(self.framework.kind, self.framework.natives.index(x.device))

    def available(self) -> tuple[Device, ...]:
        return tuple(
            Device(self.framework.kind, i, native.name) for i, native in enumerate(self.framework.natives)
        )

    def default_device(self) -> Device:
        return Device(self.framework.kind, self.framework.natives.index(self.framework._cle.get_device()))

    def accelerator(self, index: int) -> Device:
        return Device(self.framework.kind, index)

    def find_device(self, device: Device) -> Device:
        # "gpu:0" in words is accepted where OpenCL's device of that number really is a GPU.
        if (
            device.kind in ("gpu", "opencl")
            and device.kind != self.framework.kind
            and device.index < self.framework.gpus
        ):
            device = self.accelerator(device.index)
        return super().find_device(device)

    def missing_device_reason(self) -> str:
        return "Its devices are counted GPUs first and CPU devices after them, as opencl:0, opencl:1, …"

    @contextmanager
    def selected(self, device: Device) -> Iterator[None]:
        previous = self.default_device()
        self.framework.select(device)
        try:
            yield
        finally:
            self.framework.select(previous)

    def is_started(self) -> bool:
        return True

    def native_device(self, device: Device) -> Any:
        return self.framework.natives[device.index]


class ImageBatching(Batching):
    framework: ImageFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.framework.supports(dtype, shape)
        result = self.framework._cle.create(
            shape, np.dtype(dtype), device=self.framework.natives[device.index]
        )
        if device.index >= self.framework.gpus:
            opencl.use_huge_pages(result)
        return result

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        # By way of the host: the kernels behind indexing compute in float32, in which an int32 loses digits.
        rows = (slice(None),) * (axis % len(x.shape)) + (slice(start, stop),)
        return self.framework.from_host(self.framework.to_host(x)[rows], self.framework.devices.device_of(x))

    def unstack(self, x: Any) -> list[Any]:
        return [
            self.framework.from_host(plane, self.framework.devices.device_of(x))
            for plane in self.framework.to_host(x)
        ]


class ImageMemory(Memory):
    framework: ImageFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    def is_oom(self, error: BaseException) -> bool:
        return opencl.is_oom(error)

    def is_oom_text(self, text: str) -> bool:
        return opencl.is_oom_text(text)

    def synchronize(self) -> None:
        # The packages work on the current device alone.
        self.framework.interchange.block_until_ready(
            self.framework.batching.empty((1, 1, 1), "float32", self.framework.devices.default_device())
        )

    def device_details(self, device: Device) -> DeviceDetails:
        return self.framework.described[device.index]

    def oom_error(self) -> Exception:
        message = "Error: Failed to allocate. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)"
        return RuntimeError(message)


class ImageRuntime(Runtime):
    def array_classes(self) -> tuple[type, ...]:
        # The public class is a front: isinstance() knows its arrays, which are of a class of the backend.
        return (
            type(self.framework.batching.empty((1,), "float32", self.framework.devices.default_device())),
        )


class ImageFramework(Framework):
    name = "pyclesperanto"
    has_host = False
    dtypes = _DTYPES
    #: What its devices are called: with CUDA beneath, they are the cards that other frameworks count.
    kind = "opencl"
    #: The package's own objects for its devices, and how many of them, the first ones, are GPUs.
    natives: list[Any]
    gpus: int
    interchange = component(ImageInterchange)
    devices = component(ImageDevices)
    batching = component(ImageBatching)
    memory = component(ImageMemory)
    runtime = component(ImageRuntime)

    def __init__(self) -> None:
        import pyclesperanto as cle  # of the two packages, one may be missing

        self._cle = cle
        try:
            current = cle.get_device()
        except (AttributeError, RuntimeError):  # without a device, the package imports half
            current = None
        if current is None:
            raise _no_device()
        if cle.get_backend_name() == "cuda":
            self.kind, self.interchange.dlpack_device = "gpu", 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that there are none of a kind
            gpus, cpus = (range(len(cle.list_available_devices(kind))) for kind in ("gpu", "cpu"))
        places = [*((i, "gpu") for i in gpus), *((i, "cpu") for i in cpus)]
        natives = [cle.select_device(*place) for place in places]
        cle.select_device(*places[natives.index(current)])
        self._arrange(natives, len(gpus))
        #: How `select_device` calls each: its number among those of its kind.
        self._places = [places[natives.index(native)] for native in self.natives]

    def _arrange(self, natives: list[Any], gpus: int) -> None:
        """Take the devices of the package, GPUs first, in the order in which CUDA counts their cards."""
        self.natives = natives
        self.gpus = gpus
        numbers = {gpu.pci: gpu.index for gpu in hardware.gpus() if self.kind == "opencl"}
        if numbers:
            places = [numbers.get(one.identity, len(numbers)) for one in self.described]
            order = sorted(range(len(natives)), key=places.__getitem__)
            self.natives = [natives[i] for i in order]
            self.described = [self.described[i] for i in order]

    # -- arrays -----------------------------------------------------------------------------------

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cle.Array)

    def nbytes(self, x: Any) -> int:
        return np.dtype(x.dtype).itemsize * math.prod(x.shape)

    def to_host(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        values = np.ascontiguousarray(view, dtype=view.dtype.newbyteorder("="))
        result = self.batching.empty(view.shape, values.dtype.name, device)
        result.set(values)
        return result

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        super().supports(dtype, shape)
        if not 1 <= len(shape) <= _MAX_RANK or 0 in shape:
            has = f"it has one to {_MAX_RANK} axes and at least one element"
            instead = f"{has}; reshape the array, or convert it plane by plane"
            raise no_counterpart_error(self, f"an array of shape {shape}", instead)

    # -- devices, GPUs first and CPUs after them --------------------------------------------------

    @cached_property
    def described(self) -> list[DeviceDetails]:
        """The details of its devices: the names alone, unless pyopencl sees the same ones."""
        names = [native.name for native in self.natives]
        seen = opencl.described()
        return seen if [one.name for one in seen] == names else [DeviceDetails(name) for name in names]

    def select(self, device: Device) -> None:
        """Make the device the package's current one."""
        self._cle.select_device(*self._places[device.index])


class PrototypeDevices(ImageDevices):
    framework: PrototypeFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    def device_of(self, x: Any) -> Device:
        return Device(self.framework.kind, self.framework.natives.index(x.queue.device))

    def default_device(self) -> Device:
        return Device(
            self.framework.kind, self.framework.natives.index(self.framework._cle.get_device().device)
        )


class PrototypeBatching(ImageBatching):
    framework: PrototypeFramework  # pyright: ignore[reportIncompatibleVariableOverride]  # never assigned again

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.framework.supports(dtype, shape)
        current = self.framework._cle.get_device()
        native = self.framework.natives[device.index]
        queue = current.queue if current.device == native else opencl.queue_on(native)
        return type(self.framework._cle.create((1,)))(queue, shape, np.dtype(dtype))


class PrototypeInterchange(ImageInterchange):
    def block_until_ready(self, x: Any) -> None:
        x.queue.finish()


class PrototypeFramework(ImageFramework):
    """What the older package does otherwise."""

    devices = component(PrototypeDevices)
    batching = component(PrototypeBatching)
    interchange = component(PrototypeInterchange)

    def __init__(self) -> None:
        import pyclesperanto_prototype as cle
        import pyopencl as cl

        self._cle = cle
        self._cl = cl
        natives = opencl.devices()
        self._arrange(natives, sum(native.type == cl.device_type.GPU for native in natives))

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cl.array.Array)

    def select(self, device: Device) -> None:
        def is_chosen(native: Any) -> bool:
            return bool(native == self.natives[device.index])

        # The one with the highest score, and not by name, which several devices may share.
        self._cle.select_device(score_key=is_chosen)


def _no_device() -> FrameworkNotInstalledError:
    """The error for a package that is there, and has no device to work on."""
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
        code=Reason.NO_DEVICE,
        advice='Install your GPU\'s driver, or run pip install "pyopencl[pocl]" for OpenCL on the CPU, and'
        " start Python again; import arraybridge before pyclesperanto, so that the PoCL wheel is found.",
    )
