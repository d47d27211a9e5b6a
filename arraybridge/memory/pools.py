"""Reusable arrays, and page-locked host memory."""

from __future__ import annotations

import math
import threading
import weakref
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.decide import dtype_name
from arraybridge.conversion.placement import resolve_device
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import dtype_names, host_memory, registry
from arraybridge.frameworks.base import CPU, Batching, Framework
from arraybridge.memory import cleanup
from arraybridge.types import Device, FrameworkLike
from arraybridge.validation import whole_number

__all__ = ["BufferPool", "PoolLimitError", "pinned"]


class PoolLimitError(MemoryConversionError, ValueError):
    """A buffer does not fit into the limit of its `BufferPool`.

    Also a ``ValueError``.

    Example:
        >>> pool = BufferPool(max_bytes=10)
        >>> pool.take((10,), "float64", "numpy")
        Traceback (most recent call last):
            ...
        arraybridge.memory.pools.PoolLimitError: ...
    """


# -- reusable arrays -----------------------------------------------------------------------------------


class _Buffer(NamedTuple):
    """Memory of the pool. What is lent are views of it; where a framework has none, the memory itself.

    Attributes:
        place: what it may serve for: buffers of one place differ in size alone.
        nbytes: its size.
        owner: the framework that it was made for.
        memory: packed bytes; None while the array itself is lent.
    """

    place: tuple[Any, ...]
    nbytes: int
    owner: Framework
    memory: Any


class BufferPool:
    """Arrays to use again, so that memory is not taken from the system, and first touched, anew.

    What is lent is a new array over the beginning of memory that was given back: the smallest that has
    enough, and at most twice as much. NumPy and PyTorch use the same memory of the host.

    A pool may be used by several threads. It counts what it has lent as well as what is idle, and drops idle
    memory to stay within its bound, that which was given back first. `free_memory` and every recovery from
    OOM drop it all. A lent array that its user forgets, instead of giving it back, is not counted any more.

    Args:
        max_bytes: the bound on lent and idle memory together, in bytes.

    Raises:
        ValueError: the bound is not a positive int.

    >>> pool = BufferPool(max_bytes=1 << 20)
    >>> x = pool.take((256, 256), "float32", "numpy")
    >>> pool.give(x)
    >>> smaller = pool.take((200, 256), "float32", "numpy")
    >>> pool.nbytes == x.nbytes  # no more memory than before
    True
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = whole_number("max_bytes", max_bytes, least=1, type_error=ValueError)
        # Reentrant: the collector may run a finaliser that gives a buffer back in the midst of any method.
        self._lock = threading.RLock()
        self._idle: list[_Buffer] = []
        #: By the id of the lent array.
        self._taken: dict[int, tuple[weakref.ref[Any], _Buffer]] = {}
        _pools.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the lent and the idle memory."""
        return sum(b.nbytes for b in [*(buffer for _, buffer in list(self._taken.values())), *self._idle])

    def take(
        self, shape: tuple[int, ...] | int, dtype: Any, framework: FrameworkLike, gpu_id: int | None = None
    ) -> Any:
        """An array that nobody else uses; its values are whatever was there before.

        Args:
            shape: its shape.
            dtype: its dtype, by NumPy's name, as a NumPy dtype, or as ``torch.float32``.
            framework: whose array: one with mutable arrays (not JAX or TensorFlow).
            gpu_id: on which accelerator; None: on the host, or on the current device of a framework that has
                no host arrays.

        Raises:
            PoolLimitError: it would exceed the bound, also with every idle array dropped.
            DeviceNotFoundError: there is no such accelerator.
            DtypeNotSupportedError: the framework does not have the dtype, or it is none of numbers.
            TypeError: the shape is no whole number, nor several.
            ValueError: the framework's arrays are immutable, or the shape has a negative extent.
        """
        owner, extents, name, device = _parse_request(framework, shape, dtype, gpu_id)
        has_views = type(owner.batching).reinterpret is not Batching.reinterpret
        whose = "host" if device == CPU else owner.name
        place = (whose, device) if has_views else (owner.name, device, extents, name)
        nbytes = dtype_names.np_dtype(name).itemsize * math.prod(extents)
        with self._lock:
            fitting = [b for b in self._idle if b.place == place and nbytes <= b.nbytes <= 2 * nbytes]
            buffer = min(fitting, key=attrgetter("nbytes"), default=None)
            self._idle = [b for b in self._idle if b is not buffer]
            if buffer is None:
                self._evict(nbytes, owner)
                if not has_views:
                    memory = owner.batching.empty(extents, name, device)
                elif device == CPU:
                    memory = host_memory.packed((nbytes,), np.dtype(np.uint8))
                else:
                    memory = owner.batching.empty((max(1, nbytes),), "uint8", device)
                buffer = _Buffer(place, nbytes, owner, memory)
            array = buffer.memory
            if has_views:
                array = owner.batching.reinterpret(array, extents, name)
            else:
                buffer = buffer._replace(memory=None)
            self._taken[id(array)] = weakref.ref(array, partial(_forget, self._taken, id(array))), buffer
        return array

    def _evict(self, nbytes: int, owner: Framework) -> None:
        """Drop idle memory until so much more is within the bound."""
        while self._idle and self.nbytes + nbytes > self.max_bytes:
            del self._idle[0]
        if self.nbytes + nbytes > self.max_bytes:
            raise PoolLimitError(
                f"a buffer of {nbytes} bytes does not fit: {self.nbytes} of the pool's {self.max_bytes} bytes"
                " are lent. Give buffers back first, or make the pool with a larger max_bytes.",
                target_type=owner.name,
                reason=f"{nbytes} bytes exceed what is left of {self.max_bytes}",
            )

    def give(self, array: Any) -> None:
        """Give a lent array back. Whoever still refers to it, or to a view of it, must not use it any more.

        Waits until all work is done that was queued on the card, whichever its stream.

        Raises:
            ValueError: the array is not lent by this pool: it is another one, a view, or was given back
                before.
        """
        with self._lock:
            reference, buffer = self._taken.get(id(array), (None, None))
            if reference is None or buffer is None or reference() is not array:
                raise ValueError(
                    "this array is not lent by this pool: give back what take() returned, once, and no view"
                )
            del self._taken[id(array)]
        if buffer.place[1] != CPU:
            buffer.owner.memory.synchronize()  # where that fails, the memory goes
        with self._lock:
            self._idle.append(buffer if buffer.memory is not None else buffer._replace(memory=array))

    def clear(self) -> int:
        """Drop the idle memory, and return its bytes. Lent arrays stay with those who took them."""
        return self._drop(None, None)

    def _drop(self, device: Device | None, name: str | None) -> int:
        """Drop the idle memory of that framework on that device; None stands for all."""
        with self._lock:
            idle = self._idle
            gone = [b for b in idle if device in (None, b.place[1]) and name in (None, b.owner.name)]
            self._idle = [b for b in idle if not any(b is one for one in gone)]
        return sum(buffer.nbytes for buffer in gone)

    def __repr__(self) -> str:
        return (
            f"<BufferPool: {len(self._taken)} lent, {len(self._idle)} idle, {self.nbytes} of"
            f" {self.max_bytes} bytes>"
        )


def _forget(lent: dict[int, Any], identity: int, _: object) -> None:
    """Remove an array that the caller dropped instead of giving it back, and with it its memory."""
    lent.pop(identity, None)


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _drop_idle(device: Device | None, name: str | None) -> int:
    """Empty the idle memory of all pools, as far as it is on that device and of that framework."""
    return sum(pool._drop(device, name) for pool in list(_pools))


cleanup.own_caches.append(_drop_idle)


def _parse_request(
    framework: FrameworkLike, shape: Any, dtype: Any, gpu_id: int | None
) -> tuple[Framework, tuple[int, ...], str, Device]:
    """What `BufferPool.take` is asked for: framework, shape, name of the dtype, and device."""
    owner = registry.framework(framework)
    if not owner.mutable:
        raise ValueError(
            f"{owner.name} arrays are immutable, so that there is nothing to use again; take the buffer"
            " as 'numpy', 'torch' or 'cupy'"
        )
    extents = host_memory.extents(shape)
    with suppress(TypeError):  # torch.float32; bfloat16, which NumPy knows once ml_dtypes is imported
        dtype = np.dtype(dtype)
    name = dtype_name(dtype)
    owner.supports(name, extents)
    device = resolve_device(owner, cleanup.gpu_number("take", gpu_id))
    if device is None:
        device = owner.devices.find_device(owner.devices.default_device())
    return owner, extents, name, device


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
    # Page-locked bytes from whichever loaded framework locks pages.
    locked = (one.memory.pinned_bytes(view.nbytes) for one in registry.loaded())
    memory = next((memory for memory in locked if memory is not None), None)
    if memory is None:
        return x
    target = memory.view(view.dtype).reshape(view.shape)
    np.copyto(target, view)
    return convert_memory(target, owner.name, copy=False)
