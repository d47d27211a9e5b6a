"""What two processes send each other: large arrays by memory that both map, and that is used again.

Fresh pages cost several times what copying into them does. So the process that makes a segment keeps it, the
other one keeps its mapping, and says with its next message which segments nobody uses there any more.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.frameworks import registry
from arraybridge.frameworks.numpy import NumpyFast
from arraybridge.lines.gradients import refuse_graphs
from arraybridge.memory.shared import Place, Segment, SharedArray, make_segment, open_segment

__all__ = ["Exchange"]

# Bytes from which on an array goes by shared memory, and segments that are kept for arrays to come.
_LARGE, _SPARE = 1 << 20, 4


class Exchange:
    """One end of the way between two processes, which send in turns.

    It makes bytes of objects and objects of bytes: so what cannot be pickled is told from a process that has
    died. The pickler of multiprocessing would move torch's tensors to shared memory from under the arrays of
    NumPy and JAX that share theirs.
    """

    def __init__(self) -> None:
        # Segments of our own: spare, in use on the other side, and of these the ones sent last.
        self._spare: list[Segment] = []
        self._lent: dict[str, Segment] = {}
        self._new: list[Segment] = []
        # Those of the other side, and the keys of those that nobody uses here any more.
        self._mapped: dict[str, Segment] = {}
        self._unused: deque[str] = deque()
        self._dropped: list[str] = []

    def dumps(self, x: Any) -> bytes:
        """The object as the other side's `loads` reads it; what cannot be pickled raises."""
        pickler = _Pickler(self)
        with ExitStack() as undone:
            undone.callback(lambda: self._spare.extend(pickler.segments))
            pickler.dump(x)
            undone.pop_all()
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        dropped, self._dropped = self._dropped, []
        self._lent.update((segment.place.key, segment) for segment in pickler.segments)
        self._new += pickler.segments
        places = [segment.place for segment in pickler.segments]
        return pickle.dumps((unused, dropped, places)) + pickler.file.getvalue()

    def loads(self, data: bytes) -> Any:
        """The object that the other side has sent."""
        file = io.BytesIO(data)
        unused, dropped, places = pickle.load(file)  # noqa: S301  # made by our own process
        while self._new:
            self._new.pop().hide()  # the other side has mapped it by now, so that its descriptor can go
        self._spare += [self._lent.pop(key) for key in unused]
        while len(self._spare) > _SPARE:
            self._dropped.append(self._spare.pop(0).place.key)
        for key in dropped:
            self._mapped.pop(key, None)  # it was never sent where what came with it could not be pickled
        leases = [_Lease(self._segment(place), self._unused) for place in places]
        result = pickle.load(file)  # noqa: S301
        del leases  # each lives as long as an array in it
        return result

    def _segment(self, place: Place) -> Segment:
        if place.key not in self._mapped:
            self._mapped[place.key] = open_segment(place)
        return self._mapped[place.key]

    def take(self, nbytes: int) -> Segment:
        """A segment for an array to send."""
        fitting = [segment for segment in self._spare if nbytes <= segment.place.size <= 4 * nbytes]
        if not fitting:
            return make_segment(1 << (nbytes - 1).bit_length())  # pages are had when they are written to
        segment = min(fitting, key=lambda one: one.place.size)
        self._spare.remove(segment)
        return segment


class _Lease:
    """A segment of the other side, in use here as long as this object lives."""

    def __init__(self, segment: Segment, unused: deque[str]) -> None:
        self.segment, self.__array_interface__ = segment, segment.__array_interface__
        weakref.finalize(self, unused.append, segment.place.key).atexit = False
        _leases[segment.place.key] = self


# Key of the segment → the lease, while it lives.
_leases: weakref.WeakValueDictionary[str, _Lease] = weakref.WeakValueDictionary()


class _Pickler(pickle.Pickler):
    def __init__(self, exchange: Exchange) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.segments: list[Segment] = []
        self._exchange = exchange

    def reducer_override(self, obj: Any) -> Any:
        owner = None if isinstance(obj, (type, SharedArray)) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        refuse_graphs(obj)
        if not _is_sent_by_value(owner, obj):
            return NotImplemented
        try:
            view = convert_memory(obj, "numpy")
        except (ArrayNotSupportedError, DtypeNotSupportedError):  # sparse, of strings, …
            return NotImplemented
        if view.nbytes > _LARGE:
            order = "F" if view.flags.f_contiguous and not view.flags.c_contiguous else "C"
            layout = view.shape, view.dtype, order
            self.segments.append(self._exchange.take(view.nbytes))
            np.copyto(_array(self.segments[-1], *layout), view)
            return _received, (owner.name, self.segments[-1].place.key, *layout)
        # By NumPy's pickle: JAX's cuts 64 bits down to 32, and torch's takes a slice's whole storage along.
        return NotImplemented if isinstance(obj, np.ndarray) else (_converted, (view, owner.name))


def _is_sent_by_value(owner: Any, x: Any) -> bool:
    """Whether the values are all that there is to send, and lie on the host."""
    if isinstance(x, np.ndarray):
        return type(x) in NumpyFast.classes and not x.dtype.hasobject
    if not owner.has_host or owner.requires_grad(x):
        return False
    plain = owner.is_plain(x) and not owner.pool.is_scattered(x) and not owner.must_copy(x)
    return bool(plain and owner.device_of(x).kind == "cpu")


def _array(memory: Any, shape: Any, dtype: Any, order: Any) -> np.ndarray:
    return np.ndarray(shape, dtype, np.asarray(memory), order=order)


def _received(name: str, key: str, *layout: Any) -> Any:
    array = _array(_leases[key], *layout)
    return array if name == "numpy" else _converted(array, name)


def _converted(array: Any, name: str) -> Any:
    return convert_memory(array, name, device="cpu")
