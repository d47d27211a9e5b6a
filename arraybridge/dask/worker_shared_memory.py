"""Transfer of values between Dask workers of one machine through shared memory."""

from __future__ import annotations

import getpass
import pickle
import platform
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from arraybridge.errors import error_text
from arraybridge.memory.segments import Exchange, Segment, SharedMemoryGoneError


def save_shared(x: Any, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """Serialize a `shared` array: by reference for processes on this machine, otherwise by value."""
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


#: Values with more bytes than this are exported through shared memory.
_MIN_NBYTES = 1 << 20
#: The maximum number of exported values at a time.
_MAX_EXPORTED = 64
#: Seconds after which an exported value is dropped even if it is in use, because its reader may have been
#: killed.
_TIMEOUT = 60.0
_exchange = Exchange()
_lock = threading.Lock()
_exported: dict[Segment, float] = {}


def reach() -> str:
    """Return a name for this host, container and user; processes with equal names can share memory."""
    container = Path("/proc/self/ns/pid")
    parts = (platform.node(), container.readlink() if container.exists() else "", getpass.getuser())
    return "arraybridge-" + "-".join(map(str, parts))


def register_memory(worker: Any, reaches: Iterable[str]) -> None:
    """Let a worker request and send values through shared memory.

    Dask does not report which process receives a message, or how often. But a request for values lists the
    serialization families that the requester accepts, in order of preference. Each item of ``reaches``, a
    name that `reach` returned in a process of the cluster, is registered as such a family.
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
    if "compression" in header:  # a GPU array, or an array that chooses its own compression
        raise NotImplementedError
    frames = [ensure_memoryview(frame) for frame in frames]
    if sum(map(len, frames)) > _MIN_NBYTES:
        with _lock:
            segment, sizes = _export_now(frames)
        if segment is not None:
            return {"inner": header, "place": pickle.dumps((segment, sizes))}, []
    return {"inner": header}, frames


def _export_now(frames: list[Any]) -> tuple[Segment | None, list[Any]]:
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
                frames = _exchange.import_exported(*pickle.loads(header["place"]))  # noqa: S301  # as in `load_shared`
        except SharedMemoryGoneError as error:
            # Dask treats an EOFError as a lost connection, and requests the value again.
            raise EOFError(error_text(error)) from error
        frames = [memoryview(frame) for frame in frames]
    return deserialize(header["inner"], frames)
