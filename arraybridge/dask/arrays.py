"""What Dask has to know of arrays: how large they are, whether two are alike, and how they travel.

Dask takes a torch tensor of 40 MB for 80 bytes and so cannot see when to spill it to disk. What stands here
corrects that for every framework, and imports none: each is registered when Dask meets its first array.

The sizes are registered by the entry point ``dask.sizeof``, that is wherever Dask runs beside arraybridge;
tokens when a name of `arraybridge.dask` is first used; how arrays travel where workers are prepared.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.memory.frames import load, save
from arraybridge.memory.shared import SharedArray

#: Dask knows these arrays by itself.
_KNOWN_TO_DASK = ("numpy", "cupy")


def register_sizes(sizeof: Any) -> None:
    """Teach Dask the sizes of arrays; the entry point ``dask.sizeof`` calls this."""
    _teach(sizeof, size)


def register_tokens() -> None:
    """Teach Dask which arrays are the same."""
    from dask.tokenize import normalize_token

    _teach(normalize_token, token)


def register_transport() -> None:
    """Let arrays travel as `save` writes them, from here on: to workers that are prepared."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    _teach(dask_serialize, save)
    _teach(dask_deserialize, load)
    dask_serialize.register(SharedArray, save_shared)
    dask_deserialize.register(SharedArray, load_shared)


def _teach(dispatch: Any, answer: Callable[..., Any]) -> None:
    """Answer for every framework: for loaded ones at once, for others when Dask meets their first array."""
    # Dask's own registration of torch hangs on both roots, and would come after ours.
    for root, names in {**registry.roots(), "torchvision": ("torch",)}.items():
        taught = [name for name in names if name not in _KNOWN_TO_DASK]
        if taught:
            dispatch.register_lazy(root, partial(_teach_classes, dispatch, answer, taught))
        _teach_classes(dispatch, answer, filter(registry.loaded, taught))


def _teach_classes(dispatch: Any, answer: Callable[..., Any], names: Iterable[str]) -> None:
    for name in names:
        try:
            owner = registry.framework(name)
        except FrameworkNotInstalledError:  # a package that is imported but does not work here has no arrays
            continue
        for cls in owner.array_classes():
            dispatch.register(cls, answer)
            if not owner.all_pickle:
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


def size(x: Any) -> int:
    """Bytes that an array holds in memory, of the host or of a card.

    >>> import torch
    >>> size(torch.zeros(1000, 10_000, dtype=torch.float32))
    40000000
    """
    owner = registry.find_owner(x)
    with suppress(ArrayNotSupportedError, DtypeNotSupportedError):  # sparse, symbolic: no dense bytes
        if owner is not None:
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
