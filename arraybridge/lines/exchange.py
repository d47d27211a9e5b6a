"""What two processes send each other: large arrays by memory that both map, and that is used again.

Fresh pages cost several times what copying into them does. So the process that makes a segment keeps it, the
other one keeps its mapping, and the segment itself says whether anybody uses it.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.frameworks import registry
from arraybridge.frameworks.numpy import NumpyFast
from arraybridge.lines.streams import refuse_graph
from arraybridge.memory.shared import Segment, SharedArray, make_segment, open_segment

# Bytes from which on an array goes by shared memory, where a pipe becomes slow, and messages for which a
# segment is kept that none of them uses.
_LARGE, _KEPT = 1 << 17, 8


class Exchange:
    """One end of the way between two processes, which send in turns.

    It makes bytes of objects and objects of bytes: so what cannot be pickled is told from a process that has
    died. The pickler of multiprocessing would move torch's tensors to shared memory from under the arrays of
    NumPy and JAX that share theirs.
    """

    def __init__(self) -> None:
        #: Segments made here, each with the number of the last message that it went with.
        self.segments: dict[Segment, int] = {}
        #: Those of the other side, which stay mapped.
        self._mapped: set[Segment] = set()
        self._messages = 0

    def dumps(self, x: Any) -> bytes:
        """The object as the other side's `loads` reads it; what cannot be pickled raises."""
        self._messages += 1
        for segment, last in list(self.segments.items()):
            if segment.state.value != Segment.ON_ITS_WAY:
                segment.hide()  # the other side has mapped it, so that its descriptor can go
            if segment.state.value == Segment.FREE and last < self._messages - _KEPT:
                segment.state.value = Segment.DROPPED
                del self.segments[segment]
        pickler = _Pickler([one for one in self.segments if one.state.value == Segment.FREE])
        pickler.dump(x)
        for segment in pickler.used:
            segment.state.value = Segment.ON_ITS_WAY
            self.segments[segment] = self._messages
        return pickle.dumps([segment.place for segment in pickler.used]) + pickler.file.getvalue()

    def loads(self, data: bytes) -> Any:
        """The object that the other side has sent."""
        file = io.BytesIO(data)
        segments: list[Segment] = []
        for place in pickle.load(file):  # noqa: S301  # our own process
            segments.append(open_segment(place))
            segments[-1].hide()  # nobody else opens it here
        in_use = {one for one in self._mapped if one.state.value != Segment.DROPPED}
        self._mapped = in_use.union(segments)
        return pickle.load(file, buffers=map(_in_use, segments))  # noqa: S301


def _in_use(segment: Segment) -> np.ndarray:
    """The bytes of a segment, which is free again when they and every array over them are gone."""
    segment.state.value = Segment.ARRIVED
    memory = np.asarray(segment)
    weakref.finalize(memory, _free, segment, os.getpid()).atexit = False
    return memory


def _free(segment: Segment, process: int) -> None:
    if os.getpid() == process:  # what a fork lets go of is in use on
        segment.state.value = Segment.FREE


class _Pickler(pickle.Pickler):
    """Writes large arrays to segments, in the order in which it comes to them."""

    def __init__(self, free: list[Segment]) -> None:
        self.file, self._free = io.BytesIO(), free
        used: dict[Segment, pickle.PickleBuffer] = {}
        super().__init__(self.file, 5, buffer_callback=lambda buffer: buffer not in used.values())
        self.used = used

    def reducer_override(self, obj: Any) -> Any:
        is_shared = isinstance(obj, SharedArray) and obj.segment is not None
        owner = None if is_shared or isinstance(obj, type) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        refuse_graph(owner, obj)
        if not _is_sent_by_value(owner, obj):
            return NotImplemented
        if isinstance(obj, np.ndarray):
            with suppress(OSError):  # where the system has no more segments, it goes by the pipe
                return self._in_segment(obj) if obj.nbytes > _LARGE else NotImplemented
            return NotImplemented
        # As a NumPy array: JAX's pickle cuts 64 bits down to 32, torch's takes a slice's whole storage along.
        with suppress(ArrayNotSupportedError, DtypeNotSupportedError):  # sparse, of strings, …
            return _converted, (convert_memory(obj, "numpy"), owner.name)
        return NotImplemented

    def _in_segment(self, x: np.ndarray) -> tuple[Any, ...]:
        order: Any = "F" if x.flags.f_contiguous and not x.flags.c_contiguous else "C"
        size = 1 << (Segment.HEAD + x.nbytes - 1).bit_length()  # pages are had when they are written to
        fitting = [one for one in self._free if one.place.size == size and one not in self.used]
        segment = fitting[0] if fitting else make_segment(size)
        memory: Any = np.asarray(segment)
        self.used[segment], layout = pickle.PickleBuffer(memory), (x.shape, x.dtype, order)
        np.copyto(_over(memory, *layout), x)
        return _over, (self.used[segment], *layout)


def _is_sent_by_value(owner: Any, x: Any) -> bool:
    """Whether the values are all that there is to send, and lie on the host."""
    if isinstance(x, np.ndarray):
        return type(x) in NumpyFast.classes and not x.dtype.hasobject
    if not owner.has_host or owner.requires_grad(x):
        return False
    plain = owner.is_plain(x) and not owner.pool.is_scattered(x) and not owner.must_copy(x)
    return bool(plain and owner.device_of(x).kind == "cpu")


def _over(memory: Any, shape: Any, dtype: Any, order: Any) -> np.ndarray:
    """An array over what a segment is for."""
    return np.ndarray(shape, dtype, memory, Segment.HEAD, order=order)


def _converted(array: np.ndarray, name: str) -> Any:
    return convert_memory(array, name, device="cpu")
