"""`shared`: NumPy arrays in memory that processes share."""

from __future__ import annotations

import multiprocessing
import os
import reprlib
import sys
import time
from functools import cache, partialmethod
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import note_on
from arraybridge.frameworks.numpy.framework import NumpyFramework
from arraybridge.host import buffers, dtype_names
from arraybridge.host.buffers import address
from arraybridge.interface import registry
from arraybridge.interface.unsupported import sparse_array_error
from arraybridge.memory import serialization
from arraybridge.memory.segments import Segment, make_segment
from arraybridge.validation import add_hints

__all__ = ["SharedArray", "shared"]


#: The limits of the memory that a worker keeps for arrays that have not arrived. Some never do, because their
#: pickle was used for something else. Further arrays are sent by value.
_MOST_SENT_BYTES = 1 << 30
_MOST_SENT = 32


@cache
def _list_sent(process: int) -> list[Segment]:
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
        if not self.size:
            return SharedArray, (self.shape, self.dtype)
        if segment is None:
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


def keep_until_arrival(x: SharedArray) -> bool:
    """Keep the memory of an array that a worker sends until another process has mapped it.

    Only picklers that send to other processes call this function. `pickle.dumps` does not, because it is also
    used for hashes and caches, where no process receives the pickle.

    Returns:
        Whether the array can be sent by reference. If too much memory is kept already, it must be sent by
        value.
    """
    segment = x.segment
    if segment is None or not x.size or multiprocessing.parent_process() is None:
        return True
    sent = _list_sent(os.getpid())
    sent[:] = [one for one in sent if one.in_use.value and one is not segment]
    nbytes = sum(one.size for one in sent) + segment.size
    if len(sent) >= _MOST_SENT or (sent and nbytes > _MOST_SENT_BYTES):
        return False
    segment.in_use.value = True
    sent.append(segment)
    return True


def _reduce_to_send(x: SharedArray) -> Any:
    sent = x if keep_until_arrival(x) else x.view(np.ndarray)
    # Protocol 5 uses out-of-band buffers (numpy/numpy#12011), which these picklers lack.
    return sent.__reduce_ex__(4)


# These picklers send results and messages to other processes. A joblib worker imports the pickler of loky
# before this module.
serialization.before_sending[SharedArray] = keep_until_arrival
ForkingPickler.register(SharedArray, _reduce_to_send)
for _name in ("joblib.externals.loky.backend.reduction", "loky.backend.reduction"):
    if (_module := sys.modules.get(_name)) is not None:
        _module.register(SharedArray, _reduce_to_send)


@add_hints
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
        TypeError: If ``x`` is a list, there is no such dtype, or an element of the shape is not an int.
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
    if isinstance(x, list):
        shape = buffers.parse_shape(x)
        raise TypeError(
            f"shared() expected an array or a shape, got a list. Pass np.asarray({reprlib.repr(x)}) for an"
            f" array of these values, or the tuple {reprlib.repr(shape)} for an uninitialized array of this"
            " shape."
        )
    has_values = not isinstance(x, (tuple, int, np.integer))
    if has_values:
        framework, data = source_of(x)
        if framework.sparse.layout(data):
            raise sparse_array_error(framework, data)
        source = convert_memory(x, "numpy", dtype=dtype)
    else:
        elements = np.dtype("float64") if dtype is None else dtype_names.dtype_of(dtype)
        source = np.broadcast_to(np.empty((), elements), buffers.parse_shape(x))
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
