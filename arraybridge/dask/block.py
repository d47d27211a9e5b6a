"""What is called for each block: the function; its result, brought into the type of the chunk and checked."""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
from collections.abc import Callable, Hashable
from typing import Any, Literal

import cloudpickle
import numpy as np

from arraybridge.conversion.convert import convert_memory, detect_memory_type
from arraybridge.dask import arrays
from arraybridge.dask.workers import arrive, on_this_worker
from arraybridge.errors import (
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.facts import how_to_install
from arraybridge.functions.wrap import name_of
from arraybridge.trees import prefix

__all__ = ["Block", "BlockError", "checked_shape"]


class BlockError(MemoryConversionError, ValueError):
    """A function did not give the block that was declared: another shape, another dtype, or no array."""


class Block:
    """A function of blocks: it brings each result back into the type of its chunk, and checks it.

    It travels as bytes that are only opened where a block is computed, so that the scheduler, which opens
    everything else in a graph, needs no framework; and they are opened once in a process, so that what a
    function keeps, as what JAX has compiled for it, is there for the next block.
    """

    def __init__(self, fn: Callable[..., Any], dtype: np.dtype[Any], target: str | None) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._carried: tuple[str, bytes] | None = None
        self.name = name_of(fn)
        self.dtype = dtype
        self.target = target
        #: Whether a result has the shape of its block, or at most that, or one that is checked later.
        self.shape: Literal["kept", "trimmed", "declared"] = "kept"
        # By its parameters Dask knows whether a function wants its block's number.
        wanted = [p for p in ("block_id", "block_info") if _has_parameter(fn, p)]
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter("blocks", inspect.Parameter.VAR_POSITIONAL),
                *(inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=None) for p in wanted),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            ]
        )

    def __repr__(self) -> str:
        return f"<blocks of {self.name}>"

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._function()

    def __dask_tokenize__(self) -> tuple[Hashable, ...]:
        function = arrays.function_token(self._function())
        return (function, str(self.dtype), self.target, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        if self._carried is None:
            carried = cloudpickle.dumps(self._fn)
            self._carried = hashlib.blake2b(carried, digest_size=16).hexdigest(), carried
        return {**self.__dict__, "_fn": None}

    def _function(self) -> Callable[..., Any]:
        if self._fn is None and self._carried is not None:
            self._fn = _opened(*self._carried)
        assert self._fn is not None  # noqa: S101
        return self._fn

    def __call__(self, *blocks: Any, **kwargs: Any) -> Any:
        arrive()
        # A block without axes is a scalar to NumPy, and no array.
        blocks = tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in blocks])
        try:
            result = self._function()(*blocks, **kwargs)
        except FrameworkNotInstalledError as error:
            prefix(error, f"{self.name}(){on_this_worker()}")
            raise
        target = self.target or detect_memory_type(blocks[0])
        try:
            result = convert_memory(np.asarray(result) if isinstance(result, np.generic) else result, target)
        except UnknownArrayError:
            raise BlockError(
                f"{self.name}() returned a {type(result).__name__} for a block; it has to return one array",
                target_type=target,
            ) from None
        except GradientError as error:
            prefix(error, f"{self.name}(): a block leaves torch and its graph; use torch.no_grad()")
            raise
        if result.dtype != self.dtype and result.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise BlockError(
                f"{self.name}() returned a block of dtype {result.dtype} where {self.dtype} was declared:"
                f" pass dtype={str(result.dtype)!r}, or have the function cast its result",
                target_type=target,
            )
        if self.shape != "declared":
            expected = blocks[0].shape
            trimmed = self.shape == "trimmed" and len(result.shape) == len(expected)
            if result.shape != expected and not (
                trimmed and all(n <= m for n, m in zip(result.shape, expected, strict=True))
            ):
                raise BlockError(
                    f"{self.name}() returned a block of shape {result.shape} for one of shape {expected}: say"
                    " what it does to the shape, with chunks=, drop_axis= or new_axis=",
                    target_type=target,
                )
        return result


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return False


#: Bytes of the functions that are kept open, with what they carry; the oldest ones go.
_MAX_BYTES = 256 << 20
_functions: dict[str, tuple[Callable[..., Any], int]] = {}
_functions_lock = threading.RLock()  # a function may carry another one


def _opened(digest: str, carried: bytes) -> Callable[..., Any]:
    with _functions_lock:
        found = _functions.get(digest)
        if found is None:
            found = _functions[digest] = _unpickled(carried), len(carried)
            while sum(size for _, size in _functions.values()) > _MAX_BYTES and len(_functions) > 1:
                del _functions[next(iter(_functions))]
        return found[0]


def _unpickled(carried: bytes) -> Callable[..., Any]:
    try:
        fn: Callable[..., Any] = cloudpickle.loads(carried)
    except ModuleNotFoundError as error:
        # A function that mentions its framework brings the import along.
        root = (error.name or "").partition(".")[0]
        names = registry.roots().get(root, ())
        if not names:
            raise
        raise FrameworkNotInstalledError(
            f"{names[0]} is not installed; run {how_to_install(registry.facts(names[0]))}.",
            target_type=names[0],
            reason=str(error),
        ) from error
    return fn


def checked_shape(block: Any, slices: tuple[slice, ...], name: str) -> Any:
    """The block, if it fills its place in the result."""
    declared = tuple(s.stop - s.start for s in slices)
    known = all(
        math.isnan(there) or here == there for here, there in zip(block.shape, declared, strict=False)
    )
    if len(block.shape) != len(declared) or not known:
        raise BlockError(
            f"{name}() returned a block of shape {block.shape}, and its declared chunks say {declared};"
            " correct chunks=, drop_axis= or new_axis="
        )
    return block
