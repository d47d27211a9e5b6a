"""What Dask has to know of arrays: how large they are, whether two are alike, and how they travel.

Dask takes a torch tensor of 40 MB for 80 bytes and so cannot see when to spill it to disk. What stands here
corrects that for every framework, and imports none: each is registered when Dask meets its first array.

The sizes are registered by the entry point ``dask.sizeof``, that is wherever Dask runs beside arraybridge;
tokens when a name of `arraybridge.dask` is first used; how arrays travel where workers are prepared.
"""

from __future__ import annotations

import copyreg
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, FrameworkNotInstalledError
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.memory.shared import SharedArray
from arraybridge.types import Device

__all__ = ["load", "register", "register_sizes", "register_transport", "save", "size", "token"]

#: Dask knows these arrays by itself.
_KNOWN_TO_DASK = ("numpy", "cupy")


# What Dask asks, and our answer.
_tables: list[tuple[Any, Callable[..., Any]]] = []


def register_sizes(sizeof: Any) -> None:
    """Teach Dask the sizes of arrays; the entry point ``dask.sizeof`` calls this."""
    _register((sizeof, size))


def register() -> None:
    """Teach Dask the sizes and the tokens of arrays.

    Raises:
        ModuleNotFoundError: Dask or distributed is not installed.
    """
    from dask.sizeof import sizeof
    from dask.tokenize import normalize_token

    _register((sizeof, size), (normalize_token, token))


def register_transport() -> None:
    """Let arrays travel as `save` writes them, from here on: to workers that are prepared."""
    from distributed.protocol import dask_deserialize, dask_serialize

    _register((dask_serialize, save), (dask_deserialize, load))
    dask_serialize.register(SharedArray, save_shared)
    dask_deserialize.register(SharedArray, load_shared)


def save_shared(x: SharedArray, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """A `shared` array: by its place to a process of this machine; else, as to a disk, by its bytes."""
    from distributed.comm import get_address_host
    from distributed.protocol.numpy import serialize_numpy_ndarray

    ends = [(context or {}).get(end, {}).get("address") for end in ("sender", "recipient")]
    if all(ends) and len({get_address_host(end) for end in ends}) == 1:
        return {"shared": pickle.dumps(x)}, []
    header, frames = serialize_numpy_ndarray(x.view(np.ndarray))
    return header, frames


def load_shared(header: dict[str, Any], frames: list[Any]) -> Any:
    """What `save_shared` wrote."""
    from distributed.protocol.numpy import deserialize_numpy_ndarray

    if "shared" in header:
        return pickle.loads(header["shared"])  # noqa: S301  # Dask has verified who sends it
    return deserialize_numpy_ndarray(header, frames)


def _register(*tables: tuple[Any, Callable[..., Any]]) -> None:
    """Answer for the arrays of all frameworks, of those that are loaded at once."""
    new = [table for table in tables if table not in _tables]
    _tables.extend(new)
    # Dask has one registration for torch and torchvision, which must not come after ours.
    for root, names in {**registry.roots(), "torchvision": ("torch",)}.items() if new else ():
        answered = [name for name in names if name not in _KNOWN_TO_DASK]
        if not answered:
            continue
        # Dask's own answers to classes of that package, as torch.nn.Module, come first.
        before = list(filter(None, (dispatch._lazy.get(root) for dispatch, _ in new)))
        if root in sys.modules and all(registry.loaded(name) for name in answered):
            _register_classes(answered, before)
        else:
            for dispatch, _ in new:
                dispatch.register_lazy(root, lambda n=answered, b=before: _register_classes(n, b))


def _register_classes(names: list[str], before: list[Callable[[], Any]]) -> None:
    """In all tables at once: Dask's own registration fills several, and ours would not be asked any more."""
    for register_own in before:
        register_own()
    for name in names:
        try:
            owner = registry.framework(name)
        except FrameworkNotInstalledError:  # a package that is imported but does not work here has no arrays
            continue
        for cls in owner.array_classes():
            if not owner.all_pickle:
                copyreg.pickle(cls, _written_for_pickle)
            for dispatch, answer in _tables:
                dispatch.register(cls, answer)


def size(x: Any) -> int:
    """Bytes that an array holds in memory, of the host or of a card.

    >>> import torch
    >>> size(torch.zeros(1000, 10_000, dtype=torch.float32))
    40000000
    """
    owner = registry.find_owner(x)
    try:
        if owner is not None:
            owner.check(x)
            return owner.nbytes(x)
    except (ArrayNotSupportedError, DtypeNotSupportedError):
        pass  # sparse, nested, symbolic: no dense bytes to count
    return sys.getsizeof(x)


def token(x: Any) -> Any:
    """What makes an array the same as another to Dask: framework, dtype, shape, device and every bit."""
    from dask.tokenize import normalize_object, normalize_token

    owner = registry.find_owner(x)
    try:
        if owner is not None:
            owner.check(x)
            if not owner.is_plain(x):
                return normalize_object(x)
            place, grad = str(owner.device_of(x)), owner.requires_grad(x)
            return (owner.name, owner.dtype_name(x), owner.shape(x), place, grad, normalize_token(_bytes(x)))
    except (ArrayNotSupportedError, DtypeNotSupportedError):
        pass
    return normalize_object(x)


def _bytes(x: Any) -> np.ndarray:
    """The values as packed bytes in host memory, uint8, 1-D; shared where they lie so already."""
    host = np.ascontiguousarray(convert_memory(x, "numpy", grad="detach"))
    return host.reshape(-1).view(np.uint8)


def save(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """An array as a header and frames of host memory, for ``dask_serialize``.

    Raises:
        NotImplementedError: the array is to be pickled instead.
    """
    owner = registry.find_owner(x)
    if owner is None:
        raise TypeError(f"an object of type {type(x).__name__} is no array")
    if not owner.is_plain(x):
        raise NotImplementedError(f"{type(x).__name__} is more than an array")
    return _write(x, owner)


def _write(x: Any, owner: Framework) -> tuple[dict[str, Any], list[Any]]:
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
    frames: list[Any] = [_bytes(x)]
    if header["requires_grad"] and x.is_leaf and x.grad is not None:
        header["grad"], more = _write(x.grad, owner)
        frames += more
    return header, frames


def _written_for_pickle(x: Any) -> tuple[Any, ...]:
    owner = registry.find_owner(x)
    try:
        if owner is not None and owner.is_plain(x):
            return load, _write(x, owner)
    except NotImplementedError:
        pass
    reduced: tuple[Any, ...] = x.__reduce_ex__(4)
    return reduced


def load(header: dict[str, Any], frames: list[Any]) -> Any:
    """The array of a header and its frames, on the device that it came from where there is one such here."""
    owner = registry.framework(header["framework"])
    dtype, shape = hostmemory.np_dtype(header["dtype"]), tuple(header["shape"])
    frame, *more = frames
    count = math.prod(shape)
    host = np.frombuffer(frame, np.uint8).view(dtype).reshape(shape) if count else np.empty(shape, dtype)
    device = Device.parse(header["device"])
    device = device if device in owner.devices() else owner.default_device()
    array = convert_memory(host, owner.name, device=device)
    if header["requires_grad"]:
        array.requires_grad_(True)
        if "grad" in header:
            array.grad = load(header["grad"], more)
    return array
