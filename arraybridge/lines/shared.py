"""Memory that processes share: anonymous memory of the machine, which goes with its last mapping."""

from __future__ import annotations

import mmap
import os
import weakref
from math import prod
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError

__all__ = ["SharedArray", "SharedMemoryGoneError", "shared"]


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of an array went before it arrived, or is that of another machine."""


class _Segment:
    """A file of the kernel without a name, mapped: reached by its descriptor in the process that made it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.memory = mmap.mmap(descriptor, size)
        self.size = size
        self.start: int = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        self.place = os.getpid(), descriptor, size, os.fstat(descriptor).st_ino
        weakref.finalize(self, os.close, descriptor).atexit = False
        _segments[self.place[3]] = self


# Number of the file → the segment that is mapped here.
_segments: weakref.WeakValueDictionary[int, _Segment] = weakref.WeakValueDictionary()


class SharedArray(np.ndarray):
    """A NumPy array in memory that other processes map, when it or a slice of it is pickled."""

    _segment: _Segment | None = None

    def __array_finalize__(self, origin: Any) -> None:
        segment = getattr(origin, "_segment", None)
        if segment is not None and 0 <= _address(self) - segment.start <= segment.size:
            self._segment = segment

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __reduce__(self) -> Any:
        segment = self._segment
        if segment is None:
            return self.view(np.ndarray).__reduce__()
        offset = _address(self) - segment.start
        return _attached, (*segment.place, offset, self.shape, self.strides, self.dtype)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _placed(segment: _Segment, offset: int, shape: Any, strides: Any, dtype: Any) -> SharedArray:
    array = np.ndarray.__new__(SharedArray, shape, dtype, segment.memory, offset, strides)
    array._segment = segment
    return array


def _attached(process: int, descriptor: int, size: int, number: int, *layout: Any) -> SharedArray:
    segment = _segments.get(number)
    if segment is None:
        try:
            own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            if os.fstat(own).st_ino != number:
                os.close(own)
                raise FileNotFoundError("another file is there by now")
        except OSError as error:
            raise SharedMemoryGoneError(
                f"the shared memory of process {process} is not there ({error}): that process has ended or"
                " has let go of the array, or this is another machine; keep the array until it has arrived"
            ) from error
        segment = _Segment(own, size)
    return _placed(segment, *layout)


def shared(x: Any, dtype: Any = None) -> np.ndarray:
    """An array in memory that other processes can map; pickled, it hands over its place and not its bytes.

    Args:
        x: an array, whose values are copied once; or a shape, for an array with values unset.
        dtype: of the array that a shape describes.

    Raises:
        ArrayNotSupportedError: the array holds Python objects.

    >>> x = shared((2, 3), "float32")
    >>> x.shape, x.dtype
    ((2, 3), dtype('float32'))
    """
    source = None if isinstance(x, (tuple, int)) else convert_memory(x, "numpy")
    shape = x if source is None else source.shape
    kind = np.dtype(dtype if source is None else source.dtype)
    if kind.hasobject:
        raise ArrayNotSupportedError("objects of Python cannot lie in memory that processes share")
    size = max(1, prod(np.atleast_1d(shape).tolist()) * kind.itemsize)
    descriptor = os.memfd_create("arraybridge")
    if source is not None:  # written, not copied: half the time for pages that nobody has touched
        with open(descriptor, "wb", closefd=False) as file:
            source.tofile(file)
    os.ftruncate(descriptor, size)
    return _placed(_Segment(descriptor, size), 0, shape, None, kind)
