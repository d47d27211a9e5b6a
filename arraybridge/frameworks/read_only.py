"""Read-only memory that immutable frameworks share: how it is exported, and which it is."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import EXTENDED, name_of
from arraybridge.frameworks.protocols import Exported

__all__ = ["is_file_map", "is_shared_read_only", "export_read_only", "writable_alias"]


def writable_alias(view: np.ndarray) -> np.ndarray:
    """The same memory without NumPy's read-only flag, for a consumer that never writes.

    JAX and TensorFlow never write into memory that they are lent, but their DLPack version has no
    read-only flag, so that NumPy refuses to export read-only arrays to them.
    """
    if view.flags.writeable:
        return view
    if name_of(view.dtype) in EXTENDED:  # the interface has no name for these
        return writable_alias(view.view(f"uint{8 * view.dtype.itemsize}")).view(view.dtype)
    interface = view.__array_interface__
    pointer, _ = interface["data"]
    return np.asarray(Exported(view, __array_interface__={**interface, "data": (pointer, False)}))


def is_file_map(view: np.ndarray) -> bool:
    """Return whether the memory of an array is a map of a file that was opened for reading only."""
    owner: Any = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return isinstance(owner, mmap.mmap) and memoryview(owner).readonly


#: Begin and end of the read-only memory that immutable frameworks are lent now, by what keeps it.
exported_ranges: dict[weakref.ref[Any], tuple[int, int]] = {}


def export_read_only(view: np.ndarray) -> np.ndarray:
    """What an immutable framework is lent of a mutable one; `is_shared_read_only` knows the read-only memory among it."""
    alias = writable_alias(view)
    if alias is not view:
        owner: Any = alias
        while isinstance(owner, np.ndarray):  # to what lives as long as the framework has the memory
            owner = owner.base
        begin = int(view.ctypes.data)
        exported_ranges[weakref.ref(owner, exported_ranges.pop)] = (begin, begin + view.nbytes)
    return alias


def is_shared_read_only(begin: int) -> bool:
    """Whether an array of an immutable framework that begins there shows memory that nobody may write to."""
    return any(start <= begin < stop for start, stop in [*exported_ranges.values()])
