"""OpenCL beneath pyclesperanto: its drivers and devices, its errors, and the memory of a CPU device.

Needs pyopencl for all but the drivers, and does without where it is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.pyclesperanto.driver import configured_icds, pocl_wheel
from arraybridge.machine import pci_address

__all__ = ["devices", "is_oom", "map_buffer", "map_capsule", "refuse_deadly_import_order"]

# CL_INVALID_BUFFER_SIZE: one array is larger than the device gives to one array; a part of it may fit.
_OOM_CODES = (-4, -5, -6, -61)
_OOM = re.compile(
    r"Error: .*(?:CL_MEM_OBJECT_ALLOCATION_FAILURE|CL_OUT_OF_RESOURCES|CL_OUT_OF_HOST_MEMORY"
    r"|CL_INVALID_BUFFER_SIZE|CL_INVALID_IMAGE_SIZE|CUDA_ERROR_OUT_OF_MEMORY)",
    re.DOTALL,
)

# pyopencl's own words.
_NAMES = "MEM_OBJECT_ALLOCATION_FAILURE|OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|INVALID_BUFFER_SIZE"
_OOM_NAMES = re.compile(rf"\b(?:{_NAMES})\b")
# What a process sends of an error that does not pickle: its class and its words.
_SENT = re.compile(rf"(?:Memory|Runtime|Logic)?Error: \w+ failed: (?:{_NAMES})\b")


def is_oom(error: BaseException) -> bool:
    """Whether pyclesperanto, or pyopencl alone, has run out of memory."""
    cl: Any = sys.modules.get("pyopencl")
    if cl is not None and isinstance(error, cl.Error):
        record: Any = error.args[0] if error.args else None
        if callable(getattr(record, "code", None)):
            return record.code() in _OOM_CODES
        # One that came from another process: the record does not pickle, and at most its words are left.
        return isinstance(error, cl.MemoryError) or _OOM_NAMES.search(str(record)) is not None
    if isinstance(error, RuntimeError):
        message = str(error)
        return _OOM.match(message) is not None or _SENT.match(message) is not None
    return isinstance(error, MemoryError)


@cache
def devices() -> list[tuple[str, str, int]]:
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


# -- mapping buffers of a CPU device -----------------------------------------------------------------

# The first field of a capsule's tensor is the data pointer, here the cl_mem.
_queues: dict[int, Any] = {}


def map_capsule(x: Any, write: bool) -> contextlib.AbstractContextManager[np.ndarray]:
    import pyopencl as cl

    capsule = x.__dlpack__()
    handle = ctypes.c_void_p.from_address(hostmemory.tensor_of(capsule)).value
    buffer = cl.Buffer.from_int_ptr(handle, retain=True)
    context = buffer.context
    if context.int_ptr not in _queues:
        _queues[context.int_ptr] = cl.CommandQueue(context)
    return map_buffer(buffer, _queues[context.int_ptr], 0, tuple(x.shape), np.dtype(x.dtype), write)


@contextlib.contextmanager
def map_buffer(
    buffer: Any, queue: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], write: bool
) -> Iterator[np.ndarray]:
    import pyopencl as cl

    flags = cl.map_flags.WRITE_INVALIDATE_REGION if write else cl.map_flags.READ
    memory, _ = cl.enqueue_map_buffer(queue, buffer, flags, offset, shape, dtype)
    if write:
        _ask_for_huge_pages(memory)
    try:
        yield memory
    finally:
        memory.base.release(queue)
        queue.finish()


def _ask_for_huge_pages(memory: np.ndarray) -> None:
    """Advise the kernel to back untouched memory by huge pages, as NumPy does for its own (Linux alone)."""
    if sys.platform != "linux":
        return
    import mmap  # 1 ms, and only large copies need it

    start = -(-hostmemory.address(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (hostmemory.address(memory) + memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        # An advice: where the kernel declines it, the pages are merely slower to touch.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
