"""What leaves a process, as bytes that another one reads: any object, with the arrays in it bit for bit.

`dumps` hands large buffers over by shared memory. `save` makes a header and frames of one array, as Dask asks
for them.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
)
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.memory.shared import Exchange, SharedArray
from arraybridge.types import Device

__all__ = ["dumps", "load", "loads", "save"]

# Bytes from which on a pipe is slow.
_LARGE = 1 << 17


# -- any object --------------------------------------------------------------------------------------


def dumps(x: Any, exchange: Exchange) -> bytes:
    """The object as `loads` reads it in another process, which gets its large buffers by the exchange.

    The pickler of multiprocessing would move torch's tensors to shared memory from under the arrays of NumPy
    and JAX that share theirs.

    Raises:
        GradientError: an array would leave its graph behind.
        Exception: whatever is raised by what cannot be pickled.
    """
    file, large = io.BytesIO(), []

    def goes_along(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > _LARGE:
            large.append(raw)
        return raw.nbytes <= _LARGE

    _Pickler(file, 5, buffer_callback=goes_along).dump(x)
    return pickle.dumps(exchange.lend(large) if large else (None, [])) + file.getvalue()


def loads(data: bytes, exchange: Exchange) -> Any:
    """What `dumps` has written in another process."""
    file = io.BytesIO(data)
    buffers = exchange.borrow(*pickle.load(file))  # noqa: S301  # our own process
    return pickle.load(file, buffers=buffers)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        is_shared = isinstance(obj, SharedArray) and obj.segment is not None
        owner = None if is_shared or isinstance(obj, type) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        if isinstance(obj, np.ndarray):
            is_plain = type(obj) in NumpyFramework.classes and not obj.dtype.hasobject
            return _as_buffer(obj) if is_plain and obj.nbytes > _LARGE else NotImplemented
        _refuse_graph(owner, obj)
        with suppress(NotImplementedError):
            return _on_its_card(owner, obj)
        with suppress(NotImplementedError):
            return load, save(obj)
        return NotImplemented


def _as_buffer(x: np.ndarray) -> tuple[Any, ...]:
    """What a large array is pickled to, of whatever dtype and layout."""
    order: Any = "F" if x.flags.fnc else "C"
    flat: Any = np.asarray(x, order=order).reshape(-1, order=order)
    return _over, (pickle.PickleBuffer(flat.view(np.uint8)), x.shape, x.dtype, order)


def _over(buffer: Any, shape: Any, dtype: Any, order: Any) -> np.ndarray:
    return np.ndarray(shape, dtype, buffer, order=order)


def _refuse_graph(owner: Framework, x: Any) -> None:
    """Refuse an array that would come out of a process without the graph that it has there."""
    if owner.autodiff.follows(x) and not getattr(x, "is_leaf", False):  # torch and Paddle start there
        raise GradientError(
            f"an array of {owner.name} is being differentiated, and its graph would stay behind: its graph"
            " stays in the process that made it. Send it without, as x.detach(), or compute under"
            " torch.no_grad() inside of the function",
            source_type=owner.name,
            reason="a graph does not leave its process",
        )


# -- arrays on a card --------------------------------------------------------------------------------


def _on_its_card(owner: Framework, x: Any) -> tuple[Any, ...]:
    """What an array on a card is pickled to where torch hands its memory to another process (CUDA IPC).

    torch keeps that memory until the other process has let go of it. It gives away what it has allocated
    itself: arrays of CuPy and JAX are copied there, on their card.
    """
    if not registry.loaded("torch") or owner.device_of(x).kind != "gpu" or owner.requires_grad(x):
        raise NotImplementedError
    try:
        tensor = x if owner.name == "torch" else convert_memory(x, "torch", copy=True)
        return _from_its_card, (bytes(ForkingPickler.dumps(tensor)), owner.name, os.getpid())
    except (MemoryConversionError, RuntimeError) as error:
        raise NotImplementedError from error


def _from_its_card(data: bytes, name: str, sender: int) -> Any:
    """The array, over memory of the process that started this one; a copy where the sender may end first."""
    tensor = pickle.loads(data)  # noqa: S301  # our own process
    return convert_memory(tensor, name, copy=None if sender == os.getppid() else True)


# -- one array by its values -------------------------------------------------------------------------


def save(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """An array as a header and frames of host memory, for ``dask_serialize``.

    Raises:
        NotImplementedError: the array is to be pickled instead.
    """
    owner = registry.find_owner(x)
    if owner is None or not owner.is_plain(x):
        raise NotImplementedError(f"{type(x).__name__} is more than an array")
    try:
        owner.check(x)
    except (ArrayNotSupportedError, DtypeNotSupportedError) as error:  # sparse, of strings, …
        raise NotImplementedError(f"{type(x).__name__} is pickled: {error}") from error
    header: dict[str, Any] = {
        "framework": owner.name,
        "dtype": owner.dtype_name(x),
        "shape": owner.shape(x),
        "device": str(owner.device_of(x)),
        "requires_grad": owner.requires_grad(x),
    }
    host = np.ascontiguousarray(convert_memory(x, "numpy", grad="detach"))
    frames: list[Any] = [host.reshape(-1).view(np.uint8)]
    if header["requires_grad"] and x.is_leaf and x.grad is not None:
        header["grad"], more = save(x.grad)
        frames += more
    return header, frames


def load(header: dict[str, Any], frames: list[Any]) -> Any:
    """The array of a header and its frames, on the device that it came from where there is one such here."""
    owner = registry.framework(header["framework"])
    dtype, shape = hostmemory.np_dtype(header["dtype"]), tuple(header["shape"])
    frame, *more = frames
    host = np.ndarray(shape, dtype, frame)
    device = Device.parse(header["device"])
    device = device if device in owner.devices() else owner.default_device()
    array = convert_memory(host, owner.name, device=device)
    if header["requires_grad"]:
        array.requires_grad_(True)
        if "grad" in header:
            array.grad = load(header["grad"], more)
    return array
