"""Register arrays of all frameworks with Dask: their sizes, tokens and serialization.

Without this, Dask counts a PyTorch tensor of 40 MB as 80 bytes and does not know when to spill it to disk. No
framework is imported: the classes of a framework are registered when Dask encounters its first array.

Sizes are registered by the entry point ``dask.sizeof`` in every process that imports Dask. Tokens are
registered on first use of a name of `arraybridge.dask`, and serialization by `prepare`.
"""

from __future__ import annotations

import copyreg
import getpass
import pickle
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    error_text,
)
from arraybridge.frameworks import registry
from arraybridge.memory.serialization import load, save
from arraybridge.memory.shared_memory import Exchange, Segment, SharedArray, SharedMemoryGoneError

#: Frameworks that Dask supports itself.
_KNOWN_TO_DASK = ("numpy", "cupy")


def register_sizes(sizeof: Any) -> None:
    """Register the sizes of arrays; the entry point ``dask.sizeof`` calls this function."""
    _register_dispatch(sizeof, size)


def register_tokens() -> None:
    """Register the tokens by which Dask recognizes equal arrays."""
    from dask.tokenize import normalize_token

    _register_dispatch(normalize_token, token)


def register_transport() -> None:
    """Register the serialization of arrays by `save` and `load`; the receivers need it, too."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    _register_dispatch(dask_serialize, save)
    _register_dispatch(dask_deserialize, load)
    dask_serialize.register(SharedArray, save_shared)
    dask_deserialize.register(SharedArray, load_shared)


def _register_dispatch(dispatch: Any, answer: Callable[..., Any]) -> None:
    """Register a function for each framework: immediately if it is loaded, otherwise on its first array."""
    # Dask itself registers PyTorch lazily for torch and torchvision. This replaces both registrations.
    for root, names in {**registry.names_by_module(), "torchvision": ("torch",)}.items():
        registered_classes = [name for name in names if name not in _KNOWN_TO_DASK]
        if registered_classes:
            dispatch.register_lazy(root, partial(_register_classes, dispatch, answer, registered_classes))
        _register_classes(dispatch, answer, filter(registry.loaded, registered_classes))


def _register_classes(dispatch: Any, answer: Callable[..., Any], names: Iterable[str]) -> None:
    for name in names:
        try:
            owner = registry.framework(name)
        except FrameworkNotInstalledError:  # an imported package that does not work here
            continue
        for cls in owner.runtime.array_classes():
            dispatch.register(cls, answer)
            if not owner.interchange.all_pickle:
                copyreg.pickle(cls, _reduced)


def save_shared(x: SharedArray, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Serialize a `shared` array: by reference for processes on this machine, otherwise by its bytes."""
    from distributed.comm.addressing import get_address_host
    from distributed.protocol.numpy import serialize_numpy_ndarray

    ends = [(context or {}).get(end, {}).get("address") for end in ("sender", "recipient")]
    if x.segment is not None and all(ends) and len({get_address_host(end) for end in ends}) == 1:
        return {"shared": pickle.dumps(x)}, []
    header, frames = serialize_numpy_ndarray(x.view(np.ndarray))
    return header, frames


def load_shared(header: dict[str, Any], frames: list[Any]) -> Any:
    """Deserialize the result of `save_shared`."""
    from distributed.protocol.numpy import deserialize_numpy_ndarray

    if "shared" in header:
        return pickle.loads(header["shared"])  # noqa: S301  # Dask authenticates the sender
    return deserialize_numpy_ndarray(header, frames)


# -- transport by shared memory ----------------------------------------------------------------------

#: Values of more than this number of bytes are exported through shared memory.
_MIN_NBYTES = 1 << 20
#: The maximum number of exported values at a time.
_MAX_EXPORTED = 64
#: Seconds after which an export is dropped even if it is in use: its reader may have been killed.
_TIMEOUT = 60.0

_exchange = Exchange()
_lock = threading.Lock()
_exported: dict[Segment, float] = {}


def reach() -> str:
    """Return a name for this host, container and user. Processes with equal names can share memory."""
    container = Path("/proc/self/ns/pid")
    parts = (platform.node(), container.readlink() if container.exists() else "", getpass.getuser())
    return "arraybridge-" + "-".join(map(str, parts))


def register_memory(worker: Any, reaches: Iterable[str]) -> None:
    """Let a worker request and send values through shared memory.

    Dask does not report who receives a message, or how often. But a request for values lists the
    serialization families that the requester accepts, in order. Each reach is registered as such a family.
    """
    from distributed.protocol.serialize import register_serialization_family

    for family in reaches:
        serializer = export if family == reach() else _out_of_reach
        register_serialization_family(family, serializer, import_exported)
    if reach() in reaches:
        worker.rpc.deserializers = [reach(), "dask", "pickle", "msgpack", "error"]


def _out_of_reach(x: Any) -> Any:
    raise NotImplementedError


def export(x: Any, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Serialize a value as Dask does, with large values in shared memory."""
    from distributed.protocol.serialize import serialize
    from distributed.utils import ensure_memoryview

    header, frames = serialize(x, context=context)
    if "compression" in header:  # a GPU array, or one that chooses its compression
        raise NotImplementedError
    frames = [ensure_memoryview(frame) for frame in frames]
    if sum(map(len, frames)) > _MIN_NBYTES:
        with _lock:
            segment, sizes = _exported_now(frames)
        if segment is not None:
            return {"inner": header, "place": pickle.dumps((segment, sizes))}, []
    return {"inner": header}, frames


def _exported_now(frames: list[Any]) -> tuple[Segment | None, list[Any]]:
    now = time.monotonic()
    for one, since in list(_exported.items()):
        if not one.in_use.value or now - since > _TIMEOUT:
            del _exported[one]
    _exchange.segments = [one for one in _exchange.segments if one in _exported or not one.in_use.value]
    segment, sizes = _exchange.export(frames) if len(_exported) < _MAX_EXPORTED else (None, [])
    if segment is not None:
        _exported[segment] = now
    return segment, sizes


def import_exported(header: dict[str, Any], frames: list[Any]) -> Any:
    """Deserialize the result of `export`."""
    from distributed.protocol.serialize import deserialize

    if "place" in header:
        try:
            with _lock:
                frames = _exchange.import_exported(*pickle.loads(header["place"]))  # noqa: S301  # as above
        except SharedMemoryGoneError as error:
            # Dask treats it as a lost connection, and requests the value again.
            raise EOFError(error_text(error)) from error
        frames = [memoryview(frame) for frame in frames]
    return deserialize(header["inner"], frames)


# -- sizes and tokens --------------------------------------------------------------------------------


def size(x: Any) -> int:
    """Return the number of bytes of an array, in host or GPU memory.

    >>> import torch
    >>> size(torch.zeros(1000, 10_000, dtype=torch.float32))
    40000000
    """
    owner = registry.find_owner(x)
    with suppress(ArrayNotSupportedError, DtypeNotSupportedError):  # symbolic arrays
        if owner is not None:
            if not owner.sparse.layout(x):
                owner.check(x)
            return owner.nbytes(x)
    return sys.getsizeof(x)


def token(x: Any) -> Any:
    """Return the token of an array, from its framework, dtype, shape, device and data."""
    from dask.tokenize import normalize_object, normalize_token

    try:
        return normalize_token(save(x))
    except NotImplementedError:
        return normalize_object(x)


def _reduced(x: Any) -> Any:
    """Reduce an array for pickle, for frameworks whose own pickling loses data."""
    with suppress(NotImplementedError):
        return load, save(x)
    return x.__reduce_ex__(4)
