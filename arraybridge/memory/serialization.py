"""Serialization of objects and their arrays for other processes, bit for bit.

`dumps` transfers large buffers through shared memory. `save` splits one array into a header and frames, the
format that Dask uses.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.device import Device
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
)
from arraybridge.host import dtype_names
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.memory.segments import Exchange

__all__ = ["before_sending", "dumps", "load", "loads", "save"]

#: Functions that are called with a NumPy array before it is sent, by the class of the array. If the result is
#: False, the values are sent instead of the class's own reduction.
before_sending: dict[type, Callable[[Any], bool]] = {}


# -- any object --------------------------------------------------------------------------------------


def dumps(x: Any, exchange: Exchange) -> bytes:
    """Serialize an object for `loads` in another process; large buffers are sent through ``exchange``.

    The pickler of multiprocessing is not used here: it moves the storage of PyTorch tensors to shared memory
    (pytorch/pytorch#344), which would detach NumPy and JAX arrays that share it.

    Raises:
        GradientError: If an array is part of an autograd graph, which cannot be sent.
        Exception: Any exception raised by an object that cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def collect(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    _Pickler(file, 5, buffer_callback=collect).dump(x)
    return pickle.dumps(exchange.export(buffers)) + file.getvalue()


def loads(data: bytes, exchange: Exchange) -> Any:
    """Return the object that `dumps` serialized in another process."""
    file = io.BytesIO(data)
    buffers = exchange.import_exported(*pickle.load(file))  # noqa: S301  # from a process of this program
    return pickle.load(file, buffers=buffers)  # noqa: S301


class _Pickler(pickle.Pickler):
    """A pickler that uses out-of-band buffers for large NumPy arrays, and `save` for other frameworks."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            prepare = before_sending.get(type(obj))
            if prepare is not None:
                return NotImplemented if prepare(obj) else _reduce_values(obj.view(np.ndarray))
            is_plain = type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject
            return _reduce_values(obj) if is_plain and obj.nbytes > Exchange.LARGE else NotImplemented
        owner = registry.find_owner(obj)
        if owner is None:
            return NotImplemented
        # A PyTorch or Paddle leaf tensor has no graph behind it.
        if owner.autodiff.is_tracked(obj) and not getattr(obj, "is_leaf", False):
            raise GradientError(
                f"Cannot send an array of {owner.name} that is part of an autograd graph: its graph stays in"
                " the process that created it.",
                source_type=owner.name,
                reason="an autograd graph cannot leave its process",
                advice="Send x.detach(), or compute under torch.no_grad() in the function.",
            )
        try:
            return _on_its_gpu(owner, obj) or (load, save(obj))
        except NotImplementedError:
            return NotImplemented


def _reduce_values(x: np.ndarray) -> tuple[Any, ...]:
    """Return a reduction with an out-of-band buffer.

    NumPy's own reduction copies arrays into the pickle if they are not contiguous or have a dtype without the
    buffer protocol.
    """
    order: Any = "F" if x.flags.fnc else "C"
    flat: Any = np.asarray(x, order=order).reshape(-1, order=order).view(np.uint8)
    return np.ndarray, (x.shape, x.dtype, pickle.PickleBuffer(flat), 0, None, order)


# -- arrays on a GPU ---------------------------------------------------------------------------------


def _on_its_gpu(owner: Framework, x: Any) -> tuple[Any, ...] | None:
    """Return a reduction that transfers a GPU array through PyTorch's CUDA IPC; None if that is not possible.

    PyTorch keeps the memory allocated until the other process has released it. It can export only memory that
    it allocated itself, so CuPy and JAX arrays are first copied to PyTorch on their GPU.
    """
    # The parts of a sparse array are pickled one by one.
    is_on_gpu = not owner.sparse.layout(x) and owner.devices.device_of(x).kind == "gpu"
    if registry.loaded("torch") and is_on_gpu and not owner.autodiff.requires_grad(x):
        with suppress(MemoryConversionError, RuntimeError):
            is_tensor = owner is registry.framework("torch")
            tensor = x if is_tensor else convert_memory(x, "torch", copy=True)
            return _from_its_gpu, (bytes(ForkingPickler.dumps(tensor)), owner.name, os.getpid())
    return None


def _from_its_gpu(data: bytes, name: str, sender: int) -> Any:
    """Return a GPU array that another process sent. Only arrays from the parent process share memory."""
    copy = None if sender == os.getppid() else True
    return convert_memory(pickle.loads(data), name, copy=copy)  # noqa: S301  # see `loads`


# -- one array as header and frames ------------------------------------------------------------------


def save(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return an array as a header and frames of host memory, for ``dask_serialize``.

    Raises:
        NotImplementedError: If the array has to be pickled instead.
    """
    owner = registry.find_owner(x)
    if owner is None or not owner.interchange.is_plain(x):
        raise NotImplementedError(f"{type(x).__name__} is not a plain array and has to be pickled")
    try:
        owner.check(x)
    except (ArrayNotSupportedError, DtypeNotSupportedError) as error:  # such as sparse or string arrays
        raise NotImplementedError(f"{type(x).__name__} has to be pickled: {error}") from error
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
    """Restore an array from its header and frames, on its original device if that is available here."""
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
