"""Memory that processes share: `shared`, and the segments behind it.

On Linux a segment is a file of the kernel without a name (``memfd_create``), which goes with the last process
that maps it, however that ends. Another process opens it by way of ``/proc``, as long as the one that sent it
maps it. Elsewhere it is `multiprocessing.shared_memory`, whose names Python's tracker removes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial, wraps
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import MemoryConversionError, note_on
from arraybridge.frameworks import registry
from arraybridge.frameworks.hostmemory import address
from arraybridge.frameworks.numpy import NumpyFramework

__all__ = ["Exchange", "SharedArray", "SharedMemoryGoneError", "shared"]

_ANONYMOUS = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()

if _ANONYMOUS:  # Python's mmap keeps a descriptor for each mapping; before 3.13 always
    _system = ctypes.CDLL(None, use_errno=True)
    _system.mmap.restype = ctypes.c_void_p


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of a shared array went before the array arrived, or is out of this process's reach."""


class Segment:
    """Memory that processes map, each as long as anything there refers to it; bytes to NumPy.

    Pickled, it is the place where another process finds it, while this one has it and does not ``hide()`` it.
    ``lent.value``, its first byte, is the same in all of them; arrays begin at `HEAD`.
    """

    HEAD = 64

    def __init__(self, key: str, size: int, address: int, unmap: Callable[[], Any]) -> None:
        self.key, self.size, self.address = key, size, address
        self.lent = ctypes.c_bool.from_address(address)
        data = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.__array_interface__: dict[str, Any] = data
        self.hide: Callable[[], Any] = lambda: None
        weakref.finalize(self, unmap).atexit = False
        _segments[key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (platform.node(), os.getpid(), self.key, self.size)


# Key → the segment that is mapped here.
_segments: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


def make_segment(size: int) -> Segment:
    """A new segment, whose bytes are zero; an `OSError` where the system has no room or no descriptor."""
    if not _ANONYMOUS:
        return _named(None, size)
    key = f"arraybridge-{uuid4().hex}"
    descriptor = os.memfd_create(key)
    segment = _mapped(key, size, descriptor)
    os.ftruncate(descriptor, size)
    return segment


def _mapped(key: str, size: int, descriptor: int) -> Segment:
    """The segment of an open file, whose descriptor it takes over."""
    length, access = ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE
    address = _system.mmap(None, length, access, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
    if address == ctypes.c_void_p(-1).value:
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    segment = Segment(key, size, address, partial(_system.munmap, ctypes.c_void_p(address), length))
    segment.hide = weakref.finalize(segment, os.close, descriptor)
    return segment


def _found(machine: str, process: int, key: str, size: int) -> Segment:
    """The segment of a process, mapped here too, where others find it from now on."""
    if (segment := _segments.get(key)) is not None:
        return segment
    try:
        if machine != platform.node():
            raise FileNotFoundError(f"it is on another machine, {machine}")
        return _opened(process, key, size) if _ANONYMOUS else _named(key, size)
    except OSError as error:
        raise SharedMemoryGoneError(
            f"the shared memory of process {process} cannot be mapped: {error}. Keep the array until it has"
            " arrived; to another machine or user, send x.view(numpy.ndarray), whose bytes travel.",
            reason="it went, or is out of this process's reach",
        ) from error


def _opened(process: int, key: str, size: int) -> Segment:
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            if key in str(path.readlink()):
                descriptor = os.open(path, os.O_RDWR)
                if key in str(Path(f"/proc/self/fd/{descriptor}").readlink()):  # and still that file
                    return _mapped(key, size, descriptor)
                os.close(descriptor)
    raise FileNotFoundError("it is not there any more")


def _named(key: str | None, size: int) -> Segment:
    """The segment of that name; without one a new one, whose name this process takes away in the end."""
    # Before 3.13 the tracker of each family of processes removes the name when that family ends: too early
    # for those who would open it later, and of no matter to those who have mapped it.
    options: Any = {"track": False} if key is not None and sys.version_info >= (3, 13) else {}
    memory = SharedMemory(key, key is None, size, **options)
    buffer: Any = memory.buf
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    segment = Segment(memory.name, size, address, memory.close)
    if key is None:
        Finalize(segment, memory.unlink, exitpriority=0)  # which a fork leaves alone
    return segment


# -- memory that is used again -----------------------------------------------------------------------


class Exchange:
    """What one process lends to others, and borrows of them: segments that are used again and again.

    Fresh pages cost several times what copying into them does. So the process that makes a segment keeps it,
    the other one keeps its mapping for a while, and the segment itself says whether it is in use.
    """

    # Segments that are in use here at most: what comes then is copied, so that an array that is kept does not
    # keep all that it came with. Segments that are kept though nobody uses them.
    BORROWED, SPARE = 8, 3

    def __init__(self) -> None:
        #: Segments made here, the one lent last at the end; and those of others.
        self.segments: list[Segment] = []
        self._borrowed: list[Segment] = []

    def lend(self, buffers: list[Any]) -> tuple[Segment | None, list[Any]]:
        """Copy buffers of bytes to one segment; what is returned pickles, and is what `borrow` takes.

        Where the system has no more segments, the bytes go themselves.
        """
        sizes = [len(buffer) for buffer in buffers]
        size = sum(sizes) + Segment.HEAD * (len(sizes) + 1)
        lent = [one for one in self.segments if one.lent.value]
        free = [one for one in self.segments if one not in lent and one.size >= size]
        try:  # pages are had when they are written to
            segment = free.pop() if free else make_segment(1 << (size - 1).bit_length())
        except OSError:
            return None, [bytearray(buffer) for buffer in buffers]
        self.segments = [*lent, *free[-self.SPARE :], segment]
        segment.lent.value = True
        for part, buffer in zip(_parts(segment, sizes), buffers, strict=True):
            part[:] = buffer
        return segment, sizes

    def borrow(self, segment: Segment | None, sizes: list[Any]) -> list[Any]:
        """The buffers, writable; the segment is free again when they and all that lies over them are gone."""
        if segment is None:
            return sizes
        parts = list(_parts(segment, sizes))
        Finalize(parts[0].base, setattr, (segment.lent, "value", False))  # which a fork leaves alone
        others = [one for one in self._borrowed if one is not segment]
        in_use = [one for one in others if one.lent.value]
        self._borrowed = [*others, segment][-self.BORROWED - self.SPARE :]
        if segment not in self.segments:
            segment.hide()  # nobody else opens it here, so that its descriptor can go
        return [part.copy() for part in parts] if len(in_use) == self.BORROWED else parts


def _parts(segment: Segment, sizes: list[int]) -> Iterator[np.ndarray]:
    """The memory of a segment cut into parts, each aligned for every framework."""
    memory, start = np.asarray(segment), Segment.HEAD
    for size in sizes:
        yield memory[start : start + size]
        start += -(-size // Segment.HEAD) * Segment.HEAD


# -- arrays ------------------------------------------------------------------------------------------

# What this process of a pool has sent, and nobody has read: there it would be gone as soon as it is sent.
_sent: list[Segment] = []


@cache
def _wait_for_readers(process: int) -> None:
    """Let this process of a pool, which may end after any task, stay a while until it is read."""

    def wait() -> None:
        until = time.monotonic() + 5
        while any(segment.lent.value for segment in _sent) and time.monotonic() < until:
            time.sleep(0.001)

    Finalize(None, wait, exitpriority=0)


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
        if array is self:  # in place
            return self
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        segment = self.segment
        if segment is None or not self.size:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        if multiprocessing.parent_process() is not None:
            segment.lent.value = True
            _sent[:] = [segment, *(one for one in _sent if one.lent.value)]
            _wait_for_readers(os.getpid())
        layout = address(self) - segment.address, self.shape, self.strides, self.dtype
        return _arrived, (segment, self.flags.writeable, *layout)


def _arrived(segment: Segment, writeable: bool, offset: int, shape: Any, strides: Any, dtype: Any) -> Any:
    segment.lent.value = False
    array = SharedArray(shape, dtype, np.asarray(segment), offset, strides)
    array.flags.writeable = writeable
    return array


def _plain_method(name: str) -> Any:
    """A method of NumPy's, whose results are of the class only where they lie in a segment."""
    method = getattr(np.ndarray, name)

    @wraps(method, assigned=("__name__", "__qualname__"))  # NumPy's examples are not of this module
    def call(self: SharedArray, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        is_copy = isinstance(result, SharedArray) and result.segment is None
        return result.view(np.ndarray) if is_copy else result

    return call


_METHODS = [name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))]
for _name in ("__array_function__", "__copy__", "__deepcopy__", "__getitem__", *_METHODS):
    setattr(SharedArray, _name, _plain_method(_name))

NumpyFramework.classes.append(SharedArray)


def shared(x: Any, dtype: Any = None) -> np.ndarray:
    """An array in memory that other processes can map; pickled, it hands over its place and not its bytes.

    So do slices, views and transposes of it; what NumPy computes of it is an ordinary array. The memory goes
    with the last array in the last process: keep the array until it has arrived. (A worker of a pool does so
    with what it returns.)

    Args:
        x: an array, whose values are copied once; or a shape, for an array with values unset.
        dtype: of an array with values unset; or one to cast to.

    Returns:
        a NumPy array, C-contiguous and aligned for every framework.

    Raises:
        ArrayNotSupportedError, DtypeNotSupportedError: it is masked, or its elements are no numbers.
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
        source = np.broadcast_to(np.empty((), dtype), tuple(np.atleast_1d(x).tolist()))
    registry.framework("numpy").check(source)
    try:
        segment = make_segment(Segment.HEAD + source.nbytes)
    except OSError as error:
        note_on(
            error,
            f"{source.nbytes} bytes of shared memory cannot be had. Let go of shared arrays, raise the limit"
            " of descriptors (ulimit -n), of which an array takes one in each process, or enlarge /dev/shm"
            " (docker run --shm-size=2g), whichever is short",
        )
        raise
    array: np.ndarray = _arrived(segment, True, Segment.HEAD, source.shape, None, source.dtype)
    if has_values:
        array[...] = source
    return array
