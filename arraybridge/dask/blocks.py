"""Functions over the blocks of a Dask array; and Dask arrays from arrays of any framework, and back."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Literal

import cloudpickle
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArraySliceDep
from dask.tokenize import normalize_token

from arraybridge.arrays import is_array
from arraybridge.conversion.convert import convert_memory, detect_memory_type, device_of
from arraybridge.dask.workers import on_this_worker
from arraybridge.errors import (
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.facts import how_to_install
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.wrap import kind_of_function, name_of
from arraybridge.placement import decorated, placement
from arraybridge.trees import prefix
from arraybridge.types import FrameworkLike, GpuId

__all__ = ["BlockError", "from_dask", "map_blocks", "map_overlap", "to_dask"]


class BlockError(MemoryConversionError, ValueError):
    """A function did not give the block that was declared: another shape, another dtype, or no array."""


class Block:
    """A function of blocks: it brings each result back into the type of its chunk, and checks it.

    It travels as bytes that are only opened where a block is computed, so that the scheduler, which opens
    everything else in a graph, needs no framework; and they are opened once in a process, so that what a
    function keeps, as what JAX has compiled for it, is there for the next block.
    """

    def __init__(
        self, fn: Callable[..., Any], dtype: np.dtype[Any], target: str | None, expected: str = ""
    ) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._carried = b""
        self.name = name_of(fn)
        self.dtype = dtype
        #: Where the dtype comes from, in words.
        self.expected = expected
        self.target = target
        #: Whether a result has the shape of its block, or at most that, or one that is checked later.
        self.shape: Literal["kept", "trimmed", "declared"] = "kept"
        # By its parameters Dask knows whether a function wants its block's number.
        numbers = [p for p in ("block_id", "block_info") if _has_parameter(fn, p)]
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter("blocks", inspect.Parameter.VAR_POSITIONAL),
                *(inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=None) for p in numbers),
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
        return (normalize_token(self._function()), str(self.dtype), self.target, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        self._carried = self._carried or cloudpickle.dumps(self._fn)
        return {**self.__dict__, "_fn": None}

    def _function(self) -> Callable[..., Any]:
        if self._fn is None:
            with _opening:
                self._fn = _opened(self._carried)
        return self._fn

    def __call__(self, *blocks: Any, **kwargs: Any) -> Any:
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
                f"{self.name}() returned a block of dtype {result.dtype} where {self.dtype} was expected"
                f" ({self.expected}): pass dtype={str(result.dtype)!r}, or have the function cast its result",
                target_type=target,
            )
        shape, expected = result.shape, blocks[0].shape
        trimmed = self.shape == "trimmed" and len(shape) == len(expected)
        fits = all(n <= m for n, m in zip(shape, expected, strict=True)) if trimmed else shape == expected
        if self.shape != "declared" and not fits:
            raise BlockError(
                f"{self.name}() returned a block of shape {shape} for one of shape {expected}: say what it"
                " does to the shape, with chunks=, drop_axis= or new_axis=",
                target_type=target,
            )
        return result


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return False


_opening = threading.RLock()  # a function may carry another one


@lru_cache(maxsize=64)
def _opened(carried: bytes) -> Callable[..., Any]:
    """The function of these bytes, which stays open for the next block."""
    try:
        fn: Callable[..., Any] = cloudpickle.loads(carried)
    except ModuleNotFoundError as error:
        # A function that mentions its framework brings the import along.
        names = registry.roots().get((error.name or "").partition(".")[0], ())
        if not names:
            raise
        raise FrameworkNotInstalledError(
            f"{names[0]} is not installed; run {how_to_install(registry.facts(names[0]))}.",
            target_type=names[0],
            reason=str(error),
        ) from error
    return fn


def _checked_shape(block: Any, slices: tuple[slice, ...], name: str) -> Any:
    """The block, if it fills its place in the result."""
    declared = tuple(s.stop - s.start for s in slices)
    if not _same(block.shape, declared):
        raise BlockError(
            f"{name}() returned a block of shape {block.shape}, and its declared chunks say {declared};"
            " correct chunks=, drop_axis= or new_axis="
        )
    return block


def map_blocks(
    fn: Callable[..., Any], array: Any, *arrays: Any, dtype: Any = None, meta: Any = None, **kwargs: Any
) -> Any:
    """Call a function on every block of a Dask array; the function decides in which framework it runs.

    Chunks stay what they are, NumPy or CuPy arrays: a decorated function converts a block when it is called,
    and its result is converted back inside the same task. ``fn`` is not called while the graph is built, so
    that what it returns has to be declared; each block is checked against that when it is computed.

    Args:
        fn: a function with a decorator of arraybridge, or a plain one that takes the chunks as they are. It
            is called as ``fn(block, *blocks, **kwargs)`` and returns one array. If it has a parameter
            ``block_id`` or ``block_info``, Dask passes it.
        array: a Dask array of any shape.
        *arrays: more Dask arrays, of as many blocks along their last axes: blocks meet by their numbers,
            also where their sizes differ, and the chunks of the result are those of the first such array.
            One that has a single chunk along an axis is handed over whole along it. Anything else is handed
            whole to every call.
        dtype: the dtype of the results. Left out: that of ``meta``, what the decorator's ``dtype_conversion``
            says, or else the dtype of ``array``.
        meta: an empty array of the type of the results' chunks. Left out: the chunk type of ``array``.
        **kwargs: ``chunks``, ``drop_axis``, ``new_axis``, ``name``, ``token`` and ``enforce_ndim`` mean what
            they do in ``dask.array.map_blocks``: with the first three a function says that it changes the
            shape. All others are handed to ``fn``; a ``dask.delayed`` object among them is sent to each
            worker once.

    Returns:
        a Dask array; nothing is computed.

    Raises:
        TypeError: ``fn`` cannot be called, or is a coroutine or generator function; ``array`` is no Dask
            array.
        ValueError: two arrays have different numbers of blocks along an axis.
        DtypeNotSupportedError: an array holds Python objects, and ``fn`` runs in another framework than
            NumPy.

    While it is computed:
        BlockError: a block has another shape or dtype than declared, or is no array.
        FrameworkNotInstalledError: the worker, which is named, lacks the framework.

    >>> import numpy as np, arraybridge
    >>> from arraybridge.dask import to_dask
    >>> @arraybridge.torch
    ... def row_sums(block):
    ...     return block.sum(1)
    >>> images = to_dask(np.ones((4, 3), dtype="float32"), chunks=(2, 3))
    >>> map_blocks(row_sums, images, drop_axis=1).compute()
    array([3., 3., 3., 3.], dtype=float32)
    """
    block, meta = _declared("map_blocks", fn, (array, *arrays), dtype, meta)
    cut = [one for one in (array, *arrays) if isinstance(one, da.Array)]
    _check_chunks(cut)
    reshapes = any(kwargs.get(name) is not None for name in _RESHAPING)
    block.shape = "declared" if reshapes or not _are_cut_alike(cut) else "kept"
    kwargs.setdefault("token", block.name)
    name = kwargs.pop("name", None) if block.shape == "declared" else None
    out = da.map_blocks(block, array, *arrays, dtype=meta.dtype, meta=meta, **kwargs)
    return _with_checked_shape(out, block.name, name) if block.shape == "declared" else out


#: Arguments by which a function says that it changes the shape of its blocks.
_RESHAPING = ("chunks", "drop_axis", "new_axis")


def _with_checked_shape(out: Any, label: str, name: str | None) -> Any:
    """The array, each block of which is compared with the slices that it is to fill."""
    axes = tuple(range(out.ndim))
    where = ArraySliceDep(out.chunks)
    return da.blockwise(
        _checked_shape, axes, out, axes, where, axes, label, None,
        align_arrays=False, dtype=out.dtype, meta=out._meta, name=name, token=f"{label}-checked",
    )  # fmt: skip


def map_overlap(
    fn: Callable[..., Any],
    array: Any,
    *arrays: Any,
    depth: Any,
    boundary: Any = "none",
    dtype: Any = None,
    meta: Any = None,
    **kwargs: Any,
) -> Any:
    """`map_blocks` for filters: a block comes with a margin of its neighbours, which is cut off afterwards.

    Args:
        fn: as for `map_blocks`; it returns an array of the shape of its block, margins included, unless it
            says otherwise.
        array: a Dask array, whose chunk sizes are known.
        *arrays: more Dask arrays.
        depth: elements of margin: an int for all axes, a tuple or dict for each, or a list of these for each
            array.
        boundary: what lies beyond the array's edges: ``"none"``, ``"reflect"``, ``"periodic"``, ``"nearest"``
            or a number; a tuple or dict for each axis.
        dtype: as for `map_blocks`.
        meta: as for `map_blocks`.
        **kwargs: ``trim``, ``allow_rechunk``, ``align_arrays``, ``chunks``, ``drop_axis`` and ``new_axis``
            mean what they do in ``dask.array.map_overlap``, ``name`` and ``token`` what they do in
            `map_blocks`; all others are handed to ``fn``. With ``trim=False`` the function cuts the margins
            off itself, and Dask takes its word for it: without ``chunks`` the shape of the result is declared
            as that of ``array``, whatever comes out.

    Raises:
        ValueError: the chunk sizes of an array are not known.
        TypeError: one of the arrays is no Dask array.
        and what `map_blocks` raises.

    >>> import numpy as np, arraybridge
    >>> from arraybridge.dask import to_dask
    >>> @arraybridge.numpy
    ... def differences(block):
    ...     return block - np.roll(block, 1)
    >>> x = to_dask(np.array([1, 4, 9, 16]), chunks=2)
    >>> map_overlap(differences, x, depth=1, boundary="periodic").compute()
    array([-15,   3,   5,   7])
    """
    block, meta = _declared("map_overlap", fn, (array, *arrays), dtype, meta)
    for one in (array, *arrays):
        if not isinstance(one, da.Array):
            raise TypeError(
                f"map_overlap() takes Dask arrays, and this is a {type(one).__name__}; pass it to the"
                " function by name"
            )
        if any(math.isnan(n) for n in one.shape):
            raise ValueError(
                f"the chunk sizes of {one!r} are not known, so that nobody can say where its blocks meet;"
                " call its compute_chunk_sizes() first"
            )
    if not kwargs.get("align_arrays", True):
        _check_chunks([array, *arrays])
    kwargs.setdefault("token", block.name)
    if any(kwargs.get(word) is not None for word in _RESHAPING):
        block.shape = "declared"
    elif not kwargs.get("trim", True):
        block.shape = "trimmed"
    elif arrays:  # their margins may differ; what is left of the block tells
        block.shape = "declared"
    # Dask would give the name to the blocks with their margins.
    name = None if block.shape == "trimmed" else kwargs.pop("name", None)
    out = da.map_overlap(
        block, array, *arrays, depth=depth, boundary=boundary, dtype=meta.dtype, meta=meta, **kwargs
    )
    if block.shape == "trimmed" or (block.shape == "kept" and name is None):
        return out
    return _with_checked_shape(out, block.name, name)


def _declared(
    what: str, fn: Callable[..., Any], arrays: tuple[Any, ...], dtype: Any, meta: Any
) -> tuple[Block, Any]:
    """The function for the blocks, and an empty array like its results."""
    if not callable(fn):
        raise TypeError(f"{what}() takes a function first, and {fn!r} cannot be called")
    if kind_of_function(fn) != "function":
        raise TypeError(f"{what}() takes plain functions, and {name_of(fn)} is a coroutine or generator")
    array = arrays[0]
    if not isinstance(array, da.Array):
        advice = "; make one with to_dask(x, chunks)" if is_array(array) else ""
        raise TypeError(f"{what}() takes a Dask array second, and this is a {type(array).__name__}{advice}")
    placed = placement(fn)
    framework = "numpy" if placed is None else placed.framework or "numpy"
    for one in arrays:
        if isinstance(one, da.Array) and one.dtype.hasobject and framework != "numpy":
            raise DtypeNotSupportedError(
                f"{name_of(fn)} runs in {framework}, and an array of dtype {one.dtype} holds Python objects,"
                " which no framework but NumPy has; cast it first, as in array.astype('float32')",
                source_type="numpy",
                target_type=framework,
                reason=f"dtype {one.dtype}",
            )
    target = None if meta is None else detect_memory_type(meta)
    if target not in (None, "numpy", "cupy"):
        raise TypeError(
            f"meta= is an array of {target}, and the chunks of a Dask array are of numpy or cupy; leave it"
            " out, and say dtype= where it differs from that of the array"
        )
    expected = "what was declared"
    if dtype is None:
        expected = "that of the array, since dtype= was left out" if meta is None else "that of meta="
        dtype = array.dtype.newbyteorder("=") if meta is None else meta.dtype
        conversion = getattr(decorated(fn), "dtype_conversion", DtypeConversion.NATIVE_OUTPUT)
        if conversion not in (DtypeConversion.NATIVE_OUTPUT, DtypeConversion.PRESERVE_INPUT):
            dtype, expected = np.dtype(conversion.value), f"what {conversion} declares"
    empty = meta_from_array(array._meta if meta is None else meta, dtype=dtype)
    return Block(fn, empty.dtype, target, expected), empty


def _check_chunks(arrays: list[Any]) -> None:
    """Refuse arrays whose blocks cannot be paired by their numbers."""
    for first, other in itertools.combinations(arrays, 2):
        for mine, its in zip(reversed(first.chunks), reversed(other.chunks), strict=False):
            if len(mine) > 1 and len(its) > 1 and len(mine) != len(its):
                raise ValueError(
                    f"the chunks of {first!r} and {other!r} do not meet: they are {mine} and {its} along one"
                    " axis; rechunk one of the arrays, as in other.rechunk(first.chunks)"
                )


def _same(mine: tuple[float, ...], its: tuple[float, ...]) -> bool:
    """Whether an axis is cut alike, as far as that is known."""
    return len(mine) == len(its) and all(
        a == b or math.isnan(a) or math.isnan(b) for a, b in zip(mine, its, strict=True)
    )


def _are_cut_alike(arrays: list[Any]) -> bool:
    """Whether a block of the first array tells the shape of the result's."""
    first, *more = arrays
    return all(array.ndim <= first.ndim for array in more) and all(
        _same(mine, its) or its == (1,)
        for array in more
        for mine, its in zip(reversed(first.chunks), reversed(array.chunks), strict=False)
    )


# -- in and out ----------------------------------------------------------------------------------------


def to_dask(x: Any, chunks: Any = "auto", *, name: str | None = None, grad: Any = "error") -> Any:
    """An array of any framework as a Dask array.

    Its chunks are NumPy arrays of what lives on the host, and CuPy arrays of what lives on an NVIDIA card, if
    CuPy is installed. Dask takes a copy, so that later writes to the array change nothing.

    Args:
        x: an array.
        chunks: as for ``dask.array.from_array``: an int, a tuple for each axis, or ``"auto"``.
        name: the name in the graph. Left out, it is made from the values and the chunks.
        grad: as for `convert_memory`.

    Raises:
        UnknownArrayError: ``x`` is no array.
        DtypeNotSupportedError: its elements are Python objects or the like.
        ValueError: ``chunks`` does not fit the shape.

    >>> import numpy as np
    >>> to_dask(np.zeros((4, 6)), chunks=(2, 3)).numblocks
    (2, 2)
    """
    on_card = device_of(x).kind == "gpu" and registry.usable("cupy") is not None
    array = convert_memory(x, "cupy" if on_card else "numpy", grad=grad)
    if array.dtype.hasobject:
        raise DtypeNotSupportedError(
            f"an array of dtype {array.dtype} holds Python objects, which no framework but NumPy has; make it"
            " a Dask array with dask.array.from_array(x, chunks)",
            source_type="numpy",
            reason=f"dtype {array.dtype}",
        )
    # Without asarray=False Dask would bring CuPy's arrays to the host.
    return da.from_array(array, chunks=chunks, name=name, asarray=False)


def from_dask(
    array: Any, framework: FrameworkLike, gpu_id: GpuId = None, *, copy: bool | None = None, **options: Any
) -> Any:
    """Compute a Dask array, and return it as an array of a framework.

    Args:
        array: a Dask array. All of it has to fit into memory, and for a moment twice.
        framework: as for `convert_memory`.
        gpu_id: as for `convert_memory`.
        copy: as for `convert_memory`.
        **options: ``dtype`` and ``device``, as for `convert_memory`.

    Raises:
        TypeError: ``array`` is no Dask array.
        and what `convert_memory` raises.

    >>> import numpy as np
    >>> from_dask(to_dask(np.arange(4), chunks=2) + 1, "torch")
    tensor([1, 2, 3, 4])
    """
    name = registry.framework_name(framework)
    if not isinstance(array, da.Array):
        raise TypeError(
            f"from_dask() takes a Dask array, and this is a {type(array).__name__}; convert_memory() takes"
            " others"
        )
    computed = array.compute()
    if isinstance(computed, np.generic):  # what NumPy makes of an array without axes
        computed = np.asarray(computed)
    return convert_memory(computed, name, gpu_id=gpu_id, copy=copy, **options)
