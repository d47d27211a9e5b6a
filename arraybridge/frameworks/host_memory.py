"""Host memory: aligned buffers, and copies into them."""

from __future__ import annotations

import ctypes
import math
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import dtype_of
from arraybridge.frameworks.read_only import writable_alias

__all__ = [
    "MAX_RANK",
    "address",
    "aligned",
    "aligned_copy",
    "aligned_empty",
    "contiguous_copy",
    "parse_shape",
]

#: JAX and TensorFlow share host memory only where it is aligned to this many bytes.
ALIGNMENT = 64

#: The most axes that a NumPy array can have.
MAX_RANK = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32

# From this many bytes on it pays to choose how to copy.
_LARGE = 1 << 16

_first_byte = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


def address(view: np.ndarray) -> int:
    """Address of the first element."""
    if not view.flags.carray:  # to be refused as a buffer takes four times as long as to ask
        return int(view.ctypes.data)
    try:
        return _address_of(_first_byte(view))  # type: ignore[arg-type]  # an array is a buffer
    except (TypeError, ValueError, BufferError):
        # It is empty, or no buffer.
        return int(view.ctypes.data)


def parse_shape(shape: Any) -> tuple[int, ...]:
    """A shape as NumPy takes it: a whole number, or several.

    Raises:
        TypeError: it is neither.
        ValueError: one of them is negative, or they are too large or too many.
    """
    try:
        if isinstance(shape, (str, bytes, bytearray)):
            raise TypeError("text is not a shape")
        return np.broadcast_to(0, shape).shape
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"shape={shape!r} is not a shape for NumPy. Pass a whole number, or several, none negative."
        ) from error


def aligned(shape: int | tuple[int, ...], dtype: Any = "float64") -> np.ndarray:
    """An uninitialised NumPy array in memory that every framework here can share, aligned to 64 bytes.

    NumPy's own arrays are aligned to 16 bytes. JAX and TensorFlow, which want 64, share about one in four of
    the small ones, by chance, and none of the large ones; what they cannot share is copied once.

    Args:
        shape: number of elements along each axis; C-contiguous.
        dtype: of NumPy, by name (``"float32"``; ``"bfloat16"`` with ``ml_dtypes``), or as ``torch.float32``.

    Raises:
        DtypeNotSupportedError: NumPy has this dtype only through ``ml_dtypes``, which is missing.
        TypeError: there is no such dtype, or the shape is no whole number, nor several.
        ValueError: a negative extent, or a dtype whose elements are Python objects.

    >>> image = aligned((512, 512), "float32")
    >>> image[:] = 0
    >>> image.ctypes.data % 64
    0
    """
    elements = dtype_of(dtype)
    if elements.hasobject:
        raise ValueError(f"dtype={elements} holds Python objects, which no other framework can share")
    return aligned_empty(parse_shape(shape), elements)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array, aligned to `ALIGNMENT` bytes.

    The memory is NumPy's, since NumPy asks the kernel for huge pages from 4 MiB up and torch does not,
    which makes the first touch up to five times faster where the kernel gives them only on request.
    """
    memory = np.empty(dtype.itemsize * math.prod(shape) + ALIGNMENT, np.uint8)
    start = -_address_of(_first_byte(memory)) % ALIGNMENT  # type: ignore[arg-type]
    return np.ndarray(shape, dtype, memory, start)


def aligned_copy(view: np.ndarray) -> np.ndarray:
    """A C-contiguous copy in native byte order, aligned to `ALIGNMENT` bytes."""
    dtype = view.dtype
    result = aligned_empty(view.shape, dtype if dtype.isnative else dtype.newbyteorder("="))
    is_large = view.nbytes >= _LARGE and not view.flags.c_contiguous
    if is_large and dtype.isnative and dtype.itemsize in (1, 2, 4, 8):
        # What torch copies of other layouts is there up to seven times as fast (2-D, transposed).
        from_numpy = getattr(sys.modules.get("torch"), "from_numpy", None)
        if from_numpy is not None:
            with suppress(ValueError):  # it has no negative strides, nor any between elements
                bits = f"int{8 * dtype.itemsize}"  # so that no value is touched
                source = from_numpy(writable_alias(view).view(np.ndarray).view(bits))
                from_numpy(result.view(bits)).copy_(source)
                return result
    result[...] = view
    return result


def contiguous_copy(view: np.ndarray) -> np.ndarray:
    """A C-contiguous copy in native byte order, for a framework that minds no alignment beyond NumPy's."""
    dtype = view.dtype
    if view.nbytes >= _LARGE:
        return aligned_copy(view)
    return np.array(view, order="C") if dtype.isnative else view.astype(dtype.newbyteorder("="), order="C")
