"""Register arrays of all frameworks with Dask: their sizes, tokens, serialization, and how they are joined.

Without this registration, Dask counts a PyTorch tensor of 40 MB as 80 bytes (2026.8, no issue found) and does
not know when to spill it to disk. No framework is imported: the classes of a framework are registered when
Dask encounters its first array.

Sizes are registered through the entry point ``dask.sizeof`` in every process that imports Dask. Tokens and
joining are registered when a name from `arraybridge.dask` is first used, and serialization is registered by
`prepare`.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from arraybridge.conversion.convert import convert_memory
from arraybridge.dask.worker_shared_memory import load_shared, save_shared
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
)
from arraybridge.interface import registry
from arraybridge.memory.serialization import load, save

#: Frameworks whose arrays Dask itself supports.
_KNOWN_TO_DASK = ("numpy", "cupy")


def register_sizes(sizeof: Any) -> None:
    """Register `size` for the arrays of all frameworks; called through the entry point ``dask.sizeof``."""
    _register_dispatch(sizeof, size)


def register_tokens() -> None:
    """Register `token`, which returns the tokens by which Dask recognizes equal arrays."""
    from dask.tokenize import normalize_token

    _register_dispatch(normalize_token, token)


def register_joining() -> None:
    """Register `join` for the blocks of CuPy, which Dask 2026.8 joins on the current GPU (no issue found)."""
    from dask.array import dispatch
    from dask.utils import Dispatch

    def register() -> None:
        cls = sys.modules["cupy"].ndarray
        # Dask registers all its functions for CuPy when it first needs one of them. That must come first.
        for lookup in vars(dispatch).values():
            if isinstance(lookup, Dispatch) and lookup is not dispatch.concatenate_lookup:
                with suppress(TypeError):  # Dask has no such function for CuPy
                    lookup.dispatch(cls)
        dispatch.concatenate_lookup.register(cls, join)

    dispatch.concatenate_lookup.register_lazy("cupy", register)
    if registry.loaded("cupy"):
        register()


def register_transport() -> None:
    """Register `save` and `load` to serialize arrays; processes that receive arrays must do this, too."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    _register_dispatch(dask_serialize, save)
    _register_dispatch(dask_deserialize, load)
    dask_serialize.register_lazy("arraybridge", _register_shared)
    dask_deserialize.register_lazy("arraybridge", _register_shared)


def _register_shared() -> None:
    """Register `shared` arrays; called when Dask encounters the first one."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    from arraybridge.memory.shared_memory import SharedArray

    dask_serialize.register(SharedArray, save_shared)
    dask_deserialize.register(SharedArray, load_shared)


def _register_dispatch(dispatch: Any, answer: Callable[..., Any]) -> None:
    """Register ``answer`` for the arrays of each framework, once the framework is loaded."""
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
        except FrameworkNotInstalledError:  # the package is imported, but does not work here
            continue
        for cls in owner.runtime.array_classes():
            dispatch.register(cls, answer)
            if not owner.interchange.all_pickle:
                copyreg.pickle(cls, _reduce)


# -- joining, sizes and tokens ---------------------------------------------------------------------------


def join(blocks: list[Any], axis: int = 0) -> Any:
    """Return the blocks as one array, on the GPU of the first block."""
    owner = registry.framework("cupy")
    device = owner.devices.device_of(blocks[0])
    return owner.batching.concatenate([convert_memory(x, "cupy", device=device) for x in blocks], axis)


def size(x: Any) -> int:
    """Return the size of an array in bytes, in host or GPU memory.

    >>> import torch
    >>> size(torch.zeros(1000, 10_000, dtype=torch.float32))
    40000000
    """
    owner = registry.find_owner(x)
    with suppress(ArrayNotSupportedError, DtypeNotSupportedError):  # raised for symbolic arrays
        if owner is not None:
            if not owner.sparse.layout(x):
                owner.check(x)
            return owner.nbytes(x)
    return sys.getsizeof(x)


def token(x: Any) -> Any:
    """Return the token of an array, made from its framework, dtype, shape, device and data."""
    from dask.tokenize import normalize_object, normalize_token

    try:
        return normalize_token(save(x))
    except NotImplementedError:
        return normalize_object(x)


def _reduce(x: Any) -> Any:
    """Return a function and its arguments for pickle, which would otherwise change some arrays."""
    with suppress(NotImplementedError):
        return load, save(x)
    return x.__reduce_ex__(4)
