"""Register arrays of all frameworks with Dask: their sizes, tokens and serialization.

Without this registration, Dask counts a PyTorch tensor of 40 MB as 80 bytes and does not know when to spill
it to disk. No framework is imported: the classes of a framework are registered when Dask encounters its first
array.

Sizes are registered through the entry point ``dask.sizeof`` in every process that imports Dask. Tokens are
registered when a name from `arraybridge.dask` is first used, and serialization is registered by `prepare`.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from arraybridge.dask.worker_shared_memory import load_shared, save_shared
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
)
from arraybridge.frameworks import registry
from arraybridge.memory.serialization import load, save
from arraybridge.memory.shared_memory import SharedArray

#: Frameworks whose arrays Dask itself supports.
_KNOWN_TO_DASK = ("numpy", "cupy")


def register_sizes(sizeof: Any) -> None:
    """Register `size` for the arrays of all frameworks; called through the entry point ``dask.sizeof``."""
    _register_dispatch(sizeof, size)


def register_tokens() -> None:
    """Register `token`, which returns the tokens by which Dask recognizes equal arrays."""
    from dask.tokenize import normalize_token

    _register_dispatch(normalize_token, token)


def register_transport() -> None:
    """Register `save` and `load` to serialize arrays; processes that receive arrays must do this, too."""
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    _register_dispatch(dask_serialize, save)
    _register_dispatch(dask_deserialize, load)
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
                copyreg.pickle(cls, _reduced)


# -- sizes and tokens --------------------------------------------------------------------------------


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


def _reduced(x: Any) -> Any:
    """Return a function and its arguments for pickle, which would otherwise change some arrays."""
    with suppress(NotImplementedError):
        return load, save(x)
    return x.__reduce_ex__(4)
