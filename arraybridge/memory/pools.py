"""Reusable arrays, and page-locked host memory."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import DeviceNotFoundError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU, Framework, find_or_host
from arraybridge.frameworks.parts import Running
from arraybridge.memory import cleanup
from arraybridge.types import Device, FrameworkLike, check_gpu_id

__all__ = ["BufferPool", "PoolLimitError", "pinned"]


class PoolLimitError(MemoryConversionError, ValueError):
    """A buffer does not fit within the bound of its pool."""


# -- reusable arrays -----------------------------------------------------------------------------------


class _Key(NamedTuple):
    """What an array that is taken has to be."""

    framework: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    pinned: bool

    def place(self) -> tuple[str, str, bool]:
        return self.framework, self.device, self.pinned


class _Buffer(NamedTuple):
    """An array that the pool has made; ``array`` is None where it is lent as it is, which pins nothing."""

    key: _Key
    nbytes: int
    array: Any
    condition: tuple[Any, ...]


class _Loan(NamedTuple):
    """What is lent: a buffer, or ``part``, a smaller array over the beginning of its memory."""

    buffer: _Buffer
    lent: weakref.ref[Any]
    part: tuple[Any, ...] | None  # its condition


class BufferPool:
    """Arrays to use again, so that memory is not taken from the system, and touched for the first time, anew.

    An idle array of the same shape and dtype comes back as the very object. Else the smallest idle one of
    NumPy, CuPy or PyTorch that has enough memory, and at most twice as much, is lent as a smaller array over
    the beginning of its memory.

    A pool may be used by several threads. It counts the arrays that it has lent as well as the idle ones,
    and drops idle ones to stay within its bound, those that were given back first. `free_memory` and every
    recovery from OOM drop them all. A lent array that its user forgets, instead of giving it back, is not
    counted any more.

    Args:
        max_bytes: the bound on lent and idle arrays together, in bytes.

    Raises:
        ValueError: the bound is not a positive int.

    >>> pool = BufferPool(max_bytes=1 << 20)
    >>> x = pool.take((256, 256), "float32", "numpy")
    >>> pool.give(x)
    >>> pool.take((256, 256), "float32", "numpy") is x
    True
    >>> pool.give(x)
    >>> smaller = pool.take((200, 256), "float32", "numpy")
    >>> pool.nbytes == x.nbytes  # no more memory than before
    True
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
            raise ValueError(f"max_bytes={max_bytes!r} is no bound; pass a positive number of bytes")
        self.max_bytes = max_bytes
        # Reentrant: the collector may run a finaliser that gives a buffer back, in the midst of any method.
        self._lock = threading.RLock()
        self._busy = False
        # What such finalisers gave back, until the next call.
        self._given: deque[Any] = deque()
        self._idle: deque[_Buffer] = deque()
        # By the id of the lent array.
        self._lent: dict[int, _Loan] = {}
        # Lent arrays that were collected. A callback of the collector may run anywhere, also in the midst of
        # a sum, and only notes them.
        self._lost: deque[tuple[int, weakref.ref[Any]]] = deque()
        self._nbytes = 0
        _pools.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the lent and the idle arrays."""
        self._take_back()
        with self._alone():
            self._forget_lost()
            return self._nbytes

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """No other thread comes in between. False in a finaliser that runs inside such a block: look only."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False

    def _take_back(self) -> None:
        while self._given and not self._busy:
            with suppress(IndexError, ValueError):  # another thread took it back, or it was given twice
                self.give(self._given.popleft())

    def take(
        self,
        shape: tuple[int, ...] | int,
        dtype: Any,
        framework: FrameworkLike,
        gpu_id: int | None = None,
        *,
        pinned: bool = False,
    ) -> Any:
        """An array that nobody else uses; its values are whatever was there before.

        Args:
            shape: its shape.
            dtype: its dtype, by NumPy's name, as a NumPy dtype, or as ``torch.float32``.
            framework: whose array: one with mutable arrays (not JAX or TensorFlow).
            gpu_id: on which accelerator (under ``settings(missing_gpu="host")`` on the host, with a warning,
                where that is missing); None: on the host, or on the current device of a framework
                that has no host arrays.
            pinned: on the host, in page-locked memory, as of the function `pinned`; a NumPy array or a torch
                tensor.

        Raises:
            PoolLimitError: it would exceed the bound, also with every idle array dropped.
            DeviceNotFoundError: there is no such accelerator; with ``pinned``, no card, or neither PyTorch
                nor CuPy is imported, so that nobody can lock memory for it.
            DtypeNotSupportedError: the framework does not have the dtype, or it is none of numbers.
            TypeError: the shape is no whole number, nor several.
            ValueError: the framework's arrays are immutable, the shape has a negative extent, or ``pinned``
                is asked for on a card.
        """
        owner = registry.framework(framework)
        if not owner.mutable:
            raise ValueError(
                f"{owner.name} arrays are immutable, so that there is nothing to use again; take the buffer"
                " as 'numpy', 'torch' or 'cupy'"
            )
        shape = hostmemory.extents(shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape={shape} has a negative extent")
        try:
            name = np.dtype(dtype).name
        except TypeError:  # torch.float32; bfloat16 and its kin, which NumPy knows once ml_dtypes is imported
            name = str(dtype).rpartition(".")[2]
        owner.supports(name, shape)
        device = _place(owner, gpu_id)
        if pinned and device != CPU:
            raise ValueError(
                f"pinned memory is the host's, and this buffer would be on {device}; take it without gpu_id,"
                " as 'numpy' or 'torch'"
            )
        nbytes = _dtype_of_numbers(owner, name).itemsize * math.prod(shape)
        key = _Key(owner.name, str(device), name, shape, bool(pinned))
        self._take_back()
        with self._alone() as alone:
            self._forget_lost()
            array = self._from_idle(owner, key, nbytes) if alone else None
            if array is not None:
                return array
            while alone and self._nbytes + nbytes > self.max_bytes and self._idle:
                dropped = self._idle.popleft()
                self._nbytes -= dropped.nbytes
            if self._nbytes + nbytes > self.max_bytes:
                raise PoolLimitError(
                    f"a buffer of {nbytes} bytes does not fit into this pool: {self._nbytes} of its"
                    f" {self.max_bytes} bytes are lent. Give buffers back first, or make the pool with a"
                    " larger max_bytes.",
                    target_type=owner.name,
                    reason=f"{nbytes} bytes exceed what is left of {self.max_bytes}",
                )
            self._nbytes += nbytes  # set aside, so that other threads stay within the bound meanwhile
        try:
            array = _pinned_empty(owner, shape, name) if pinned else owner.empty(shape, name, device)
            condition = _condition(owner, array)
        except BaseException:  # whatever it is, it goes on to the caller; nothing was lent
            with self._lock:
                self._nbytes -= nbytes
            raise
        with self._alone():
            self._lend(_Buffer(key, nbytes, None, condition), array, None)
        return array

    def _from_idle(self, owner: Framework, key: _Key, nbytes: int) -> Any:
        """The idle array of that key, or a part of the one that fits best; None where there is none."""
        for i, buffer in enumerate(self._idle):
            if buffer.key == key:
                del self._idle[i]
                self._lend(buffer._replace(array=None), buffer.array, None)
                return buffer.array
        fitting = [
            (buffer.nbytes, i)
            for i, buffer in enumerate(self._idle)
            if buffer.key.place() == key.place() and 0 < nbytes <= buffer.nbytes <= 2 * nbytes
        ]
        if not fitting:
            return None
        _, best = min(fitting)
        buffer = self._idle[best]
        part = (owner.running or Running()).part(buffer.array, key.shape, key.dtype)
        if part is not None:
            condition = _condition(owner, part)
            del self._idle[best]
            self._lend(buffer, part, condition)
        return part

    def _lend(self, buffer: _Buffer, array: Any, part: tuple[Any, ...] | None) -> None:
        self._forget_lost()  # among them, perhaps, one that had this array's id
        identity, lost = id(array), self._lost
        reference = weakref.ref(array, lambda dead: lost.append((identity, dead)))
        self._lent[identity] = _Loan(buffer, reference, part)

    def _forget_lost(self) -> None:
        with suppress(IndexError):
            while True:
                identity, dead = self._lost.popleft()
                loan = self._lent.get(identity)
                if loan is not None and loan.lent is dead:
                    del self._lent[identity]
                    self._nbytes -= loan.buffer.nbytes

    def give(self, array: Any) -> None:
        """Give a lent array back. Whoever still refers to it, or to a view of it, must not use it any more.

        Waits until the work that was queued on an array of a card is done. One whose shape, strides, dtype,
        flags, ``requires_grad`` or memory was changed meanwhile is let go, and not lent again.

        Raises:
            ValueError: the array is not lent by this pool: it is another one, a view, or was given back
                before.
        """
        self._take_back()
        with self._alone() as alone:
            loan = self._lent.get(id(array))
            if loan is None or loan.lent() is not array:
                raise ValueError(
                    "this array is not lent by this pool: give back the very array that take() returned,"
                    " once, and not a view or a copy of it"
                )
            if not alone:
                self._given.append(array)
                return
            del self._lent[id(array)]
        buffer, lent_part = loan.buffer, loan.part
        del loan  # with it the reference goes, which would tell that the array is lost
        try:
            owner = registry.framework(buffer.key.framework)
            owner.settle(array)
            whole = array if lent_part is None else buffer.array
            unchanged = lent_part is None or _condition(owner, array) == lent_part
            unchanged = unchanged and _condition(owner, whole) == buffer.condition
        except BaseException:  # the work on it failed: the array goes, and its bytes with it
            with self._lock:
                self._nbytes -= buffer.nbytes
            raise
        with self._alone():
            if unchanged:
                self._idle.append(buffer._replace(array=whole))
            else:
                self._nbytes -= buffer.nbytes

    def clear(self) -> int:
        """Drop the idle arrays, and return their bytes. Lent ones stay with those who took them."""
        return self._drop(None, None)

    def _drop(self, device: Device | None, name: str | None) -> int:
        """Drop the idle arrays of that framework on that device; None stands for all."""
        freed = 0
        self._take_back()
        with self._alone() as alone:
            if not alone:
                return 0
            self._forget_lost()  # a part that was lost keeps its buffer until then
            kept: deque[_Buffer] = deque()
            for buffer in self._idle:
                on_it = device is None or buffer.key.device == str(device)
                if on_it and name in (None, buffer.key.framework):
                    freed += buffer.nbytes
                else:
                    kept.append(buffer)
            self._idle = kept
            self._nbytes -= freed
        return freed

    def __repr__(self) -> str:
        return (
            f"<BufferPool: {len(self._lent)} lent, {len(self._idle)} idle, {self._nbytes} of"
            f" {self.max_bytes} bytes>"
        )


def _condition(owner: Framework, x: Any) -> tuple[Any, ...]:
    """All of an array that must be as it was when the array is lent again."""
    facts = (type(x), owner.shape(x), owner.dtype_name(x), str(owner.device_of(x)), owner.address(x))
    return (*facts, *(owner.running or Running()).condition(x))


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _dtype_of_numbers(owner: Framework, name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; memory of references may not be used for anything else."""
    try:
        found = hostmemory.np_dtype(name)
    except TypeError:
        found = None
    if found is None or found.hasobject:
        raise DtypeNotSupportedError(
            f"a buffer of dtype {name} cannot be lent, since its memory may be used again for any numbers;"
            " pass the name of a dtype of numbers, as 'float32'",
            target_type=owner.name,
            reason=f"{name} is no dtype of numbers",
        )
    return found


def _place(owner: Framework, gpu_id: int | None) -> Device:
    index = check_gpu_id(gpu_id)
    if isinstance(index, str):
        raise ValueError("take(gpu_id='auto') has no meaning; pass least_used_gpu(), a number or None")
    if index is None or owner.name == "numpy":
        return owner.find_device(owner.default_device())
    return find_or_host(owner, owner.accelerator(index))


def _drop_idle(device: Device | None, name: str | None) -> int:
    """Empty the idle arrays of all pools, as far as they are on that device and of that framework."""
    freed = 0
    for pool in list(_pools):
        freed += pool._drop(device, name)
    return freed


cleanup.own_caches.append(_drop_idle)


# -- pinned memory -------------------------------------------------------------------------------------


def pinned(x: Any) -> Any:
    """A copy of a host array in page-locked memory, from which a card copies at full speed.

    Worth it for memory that travels again and again; `take` such memory once, not for each transfer.
    PyTorch or CuPy, whichever is loaded, locks the pages. Where neither is, or there is no CUDA card, nothing
    can be gained and ``x`` itself comes back.

    Args:
        x: an array in host memory: a NumPy array or a torch tensor, of any shape and dtype. (Arrays of JAX
            and TensorFlow come back as they are: those frameworks allocate by themselves.)

    Returns:
        An array of the same framework, shape, dtype and values.

    Raises:
        UnknownArrayError: ``x`` is no array.
        CopyRequiredError: it is not in host memory.

    >>> import numpy as np
    >>> pinned(np.arange(3))
    array([0, 1, 2])
    """
    view = convert_memory(x, "numpy", copy=False)
    owner = registry.find_owner(x)
    if owner is None or not owner.mutable or not view.nbytes:
        return x
    memory = _locked(view.nbytes)
    if memory is None:
        return x
    target = memory.view(view.dtype).reshape(view.shape)
    np.copyto(target, view)
    return convert_memory(target, owner.name, copy=False)


def _locked(nbytes: int) -> np.ndarray | None:
    """Page-locked bytes from whichever loaded framework locks pages; None where none does."""
    for one in registry.loaded():
        memory = None if one.pinning is None else one.pinning.pinned_bytes(nbytes)
        if memory is not None:
            return memory
    return None


def _pinned_empty(owner: Framework, shape: tuple[int, ...], dtype: str) -> Any:
    whole = hostmemory.np_dtype(dtype)
    nbytes = whole.itemsize * math.prod(shape)
    memory = _locked(max(1, nbytes))
    if memory is None:
        raise DeviceNotFoundError(
            "memory is page-locked for a card, by PyTorch or CuPy, and none of those that are imported here"
            " sees a card. Take the buffer without pinned=True, or import the framework that has the card"
            " before.",
            target_type=owner.name,
            reason="no imported framework sees a card to lock memory for",
        )
    return convert_memory(memory[:nbytes].view(whole).reshape(shape), owner.name, copy=False)


# -- the buffers behind gpu_id= ------------------------------------------------------------------------


def _drop_rings(device: Device | None, name: str | None) -> int:
    """Let the staging buffers go that a framework locked, for whichever of its cards."""
    from arraybridge.conversion import staging  # nothing that `import arraybridge` needs

    return staging.drop(name)


cleanup.own_caches.append(_drop_rings)
