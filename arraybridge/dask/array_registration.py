"""What Dask has to know of arrays: how large they are, whether two are alike, and how they travel.

Dask takes a torch tensor of 40 MB for 80 bytes and so cannot see when to spill it to disk. What stands here
corrects that for every framework, and imports none: each is registered when Dask meets its first array.

The sizes are registered by the entry point ``dask.sizeof``, that is wherever Dask runs beside arraybridge;
tokens when a name of `arraybridge.dask` is first used; how arrays travel where workers are prepared.
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

#: Dask knows these arrays by itself.
_KNOWN_TO_DASK = ("numpy", "cupy")


def register_sizes(sizeof: Any) -> None:
    """Teach Dask the sizes of arrays; the entry point ``dask.sizeof`` calls this."""
    _register_dispatch(sizeof, size)


def register_tokens() -> None:
    """Teach Dask which arrays are the same."""
    from dask.tokenize import normalize_token

    _register_dispatch(normalize_token, token)


def register_transport() -> None:
    """Let arrays travel as `save` writes them, from here on: to workers that are prepared."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    _register_dispatch(dask_serialize, save)
    _register_dispatch(dask_deserialize, load)
    dask_serialize.register(SharedArray, save_shared)
    dask_deserialize.register(SharedArray, load_shared)


def _register_dispatch(dispatch: Any, answer: Callable[..., Any]) -> None:
    """Answer for every framework: for loaded ones at once, for others when Dask meets their first array."""
    # Dask's own registration of torch hangs on both roots, and would come after ours.
    for root, names in {**registry.names_by_module(), "torchvision": ("torch",)}.items():
        registered_classes = [name for name in names if name not in _KNOWN_TO_DASK]
        if registered_classes:
            dispatch.register_lazy(root, partial(_register_classes, dispatch, answer, registered_classes))
        _register_classes(dispatch, answer, filter(registry.loaded, registered_classes))


def _register_classes(dispatch: Any, answer: Callable[..., Any], names: Iterable[str]) -> None:
    for name in names:
        try:
            owner = registry.framework(name)
        except FrameworkNotInstalledError:  # a package that is imported but does not work here has no arrays
            continue
        for cls in owner.runtime.array_classes():
            dispatch.register(cls, answer)
            if not owner.interchange.all_pickle:
                copyreg.pickle(cls, _reduced)


def save_shared(x: SharedArray, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """A `shared` array: by its place to a process of this machine; else, as to a disk, by its bytes."""
    from distributed.comm.addressing import get_address_host
    from distributed.protocol.numpy import serialize_numpy_ndarray

    ends = [(context or {}).get(end, {}).get("address") for end in ("sender", "recipient")]
    if x.segment is not None and all(ends) and len({get_address_host(end) for end in ends}) == 1:
        return {"shared": pickle.dumps(x)}, []
    header, frames = serialize_numpy_ndarray(x.view(np.ndarray))
    return header, frames


def load_shared(header: dict[str, Any], frames: list[Any]) -> Any:
    """What `save_shared` wrote."""
    from distributed.protocol.numpy import deserialize_numpy_ndarray

    if "shared" in header:
        return pickle.loads(header["shared"])  # noqa: S301  # Dask has verified who sends it
    return deserialize_numpy_ndarray(header, frames)


# -- by memory that workers share --------------------------------------------------------------------

#: Values of at least so many bytes are sent this way.
_LARGE = 1 << 20
#: The maximum number of values that are being sent.
_MOST = 64
#: Seconds after which a value that nobody gives back counts as lost: its reader may have been killed.
_TIMEOUT = 60.0

_exchange = Exchange()
_lock = threading.Lock()
_exported: dict[Segment, float] = {}


def reach() -> str:
    """What processes have in common that can map each other's memory: machine, container and user."""
    container = Path("/proc/self/ns/pid")
    words = (platform.node(), container.readlink() if container.exists() else "", getpass.getuser())
    return "arraybridge-" + "-".join(map(str, words))


def register_memory(worker: Any, reaches: Iterable[str]) -> None:
    """Let a worker ask others for values by shared memory, and hand over its own to those who ask so.

    Dask does not tell who reads a message, and how often. But whoever asks for values names the ways to
    serialise them that he reads, the first one first; these are ways of that kind, one for each reach.
    """
    from distributed.protocol.serialize import register_serialization_family

    for there in reaches:
        register_serialization_family(there, export if there == reach() else _out_of_reach, import_exported)
    if reach() in reaches:
        worker.rpc.deserializers = [reach(), "dask", "pickle", "msgpack", "error"]


def _out_of_reach(x: Any) -> Any:
    raise NotImplementedError


def export(x: Any, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """What Dask writes of a value, in shared memory where it is large."""
    from distributed.protocol.serialize import serialize
    from distributed.utils import ensure_memoryview

    header, frames = serialize(x, context=context)
    if "compression" in header:  # of a card, or with a wish of its own
        raise NotImplementedError
    frames = [ensure_memoryview(frame) for frame in frames]
    if sum(map(len, frames)) > _LARGE:
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
    segment, sizes = _exchange.export(frames) if len(_exported) < _MOST else (None, [])
    if segment is not None:
        _exported[segment] = now
    return segment, sizes


def import_exported(header: dict[str, Any], frames: list[Any]) -> Any:
    """The value that `export` wrote."""
    from distributed.protocol.serialize import deserialize

    if "place" in header:
        try:
            with _lock:
                frames = _exchange.import_exported(*pickle.loads(header["place"]))  # noqa: S301  # as above
        except SharedMemoryGoneError as error:
            raise EOFError(
                error_text(error)
            ) from error  # for Dask a broken connection, so that it asks again
        frames = [memoryview(frame) for frame in frames]
    return deserialize(header["inner"], frames)


# -- what it holds -----------------------------------------------------------------------------------


def size(x: Any) -> int:
    """Bytes that an array holds in memory, of the host or of a card.

    >>> import torch
    >>> size(torch.zeros(1000, 10_000, dtype=torch.float32))
    40000000
    """
    owner = registry.find_owner(x)
    with suppress(ArrayNotSupportedError, DtypeNotSupportedError):  # symbolic: no bytes
        if owner is not None:
            if not owner.sparse.layout(x):
                owner.check(x)
            return owner.nbytes(x)
    return sys.getsizeof(x)


def token(x: Any) -> Any:
    """What makes an array the same as another to Dask: framework, dtype, shape, device and every bit."""
    from dask.tokenize import normalize_object, normalize_token

    try:
        return normalize_token(save(x))
    except NotImplementedError:
        return normalize_object(x)


def _reduced(x: Any) -> Any:
    """What pickle writes of an array inside of an object, where its framework would lose bits."""
    with suppress(NotImplementedError):
        return load, save(x)
    return x.__reduce_ex__(4)
