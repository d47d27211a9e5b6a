"""Arrays in memory that processes share, and the segments that contain them.

On Linux, a segment is an anonymous file (``memfd_create``). The kernel frees it when no process maps it
anymore, even if a process crashes. Another process opens it through ``/proc`` while the sender maps it. On
other systems, a segment is a `multiprocessing.shared_memory` block, whose name Python's resource tracker
removes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import sys
import time
import weakref
from contextlib import suppress
from functools import cache, partialmethod
from mmap import mmap
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import MemoryConversionError, note_on
from arraybridge.frameworks import dtype_names, host_memory, registry
from arraybridge.frameworks.host_memory import address
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.frameworks.unsupported import sparse_array_error

__all__ = ["Exchange", "SharedArray", "SharedMemoryGoneError", "shared"]

_ANONYMOUS = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of a shared array was freed before the array arrived, or another process cannot map it.

    Also a ``RuntimeError``.

    Example:
        >>> import pickle
        >>> location = pickle.dumps(shared((100, 100), "float32"))  # no variable keeps the array alive
        >>> pickle.loads(location)
        Traceback (most recent call last):
            ...
        arraybridge.memory.shared_memory.SharedMemoryGoneError: ...
    """


class Segment:
    """A block of memory that several processes map. NumPy reads it as an array of bytes.

    Each process maps the segment as long as an object in that process refers to it. The pickle of a segment
    contains only its location, and can be loaded while the sender maps the segment.

    Attributes:
        key: The unique name of the segment.
        size: The size in bytes.
        address: The address of the first byte in this process.
        in_use: The first byte of the segment, as a flag that all processes share.
    """

    #: The offset of the first array, in bytes.
    HEAD = 64

    def __init__(self, key: str, memory: Any) -> None:
        self.key = key
        self._memory = memory  # an mmap or SharedMemory, which unmaps the memory when it is deleted
        buffer = getattr(memory, "buf", memory)
        self.size = len(buffer)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.in_use = ctypes.c_bool.from_address(self.address)
        data = {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}
        self.__array_interface__: dict[str, Any] = data
        _segments[key] = self

    def set_free(self) -> None:
        """Clear the in-use flag of the segment, which all processes share."""
        self.in_use.value = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (platform.node(), os.getpid(), self.key)


# The segments that this process maps, by key.
_segments: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


def make_segment(size: int) -> Segment:
    """Return a new segment, filled with zeros.

    Raises:
        OSError: If the system has no memory or no file descriptor left.
    """
    if not _ANONYMOUS:
        memory = SharedMemory(None, True, size)
        segment = Segment(memory.name, memory)
        Finalize(segment, memory.unlink, exitpriority=0)  # forked processes do not run it
        return segment
    key = f"arraybridge-{uuid4().hex}"
    with os.fdopen(os.memfd_create(key), "r+b", buffering=0) as file:
        file.truncate(size)
        return Segment(key, mmap(file.fileno(), size))


def _found(machine: str, process: int, key: str) -> Segment:
    """Map the segment of another process into this one, and return it.

    Further processes can then open the segment through this process.
    """
    if (segment := _segments.get(key)) is not None:
        return segment
    try:
        if machine != platform.node():
            raise FileNotFoundError(f"it is on another machine, {machine}")
        return Segment(key, _mapped_memory(process, key))
    except OSError as error:
        raise SharedMemoryGoneError(
            f"Cannot map the shared memory of process {process}: {error}. Keep the array until it has"
            " arrived. To send the values to another machine or user, send x.view(numpy.ndarray).",
            reason="its memory was freed or is not accessible from this process",
        ) from error


def _mapped_memory(process: int, key: str) -> Any:
    """Map the memory that has this key in the other process into this one, and return it."""
    if not _ANONYMOUS:
        # Python < 3.13: the resource tracker removes the name when a process tree that opened it ends.
        # That is too early for processes that open it later, but harmless to those that have mapped it.
        options: Any = {"track": False} if sys.version_info >= (3, 13) else {}
        return SharedMemory(key, **options)
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
            if key in str(path.readlink()):
                with path.open("r+b", buffering=0) as file:
                    # The descriptor may have been closed and reused since.
                    if key in str(Path(f"/proc/self/fd/{file.fileno()}").readlink()):
                        return mmap(file.fileno(), 0)
    raise FileNotFoundError("it no longer exists")


# -- reused segments ---------------------------------------------------------------------------------


class Exchange:
    """The segments that one process exports to and imports from other processes, for reuse.

    Fresh pages cost several times as much as copying into them. The process that creates a segment therefore
    caches it, the other process caches its mapping, and a flag in the segment records whether it is in use.
    """

    #: The size in bytes above which shared memory is faster than a pipe.
    LARGE = 1 << 17
    #: The largest number of unused segments that are cached.
    SPARE = 3
    #: The largest number of imported segments in use. Further buffers are copied, so that an array that the
    #: caller stores does not keep the other arrays of its message alive.
    IN_USE = 8

    def __init__(self) -> None:
        #: The segments that this process created. The one exported last is at the end.
        self.segments: list[Segment] = []
        #: The segments imported from other processes.
        self._imported: list[Segment] = []

    def export(self, buffers: list[Any]) -> tuple[Segment | None, list[Any]]:
        """Copy buffers of bytes to one segment, and return picklable arguments for `import_exported`.

        The result contains the bytes themselves if the buffers are small, or if no segment can be created.
        """
        places: list[slice] = []
        size = Segment.HEAD
        for buffer in buffers:  # align each buffer for every framework
            places.append(slice(size, size + len(buffer)))
            size += -(-len(buffer) // Segment.HEAD) * Segment.HEAD
        in_use = [one for one in self.segments if one.in_use.value]
        free = [one for one in self.segments if one not in in_use and one.size >= size > self.LARGE]
        segment = free.pop() if free else None
        if segment is None and size > self.LARGE:
            # Rounding up costs no memory: the system allocates pages when they are written to.
            with suppress(OSError):
                segment = make_segment(1 << (size - 1).bit_length())
        if segment is None:
            return None, [bytearray(buffer) for buffer in buffers]
        self.segments = [*in_use, *free[-self.SPARE :], segment]
        segment.in_use.value = True
        memory = np.asarray(segment)
        for place, buffer in zip(places, buffers, strict=True):
            memory[place] = buffer
        return segment, places

    def import_exported(self, segment: Segment | None, places: list[Any]) -> list[Any]:
        """Return writable views of the buffers. The segment is free again when all views are deleted."""
        if segment is None:
            return places
        memory = np.asarray(segment)
        # NumPy >= 2.5 releases the base of an array before it calls the array's finalizers. The finalizer
        # therefore holds the segment itself, so that its memory is still mapped. A fork drops the finalizer.
        Finalize(memory, Segment.set_free, (segment,))
        other_segments = [one for one in self._imported if one is not segment]
        is_full = sum(one.in_use.value for one in other_segments) >= self.IN_USE
        self._imported = [*other_segments, segment][-self.IN_USE - self.SPARE :]
        return [memory[place].copy() if is_full else memory[place] for place in places]


# -- arrays ------------------------------------------------------------------------------------------


@cache
def _sent_segments(process: int) -> list[Segment]:
    """Return the segments that this worker process has sent. At exit, the worker waits for their readers."""
    sent: list[Segment] = []

    def wait() -> None:
        until = time.monotonic() + 5
        while any(segment.in_use.value for segment in sent) and time.monotonic() < until:
            time.sleep(0.001)

    Finalize(None, wait, exitpriority=0)
    return sent


class SharedArray(np.ndarray):
    """A NumPy array in shared memory. Its pickle, or that of a view, contains only the location.

    Copies of the array and results of NumPy functions are ordinary arrays.
    """

    @property
    def segment(self) -> Segment | None:
        """The segment that contains the array; None if it has separate memory."""
        base: Any = self
        while base is not None and not isinstance(base, Segment):
            base = getattr(base, "base", None)
        return base

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:  # an in-place operation
            return self
        return array.view(np.ndarray)[()]  # [()] returns a scalar if the array is 0-d

    def __reduce_ex__(self, protocol: Any) -> Any:
        segment = self.segment
        if segment is None or not self.size:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        layout = address(self) - segment.address, self.shape, self.strides, self.dtype
        return _rebuild, (segment, self.flags.writeable, *layout)


def _rebuild(segment: Segment, writeable: bool, offset: int, shape: Any, strides: Any, dtype: Any) -> Any:
    segment.in_use.value = False
    array = SharedArray(shape, dtype, np.asarray(segment), offset, strides)
    array.flags.writeable = writeable
    return array


def _call_and_unwrap(array: SharedArray, method: str, *args: Any, **options: Any) -> Any:
    """Return the result of a `numpy.ndarray` method, as an ordinary array unless it is in a segment."""
    result = getattr(np.ndarray, method)(array, *args, **options)
    is_copy = isinstance(result, SharedArray) and result.segment is None
    return result.view(np.ndarray) if is_copy else result


_METHODS = [name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))]
for _name in ("__array_function__", "__copy__", "__deepcopy__", "__getitem__", *_METHODS):
    setattr(SharedArray, _name, partialmethod(_call_and_unwrap, _name))

NumpyFramework.classes.append(SharedArray)


def keep_until_arrival(x: SharedArray) -> None:
    """Keep the memory of an array that a worker sends until another process has mapped it.

    Only picklers that send to other processes call this function. `pickle.dumps` does not, because it is also
    used for hashes and caches, where no process receives the pickle.
    """
    segment = x.segment
    if segment is None or not x.size or multiprocessing.parent_process() is None:
        return
    sent = _sent_segments(os.getpid())
    segment.in_use.value = True
    sent[:] = [segment, *(one for one in sent if one.in_use.value and one is not segment)]


def _reduce_to_send(x: SharedArray) -> Any:
    keep_until_arrival(x)
    return x.__reduce_ex__(4)  # protocol 5 uses out-of-band buffers, which these picklers do not support


# These picklers send results and messages to other processes. A joblib worker imports the pickler of loky
# before this module.
ForkingPickler.register(SharedArray, _reduce_to_send)
for _name in ("joblib.externals.loky.backend.reduction", "loky.backend.reduction"):
    if (_module := sys.modules.get(_name)) is not None:
        _module.register(SharedArray, _reduce_to_send)


def shared(x: Any, dtype: Any = None) -> np.ndarray:
    """Return a NumPy array in memory that other processes can map.

    Pickling the array, a slice, a view or a transpose of it transfers only its location. Results of NumPy
    functions are ordinary arrays. The memory is freed with the last array in the last process: keep the array
    until it has arrived in the other process. Workers of process pools do so for arrays that they return or
    send. `pickle.dumps`, as used for hashes and caches, does not keep the array.

    Args:
        x: An array, whose values are copied once; or a shape, for an uninitialized array.
        dtype: The dtype of an uninitialized array, as in `aligned`, or the dtype to cast ``x`` to. Defaults
            to None: float64, or the dtype of ``x``.

    Returns:
        A NumPy array, C-contiguous and aligned for every framework.

    Raises:
        UnknownArrayError: If ``x`` is neither an array nor a shape.
        ArrayNotSupportedError: If the array is masked or sparse.
        DtypeNotSupportedError: If the elements of the array are not numbers.
        TypeError: If there is no such dtype, or an element of the shape is not an int.
        ValueError: If an element of the shape is negative, or the shape is too large.
        OSError: If the system has no memory or no file descriptor left. A note describes how to increase
            the limits.
        MemoryConversionError: Any other error raised by `convert_memory`.

    Example:
        >>> import pickle
        >>> x = shared((2, 3), "float32")
        >>> x[:] = 1
        >>> y = pickle.loads(pickle.dumps(x[0]))  # in this process or another
        >>> y[:] = 5
        >>> float(x[0, 0])
        5.0
    """
    has_values = not isinstance(x, (tuple, list, int, np.integer))
    if has_values:
        framework, data = source_of(x)
        if framework.sparse.layout(data):
            raise sparse_array_error(framework, data)
        source = convert_memory(x, "numpy", dtype=dtype)
    else:
        elements = np.dtype("float64") if dtype is None else dtype_names.dtype_of(dtype)
        source = np.broadcast_to(np.empty((), elements), host_memory.parse_shape(x))
    registry.framework("numpy").check(source)
    try:
        segment = make_segment(Segment.HEAD + source.nbytes)
    except OSError as error:
        note_on(
            error,
            f"Cannot allocate {source.nbytes} bytes of shared memory. Delete shared arrays, raise ulimit -n"
            " (each array uses one file descriptor per process), or enlarge /dev/shm (docker run"
            " --shm-size=2g).",
        )
        raise
    array: np.ndarray = _rebuild(segment, True, Segment.HEAD, source.shape, None, source.dtype)
    if has_values:
        array[...] = source
    return array
