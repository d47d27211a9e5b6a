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
from arraybridge.frameworks import dtype_names, registry
from arraybridge.frameworks.base import Framework
from arraybridge.memory.shared_memory import Exchange, SharedArray, keep_until_arrival
from arraybridge.types import Device

__all__ = ["dumps", "load", "loads", "save"]


# -- any object --------------------------------------------------------------------------------------


def dumps(x: Any, exchange: Exchange) -> bytes:
    """The object as `loads` reads it in another process, which gets its large buffers by the exchange.

    The pickler of multiprocessing would move torch's tensors to shared memory from under the arrays of NumPy
    and JAX that share theirs.

    Raises:
        GradientError: an array would leave its graph behind.
        Exception: whatever is raised by what cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def collect(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    _Pickler(file, 5, buffer_callback=collect).dump(x)
    return pickle.dumps(exchange.export(buffers)) + file.getvalue()


def loads(data: bytes, exchange: Exchange) -> Any:
    """What `dumps` has written in another process."""
    file = io.BytesIO(data)
    buffers = exchange.import_exported(*pickle.load(file))  # noqa: S301  # our own process
    return pickle.load(file, buffers=buffers)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (np.ndarray, np.memmap) and obj.nbytes > Exchange.LARGE and not obj.dtype.hasobject:
            # NumPy itself writes into the pickle what is of another layout, or of a dtype without a buffer.
            order: Any = "F" if obj.flags.fnc else "C"
            flat: Any = np.asarray(obj, order=order).reshape(-1, order=order).view(np.uint8)
            return np.ndarray, (obj.shape, obj.dtype, pickle.PickleBuffer(flat), 0, None, order)
        if type(obj) is SharedArray:
            keep_until_arrival(obj)
            return NotImplemented
        owner = None if isinstance(obj, np.ndarray) else registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        if owner.autodiff.follows(obj) and not getattr(obj, "is_leaf", False):  # torch and Paddle start there
            raise GradientError(
                f"an array of {owner.name} is being differentiated, and its graph stays in the process that"
                " made it.",
                source_type=owner.name,
                reason="a graph does not leave its process",
                advice="Send it without, as x.detach(), or compute under torch.no_grad() in the function.",
            )
        try:
            return _on_its_gpu(owner, obj) or (load, save(obj))
        except NotImplementedError:
            return NotImplemented


# -- arrays on a card --------------------------------------------------------------------------------


def _on_its_gpu(owner: Framework, x: Any) -> tuple[Any, ...] | None:
    """What an array on a card is pickled to where torch hands its memory to another process (CUDA IPC).

    torch keeps that memory until the other process has let go of it. It gives away what it has allocated
    itself: arrays of CuPy and JAX are copied there, on their card.
    """
    is_on_gpu = owner.devices.device_of(x).kind == "gpu"
    if registry.loaded("torch") and is_on_gpu and not owner.autodiff.requires_grad(x):
        with suppress(MemoryConversionError, RuntimeError):
            is_tensor = owner is registry.framework("torch")
            tensor = x if is_tensor else convert_memory(x, "torch", copy=True)
            return _from_its_gpu, (bytes(ForkingPickler.dumps(tensor)), owner.name, os.getpid())
    return None


def _from_its_gpu(data: bytes, name: str, sender: int) -> Any:
    """The array, over memory of the process that started this one; a copy where the sender may end first."""
    copy = None if sender == os.getppid() else True
    return convert_memory(pickle.loads(data), name, copy=copy)  # noqa: S301  # our own process


# -- one array by its values -------------------------------------------------------------------------


def save(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """An array as a header and frames of host memory, for ``dask_serialize``.

    Raises:
        NotImplementedError: the array is to be pickled instead.
    """
    owner = registry.find_owner(x)
    if owner is None or not owner.interchange.is_plain(x):
        raise NotImplementedError(f"{type(x).__name__} is more than an array")
    try:
        owner.check(x)
    except (ArrayNotSupportedError, DtypeNotSupportedError) as error:  # sparse, of strings, …
        raise NotImplementedError(f"{type(x).__name__} is pickled: {error}") from error
    header: dict[str, Any] = {
        "framework": owner.name,
        "dtype": owner.dtype_name(x),
        "shape": owner.shape(x),
        "device": str(owner.devices.device_of(x)),
        "requires_grad": owner.autodiff.requires_grad(x),
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
    frame, *more = frames
    host = np.ndarray(tuple(header["shape"]), dtype_names.np_dtype(header["dtype"]), frame)
    device = Device.parse(header["device"])
    device = device if device in owner.devices.available() else owner.devices.default_device()
    array = convert_memory(host, owner.name, device=device)
    if header["requires_grad"]:
        array.requires_grad_(True)
        if "grad" in header:
            array.grad = load(header["grad"], more)
    return array
