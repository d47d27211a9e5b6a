"""`BufferPool`: pools of reusable arrays."""

from __future__ import annotations

import math
import threading
import weakref
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from arraybridge.compilers import run_eagerly
from arraybridge.conversion.device_resolution import resolve_device
from arraybridge.conversion.request import dtype_name
from arraybridge.device import Device
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError
from arraybridge.formatting import one_of
from arraybridge.host import buffers, dtype_names
from arraybridge.interface import registry
from arraybridge.interface.batching import Batching
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.memory import cleanup
from arraybridge.types import FrameworkLike
from arraybridge.validation import add_hints, whole_number

__all__ = [
    "BufferPool",
    "PoolLimitError",
]


class PoolLimitError(MemoryConversionError, ValueError):
    """A buffer exceeds the limit of its `BufferPool`.

    Also a ``ValueError``.

    Example:
        >>> pool = BufferPool(max_bytes=10)
        >>> pool.take((10,), "float64", "numpy")
        Traceback (most recent call last):
            ...
        arraybridge.memory.pools.PoolLimitError: ...
    """


class _Buffer(NamedTuple):
    """A block of memory in a pool.

    The pool returns views of the block, or the block itself if its framework has no views.

    Attributes:
        place: The key of interchangeable buffers: buffers with the same key differ only in size.
        nbytes: The size in bytes.
        owner: The framework for which it was allocated.
        memory: Contiguous bytes, of which the pool returns views, or an idle array; None if the array itself
            is in use.
    """

    place: tuple[Any, ...]
    nbytes: int
    owner: Framework
    memory: Any


class BufferPool:
    """A pool of reusable arrays. Reuse saves the cost of allocating memory and of touching new pages.

    `take` returns a new array over the beginning of an idle buffer: the smallest one that is large enough and
    at most twice as large. NumPy and PyTorch share the same host buffers.

    A pool is thread-safe. Its limit covers both the arrays in use and the idle buffers. To stay within the
    limit, the pool drops idle buffers, starting with the one that was returned first. `free_memory` and every
    recovery from OOM drop all idle buffers. An array that is deleted instead of returned is no longer
    counted. A pool that was pickled arrives without buffers.

    Args:
        max_bytes: The limit on all memory, in use and idle, in bytes. Defaults to 1 GiB.

    Raises:
        ValueError: If ``max_bytes`` is not a positive int.

    Example:
        >>> pool = BufferPool(max_bytes=1 << 20)
        >>> x = pool.take((256, 256), "float32", "numpy")
        >>> pool.give(x)
        >>> smaller = pool.take((200, 256), "float32", "numpy")
        >>> pool.nbytes == x.nbytes  # no more memory than before
        True
    """

    @add_hints
    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = whole_number("max_bytes", max_bytes, least=1, type_error=ValueError)
        # Reentrant: the garbage collector may run a finalizer that calls `give` during any method.
        self._lock = threading.RLock()
        self._idle: list[_Buffer] = []
        #: The arrays in use, by id, with their buffers.
        self._taken: dict[int, tuple[weakref.ref[Any], _Buffer]] = {}
        _pools.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Buffers stay in their process, and dill 0.4 restores an RLock locked (uqfoundation/dill#321).
        return type(self), (self.max_bytes,)

    @property
    def nbytes(self) -> int:
        """The number of bytes in use and idle."""
        with self._lock:
            return sum(b.nbytes for b in [*(buffer for _, buffer in list(self._taken.values())), *self._idle])

    @run_eagerly
    def take(
        self, shape: tuple[int, ...] | int, dtype: Any, framework: FrameworkLike, gpu_id: int | None = None
    ) -> Any:
        """Return an uninitialized array for exclusive use.

        Args:
            shape: The shape.
            dtype: The dtype: a NumPy name, a NumPy dtype, or the dtype of a framework, such as
                ``torch.float32``.
            framework: The framework of the array. Its arrays must be mutable, which excludes JAX and
                TensorFlow.
            gpu_id: The number of the accelerator. Defaults to None: the host, or the current device of a
                framework that has no host arrays.

        Returns:
            A C-contiguous array. Its values are undefined.

        Raises:
            PoolLimitError: If the array would exceed the limit even with no idle buffers left.
            DeviceNotFoundError: If there is no such accelerator.
            DtypeNotSupportedError: If the dtype is not numeric, or the framework does not support it.
            ArrayNotSupportedError: If the framework does not support the shape.
            TypeError: If the shape is neither an int nor a sequence of ints.
            ValueError: If the framework's arrays are immutable, the shape has a negative extent, or
                ``gpu_id`` is not a number.

        Example:
            >>> BufferPool().take((2, 3), "float32", "numpy").shape
            (2, 3)
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
                    memory = buffers.allocate_aligned((nbytes,), np.dtype(np.uint8))
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
        """Drop idle buffers until ``nbytes`` more bytes are within the limit."""
        if nbytes > self.max_bytes:
            raise PoolLimitError(
                f"A buffer of {nbytes} bytes does not fit: the pool is limited to {self.max_bytes} bytes."
                " Create the pool with a larger max_bytes.",
                target_type=owner.name,
                reason=f"{nbytes} bytes exceed the limit of {self.max_bytes} bytes",
            )
        while self._idle and self.nbytes + nbytes > self.max_bytes:
            del self._idle[0]
        if self.nbytes + nbytes > self.max_bytes:
            raise PoolLimitError(
                f"A buffer of {nbytes} bytes does not fit: {self.nbytes} of the pool's {self.max_bytes} bytes"
                " are in use. Return buffers with give() first, or create the pool with a larger max_bytes.",
                target_type=owner.name,
                reason=f"{nbytes} bytes exceed the unused part of the limit of {self.max_bytes} bytes",
            )

    @run_eagerly
    def give(self, array: Any) -> None:
        """Return an array to the pool. Do not use the array or a view of it afterwards.

        The call waits until all work on the array's device is complete, in every stream.

        Args:
            array: An array returned by this pool's `take`.

        Raises:
            ValueError: If this pool did not create the array, it is a view, or it was already returned.

        Example:
            >>> pool = BufferPool()
            >>> pool.give(pool.take(4, "float32", "numpy"))
        """
        with self._lock:
            reference, buffer = self._taken.get(id(array), (None, None))
            if reference is None or buffer is None or reference() is not array:
                raise ValueError(
                    "This array is not in use, or not from this pool. Pass the array that take() returned,"
                    " not a view of it, and only once."
                )
            del self._taken[id(array)]
        if buffer.place[1] != CPU:
            buffer.owner.memory.synchronize()  # if this raises, the buffer is dropped
        with self._lock:
            self._idle.append(buffer if buffer.memory is not None else buffer._replace(memory=array))

    def clear(self) -> int:
        """Drop the idle buffers, and return the number of bytes freed. Arrays in use are not affected."""
        return self.drop_idle(None, None)

    @run_eagerly
    def drop_idle(self, device: Device | None, name: str | None) -> int:
        """Drop the idle buffers of a framework on a device, and return the number of bytes freed.

        Args:
            device: The device of the buffers. None means any device.
            name: The framework of the buffers. None means any framework.
        """
        with self._lock:
            idle = self._idle
            gone = [b for b in idle if device in (None, b.place[1]) and name in (None, b.owner.name)]
            self._idle = [b for b in idle if not any(b is one for one in gone)]
        return sum(buffer.nbytes for buffer in gone)

    def __repr__(self) -> str:
        return (
            f"<BufferPool: {len(self._taken)} in use, {len(self._idle)} idle, {self.nbytes} of"
            f" {self.max_bytes} bytes>"
        )


def _forget(taken: dict[int, Any], identity: int, _: object) -> None:
    """Drop the buffer of an array that the caller deleted instead of returning it."""
    taken.pop(identity, None)


_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _drop_idle(device: Device | None, name: str | None) -> int:
    """Drop idle buffers in all pools as `BufferPool.drop_idle` does, and return their size in bytes."""
    return sum(pool.drop_idle(device, name) for pool in list(_pools))


cleanup.own_caches.append(_drop_idle)


def _parse_request(
    framework: FrameworkLike, shape: Any, dtype: Any, gpu_id: int | None
) -> tuple[Framework, tuple[int, ...], str, Device]:
    """Check the arguments of `BufferPool.take`; return the framework, shape, dtype name and device."""
    owner = registry.framework(framework)
    if not owner.mutable:
        raise ValueError(
            f"{owner.name} arrays are immutable, so their memory cannot be reused. Pass framework='numpy',"
            " 'torch' or 'cupy'."
        )
    extents = buffers.parse_shape(shape)
    with suppress(TypeError):  # NumPy rejects torch.float32, and bfloat16 before ml_dtypes is imported
        dtype = np.dtype(dtype)
    name = dtype_name(dtype)
    _check_dtype(owner, name, extents)
    device = resolve_device(owner, cleanup.gpu_number("take", gpu_id))
    if device is None:
        device = owner.devices.find_device(owner.devices.default_device())
    return owner, extents, name, device


def _check_dtype(owner: Framework, name: str, shape: tuple[int, ...]) -> None:
    """Raise an error for a dtype or a shape that a framework does not support."""
    try:
        owner.supports(name, shape)
    except DtypeNotSupportedError as error:
        # The advice of this error is to cast, but a new array has no values to cast.
        advice = f"Pass {one_of(sorted(owner.dtypes))}." if owner.dtypes else ""
        raise DtypeNotSupportedError(
            f"{error.reason}.", target_type=owner.name, reason=error.reason, advice=advice
        ) from None
