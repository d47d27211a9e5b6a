"""OpenCL for pyclesperanto: drivers, devices, errors and import order.

The module imports pyopencl only in functions that need it, and never imports either of pyclesperanto's two
packages.
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
from arraybridge.host import dlpack_capsules
from arraybridge.interface.installation import is_imported
from arraybridge.interface.memory import DeviceDetails

__all__ = ["use_pocl_wheel"]

# The minimum size in bytes for which huge pages are faster.
_LARGE = 1 << 25

# -- drivers -----------------------------------------------------------------------------------------


def list_icds() -> list[str]:
    """Return the drivers that the OpenCL loader opens: the contents of the .icd files, or library names."""
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
    with open(path, errors="replace") as file:  # noqa: PTH123  # pathlib takes 10% of the import time
        return file.read().strip()


def pocl_wheel() -> str | None:
    """Return the path of the driver in the wheel that ``pip install "pyopencl[pocl]"`` installs, or None."""
    spec = PathFinder.find_spec("pyopencl")
    if spec is None or spec.origin is None:
        return None
    folder = spec.origin.rpartition(os.sep)[0] + f"{os.sep}.libs{os.sep}"
    try:
        return folder + _text(f"{folder}pocl.icd")
    except OSError:
        return None


@cache
def use_pocl_wheel() -> str:
    """Configure the PoCL wheel for pyclesperanto if no other OpenCL driver is configured.

    pyopencl finds the wheel automatically. pyclesperanto includes a separate loader that does not.

    Returns:
        The path of the wheel's driver if it was configured, otherwise ``""``.
    """
    library = None if sys.platform != "linux" or list_icds() else pocl_wheel()
    if library is None:
        return ""
    os.environ["OCL_ICD_FILENAMES"] = library
    return library


def check_import_order() -> None:
    """Raise if loading a system-wide PoCL after TensorFlow would crash the process.

    Both libraries export LLVM symbols (TensorFlow 2.21, tensorflow/tensorflow#119254). The PoCL wheel hides
    its LLVM symbols and can be loaded in any order.

    Raises:
        FrameworkNotInstalledError: If TensorFlow was imported first and OpenCL uses a system-wide PoCL, such
            as PoCL 3.1 in Debian 12.
    """
    loaded = [*sys.modules]
    if not is_imported("tensorflow"):
        return
    before = loaded[: loaded.index("tensorflow")]
    if not {"pyopencl", "pyclesperanto", "pyclesperanto_prototype"}.isdisjoint(before):
        return
    wheel = pocl_wheel()
    if any("libpocl" in icd and icd != wheel for icd in list_icds()):
        raise FrameworkNotInstalledError(
            "OpenCL on this system uses a PoCL library that crashes the process when it is loaded after"
            " TensorFlow.",
            target_type="pyclesperanto",
            reason="a system PoCL cannot be loaded after TensorFlow",
            advice="Import pyclesperanto before tensorflow. Or install the PoCL wheel with pip install"
            ' "pyopencl[pocl]", and set OCL_ICD_VENDORS to an empty folder.',
        )


# -- devices -----------------------------------------------------------------------------------------


@cache
def devices() -> list[Any]:
    """Return the OpenCL devices, GPUs first; ``[]`` without pyopencl or drivers. This creates no context."""
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
    """Return a command queue on a device, without making it pyclesperanto's current device.

    Selecting the device would create another context.
    """
    import pyopencl as cl

    return cl.CommandQueue(cl.Context([native]))


def use_huge_pages(x: Any) -> None:
    """Let Linux use huge pages for a large new array on a CPU device, as NumPy does (numpy/numpy#11957).

    Otherwise, the first write touches PoCL's memory page by page, which takes five times as long as the copy.
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


def describe() -> list[DeviceDetails]:
    """Return the details of each device. Only NVIDIA's driver reports the PCI address."""
    return [
        DeviceDetails(device.name, _pci_address(device), int(device.global_mem_size)) for device in devices()
    ]


def _pci_address(device: Any) -> str:
    """Return the PCI address of a device in NVML's format; ``""`` if it is unknown."""
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return ""
    domain = getattr(device, "pci_domain_id_nv", 0)
    return f"{domain:04x}:{device.pci_bus_id_nv:02x}:{device.pci_slot_id_nv >> 3:02x}.0"


# -- errors ------------------------------------------------------------------------------------------

# INVALID_BUFFER_SIZE: the array exceeds the device's limit for a single array, and a part of it may fit.
_CODES = "MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|INVALID_BUFFER_SIZE"
# The messages of pyclesperanto and pyopencl. Messages from another process begin with the exception class.
_OOM = (
    rf"(?s:Error: .*(?:CL_(?:{_CODES}|INVALID_IMAGE_SIZE)|CUDA_ERROR_OUT_OF_MEMORY)"
    rf"|(?:\w*Error: )?\w+ failed: (?:{_CODES})\b)"
)


def is_oom(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error from pyclesperanto or pyopencl."""
    cl: Any = sys.modules.get("pyopencl")
    if isinstance(error, MemoryError) or (cl is not None and isinstance(error, cl.MemoryError)):
        return True
    kinds = RuntimeError if cl is None else (RuntimeError, cl.Error)
    return isinstance(error, kinds) and is_oom_text(str(error))


def lacks_platform(error: BaseException) -> bool:
    """Return whether an error reports that OpenCL has no driver (``PLATFORM_NOT_FOUND_KHR`` in pyopencl)."""
    return "PLATFORM_NOT_FOUND" in (text_of(error) or "")


def is_oom_text(text: str) -> bool:
    """Return whether a message begins like an out-of-memory message from pyclesperanto or pyopencl."""
    return re.match(_OOM, text) is not None
