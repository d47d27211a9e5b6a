"""Functions over the blocks of a Dask array; and Dask arrays from arrays of any framework, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArraySliceDep
from dask.tokenize import normalize_token

from arraybridge.carriers.sources import is_array
from arraybridge.conversion.convert import convert_memory, detect_memory_type, device_of
from arraybridge.dask.cluster_workers import on_this_worker
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.wrapping import name_of
from arraybridge.errors import (
    Advice,
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
)
from arraybridge.frameworks import registry
from arraybridge.parallel.function_devices import decorated, placement
from arraybridge.types import FrameworkLike, GpuId


class BlockError(MemoryConversionError, ValueError):
    """A function returned another shape or dtype than declared, or not an array.

    Also a ``ValueError``. Declare the result, as in this example, or cast it in the function::

        map_blocks(fn, x, dtype="float32", drop_axis=(1, 2))
    """


#: Dtypes that JAX narrows by default.
_WIDE_DTYPES = ("float64", "int64", "uint64", "complex128")


class Block:
    """A function of blocks: it brings each result back into the type of its chunk, and checks its dtype.

    It travels as bytes that are only opened where a block is computed, so that the scheduler, which opens
    everything else in a graph, needs no framework; and they are opened once in a process, so that what a
    function keeps, as what JAX has compiled for it, is there for the next block.
    """

    def __init__(
        self, fn: Callable[..., Any], dtype: np.dtype[Any], target: str | None, expected: str
    ) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._carried = b""
        self.__name__ = name_of(fn)
        self.dtype = dtype
        #: Where the dtype comes from, in words.
        self.expected = expected
        self.target = target
        placed = placement(fn)
        #: The framework that runs the function and must keep its 64-bit dtypes; None if none is known.
        self.x64_framework = placed.framework if placed is not None and dtype.name in _WIDE_DTYPES else None
        #: Whether a result has the shape of its block, which is compared at once.
        self.keeps_shape = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function; by its parameters Dask knows whether it wants the block's number."""
        return self._fn or _unpickled(self._carried)

    def __dask_tokenize__(self) -> tuple[Hashable, ...]:
        return (normalize_token(self.__wrapped__), str(self.dtype), self.target, self.keeps_shape)

    def __getstate__(self) -> dict[str, Any]:
        self._carried = self._carried or cloudpickle.dumps(self._fn)
        return {**self.__dict__, "_fn": None}

    def __call__(self, *blocks: Any, **kwargs: Any) -> Any:
        # A block without axes is a scalar to NumPy, and no array.
        blocks = tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in blocks])
        try:
            function = self.__wrapped__  # opened first: an error of its own imports comes first
            with (
                nullcontext()
                if self.x64_framework is None
                else registry.framework(self.x64_framework).runtime.x64_context()
            ):
                result = function(*blocks, **kwargs)
        except FrameworkNotInstalledError as error:
            error.add_call(f"{self.__name__}(){on_this_worker()}")
            raise
        target = self.target or detect_memory_type(blocks[0])
        try:
            result = convert_memory(result, target)
        except UnknownArrayError:
            raise BlockError(
                f"{self.__name__}() returned a {type(result).__name__} for a block; it has to return one"
                " array",
                target_type=target,
            ) from None
        except GradientError as error:
            error.add_call(f"{self.__name__}()")
            error.advise(
                Advice("A block would leave PyTorch and its graph. Use torch.no_grad() in the function.")
            )
            raise
        if result.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise BlockError(
                f"{self.__name__}() returned a block of dtype {result.dtype} where {self.dtype} was expected"
                f" ({self.expected}): pass dtype={str(result.dtype)!r}, or have the function cast its result",
                target_type=target,
            )
        return _of_shape(blocks[0].shape, result, self.__name__) if self.keeps_shape else result


_unpickled = lru_cache(maxsize=64)(cloudpickle.loads)


def _in_place(out: Any, name: str | None, token: str, function: str) -> Any:
    """The array, each block of which is compared with the place that it is to fill."""
    axes = tuple(range(out.ndim))
    places = ArraySliceDep(out.chunks)
    return da.blockwise(
        _filling, axes, out, axes, places, axes, function, None,
        align_arrays=False, dtype=out.dtype, meta=out._meta, name=name, token=token,
    )  # fmt: skip


def _filling(block: Any, place: tuple[slice, ...], function: str) -> Any:
    """The block, if it fills its place in the result."""
    return _of_shape(tuple(s.stop - s.start for s in place), block, function)


def _of_shape(expected: tuple[float, ...], block: Any, function: str) -> Any:
    """The block, if it has that shape; a size that nobody knows is nan."""
    if len(block.shape) != len(expected) or any(
        n != m and not math.isnan(m) for n, m in zip(block.shape, expected, strict=True)
    ):
        raise BlockError(
            f"{function}() returned a block of shape {block.shape} where {expected} was expected: say what it"
            " does to the shape, with chunks=, drop_axis= or new_axis=",
            target_type=detect_memory_type(block),
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
            says, or else the dtype of ``array``. If it is a 64-bit dtype, a function decorated with `jax`
            runs with x64 on, so that it keeps 64-bit values.
        meta: an empty array of the type of the results' chunks. Left out: the chunk type of ``array``.
        **kwargs: ``chunks``, ``drop_axis``, ``new_axis``, ``name``, ``token`` and ``enforce_ndim`` mean what
            they do in ``dask.array.map_blocks``: with the first three a function says that it changes the
            shape. All others are handed to ``fn``; a ``dask.delayed`` object among them is sent to each
            worker once.

    Returns:
        a Dask array; nothing is computed.

    Raises:
        TypeError: ``fn`` cannot be called; ``array`` is no Dask array.

    While it is computed:
        ValueError: two arrays have different numbers of blocks along an axis.
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
    block, meta = _declared("map_blocks", fn, array, dtype, meta)
    reshapes = any(kwargs.get(word) is not None for word in ("chunks", "drop_axis", "new_axis"))
    block.keeps_shape = not reshapes and not any(isinstance(one, da.Array) for one in arrays)
    name = kwargs.pop("name", None)
    token = kwargs.pop("token", block.__name__)
    options = {"token": token, "dtype": meta.dtype, "meta": meta, **kwargs}
    if block.keeps_shape:  # without a second task for each block, which costs 0.1 ms
        return da.map_blocks(block, array, *arrays, name=name, **options)
    return _in_place(da.map_blocks(block, array, *arrays, **options), name, token, block.__name__)


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
            off itself; it returns blocks of the chunks of ``array``, or of ``chunks``.

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
    block, meta = _declared("map_overlap", fn, array, dtype, meta)
    for one in (array, *arrays):
        if any(math.isnan(n) for n in one.shape):
            raise ValueError(
                f"the chunk sizes of {one!r} are not known, so that nobody can say where its blocks meet;"
                " call its compute_chunk_sizes() first"
            )
    # Dask would give the name to the blocks with their margins.
    name = kwargs.pop("name", None)
    token = kwargs.pop("token", block.__name__)
    out = da.map_overlap(
        block, array, *arrays, depth=depth, boundary=boundary, dtype=meta.dtype, meta=meta, token=token,
        **kwargs,
    )  # fmt: skip
    return _in_place(out, name, token, block.__name__)


def _declared(what: str, fn: Callable[..., Any], array: Any, dtype: Any, meta: Any) -> tuple[Block, Any]:
    """The function for the blocks, and an empty array like its results."""
    if not callable(fn):
        raise TypeError(f"{what}() takes a function first, and {fn!r} cannot be called")
    if not isinstance(array, da.Array):
        advice = "; make one with to_dask(x, chunks)" if is_array(array) else ""
        raise TypeError(f"{what}() takes a Dask array second, and this is a {type(array).__name__}{advice}")
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
            dtype = np.dtype(conversion.value)
            expected = f"what {conversion} declares"
    empty = meta_from_array(array._meta if meta is None else meta, dtype=dtype)
    return Block(fn, empty.dtype, target, expected), empty


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
        ValueError: ``chunks`` does not fit the shape.

    >>> import numpy as np
    >>> to_dask(np.zeros((4, 6)), chunks=(2, 3)).numblocks
    (2, 2)
    """
    on_gpu = device_of(x).kind == "gpu" and registry.load_or_none("cupy") is not None
    array = convert_memory(x, "cupy" if on_gpu else "numpy", grad=grad)
    # Without asarray=False Dask would bring CuPy's arrays to the host.
    return da.from_array(array, chunks=chunks, name=name, asarray=False)


def from_dask(array: Any, framework: FrameworkLike, gpu_id: GpuId = None, **options: Any) -> Any:
    """Compute a Dask array, and return it as an array of a framework.

    Args:
        array: a Dask array. All of it has to fit into memory, and for a moment twice.
        framework: as for `convert_memory`.
        gpu_id: as for `convert_memory`.
        **options: ``copy``, ``dtype`` and ``device``, as for `convert_memory`.

    Raises:
        TypeError: ``array`` is no Dask array.
        and what `convert_memory` raises.

    >>> import numpy as np
    >>> from_dask(to_dask(np.arange(4), chunks=2) + 1, "torch")
    tensor([1, 2, 3, 4])
    """
    if not isinstance(array, da.Array):
        raise TypeError(
            f"from_dask() takes a Dask array, and this is a {type(array).__name__}; convert_memory() takes"
            " others"
        )
    return convert_memory(array.compute(), framework, gpu_id=gpu_id, **options)
