"""Memory that processes share: `shared`, and the segments behind it.

On Linux a segment is a file of the kernel without a name (``memfd_create``), which goes with the last process
that maps it, however that ends. Another process opens it by way of ``/proc``, as long as the one that sent it
maps it. Elsewhere it is `multiprocessing.shared_memory`, whose names Python's tracker removes.
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

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import MemoryConversionError, note_on
from arraybridge.frameworks import dtype_names, host_memory, registry
from arraybridge.frameworks.host_memory import address
from arraybridge.frameworks.numpy import NumpyFramework

__all__ = ["Exchange", "SharedArray", "SharedMemoryGoneError", "shared"]

_ANONYMOUS = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of a shared array was freed before the array arrived, or another process cannot map it.

    Also a ``RuntimeError``.

    Example:
        >>> import pickle
        >>> location = pickle.dumps(shared((100, 100), "float32"))  # nothing keeps the array
        >>> pickle.loads(location)
        Traceback (most recent call last):
            ...
        arraybridge.memory.shared_memory.SharedMemoryGoneError: ...
    """


class Segment:
    """Memory that processes map, each as long as anything there refers to it; bytes to NumPy.

    Pickled, it is the place where another process finds it, while this one has it. ``in_use.value``, its first
    byte, is the same in all of them; arrays begin at `HEAD`.
    """

    HEAD = 64

    def __init__(self, key: str, memory: Any) -> None:
        self.key = key
        self._memory = memory  # an mmap or SharedMemory, which is unmapped when it goes
        buffer = getattr(memory, "buf", memory)
        self.size = len(buffer)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.in_use = ctypes.c_bool.from_address(self.address)
        data = {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}
        self.__array_interface__: dict[str, Any] = data
        _segments[key] = self

    def set_free(self) -> None:
        """Report to all processes that nothing uses the segment."""
        self.in_use.value = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (platform.node(), os.getpid(), self.key)


# Key → the segment that is mapped here, by way of a descriptor of its own.
_segments: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


def make_segment(size: int) -> Segment:
    """A new segment, whose bytes are zero; an `OSError` where the system has no room or no descriptor."""
    if not _ANONYMOUS:
        memory = SharedMemory(None, True, size)
        segment = Segment(memory.name, memory)
        Finalize(segment, memory.unlink, exitpriority=0)  # which a fork leaves alone
        return segment
    key = f"arraybridge-{uuid4().hex}"
    with os.fdopen(os.memfd_create(key), "r+b", buffering=0) as file:
        file.truncate(size)
        return Segment(key, mmap(file.fileno(), size))


def _found(machine: str, process: int, key: str) -> Segment:
    """The segment of a process, mapped here too, where others find it from now on."""
    if (segment := _segments.get(key)) is not None:
        return segment
    try:
        if machine != platform.node():
            raise FileNotFoundError(f"it is on another machine, {machine}")
        return Segment(key, _mapped_memory(process, key))
    except OSError as error:
        raise SharedMemoryGoneError(
            f"the shared memory of process {process} cannot be mapped: {error}. Keep the array until it has"
            " arrived; to another machine or user, send x.view(numpy.ndarray), whose bytes travel.",
            reason="it went, or is out of this process's reach",
        ) from error


def _mapped_memory(process: int, key: str) -> Any:
    """The memory of that key, which the process has mapped."""
    if not _ANONYMOUS:
        # Before 3.13 the tracker of each family of processes removes the name when that family ends: too
        # early for those who would open it later, and of no matter to those who have mapped it.
        options: Any = {"track": False} if sys.version_info >= (3, 13) else {}
        return SharedMemory(key, **options)
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            if key in str(path.readlink()):
                with path.open("r+b", buffering=0) as file:
                    if key in str(Path(f"/proc/self/fd/{file.fileno()}").readlink()):  # still that file
                        return mmap(file.fileno(), 0)
    raise FileNotFoundError("it is not there any more")


# -- memory that is used again -----------------------------------------------------------------------


class Exchange:
    """What one process lends to others, and borrows of them: segments that are used again and again.

    Fresh pages cost several times what copying into them does. So the process that makes a segment keeps it,
    the other one keeps its mapping for a while, and the segment itself says whether it is in use.
    """

    #: Bytes from which on memory is faster than a pipe.
    LARGE = 1 << 17
    #: The number of unused segments that are cached.
    SPARE = 3
    #: The largest number of imported segments in use. Buffers beyond it are copied, so that an array that the
    #: caller stores does not keep the other arrays of its message alive.
    IN_USE = 8

    def __init__(self) -> None:
        #: Segments made here, the one lent last at the end; and those of others.
        self.segments: list[Segment] = []
        self._in_use: list[Segment] = []

    def export(self, buffers: list[Any]) -> tuple[Segment | None, list[Any]]:
        """Copy buffers of bytes to one segment; what is returned pickles, and is what `import_exported` takes.

        Few bytes go themselves, and all where the system has no more segments.
        """
        places: list[slice] = []
        size = Segment.HEAD
        for buffer in buffers:  # each aligned for every framework
            places.append(slice(size, size + len(buffer)))
            size += -(-len(buffer) // Segment.HEAD) * Segment.HEAD
        in_use = [one for one in self.segments if one.in_use.value]
        free = [one for one in self.segments if one not in in_use and one.size >= size > self.LARGE]
        segment = free.pop() if free else None
        if segment is None and size > self.LARGE:
            with suppress(OSError):  # pages are had when they are written to
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
        """The buffers, writable; the segment is free again when they and all that lies over them are gone."""
        if segment is None:
            return places
        memory = np.asarray(segment)
        # NumPy >= 2.5 releases the base of an array before it calls the array's finalizers. The finalizer
        # therefore holds the segment itself, so that its memory is still mapped. A fork drops the finalizer.
        Finalize(memory, Segment.set_free, (segment,))
        other_segments = [one for one in self._in_use if one is not segment]
        is_full = sum(one.in_use.value for one in other_segments) >= self.IN_USE
        self._in_use = [*other_segments, segment][-self.IN_USE - self.SPARE :]
        return [memory[place].copy() if is_full else memory[place] for place in places]


# -- arrays ------------------------------------------------------------------------------------------


@cache
def _sent_segments(process: int) -> list[Segment]:
    """What this process of a pool has sent. It may end after any task, and waits for the readers."""
    sent: list[Segment] = []

    def wait() -> None:
        until = time.monotonic() + 5
        while any(segment.in_use.value for segment in sent) and time.monotonic() < until:
            time.sleep(0.001)

    Finalize(None, wait, exitpriority=0)
    return sent


class SharedArray(np.ndarray):
    """A NumPy array in memory that other processes map, when it or a view of it is pickled.

    What NumPy computes or copies of it is an ordinary array.
    """

    @property
    def segment(self) -> Segment | None:
        """The memory that it lies in; None: memory of its own."""
        base: Any = self
        while base is not None and not isinstance(base, Segment):
            base = getattr(base, "base", None)
        return base

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return self if array is self else array.view(np.ndarray)[()]  # in place; a number where it is 0-d

    def _plain(self, method: str, *args: Any, **options: Any) -> Any:
        """What a method of NumPy's returns, of this class only where it lies in a segment."""
        result = getattr(np.ndarray, method)(self, *args, **options)
        is_copy = isinstance(result, SharedArray) and result.segment is None
        return result.view(np.ndarray) if is_copy else result

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


_METHODS = [name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))]
for _name in ("__array_function__", "__copy__", "__deepcopy__", "__getitem__", *_METHODS):
    setattr(SharedArray, _name, partialmethod(SharedArray._plain, _name))

NumpyFramework.classes.append(SharedArray)


def keep_until_arrival(x: SharedArray) -> None:
    """Keep the memory of an array that is sent from a worker until another process has mapped it.

    Only picklers that send to other processes call this. `pickle.dumps` serves hashes and caches as well, and
    nothing ever arrives from those.
    """
    segment = x.segment
    if segment is None or not x.size or multiprocessing.parent_process() is None:
        return
    sent = _sent_segments(os.getpid())
    segment.in_use.value = True
    sent[:] = [segment, *(one for one in sent if one.in_use.value and one is not segment)]


def _reduce_to_send(x: SharedArray) -> Any:
    keep_until_arrival(x)
    return x.__reduce_ex__(4)  # protocol 5 has separate buffers, which these picklers do not take


# Picklers of results and messages. A worker of joblib has loaded loky's before it loads this module.
ForkingPickler.register(SharedArray, _reduce_to_send)
for _name in ("joblib.externals.loky.backend.reduction", "loky.backend.reduction"):
    if (_module := sys.modules.get(_name)) is not None:
        _module.register(SharedArray, _reduce_to_send)


def shared(x: Any, dtype: Any = None) -> np.ndarray:
    """An array in memory that other processes can map; pickled, it hands over its place and not its bytes.

    So do slices, views and transposes of it; what NumPy computes of it is an ordinary array. The memory goes
    with the last array in the last process: keep the array until it has arrived. Workers of pools do so with
    the arrays that they return or send. `pickle.dumps`, as in a hash or a cache, keeps nothing.

    Args:
        x: an array, whose values are copied once; or a shape, for an array with values unset.
        dtype: the dtype of an array with values unset, as in `aligned`; or one to cast to.

    Returns:
        a NumPy array, C-contiguous and aligned for every framework.

    Raises:
        ArrayNotSupportedError, DtypeNotSupportedError: it is masked, or its elements are no numbers.
        TypeError: there is no such dtype, or an element of the shape is not a whole number.
        ValueError: an element of the shape is negative, or the shape is too large.
        OSError: the system has no room for it; a note says what to do.
        as `convert_memory`: ``x`` is no array.

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
        source = convert_memory(x, "numpy", dtype=dtype)
    else:
        elements = np.dtype("float64") if dtype is None else dtype_names.dtype_of(dtype)
        source = np.broadcast_to(np.empty((), elements), host_memory.extents(x))
    registry.framework("numpy").check(source)
    try:
        segment = make_segment(Segment.HEAD + source.nbytes)
    except OSError as error:
        note_on(
            error,
            f"{source.nbytes} bytes of shared memory cannot be had. Let go of shared arrays, raise ulimit -n"
            " (an array takes a descriptor in each process), or enlarge /dev/shm (docker run --shm-size=2g)",
        )
        raise
    array: np.ndarray = _rebuild(segment, True, Segment.HEAD, source.shape, None, source.dtype)
    if has_values:
        array[...] = source
    return array
