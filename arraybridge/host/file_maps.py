"""Arrays that map files: how to recognize them."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from arraybridge.host import buffers
from arraybridge.reasons import Cause, Reason

__all__ = ["SafetensorsMap", "is_read_only_map", "misalignment"]


class SafetensorsMap(mmap.mmap):
    """A map of a ``.safetensors`` file."""


def is_read_only_map(view: np.ndarray) -> bool:
    """Return whether the memory of an array is a read-only map of a file."""
    _, owner = _owner_of(view)
    return isinstance(owner, mmap.mmap) and memoryview(owner).readonly


def misalignment(x: Any, framework: str, alignment: int) -> Cause:
    """Return the reason why an array whose memory is not aligned has to be copied.

    Args:
        x: The array, which need not be a NumPy array.
        framework: The framework that needs the alignment.
        alignment: The alignment in bytes.
    """
    code = Reason.MISALIGNED
    if isinstance(x, np.ndarray):
        tensor, owner = _owner_of(x)
        # The tensor itself is not aligned, instead of a slice of it, and `save_safetensors` would align it.
        if isinstance(owner, SafetensorsMap) and not tensor.nbytes % alignment:
            code = Reason.MISALIGNED_IN_FILE if buffers.address(tensor) % alignment else code
    return Cause(code, framework=framework, alignment=alignment)


def _owner_of(view: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return the array that a view was made of, and the object that owns its memory."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    owner = view.base
    return view, owner.obj if isinstance(owner, memoryview) else owner
