"""Read-only memory that frameworks without read-only arrays share: how to export and how to recognize it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from arraybridge.host.dtype_names import EXTENDED, name_of
from arraybridge.host.protocols import Exported

__all__ = ["export_read_only", "is_shared_read_only", "record", "writable_alias"]


def writable_alias(view: np.ndarray) -> np.ndarray:
    """Return a writable array that shares the view's memory, for a consumer that never writes to it.

    JAX and TensorFlow never write to memory that they import. But their DLPack version has no read-only flag,
    so NumPy raises when it exports read-only arrays to them.
    """
    if view.flags.writeable:
        return view
    if name_of(view.dtype) in EXTENDED:  # __array_interface__ has no type string for these
        return writable_alias(view.view(f"uint{8 * view.dtype.itemsize}")).view(view.dtype)
    return alias(view)


def alias(view: np.ndarray) -> np.ndarray:
    """Return a new writable array of ordinary host memory that shares the view's memory.

    The dtype of the view must be one of NumPy's own.
    """
    interface = view.__array_interface__
    pointer, _ = interface["data"]
    return np.asarray(Exported(view, __array_interface__={**interface, "data": (pointer, False)}))


#: The address ranges of read-only memory that other arrays use, and references to the objects that keep them
#: alive. The addresses of CUDA memory and host memory differ.
exported_ranges: dict[int, tuple[weakref.ref[Any], int, int]] = {}


def export_read_only(view: np.ndarray) -> np.ndarray:
    """Return a writable array for import as an immutable array, and record its memory if it is read-only.

    `is_shared_read_only` recognizes the recorded memory.
    """
    alias = writable_alias(view)
    if alias is not view:
        owner: Any = alias
        while isinstance(owner, np.ndarray):  # find the object that lives as long as the memory is in use
            owner = owner.base
        record(owner, int(view.ctypes.data), view.nbytes)
    return alias


def record(owner: Any, begin: int, nbytes: int) -> None:
    """Record that this memory is read-only as long as ``owner`` is alive."""
    reference = weakref.ref(owner, _forget)
    # CuPy's arrays, and references to them, are not hashable.
    exported_ranges[id(reference)] = reference, begin, begin + nbytes


def _forget(reference: weakref.ref[Any]) -> None:
    exported_ranges.pop(id(reference), None)


def is_shared_read_only(begin: int) -> bool:
    """Return whether an array that begins at this address uses recorded read-only memory."""
    return any(start <= begin < stop for _, start, stop in [*exported_ranges.values()])
