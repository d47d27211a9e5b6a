"""pyclesperanto: images with one to three axes on OpenCL, CUDA or Metal devices, from either of two packages.

The packages are ``pyclesperanto``, with the backend that is selected at its first use, and
``pyclesperanto_prototype``, which uses pyopencl. The package that the process has imported is used, otherwise
the first one that is installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from arraybridge import hardware
from arraybridge.device import Device
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.host import dlpack_capsules
from arraybridge.interface import keep_alives
from arraybridge.interface.batching import Batching
from arraybridge.interface.component import component
from arraybridge.interface.devices import Devices
from arraybridge.interface.framework import Framework
from arraybridge.interface.installation import can_find, is_imported
from arraybridge.interface.interchange import Interchange, is_c_contiguous
from arraybridge.interface.memory import DeviceDetails, Memory
from arraybridge.interface.registry import BUILT_IN
from arraybridge.interface.runtime import Runtime
from arraybridge.interface.unsupported import no_counterpart_error
from arraybridge.reasons import Cause, Reason

# The only dtypes that pyclesperanto's kernels support. push() silently converts float64 to float32, int64 to
# int32, bool to uint8 and complex64 to its real part. The prototype converts everything to float32
# (clEsperanto/pyclesperanto_prototype#206).
_DTYPES = frozenset({"float32", "int8", "int16", "int32", "uint8", "uint16", "uint32"})
_MAX_RANK = 3
_NOT_C_CONTIGUOUS = Cause(Reason.NOT_C_CONTIGUOUS)


def make_framework() -> ImageFramework:
    """Return the framework for the imported package; if none is imported, for the installed one."""
    opencl.check_import_order()
    opencl.use_pocl_wheel()
    packages = BUILT_IN["pyclesperanto"].packages
    imported, installed = (list(filter(test, packages)) for test in (is_imported, can_find))
    if next(iter(imported or installed or packages)) == "pyclesperanto":
        return ImageFramework()
    if not opencl.devices():  # without a device, importing the prototype raises
        raise _no_device_error()
    return PrototypeFramework()


class ImageInterchange(Interchange):
    """Exchange of memory with pyclesperanto.

    Only the CUDA backend shares memory. Its arrays are in contiguous device memory, and this backend has no
    stream that other frameworks could wait for.
    """

    all_pickle = False

    def nearest_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if not shape:
            return (1,)
        return (-1, *shape[-2:]) if len(shape) > _MAX_RANK and 0 not in shape else None

    def block_until_ready(self, x: Any) -> None:
        self.framework.wait_for(x)

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        return None if is_c_contiguous(shape, strides, itemsize) else _NOT_C_CONTIGUOUS

    def export(self, x: Any, device: Device) -> Any:
        self.block_until_ready(x)
        # pyclesperanto 0.25 defines __dlpack__(stream, version), without max_version
        # (data-apis/array-api#602).
        return dlpack_capsules.Importable(x.__dlpack__(), (2, device.index))

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        keep_alives.release()
        with source.devices.select(device):
            source.interchange.block_until_ready(x)
            native = self.framework.natives[device.index]
            exported = source.interchange.export(x, device)
            imported = self.framework.cle.from_dlpack(exported, device=native, copy=False)
        begin = partial(self.framework.batching.empty, (1, 1, 1), "float32", device)
        keep_alives.keep_until_done(imported, x, begin, self.block_until_ready)
        return imported


class ImageDevices(Devices):
    """The devices of pyclesperanto: GPUs first, then CPUs."""

    selects_per_thread = False

    def device_of(self, x: Any) -> Device:
        return self.accelerator(self.framework.natives.index(self.framework.native_of(x)))

    def available(self) -> tuple[Device, ...]:
        kind = self.framework.kind
        return tuple(Device(kind, i, native.name) for i, native in enumerate(self.framework.natives))

    def default_device(self) -> Device:
        return self.accelerator(self.framework.natives.index(self.framework.current_native()))

    def accelerator(self, index: int) -> Device:
        return Device(self.framework.kind, index)

    def find_device(self, device: Device) -> Device:
        # The device string "gpu:0" is accepted if the OpenCL device with that index is a GPU.
        if (
            device.kind in ("gpu", "opencl")
            and device.kind != self.framework.kind
            and device.index < self.framework.gpus
        ):
            device = self.accelerator(device.index)
        return super().find_device(device)

    def missing_device_reason(self) -> str:
        return "Its devices are opencl:0, opencl:1, …, GPUs first and then CPUs."

    @contextmanager
    def select(self, device: Device) -> Iterator[None]:
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
    """Functions that copy images to host memory to split them.

    The indexing kernels compute in float32, which rounds int32 (0.25, no issue found).
    """

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self.framework.supports(dtype, shape)
        return self.framework.create(shape, np.dtype(dtype), device.index)


class ImageMemory(Memory):
    """Memory queries, synchronization and recognition of out-of-memory errors for pyclesperanto."""

    def is_oom(self, error: BaseException) -> bool:
        return opencl.is_oom(error)

    def is_oom_text(self, text: str) -> bool:
        return opencl.is_oom_text(text)

    def synchronize(self) -> None:
        # Both packages use only the current device.
        self.framework.interchange.block_until_ready(
            self.framework.batching.empty((1, 1, 1), "float32", self.framework.devices.default_device())
        )

    def device_details(self, device: Device) -> DeviceDetails:
        return self.framework.described[device.index]

    def oom_error(self) -> Exception:
        message = "Error: Failed to allocate. OpenCL error: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)"
        return RuntimeError(message)


class ImageRuntime(Runtime):
    """The array class of pyclesperanto's backend."""

    def array_classes(self) -> tuple[type, ...]:
        # The public class only implements isinstance(). Arrays are instances of a class of the backend.
        device = self.framework.devices.default_device()
        return (type(self.framework.batching.empty((1,), "float32", device)),)


class ImageFramework(Framework):
    """The package ``pyclesperanto``.

    The last methods are those in which the two packages differ. The components call them.

    Attributes:
        kind: The kind of its devices: ``"gpu"`` with the CUDA backend, whose devices have the same numbers as
            in other frameworks, and ``"opencl"`` otherwise.
        natives: The package's own device objects, GPUs first.
        gpus: The number of GPUs in ``natives``.
    """

    name = "pyclesperanto"
    has_host = False
    dtypes = _DTYPES
    kind = "opencl"
    natives: list[Any]
    gpus: int
    interchange = component(ImageInterchange)
    devices = component(ImageDevices)
    batching = component(ImageBatching)
    memory = component(ImageMemory)
    runtime = component(ImageRuntime)

    def __init__(self) -> None:
        import pyclesperanto as cle  # either of the two packages may be missing

        self.cle = cle
        try:
            current = cle.get_device()
        except (AttributeError, RuntimeError):  # without a device, the package is only partly initialized
            current = None
        if current is None:
            raise _no_device_error()
        if cle.get_backend_name() == "cuda":
            self.kind, self.interchange.dlpack_device = "gpu", 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # issued if there are no devices of a kind
            gpus, cpus = (range(len(cle.list_available_devices(kind))) for kind in ("gpu", "cpu"))
        places = [*((i, "gpu") for i in gpus), *((i, "cpu") for i in cpus)]
        natives = [cle.select_device(*place) for place in places]
        cle.select_device(*places[natives.index(current)])
        self._arrange(natives, len(gpus))
        #: The arguments of `select_device` for each device: its number among those of its type, and the type.
        self._places = [places[natives.index(native)] for native in self.natives]

    def _arrange(self, natives: list[Any], gpus: int) -> None:
        """Set the devices, GPUs first, in the order in which CUDA numbers the GPUs."""
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
        return isinstance(x, self.cle.Array)

    def to_host(self, x: Any) -> np.ndarray:
        return np.asarray(x.get())

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        values = np.ascontiguousarray(view, dtype=view.dtype.newbyteorder("="))
        result = self.batching.empty(view.shape, values.dtype.name, device)
        result.set(values)
        return result

    def write(self, out: Any, x: Any) -> None:
        if isinstance(x, np.ndarray):
            out.set(np.ascontiguousarray(x, dtype=np.dtype(out.dtype)))
        elif x.dtype == out.dtype and self.devices.device_of(x) == self.devices.device_of(out):
            with self.devices.select(self.devices.device_of(out)):
                self.cle.copy(x, out)
        else:
            self.write(out, self.to_host(x))

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        what = f"an array of shape {shape}"
        if 0 in shape:
            cause = "images need at least one element"
            raise no_counterpart_error(self, what, cause, "Keep empty arrays in another framework.")
        if not 1 <= len(shape) <= _MAX_RANK:
            cause = f"images have 1 to {_MAX_RANK} axes"
            raise no_counterpart_error(self, what, cause, "Reshape the array, or convert it plane by plane.")
        super().supports(dtype, shape)

    # -- devices ----------------------------------------------------------------------------------

    @cached_property
    def described(self) -> list[DeviceDetails]:
        """The details of the devices; only their names unless pyopencl lists the same devices."""
        names = [native.name for native in self.natives]
        listed = opencl.describe()
        if [details.name for details in listed] == names:
            return listed
        return [DeviceDetails(name) for name in names]

    # -- differences between the two packages -----------------------------------------------------

    def native_of(self, x: Any) -> Any:
        """Return the package's device object for the device of an image."""
        return x.device

    def current_native(self) -> Any:
        """Return the package's device object for its current device."""
        return self.cle.get_device()

    def select(self, device: Device) -> None:
        """Make a device the package's current one."""
        self.cle.select_device(*self._places[device.index])

    def create(self, shape: tuple[int, ...], dtype: np.dtype, index: int) -> Any:
        """Return an uninitialized image on the device with this index."""
        result = self.cle.create(shape, dtype, device=self.natives[index])
        if index >= self.gpus:
            opencl.use_huge_pages(result)
        return result

    def wait_for(self, x: Any) -> None:
        """Wait until an image is computed."""
        x.get((0, 0, 0), (1, 1, 1))  # a blocking read of one element, which runs after all queued kernels


class PrototypeFramework(ImageFramework):
    """The package ``pyclesperanto_prototype``."""

    def __init__(self) -> None:
        import pyclesperanto_prototype as cle
        import pyopencl as cl

        self.cle = cle
        self._cl = cl
        natives = opencl.devices()
        self._arrange(natives, sum(native.type == cl.device_type.GPU for native in natives))

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._cl.array.Array)

    def native_of(self, x: Any) -> Any:
        return x.queue.device

    def current_native(self) -> Any:
        return self.cle.get_device().device

    def select(self, device: Device) -> None:
        def is_chosen(native: Any) -> bool:
            return bool(native == self.natives[device.index])

        # Select by score, because several devices may have the same name.
        self.cle.select_device(score_key=is_chosen)

    def create(self, shape: tuple[int, ...], dtype: np.dtype, index: int) -> Any:
        current = self.cle.get_device()
        native = self.natives[index]
        queue = current.queue if current.device == native else opencl.queue_on(native)
        return type(self.cle.create((1,)))(queue, shape, dtype)

    def wait_for(self, x: Any) -> None:
        x.queue.finish()


def _no_device_error() -> FrameworkNotInstalledError:
    """Return the error for an installed package without an OpenCL device."""
    return FrameworkNotInstalledError(
        "pyclesperanto is installed, but finds no OpenCL device.",
        target_type="pyclesperanto",
        reason="no OpenCL device",
        code=Reason.NO_DEVICE,
        advice='Install the driver of your GPU, or run pip install "pyopencl[pocl]" for OpenCL on the CPU.'
        " Then restart Python, and import arraybridge before pyclesperanto so that the PoCL wheel is found.",
    )
