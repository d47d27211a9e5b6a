"""Read-only host memory in frameworks with immutable arrays: how to export it, and how to recognize it."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import EXTENDED, name_of
from arraybridge.frameworks.protocols import Exported

__all__ = ["export_read_only", "is_file_map", "is_shared_read_only", "writable_alias"]


def writable_alias(view: np.ndarray) -> np.ndarray:
    """Return a writable array that shares the view's memory, for a consumer that never writes to it.

    JAX and TensorFlow never write to memory that they import. But their DLPack version has no read-only flag,
    so NumPy raises when it exports read-only arrays to them.
    """
    if view.flags.writeable:
        return view
    if name_of(view.dtype) in EXTENDED:  # __array_interface__ has no type string for these
        return writable_alias(view.view(f"uint{8 * view.dtype.itemsize}")).view(view.dtype)
    interface = view.__array_interface__
    pointer, _ = interface["data"]
    return np.asarray(Exported(view, __array_interface__={**interface, "data": (pointer, False)}))


def is_file_map(view: np.ndarray) -> bool:
    """Return whether the memory of an array is a read-only memory map of a file."""
    owner: Any = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return isinstance(owner, mmap.mmap) and memoryview(owner).readonly


#: The address ranges of read-only memory that immutable arrays use, by the object that keeps them alive.
exported_ranges: dict[weakref.ref[Any], tuple[int, int]] = {}


def export_read_only(view: np.ndarray) -> np.ndarray:
    """Return a writable array for import as an immutable array, and record its memory if it is read-only.

    `is_shared_read_only` recognizes the recorded memory.
    """
    alias = writable_alias(view)
    if alias is not view:
        owner: Any = alias
        while isinstance(owner, np.ndarray):  # find the object that lives as long as the memory is in use
            owner = owner.base
        begin = int(view.ctypes.data)
        exported_ranges[weakref.ref(owner, exported_ranges.pop)] = (begin, begin + view.nbytes)
    return alias


def is_shared_read_only(begin: int) -> bool:
    """Return whether an immutable array that begins at this address uses recorded read-only memory."""
    return any(start <= begin < stop for start, stop in [*exported_ranges.values()])
