"""`map_blocks` and `map_overlap`: what is to be computed of which blocks, and what comes out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArraySliceDep

from arraybridge.conversion.convert import detect_memory_type
from arraybridge.dask.block import Block, checked_shape
from arraybridge.errors import DtypeNotSupportedError
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.wrap import kind_of_function, name_of
from arraybridge.placement import decorated, placement
from arraybridge.trees import is_array

__all__ = ["map_blocks", "map_overlap"]


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
        checked_shape, axes, out, axes, where, axes, label, None,
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
    if dtype is None:
        dtype = array.dtype.newbyteorder("=") if meta is None else meta.dtype
        conversion = getattr(decorated(fn), "dtype_conversion", DtypeConversion.NATIVE_OUTPUT)
        if conversion not in (DtypeConversion.NATIVE_OUTPUT, DtypeConversion.PRESERVE_INPUT):
            dtype = np.dtype(conversion.value)
    made = meta_from_array(array._meta if meta is None else meta, dtype=dtype)
    return Block(fn, made.dtype, target), made


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
    first, *others = arrays
    return all(
        other.ndim <= first.ndim
        and all(
            _same(mine, its) or its == (1,)
            for mine, its in zip(reversed(first.chunks), reversed(other.chunks), strict=False)
        )
        for other in others
    )
