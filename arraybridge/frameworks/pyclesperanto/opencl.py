"""OpenCL beneath pyclesperanto: the drivers of this machine, devices, errors, and what ends the process.

Imports neither package of pyclesperanto, and pyopencl only where it is asked for the devices.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from typing import Any

from arraybridge.errors import FrameworkNotInstalledError, text_of
from arraybridge.frameworks import dlpack_capsules
from arraybridge.frameworks.accelerators import DeviceDetails
from arraybridge.frameworks.registry import is_imported

__all__ = ["use_pocl_wheel"]

# From this many bytes on it pays to ask for huge pages.
_LARGE = 1 << 25

# -- drivers -----------------------------------------------------------------------------------------


def configured_icds() -> list[str]:
    """What the OpenCL loader will open: the contents of the .icd files, or the libraries by name."""
    named = os.environ.get("OCL_ICD_FILENAMES")
    if named:
        return named.split(os.pathsep)
    folder = (
        os.environ.get("OCL_ICD_VENDORS") or os.environ.get("OPENCL_VENDOR_PATH") or "/etc/OpenCL/vendors"
    )
    try:
        files = sorted(file.path for file in os.scandir(folder) if file.name.endswith(".icd"))
    except OSError:
        return []
    return [_text(file) for file in files]


def _text(path: str) -> str:
    with open(path, errors="replace") as file:  # noqa: PTH123  # pathlib is a tenth of the time of an import
        return file.read().strip()


def pocl_wheel() -> str | None:
    """The OpenCL driver in the wheel that ``pip install "pyopencl[pocl]"`` brings, or None."""
    spec = PathFinder.find_spec("pyopencl")  # a wheel lies on the path
    if spec is None or spec.origin is None:
        return None
    folder = spec.origin.rpartition(os.sep)[0] + f"{os.sep}.libs{os.sep}"
    try:
        return folder + _text(f"{folder}pocl.icd")
    except OSError:
        return None


@cache
def use_pocl_wheel() -> str:
    """Where no OpenCL platform is configured, point pyclesperanto's loader to the PoCL wheel.

    pyopencl finds the wheel by itself; pyclesperanto brings a loader of its own, which does not. Returns the
    path of the wheel's driver where that was needed, else ``""``.
    """
    library = None if sys.platform != "linux" or configured_icds() else pocl_wheel()
    if library is None:
        return ""
    os.environ["OCL_ICD_FILENAMES"] = library
    return library


def check_import_order() -> None:
    """A system PoCL shares LLVM's symbols with TensorFlow: loaded after it, the process ends.

    The wheel carries its LLVM inside and may be loaded in any order (PoCL 3.1 of Debian 12 is meant).
    """
    loaded = [*sys.modules]
    if not is_imported("tensorflow"):
        return
    before = loaded[: loaded.index("tensorflow")]
    if not {"pyopencl", "pyclesperanto", "pyclesperanto_prototype"}.isdisjoint(before):
        return
    wheel = pocl_wheel()
    if any("libpocl" in icd and icd != wheel for icd in configured_icds()):
        raise FrameworkNotInstalledError(
            "OpenCL on this system comes from a PoCL library which ends the process when it is loaded after"
            " TensorFlow.",
            target_type="pyclesperanto",
            reason="a system PoCL cannot be loaded after TensorFlow",
            advice="Import pyclesperanto before tensorflow; or install the PoCL wheel, pip install"
            ' "pyopencl[pocl]", and set OCL_ICD_VENDORS to an empty folder.',
        )


# -- devices -----------------------------------------------------------------------------------------


@cache
def devices() -> list[Any]:
    """OpenCL's devices as pyopencl has them, GPUs first; opens none. Empty without pyopencl."""
    try:
        import pyopencl as cl
    except ImportError:
        return []
    try:
        natives = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:  # PLATFORM_NOT_FOUND_KHR
        return []
    gpus = [native for native in natives if native.type == cl.device_type.GPU]
    return gpus + [native for native in natives if native.type != cl.device_type.GPU]


@cache
def queue_on(native: Any) -> Any:
    """A queue on a device that is not the current one; to select it would give that one another context."""
    import pyopencl as cl

    return cl.CommandQueue(cl.Context([native]))


def use_huge_pages(x: Any) -> None:
    """Advise Linux to back a large new array of a CPU device by huge pages, as NumPy does for its own.

    What PoCL has allocated is touched page by page otherwise, which takes five times as long as the copy.
    """
    if x.nbytes < _LARGE or sys.platform != "linux" or not devices():
        return
    import pyopencl as cl

    buffer = cl.Buffer.from_int_ptr(dlpack_capsules.capsule_address(x.__dlpack__()), retain=True)
    queue = cl.CommandQueue(buffer.context)
    flags = cl.map_flags.WRITE_INVALIDATE_REGION
    memory, _ = cl.enqueue_map_buffer(queue, buffer, flags, 0, x.shape, x.dtype)
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = memory.ctypes.data + memory.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    memory.base.release(queue)
    queue.finish()


def described() -> list[DeviceDetails]:
    """Return the details of each device; NVIDIA's driver alone tells the identity."""
    return [
        DeviceDetails(device.name, _pci_address(device), int(device.global_mem_size)) for device in devices()
    ]


def _pci_address(device: Any) -> str:
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return ""
    domain = getattr(device, "pci_domain_id_nv", 0)
    return f"{domain:04x}:{device.pci_bus_id_nv:02x}:{device.pci_slot_id_nv >> 3:02x}.0"  # as NVML writes it


# -- errors ------------------------------------------------------------------------------------------

# INVALID_BUFFER_SIZE: one array is larger than the device gives to one array; a part of it may fit.
_CODES = "MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|INVALID_BUFFER_SIZE"
# pyclesperanto's words, and pyopencl's; before them its class, where the error came from another process.
_OOM = (
    rf"(?s:Error: .*(?:CL_(?:{_CODES}|INVALID_IMAGE_SIZE)|CUDA_ERROR_OUT_OF_MEMORY)"
    rf"|(?:\w*Error: )?\w+ failed: (?:{_CODES})\b)"
)


def is_oom(error: BaseException) -> bool:
    """Whether pyclesperanto, or pyopencl alone, has run out of memory."""
    cl: Any = sys.modules.get("pyopencl")
    if isinstance(error, MemoryError) or (cl is not None and isinstance(error, cl.MemoryError)):
        return True
    kinds = RuntimeError if cl is None else (RuntimeError, cl.Error)
    return isinstance(error, kinds) and is_oom_text(str(error))


def lacks_platform(error: BaseException) -> bool:
    """Return whether OpenCL found no driver; pyopencl raises ``PLATFORM_NOT_FOUND_KHR``."""
    return "PLATFORM_NOT_FOUND" in (text_of(error) or "")


def is_oom_text(text: str) -> bool:
    """Return whether a message begins as one of pyclesperanto or pyopencl for out of memory."""
    return re.match(_OOM, text) is not None
