"""Memory that processes share: `shared`, and the segments behind it.

On Linux a segment is a file of the kernel without a name (``memfd_create``), which goes with the last process
that maps it, however that ends. Another process opens it by way of ``/proc``, as long as the one that sent it
keeps its descriptor. Elsewhere it is `multiprocessing.shared_memory`, whose names Python's tracker removes.
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
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError, note_on
from arraybridge.frameworks.numpy import NumpyFast

__all__ = ["Segment", "SharedArray", "SharedMemoryGoneError", "make_segment", "open_segment", "shared"]


class SharedMemoryGoneError(MemoryConversionError, RuntimeError):
    """The memory of a shared array went before the array arrived, or is out of this process's reach."""


class Place(NamedTuple):
    """Where another process finds a segment."""

    machine: str
    process: int
    descriptor: int
    key: str
    size: int


class Segment:
    """Memory that other processes can map, in this one as long as somebody refers to it; bytes to NumPy.

    After ``hide()`` no other process can open it any more. ``state.value`` is the same in all of them.
    """

    # Bytes in front of what the segment is for. The first of them is the state.
    HEAD = 64
    FREE, ON_ITS_WAY, ARRIVED, DROPPED = range(4)

    def __init__(self, place: Place, address: int, unmap: Callable[[], Any], hide: Callable[[], Any]) -> None:
        self.place, self.address = place, address
        data = {"data": (address, False), "shape": (place.size,), "typestr": "|u1", "version": 3}
        self.__array_interface__: dict[str, Any] = data
        self.state = ctypes.c_ubyte.from_address(address)
        unmapping, self.hide = weakref.finalize(self, unmap), weakref.finalize(self, hide)
        unmapping.atexit, self.hide.atexit = False, not _ANONYMOUS
        _segments[place.key] = self


# Key → the segment that is mapped here.
_segments: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


def make_segment(size: int) -> Segment:
    """A new segment, whose bytes are zero.

    Raises:
        OSError: the system has no room for it, or no descriptor.
    """
    try:
        return _make_anonymous(size) if _ANONYMOUS else _make_named(size)
    except OSError as error:
        note_on(
            error,
            f"{size} bytes of shared memory cannot be had. Let go of shared arrays, raise the limit of"
            " descriptors (ulimit -n), of which an array takes one in each process, or enlarge /dev/shm"
            " (docker run --shm-size=2g), whichever is short",
        )
        raise


def open_segment(place: Place) -> Segment:
    """The segment that lies there, mapped here too, where others may open it from now on.

    Raises:
        SharedMemoryGoneError: it is not there any more, on another machine, or another user's.
    """
    segment = _segments.get(place.key)
    if segment is not None:
        return segment
    try:
        if place.machine != platform.node():
            raise FileNotFoundError(f"it is on another machine, {place.machine}")
        return _open_anonymous(place) if _ANONYMOUS else _open_named(place)
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        raise SharedMemoryGoneError(
            f"the shared memory of process {place.process} cannot be mapped: {error}. Keep the array until it"
            " has arrived; to another machine or user, send x.view(numpy.ndarray), whose bytes travel.",
            reason="it went, or is out of this process's reach",
        ) from error


# -- Linux, and other systems ------------------------------------------------------------------------

_ANONYMOUS = hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()

if _ANONYMOUS:
    # Python's mmap keeps a descriptor for each mapping; before 3.13 always.
    _system = ctypes.CDLL(None, use_errno=True)
    _system.mmap.restype = ctypes.c_void_p
    _system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _make_anonymous(size: int) -> Segment:
    key = f"arraybridge-{uuid4().hex}"
    descriptor = os.memfd_create(key)
    try:
        os.ftruncate(descriptor, size)
        return _open_anonymous(Place(platform.node(), os.getpid(), descriptor, key, size))
    finally:
        os.close(descriptor)


def _open_anonymous(place: Place) -> Segment:
    descriptor = os.open(f"/proc/{place.process}/fd/{place.descriptor}", os.O_RDWR)
    with ExitStack() as opened:
        opened.callback(os.close, descriptor)
        if place.key not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise FileNotFoundError("its descriptor is that of another file by now")
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _system.mmap(None, place.size, access, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        hide = opened.pop_all().close
    here = place._replace(process=os.getpid(), descriptor=descriptor)
    return Segment(here, address, partial(_system.munmap, address, place.size), hide)


def _make_named(size: int) -> Segment:
    memory, process = SharedMemory(create=True, size=size), os.getpid()

    def hide() -> None:
        if os.getpid() == process:  # a fork leaves the name alone
            memory.unlink()

    return _named(Place(platform.node(), process, -1, memory.name, size), memory, hide)


def _open_named(place: Place) -> Segment:
    # Before 3.13 the tracker of each family of processes removes the name when that family ends: too early
    # for those who would open it later, and of no matter to those who have mapped it.
    options: Any = {"track": False} if sys.version_info >= (3, 13) else {}
    return _named(place, SharedMemory(place.key, **options), lambda: None)


def _named(place: Place, memory: SharedMemory, hide: Callable[[], Any]) -> Segment:
    buffer: Any = memory.buf
    return Segment(place, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), memory.close, hide)


# -- arrays ------------------------------------------------------------------------------------------

# What a worker of a pool has sent, and nobody has read: there it is gone as soon as it is sent.
_sent: list[Segment] = []


def _hand_over(segment: Segment) -> None:
    segment.state.value = Segment.ON_ITS_WAY
    _sent[:] = [segment, *_unread()]
    _stay_until_read(os.getpid())


def _unread() -> list[Segment]:
    return [segment for segment in _sent if segment.state.value == Segment.ON_ITS_WAY]


@cache
def _stay_until_read(process: int) -> None:
    """Let this process of a pool, which may end after any task, wait a while for its readers."""

    def wait() -> None:
        until = time.monotonic() + 5
        while _unread() and time.monotonic() < until:
            time.sleep(0.001)

    Finalize(None, wait, exitpriority=0)


class SharedArray(np.ndarray):
    """A NumPy array in memory that other processes map, when it or a view of it is pickled.

    What NumPy computes or copies of it is an ordinary array.
    """

    segment: Segment | None = None

    def __array_finalize__(self, origin: Any) -> None:
        segment = getattr(origin, "segment", None)
        if segment is not None and 0 <= _start(self) - segment.address < segment.place.size:
            self.segment = segment

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        if array is self:  # in place
            return self
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _plain(super().__array_function__(function, types, args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        segment = self.segment
        if segment is None:
            return self.view(np.ndarray).__reduce_ex__(protocol)
        if multiprocessing.parent_process() is not None:
            _hand_over(segment)
        place = segment.place._replace(process=os.getpid())  # a fork has a descriptor of its own
        layout = _start(self) - segment.address, self.shape, self.strides, self.dtype
        return _arrived, (place, self.flags.writeable, *layout)


def _arrived(place: tuple[Any, ...], writeable: bool, *layout: Any) -> SharedArray:
    segment = open_segment(Place(*place))
    segment.state.value = Segment.ARRIVED
    array = _array(segment, *layout)
    array.flags.writeable = writeable
    return array


def _array(segment: Segment, offset: int, shape: Any, strides: Any, dtype: Any) -> SharedArray:
    array = SharedArray(shape, dtype, np.asarray(segment), offset, strides)
    array.segment = segment
    return array


def _start(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _plain(result: Any) -> Any:
    """A result of NumPy's, without the class where it lies elsewhere."""
    if isinstance(result, SharedArray) and result.segment is None:
        return result.view(np.ndarray)
    if type(result) in (list, tuple):
        return type(result)([_plain(x) for x in result])
    return result


def _plain_method(name: str) -> Any:
    method = getattr(np.ndarray, name)
    return lambda self, *args, **options: _plain(method(self, *args, **options))


# What may copy and does not pass by `__array_wrap__`.
for _name in (
    *("__getitem__", "__copy__", "__deepcopy__", "argpartition", "argsort", "astype", "byteswap", "choose"),
    *("compress", "copy", "diagonal", "dot", "flatten", "ravel", "repeat", "reshape", "round", "take"),
):
    setattr(SharedArray, _name, _plain_method(_name))

NumpyFast.classes.append(SharedArray)


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
        ArrayNotSupportedError: it would hold Python objects, or it is masked.
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
    if isinstance(source, np.ma.MaskedArray):
        raise ArrayNotSupportedError("shared memory has no place for a mask; pass x.filled(value)")
    if source.dtype.hasobject:
        raise ArrayNotSupportedError("objects of Python cannot lie in memory that processes share")
    segment = make_segment(Segment.HEAD + source.nbytes)
    array = _array(segment, Segment.HEAD, source.shape, None, source.dtype)
    if has_values:
        array[...] = source
    return array
