"""What Dask has to know of arrays: how large they are, whether two are alike, and how they travel.

Dask takes a torch tensor of 40 MB for 80 bytes and so cannot see when to spill it to disk. What stands here
corrects that for every framework, and imports none: each is registered when Dask meets its first array.

The sizes are registered by the entry point ``dask.sizeof``, that is wherever Dask runs beside arraybridge.
All else is registered when a name of `arraybridge.dask` is first used.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
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
from arraybridge.types import Device

__all__ = ["load", "register", "register_sizes", "save", "size", "token"]

#: Dask knows these arrays by itself.
_KNOWN_TO_DASK = ("numpy", "cupy")


# What Dask asks, and our answer.
_tables: list[tuple[Any, Callable[..., Any]]] = []
# The answers of Dask itself that ours have replaced.
_replaced: dict[tuple[Callable[..., Any], type], Callable[..., Any]] = {}
# Schedulers of the clusters all of whose processes read what `save` writes.
_agreed: set[str] = set()


def agree(scheduler: str) -> None:
    """Let arrays travel in the form of `save` in the cluster of that scheduler, by its address."""
    _agreed.add(scheduler)


def register_sizes(sizeof: Any) -> None:
    """Teach Dask the sizes of arrays; the entry point ``dask.sizeof`` calls this."""
    _register((sizeof, size))


def register() -> None:
    """Teach Dask the sizes, the tokens and the serialization of arrays.

    Raises:
        ModuleNotFoundError: Dask or distributed is not installed.
    """
    from dask.sizeof import sizeof
    from dask.tokenize import normalize_token
    from distributed.protocol import dask_deserialize, dask_serialize

    _register((sizeof, size), (normalize_token, token), (dask_serialize, save), (dask_deserialize, load))


def _register(*tables: tuple[Any, Callable[..., Any]]) -> None:
    """Answer for the arrays of all frameworks, of those that are loaded at once."""
    _tables.extend(tables)
    # Dask has one registration for torch and torchvision, which must not come after ours.
    for root, names in {**registry.roots(), "torchvision": ("torch",)}.items():
        answered = [name for name in names if name not in _KNOWN_TO_DASK]
        if not answered:
            continue
        # Dask's own answers to classes of that package, as torch.nn.Module, come first.
        before = list(filter(None, (dispatch._lazy.get(root) for dispatch, _ in tables)))
        if root in sys.modules and all(registry.loaded(name) for name in answered):
            _register_classes(answered, before)
        else:
            for dispatch, _ in tables:
                dispatch.register_lazy(root, lambda n=answered, b=before: _register_classes(n, b))


def _register_classes(names: list[str], before: list[Callable[[], Any]]) -> None:
    """In all tables at once: Dask's own registration fills several, and ours would not be asked any more."""
    for one in before:
        one()
    for name in names:
        try:
            classes = _classes(registry.framework(name))
        except FrameworkNotInstalledError:  # a package that is imported but does not work here has no arrays
            continue
        for cls in classes:
            if not registry.framework(name).pickling.all_pickle:
                copyreg.pickle(cls, _written_for_pickle)
            for dispatch, answer in _tables:
                known = dispatch._lookup.get(cls)
                if known is not None and known is not answer:
                    _replaced[answer, cls] = known
                dispatch.register(cls, answer)


def _classes(owner: Framework) -> tuple[type, ...]:
    return owner.pickling.classes() or owner.fast.types()


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
            held = owner.pickling.held_bytes(x)
            return owner.nbytes(x) if held is None else held
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
            if not owner.pickling.is_plain(x):
                return normalize_object(x)
            place, grad = str(owner.device_of(x)), owner.requires_grad(x)
            return (owner.name, owner.dtype_name(x), owner.shape(x), place, grad, normalize_token(_bytes(x)))
    except (ArrayNotSupportedError, DtypeNotSupportedError):
        pass
    return normalize_object(x)


def function_token(fn: Callable[..., Any]) -> Any:
    """What makes a function the same as another: its name, or its code with the arrays that it holds.

    Dask's own answer differs from process to process for a function that holds a torch tensor, whose pickle
    contains an address.
    """
    import cloudpickle
    from dask.tokenize import normalize_token

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            owner = None if isinstance(obj, type) else registry.find_owner(obj)
            if owner is not None and owner.name not in _KNOWN_TO_DASK and owner.pickling.is_plain(obj):
                return str, (str(token(obj)),)
            return super().reducer_override(obj)

    written = io.BytesIO()
    try:
        Pickler(written).dump(fn)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, OSError):
        # What cannot travel, as one that holds a lock, can still be called here.
        return normalize_token(fn)
    return hashlib.blake2b(written.getvalue(), digest_size=16).hexdigest()


def _bytes(x: Any) -> np.ndarray:
    """The values as packed bytes in host memory, uint8, 1-D; shared where they lie so already."""
    host = np.ascontiguousarray(convert_memory(x, "numpy", grad="detach"))
    return host.reshape(-1).view(np.uint8)


def save(x: Any) -> tuple[dict[str, Any], list[Any]]:
    """An array as a header and frames of host memory, for ``dask_serialize``.

    In a cluster whose other processes may not read them, arrays travel as Dask itself has them travel.

    Raises:
        NotImplementedError: the array is to be pickled instead.
    """
    owner = registry.find_owner(x)
    if owner is None:
        raise TypeError(f"an object of type {type(x).__name__} is no array")
    if not owner.pickling.is_plain(x):
        raise NotImplementedError(f"{type(x).__name__} is more than an array")
    return _write(x, owner) if _is_understood() else _saved_by_dask(x)


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
        if owner is not None and not owner.pickling.pickles(x):
            return load, _write(x, owner)
    except NotImplementedError:
        pass
    reduced: tuple[Any, ...] = x.__reduce_ex__(4)
    return reduced


def _is_understood() -> bool:
    """Whether what `save` writes will be read: in all clusters of which this process is a part."""
    from distributed import Client, Worker

    members = [one for one in Client._instances if one.status not in ("closed", "newly-created")]
    return all(one.scheduler.address in _agreed for one in (*members, *Worker._instances))


def _saved_by_dask(x: Any) -> tuple[dict[str, Any], list[Any]]:
    for cls in type(x).__mro__:
        own = _replaced.get((save, cls))
        if own is not None:
            try:
                header, frames = own(x)
            except (TypeError, RuntimeError):  # torch's bfloat16, its arrays on a card, and the like
                break
            return header, frames
    raise NotImplementedError(f"{type(x).__name__} is pickled")


def load(header: dict[str, Any], frames: list[Any]) -> Any:
    """The array of a header and its frames, on the device that it came from where there is one such here."""
    if "framework" not in header:  # written by a process that is not prepared; only torch's are
        (own,) = (answer for (ours, _), answer in _replaced.copy().items() if ours is load)
        return own(header, frames)
    owner = registry.framework(header["framework"])
    dtype, shape = hostmemory.np_dtype(header["dtype"]), tuple(header["shape"])
    frame, *more = frames
    count = math.prod(shape)
    host = np.frombuffer(frame, np.uint8).view(dtype).reshape(shape) if count else np.empty(shape, dtype)
    device = Device.parse(header["device"])
    there = device if device in owner.devices() else owner.default_device()
    array = convert_memory(host, owner.name, device=there)
    if header["requires_grad"]:
        array.requires_grad_(True)
        if "grad" in header:
            array.grad = load(header["grad"], more)
    return array
