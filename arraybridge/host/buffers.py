"""Aligned buffers in host memory, and copies into them."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.host.dlpack_capsules import capsule_pointer
from arraybridge.host.dtype_names import dtype_of, np_dtype
from arraybridge.host.read_only_memory import writable_alias
from arraybridge.validation import add_hints

__all__ = [
    "MAX_RANK",
    "address",
    "aligned",
    "allocate_aligned",
    "cast",
    "contiguous_copy",
    "copy_aligned",
    "copy_into",
    "copy_normalized",
    "has_other_bools",
    "has_repeated_elements",
    "parse_shape",
]

#: JAX and TensorFlow (dmlc/dgl#995) share host memory only if it is aligned to this number of bytes.
ALIGNMENT = 64

#: The maximum number of axes of a NumPy array.
MAX_RANK = 64 if int(np.__version__.partition(".")[0]) >= 2 else 32

# The maximum size in bytes for which deleting the bytes 0 and 1 is faster than computing the maximum (0.1
# instead of 1.1 µs for 16 bytes).
_FEW_BOOLS = 1024
# The minimum size in bytes for which a specialized copy is faster.
_LARGE = 1 << 16
# The minimum extent of an axis for which PyTorch copies strided arrays faster.
_SHORT = 32

_first_byte = ctypes.c_char.from_buffer
_address_of = ctypes.addressof
_pointer_at = ctypes.c_void_p.from_address
# Offset of PyArrayInterface.data, after five integers of 4 bytes, padding, and two pointers.
_DATA_OFFSET = 40


def address(view: np.ndarray) -> int:
    """Return the address of the first element of an array."""
    if view.flags.carray:  # checking the flag first is four times as fast as the exception
        try:
            return _address_of(_first_byte(view))  # type: ignore[arg-type]  # an array is a buffer
        except (TypeError, ValueError, BufferError):  # an empty array, or one that is not a buffer
            pass
    # This takes half the time of `view.ctypes.data`. The capsule owns the memory that is read.
    interface = view.__array_struct__
    return _pointer_at(capsule_pointer(interface, None) + _DATA_OFFSET).value or 0


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


@add_hints
def aligned(shape: int | tuple[int, ...], dtype: Any = "float64") -> np.ndarray:
    """Return an uninitialized NumPy array, aligned to 64 bytes so that other frameworks can share its memory.

    NumPy's own arrays are aligned to 16 bytes (numpy/numpy#5312). JAX and TensorFlow require 64 bytes, and
    copy all others. About one in four small NumPy arrays is aligned to 64 bytes by chance, but no large array
    is.

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
    return allocate_aligned(parse_shape(shape), elements)


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialized C-contiguous array, aligned to `ALIGNMENT` bytes.

    NumPy allocates the memory, because it requests huge pages for arrays of 4 MiB or more
    (numpy/numpy#11957). PyTorch does not. If the kernel provides huge pages only on request, they make the
    first write up to five times faster.
    """
    memory = np.empty(dtype.itemsize * math.prod(shape) + ALIGNMENT, np.uint8)
    start = -_address_of(_first_byte(memory)) % ALIGNMENT  # type: ignore[arg-type]
    return np.ndarray(shape, dtype, memory, start)


def copy_aligned(view: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy in native byte order, aligned to `ALIGNMENT` bytes."""
    dtype = view.dtype
    result = allocate_aligned(view.shape, dtype if dtype.isnative else dtype.newbyteorder("="))
    if not _copy_by_torch(result, view):
        result[...] = view
    return result


def _copy_by_torch(result: np.ndarray, view: np.ndarray) -> bool:
    """Copy values by PyTorch if that is faster, and return whether they were copied.

    PyTorch copies large strided arrays up to seven times as fast as NumPy (2-D, transposed). NumPy copies
    those with one axis about as fast, and does not wait for OpenMP threads, which other work may delay. If
    the axis of adjacent elements is short, as in channels-last images, or one of two axes, as in a table,
    NumPy takes down to a tenth of the time (torch 2.13, pytorch/pytorch#172205).
    """
    dtype = view.dtype
    if view.nbytes < _LARGE or view.ndim < 2 or view.flags.c_contiguous or not dtype.isnative:
        return False
    _, extent = min(zip(map(abs, view.strides), view.shape, strict=True))
    if extent < _SHORT or (view.ndim == 2 and view.shape[1] < _SHORT):
        return False
    from_numpy = getattr(sys.modules.get("torch"), "from_numpy", None)
    if from_numpy is None or dtype.itemsize not in (1, 2, 4, 8):
        return False
    # PyTorch raises ValueError for negative strides and for strides that are not multiples of the element
    # size, and RuntimeError if the tensor has no memory.
    with suppress(ValueError, RuntimeError):
        bits = f"int{8 * dtype.itemsize}"  # copying integers changes no bits
        source = from_numpy(writable_alias(view).view(np.ndarray).view(bits))
        target = from_numpy(result.view(np.ndarray).view(bits))
        # Within FakeTensorMode and some transforms of PyTorch, the tensor has other memory or none.
        if type(target).__name__ == "Tensor" and target.data_ptr() == address(result):
            target.copy_(source)
            return True
    return False


def copy_into(result: np.ndarray, view: np.ndarray) -> None:
    """Copy values to an array of the same shape, cast by NumPy's rules. The two arrays may overlap."""
    # NumPy ignores the overlap of arrays with one axis and other strides (NumPy 2.4, no issue found; the
    # general one is numpy/numpy#6272).
    if view.ndim == 1 and view.strides != result.strides and np.may_share_memory(result, view):
        view = view.copy()
    if view.dtype == result.dtype:
        is_small = view.nbytes < _LARGE
        if is_small or np.may_share_memory(result, view) or not _copy_by_torch(result, view):
            np.copyto(result, view)
        return
    intermediate, _ = _cast_steps(view.dtype, result.dtype)
    with np.errstate(all="ignore"):  # as in `cast`
        np.copyto(result, view if intermediate is None else view.astype(intermediate), casting="unsafe")


def has_repeated_elements(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether elements of an array overlap in memory, as in a broadcast array."""
    axes = sorted((abs(stride), extent) for extent, stride in zip(shape, strides, strict=True) if extent > 1)
    end = itemsize
    for stride, extent in axes:
        if stride < end:
            break
        end += stride * (extent - 1)
    else:
        return False
    if 0 in shape:
        return False
    if any(stride < itemsize for stride, _ in axes):
        return True
    # Interleaved axes, which are rare: compare the offsets of all elements.
    offsets = np.zeros(1, np.int64)
    for stride, extent in axes:
        offsets = np.add.outer(offsets, np.arange(extent) * stride).ravel()
    return bool(np.any(np.diff(np.sort(offsets)) < itemsize))


def contiguous_copy(view: np.ndarray) -> np.ndarray:
    """Return a C-contiguous copy in native byte order, with no more alignment than NumPy provides."""
    dtype = view.dtype
    if view.nbytes >= _LARGE:
        return copy_aligned(view)
    return np.array(view, order="C") if dtype.isnative else view.astype(dtype.newbyteorder("="), order="C")


def has_other_bools(view: np.ndarray) -> bool:
    """Return whether a bool array has bytes other than 0 and 1, such as one from ``uint8_array.view(bool)``.

    NumPy and PyTorch read such bytes as True. XLA and TensorFlow compute with the byte.
    """
    if view.nbytes <= _FEW_BOOLS:
        return len(view.tobytes().translate(None, b"\0\1")) > 0
    return bool(view.view(np.uint8).max() > 1)


def copy_normalized(view: np.ndarray) -> np.ndarray:
    """Return a `copy_aligned` whose bools are stored as 0 and 1."""
    copy = copy_aligned(view)
    if copy.dtype.char == "?":
        bits = copy.view(np.uint8)
        np.minimum(bits, np.uint8(1), out=bits)
    return copy


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values cast to a dtype by NumPy's rules, even if ml_dtypes lacks the direct cast.

    Values that the dtype cannot represent neither warn nor raise, as in other frameworks.
    """
    target = np_dtype(dtype)
    intermediate, keeps_values = _cast_steps(values.dtype, target)
    if keeps_values:
        return values.astype(target)
    with np.errstate(all="ignore"):
        return (values if intermediate is None else values.astype(intermediate)).astype(target)


@functools.cache
def _cast_steps(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[np.dtype[Any] | None, bool]:
    """Return the dtype to cast to first, or None, and whether the target holds every value of the source.

    ml_dtypes 0.5 has no casts between float8_e8m0fnu and other dtypes of at most one byte, nor between its
    4-bit and 2-bit integers. The intermediate dtype holds every value of the source.
    """
    if source.isbuiltin != 2 or target.isbuiltin != 2:  # at least one is a built-in NumPy dtype
        return None, np.can_cast(source, target)
    try:
        np.empty(0, source).astype(target)
    except TypeError:
        both = source.name + target.name
        return np.dtype(np.float32 if "float" in both else np.int8), False
    return None, False
