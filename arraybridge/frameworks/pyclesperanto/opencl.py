"""OpenCL beneath pyclesperanto: devices, errors, memory of the host, and a driver that ends the process.

Needs pyopencl for all but the drivers, and does without where it is missing.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.facts import is_imported
from arraybridge.frameworks.pyclesperanto.driver import configured_icds, pocl_wheel
from arraybridge.machine import pci_address

# INVALID_BUFFER_SIZE: one array is larger than the device gives to one array; a part of it may fit.
_CODES = "MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|INVALID_BUFFER_SIZE"
# pyclesperanto's words, and pyopencl's; before them its class, where the error came from another process.
_OOM = re.compile(
    rf"Error: .*(?:CL_(?:{_CODES}|INVALID_IMAGE_SIZE)|CUDA_ERROR_OUT_OF_MEMORY)"
    rf"|(?:\w*Error: )?\w+ failed: (?:{_CODES})\b",
    re.DOTALL,
)


def is_oom(error: BaseException) -> bool:
    """Whether pyclesperanto, or pyopencl alone, has run out of memory."""
    cl: Any = sys.modules.get("pyopencl")
    if isinstance(error, MemoryError) or (cl is not None and isinstance(error, cl.MemoryError)):
        return True
    kinds = RuntimeError if cl is None else (RuntimeError, cl.Error)
    return isinstance(error, kinds) and _OOM.match(str(error)) is not None


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
    return sorted(natives, key=lambda device: device.type != cl.device_type.GPU)


@cache
def described() -> list[tuple[str, str, int | None]]:
    """Name, PCI address or ``""``, and bytes of each of them."""
    return [(device.name, _pci_address(device), int(device.global_mem_size)) for device in devices()]


def _pci_address(device: Any) -> str:
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return ""
    domain = getattr(device, "pci_domain_id_nv", 0)
    return pci_address(domain, device.pci_bus_id_nv, device.pci_slot_id_nv >> 3)


def refuse_deadly_import_order() -> None:
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
            " TensorFlow. Import pyclesperanto before tensorflow; or install the PoCL wheel,"
            ' pip install "pyopencl[pocl]", and set OCL_ICD_VENDORS to an empty folder.',
            target_type="pyclesperanto",
            reason="a system PoCL cannot be loaded after TensorFlow",
        )


def fill_mapped(x: Any, values: np.ndarray) -> None:
    """Set the elements of an array of a CPU device where they lie, in this process.

    Large ones take a quarter of the time so, since they can be given huge pages, as NumPy gives its own.
    """
    import pyopencl as cl

    # A capsule's data pointer is the cl_mem here.
    buffer: Any = cl.Buffer.from_int_ptr(hostmemory.lent_at(x.__dlpack__()), retain=True)
    queue = cl.CommandQueue(buffer.context)
    flags = cl.map_flags.WRITE_INVALIDATE_REGION
    memory, _ = cl.enqueue_map_buffer(queue, buffer, flags, 0, values.shape, values.dtype)
    if sys.platform == "linux":
        start = -(-hostmemory.address(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = ctypes.c_size_t(memory.nbytes - mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_HUGEPAGE)
    np.copyto(memory, values)
    memory.base.release(queue)
    queue.finish()
