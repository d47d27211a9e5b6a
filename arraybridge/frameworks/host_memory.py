"""Aligned buffers in host memory, and copies into them."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.frameworks.dtype_names import dtype_of, np_dtype
from arraybridge.frameworks.read_only_memory import writable_alias

__all__ = [
    "MAX_RANK",
    "address",
    "aligned",
    "aligned_copy",
    "aligned_empty",
    "cast",
    "contiguous_copy",
    "parse_shape",
]

#: JAX and TensorFlow share host memory only if it is aligned to this number of bytes.
ALIGNMENT = 64

#: The maximum number of axes of a NumPy array.
MAX_RANK = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32

# The minimum size in bytes for which a specialized copy is faster.
_LARGE = 1 << 16

_first_byte = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


def address(view: np.ndarray) -> int:
    """Return the address of the first element of an array."""
    if not view.flags.carray:  # checking the flag first is four times as fast as the exception
        return int(view.ctypes.data)
    try:
        return _address_of(_first_byte(view))  # type: ignore[arg-type]  # an array is a buffer
    except (TypeError, ValueError, BufferError):  # an empty array, or one that is not a buffer
        return int(view.ctypes.data)


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple, with the same interpretation as in NumPy.

    Args:
        shape: An integer or a sequence of integers.

    Raises:
        TypeError: If ``shape`` is neither.
        ValueError: If a number is negative or too large, or if there are too many numbers.
    """
    try:
        if isinstance(shape, (str, bytes, bytearray)):
            raise TypeError("text is not a shape")
        return np.broadcast_to(0, shape).shape
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"shape={shape!r} is not a valid shape. Pass a non-negative integer or a tuple of them."
        ) from error


def aligned(shape: int | tuple[int, ...], dtype: Any = "float64") -> np.ndarray:
    """Return an uninitialized NumPy array, aligned to 64 bytes so that other frameworks can share its memory.

    NumPy's own arrays are aligned to 16 bytes. JAX and TensorFlow require 64 bytes, and copy all others.
    About one in four small NumPy arrays is aligned to 64 bytes by chance, but no large array is.

    Args:
        shape: The number of elements along each axis, or an integer for one axis. The array is C-contiguous.
        dtype: A NumPy dtype, its name (such as ``"float32"``, or ``"bfloat16"`` with ``ml_dtypes``), or a
            dtype such as ``torch.float32``. Defaults to ``"float64"``.

    Returns:
        The array.

    Raises:
        DtypeNotSupportedError: If the dtype needs ``ml_dtypes`` and that package is not installed.
        TypeError: If there is no such dtype, or the shape is neither an integer nor a sequence of integers.
        ValueError: If the shape has a negative number, or the elements of the dtype are Python objects.

    Example:
        >>> image = aligned((512, 512), "float32")
        >>> image[:] = 0
        >>> image.ctypes.data % 64
        0
    """
    elements = dtype_of(dtype)
    if elements.hasobject:
        raise ValueError(
            f"dtype={elements} holds Python objects, which no other framework can share."
            " Pass a numeric dtype."
        )
    return aligned_empty(parse_shape(shape), elements)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialized C-contiguous array, aligned to `ALIGNMENT` bytes.

    NumPy allocates the memory, because it requests huge pages for arrays of 4 MiB or more. PyTorch does not.
    If the kernel provides huge pages only on request, they make the first write up to five times faster.
    """
    memory = np.empty(dtype.itemsize * math.prod(shape) + ALIGNMENT, np.uint8)
    start = -_address_of(_first_byte(memory)) % ALIGNMENT  # type: ignore[arg-type]
    return np.ndarray(shape, dtype, memory, start)


def aligned_copy(view: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy in native byte order, aligned to `ALIGNMENT` bytes."""
    dtype = view.dtype
    result = aligned_empty(view.shape, dtype if dtype.isnative else dtype.newbyteorder("="))
    is_large = view.nbytes >= _LARGE and not view.flags.c_contiguous
    if is_large and dtype.isnative and dtype.itemsize in (1, 2, 4, 8):
        # PyTorch copies strided arrays up to seven times as fast as NumPy (2-D, transposed).
        from_numpy = getattr(sys.modules.get("torch"), "from_numpy", None)
        if from_numpy is not None:
            # PyTorch raises for negative strides and for strides that are not multiples of the element size.
            with suppress(ValueError):
                bits = f"int{8 * dtype.itemsize}"  # copying integers changes no bits
                source = from_numpy(writable_alias(view).view(np.ndarray).view(bits))
                from_numpy(result.view(bits)).copy_(source)
                return result
    result[...] = view
    return result


def contiguous_copy(view: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy in native byte order, with no more alignment than NumPy provides."""
    dtype = view.dtype
    if view.nbytes >= _LARGE:
        return aligned_copy(view)
    return np.array(view, order="C") if dtype.isnative else view.astype(dtype.newbyteorder("="), order="C")


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values cast to a dtype by NumPy's rules, even if ml_dtypes lacks the direct cast."""
    target = np_dtype(dtype)
    intermediate = _intermediate_dtype(values.dtype, target)
    return (values if intermediate is None else values.astype(intermediate)).astype(target)


@functools.cache
def _intermediate_dtype(source: np.dtype[Any], target: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype to cast to first, which holds every value of the source; None for a direct cast.

    ml_dtypes 0.5 has no casts between float8_e8m0fnu and other dtypes of at most one byte, nor between its
    4-bit and 2-bit integers.
    """
    if source.isbuiltin != 2 or target.isbuiltin != 2:  # at least one is a built-in NumPy dtype
        return None
    try:
        np.empty(0, source).astype(target)
    except TypeError:
        both = source.name + target.name
        return np.dtype(np.float32 if "float" in both else np.int8)
    return None
