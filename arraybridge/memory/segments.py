"""Segments: blocks of memory that processes share, and the exchange of buffers through them.

On Linux, a segment is an anonymous file (``memfd_create``). The kernel frees it when no process maps it
anymore, even if a process crashes. Another process opens it through ``/proc`` while the sender maps it. On
other systems, a segment is a `multiprocessing.shared_memory` block, whose name Python's resource tracker
removes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import weakref
from contextlib import suppress
from mmap import mmap
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from arraybridge.errors import MemoryConversionError

__all__ = ["Exchange", "Segment", "SharedMemoryGoneError", "make_segment"]

_ANONYMOUS = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of a shared array was freed before the array arrived, or another process cannot map it.

    Also a ``RuntimeError``.

    Example:
        >>> import pickle
        >>> from arraybridge import shared
        >>> location = pickle.dumps(shared((100, 100), "float32"))  # no variable keeps the array alive
        >>> pickle.loads(location)
        Traceback (most recent call last):
            ...
        arraybridge.memory.segments.SharedMemoryGoneError: ...
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
        return _find, (platform.node(), os.getpid(), self.key)


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


def _find(machine: str, process: int, key: str) -> Segment:
    """Map the segment of another process into this one, and return it.

    Further processes can then open the segment through this process.
    """
    if (segment := _segments.get(key)) is not None:
        return segment
    try:
        if machine != platform.node():
            raise FileNotFoundError(f"it is on another machine, {machine}")
        return Segment(key, _map_memory(process, key))
    except OSError as error:
        raise SharedMemoryGoneError(
            f"Cannot map the shared memory of process {process}: {error}. Keep the array until it has"
            " arrived. To send the values to another machine or user, send x.view(numpy.ndarray).",
            reason="its memory was freed or is not accessible from this process",
        ) from error


def _map_memory(process: int, key: str) -> Any:
    """Map the memory that has this key in the other process into this one, and return it."""
    if not _ANONYMOUS:
        # Python < 3.13: the resource tracker removes the name when a process tree that opened it ends
        # (python/cpython#82300). That is too early for processes that open it later, but harmless to those
        # that have mapped it.
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
        # NumPy >= 2.5 releases the base of an array before it calls the array's finalizers
        # (numpy/numpy#30414). The finalizer therefore holds the segment itself, so that its memory is still
        # mapped. A fork drops the finalizer.
        Finalize(memory, Segment.set_free, (segment,))
        other_segments = [one for one in self._imported if one is not segment]
        is_full = sum(one.in_use.value for one in other_segments) >= self.IN_USE
        self._imported = [*other_segments, segment][-self.IN_USE - self.SPARE :]
        return [memory[place].copy() if is_full else memory[place] for place in places]
