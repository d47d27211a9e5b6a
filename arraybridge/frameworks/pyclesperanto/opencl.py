"""OpenCL beneath pyclesperanto: devices, errors, memory of the host, and a driver that ends the process.

Needs pyopencl for all but the drivers, and does without where it is missing.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.pyclesperanto.driver import configured_icds, pocl_wheel
from arraybridge.machine import pci_address

__all__ = ["devices"]

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
def devices() -> list[tuple[str, str, int | None]]:
    """Name, PCI address or ``""``, and bytes of OpenCL's devices, GPUs first; opens none. Needs pyopencl."""
    try:
        import pyopencl as cl
    except ImportError:
        return []
    try:
        native = [d for platform in cl.get_platforms() for d in platform.get_devices()]
    except cl.Error:
        return []
    native.sort(key=lambda d: d.type != cl.device_type.GPU)
    return [(d.name, _pci_address(d), int(d.global_mem_size)) for d in native]


def _pci_address(device: Any) -> str:
    if "cl_nv_device_attribute_query" not in device.extensions.split():
        return ""
    domain = getattr(device, "pci_domain_id_nv", 0)
    return pci_address(domain, device.pci_bus_id_nv, device.pci_slot_id_nv >> 3)


def refuse_deadly_import_order(packages: tuple[str, ...]) -> None:
    """A system PoCL shares LLVM's symbols with TensorFlow: loaded after it, the process ends.

    The wheel carries its LLVM inside and may be loaded in any order (PoCL 3.1 of Debian 12 is meant).
    """
    loaded = [name for name, module in sys.modules.copy().items() if module is not None]
    if "tensorflow" not in loaded:
        return
    first = min((loaded.index(name) for name in (*packages, "pyopencl") if name in loaded), default=None)
    if first is not None and first < loaded.index("tensorflow"):
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


@contextmanager
def mapped(x: Any, write: bool) -> Iterator[np.ndarray]:
    """The memory of an array of a CPU device, in this process."""
    import pyopencl as cl

    # A capsule's data pointer is the cl_mem here.
    buffer = cl.Buffer.from_int_ptr(hostmemory.lent_at(x.__dlpack__()), retain=True)
    queue = cl.CommandQueue(buffer.context)
    flags = cl.map_flags.WRITE_INVALIDATE_REGION if write else cl.map_flags.READ
    memory, _ = cl.enqueue_map_buffer(queue, buffer, flags, 0, tuple(x.shape), np.dtype(x.dtype))
    if write and sys.platform == "linux":
        # Huge pages, as NumPy has for its own memory: to touch small ones first takes five times the copy.
        start = -(-hostmemory.address(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = ctypes.c_size_t(memory.nbytes - mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_HUGEPAGE)
    try:
        yield memory
    finally:
        memory.base.release(queue)
        queue.finish()
