"""Apply functions to the blocks of Dask arrays, and convert arrays to and from Dask."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.layers import ArraySliceDep
from dask.tokenize import normalize_token

from arraybridge.advice import Advice
from arraybridge.carriers.sources import is_array
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.detection import detect_memory_type, device_of
from arraybridge.dask.cluster_workers import on_this_worker
from arraybridge.dask.overlap_options import check_boundary, check_depth
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.wrapping import name_of
from arraybridge.errors import (
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
)
from arraybridge.formatting import format_count
from arraybridge.host import dtype_names
from arraybridge.interface import registry
from arraybridge.parallel.function_devices import find_decorated, placement
from arraybridge.parallel.workers import noting
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import add_hints, bool_option, raise_unknown_option


class BlockError(MemoryConversionError, ValueError):
    """The result for a block does not have the declared shape or dtype, or is not an array.

    Also a ``ValueError``. Declare the shape and dtype of the result, as in this example, or cast the result
    in the function::

        map_blocks(fn, x, dtype="float32", drop_axis=(1, 2))
    """


#: Dtypes that JAX narrows by default.
_WIDE_DTYPES = ("float64", "int64", "uint64", "complex128")


class Block:
    """A callable that runs a function on blocks, converts results to the type of the chunks, and checks them.

    The function is pickled separately and is only unpickled by the workers, so that the scheduler does not
    import a framework. A process unpickles it once, so that caches of the function, such as code compiled by
    JAX, are reused for the next block.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        dtype: np.dtype[Any],
        target: str | None,
        expected: str,
        x64: bool | None,
    ) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._pickled = b""
        self.__name__ = name_of(fn)
        self.dtype = dtype
        #: Where the expected dtype comes from, for messages.
        self.expected = expected
        self.target = target
        if x64 is None and dtype.name in _WIDE_DTYPES:
            x64 = True  # JAX would narrow the dtype
        #: Whether x64 is on while the function runs; None for the setting of the worker.
        self.x64 = x64
        #: The function's framework if x64 is selected for its calls; otherwise None.
        self.x64_framework = None if x64 is None else _x64_framework_of(fn)
        #: Whether a result must have the shape of its block. This is checked in the task itself.
        self.keeps_shape = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The wrapped function. Dask inspects its parameters for ``block_id`` and ``block_info``."""
        return self._fn or _unpickled(self._pickled)

    def __dask_tokenize__(self) -> tuple[Hashable, ...]:
        return (normalize_token(self.__wrapped__), str(self.dtype), self.target, self.keeps_shape, self.x64)

    def __getstate__(self) -> dict[str, Any]:
        self._pickled = self._pickled or cloudpickle.dumps(self._fn)
        return {**self.__dict__, "_fn": None}

    def __call__(self, *blocks: Any, **kwargs: Any) -> Any:
        """Call the function on blocks and check the result."""
        # NumPy passes 0-d blocks as scalars, which are not arrays.
        blocks = tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in blocks])
        try:
            # The block includes the unpickling of the function, whose imports may raise.
            with noting(self._note_on_call(blocks, kwargs)), self._x64_context():
                result = self.__wrapped__(*blocks, **kwargs)
        except FrameworkNotInstalledError as error:
            error.add_call(f"{self.__name__}(){on_this_worker()}")
            raise
        target = self.target or detect_memory_type(blocks[0])
        try:
            result = convert_memory(result, target)
        except UnknownArrayError:
            raise BlockError(
                f"{self.__name__}() returned {type(result).__name__} for a block. Return one array.",
                target_type=target,
            ) from None
        except GradientError as error:
            error.add_call(f"{self.__name__}()")
            error.advise(Advice("Dask chunks do not have gradients. Use torch.no_grad() in the function."))
            raise
        if result.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise BlockError(
                f"{self.__name__}() returned a block of dtype {result.dtype}, expected {self.dtype}"
                f" ({self.expected}). Pass dtype={str(result.dtype)!r}, or cast the result in the function.",
                target_type=target,
            )
        return _check_shape(blocks[0].shape, result, self.__name__) if self.keeps_shape else result

    def _x64_context(self) -> AbstractContextManager[Any]:
        if self.x64_framework is None or self.x64 is None:
            return nullcontext()
        return registry.framework(self.x64_framework).runtime.x64_context(self.x64)

    def _note_on_call(self, blocks: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return a note on a failed call, with the shapes of the blocks and the names of the options."""
        shapes = [str(getattr(x, "shape", ())) for x in blocks]
        named = [name for name in kwargs if name not in ("block_id", "block_info")]
        arguments = f"{format_count(len(blocks), 'block')} of shape {' and '.join(shapes)}"
        options = f", and {', '.join(named)} by keyword" if named else ""
        advice = " If they should be equal, rechunk one of the arrays." if len(set(shapes)) > 1 else ""
        return f"arraybridge: {self.__name__}() got {arguments}{options}.{advice}"


_unpickled = lru_cache(maxsize=64)(cloudpickle.loads)


def _check_blocks(out: Any, name: str | None, token: str, function: str) -> Any:
    """Return the Dask array with an additional task per block, which checks the shape of the block."""
    axes = tuple(range(out.ndim))
    places = ArraySliceDep(out.chunks)
    return da.blockwise(
        _check_block, axes, out, axes, places, axes, function, None,
        align_arrays=False, dtype=out.dtype, meta=out._meta, name=name, token=token,  # noqa: SLF001  # as Dask itself
    )  # fmt: skip


def _check_block(block: Any, place: tuple[slice, ...], function: str) -> Any:
    """Return the block if it has the shape of its slices in the result; otherwise raise `BlockError`."""
    return _check_shape(tuple(s.stop - s.start for s in place), block, function)


def _check_shape(expected: tuple[float, ...], block: Any, function: str) -> Any:
    """Return the block if it has the expected shape, otherwise raise `BlockError`; unknown sizes are nan."""
    if len(block.shape) != len(expected) or any(
        n != m and not math.isnan(m) for n, m in zip(block.shape, expected, strict=True)
    ):
        raise BlockError(
            f"{function}() returned a block of shape {block.shape}, expected {expected}. Declare the"
            " change of shape with chunks=, drop_axis= or new_axis=.",
            target_type=detect_memory_type(block),
        )
    return block


@add_hints
def map_blocks(
    fn: Callable[..., Any],
    array: Any,
    *arrays: Any,
    dtype: Any = None,
    meta: Any = None,
    x64: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function on every block of a Dask array, in the framework of its decorator.

    Chunks stay NumPy or CuPy arrays: a decorated function converts each block, and its result is converted
    back in the same task. ``fn`` is not called while the graph is built, so declare the dtype and shape of
    its results. Each block is checked when it is computed.

    Args:
        fn: A function with a decorator of arraybridge, or any function of the chunks. It is called as
            ``fn(block, *blocks, **kwargs)`` and returns one array. Dask passes the parameters ``block_id``
            and ``block_info`` if ``fn`` has them.
        array: A Dask array of any shape.
        *arrays: More Dask arrays with the same number of blocks along their last axes. Blocks are matched by
            number, even if their sizes differ; along each axis, the result has the chunk sizes of the first
            array with the most blocks. A single chunk along an axis is passed to all calls along that axis.
            Other objects are passed to every call.
        dtype: The dtype of the results. Defaults to the dtype of ``meta``, then to the decorator's
            ``dtype_conversion``, then to the dtype of ``array``.
        meta: An empty array of the type of the results' chunks. Defaults to the chunk type of ``array``.
        x64: Whether a function decorated with `jax` runs with 64-bit types enabled. Defaults to None: they
            are enabled if ``dtype`` has 64 bits, and otherwise the worker's setting applies.
        **kwargs: ``chunks``, ``drop_axis``, ``new_axis``, ``name``, ``token`` and ``enforce_ndim`` as for
            ``dask.array.map_blocks``; the first three declare a change of shape. Other arguments are passed
            to ``fn``; a ``dask.delayed`` object among them is sent to each worker once.

    Returns:
        A Dask array, which is not computed yet.

    Raises:
        TypeError: If ``fn`` is not callable, ``array`` is not a Dask array, or ``x64`` is not a bool.
        ValueError: If two arrays have different numbers of blocks along an axis, or ``x64`` is given and
            ``fn`` is not decorated with `jax`.
        BlockError: When the result is computed, if a block does not have the declared shape and dtype, or is
            not an array.
        FrameworkNotInstalledError: When the result is computed, if a worker lacks the framework. The message
            names the worker.

    >>> import numpy as np, arraybridge
    >>> from arraybridge.dask import to_dask
    >>> @arraybridge.torch
    ... def row_sums(block):
    ...     return block.sum(1)
    >>> images = to_dask(np.ones((4, 3), dtype="float32"), chunks=(2, 3))
    >>> map_blocks(row_sums, images, drop_axis=1).compute()
    array([3., 3., 3., 3.], dtype=float32)
    """
    block, meta = _declare("map_blocks", fn, array, dtype, meta, x64)
    _check_block_counts([x for x in (array, *arrays) if isinstance(x, da.Array)])
    reshapes = any(kwargs.get(option) is not None for option in ("chunks", "drop_axis", "new_axis"))
    block.keeps_shape = not reshapes and not any(isinstance(one, da.Array) for one in arrays)
    name = kwargs.pop("name", None)
    token = kwargs.pop("token", block.__name__)
    options = {"token": token, "dtype": meta.dtype, "meta": meta, **kwargs}
    if block.keeps_shape:  # avoids a second task per block, which takes 0.1 ms
        return da.map_blocks(block, array, *arrays, name=name, **options)
    return _check_blocks(da.map_blocks(block, array, *arrays, **options), name, token, block.__name__)


def _check_block_counts(arrays: list[Any]) -> None:
    """Raise `ValueError` if arrays have different numbers of blocks, which Dask detects only when computing.

    Axes are aligned from the last one, and an axis with a single block matches any number of blocks.
    """
    ndim = max(x.ndim for x in arrays)
    for axis in range(-ndim, 0):
        counts = dict.fromkeys(x.numblocks[axis] for x in arrays if x.ndim >= -axis)
        counts.pop(1, None)
        if len(counts) > 1:
            first, second = list(counts)[:2]
            raise ValueError(
                "map_blocks() needs arrays with the same number of blocks along each axis, but the arrays"
                f" have {first} and {second} blocks along axis {axis + ndim}. Rechunk one of them, as in"
                " y.rechunk(x.chunks), or pass it in one chunk."
            )


@add_hints
def map_overlap(
    fn: Callable[..., Any],
    array: Any,
    *arrays: Any,
    depth: Any,
    boundary: Any = "none",
    dtype: Any = None,
    meta: Any = None,
    x64: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function on every block with a margin from its neighbors, and trim the margin from the result.

    Args:
        fn: As for `map_blocks`. It returns an array of the shape of its block, including the margins, unless
            ``chunks``, ``drop_axis`` or ``new_axis`` declare another shape.
        array: A Dask array with known chunk sizes.
        *arrays: More Dask arrays.
        depth: The margin in elements: an int for all axes, a tuple or dict with one per axis, or a list of
            these with one per array. Axes that a dict omits have no margin.
        boundary: The values beyond the array's edges: ``"none"``, ``"reflect"``, ``"periodic"``,
            ``"nearest"`` or a number; or a tuple or dict with one per axis, or a list of these with one per
            array.
        dtype: As for `map_blocks`.
        meta: As for `map_blocks`.
        x64: As for `map_blocks`.
        **kwargs: ``trim``, ``allow_rechunk``, ``align_arrays``, ``chunks``, ``drop_axis`` and ``new_axis`` as
            for ``dask.array.map_overlap``; ``name`` and ``token`` as for `map_blocks`. Other arguments are
            passed to ``fn``. With ``trim=False`` the function trims the margins itself, and returns blocks of
            the chunk sizes of ``array`` or of ``chunks``.

    Returns:
        A Dask array, which is not computed yet.

    Raises:
        ValueError: If the chunk sizes of an array are unknown, or ``depth`` or ``boundary`` has an invalid
            value or does not match the arrays and axes.
        TypeError: If one of the arrays is not a Dask array, or ``depth`` is not an int.
        MemoryConversionError: As for `map_blocks`.

    >>> import numpy as np, arraybridge
    >>> from arraybridge.dask import to_dask
    >>> @arraybridge.numpy
    ... def differences(block):
    ...     return block - np.roll(block, 1)
    >>> x = to_dask(np.array([1, 4, 9, 16]), chunks=2)
    >>> map_overlap(differences, x, depth=1, boundary="periodic").compute()
    array([-15,   3,   5,   7])
    """
    block, meta = _declare("map_overlap", fn, array, dtype, meta, x64)
    for one in (array, *arrays):
        if not isinstance(one, da.Array):
            advice = (
                "Create one with to_dask(x, chunks)"
                if is_array(one)
                else "Pass other arguments of the function by keyword"
            )
            raise TypeError(f"map_overlap() expected Dask arrays, got {type(one).__name__}. {advice}.")
        if any(math.isnan(n) for n in one.shape):
            raise ValueError(
                f"The chunk sizes of {one!r} are not known, but map_overlap() needs them. Call its"
                " compute_chunk_sizes() method first."
            )
    ranks = [one.ndim for one in (array, *arrays)]
    check_depth(depth, ranks)
    check_boundary(boundary, ranks)
    # The name is not passed to Dask, which would use it for the blocks with their margins.
    name = kwargs.pop("name", None)
    token = kwargs.pop("token", block.__name__)
    out = da.map_overlap(
        block, array, *arrays, depth=depth, boundary=boundary, dtype=meta.dtype, meta=meta, token=token,
        **kwargs,
    )  # fmt: skip
    return _check_blocks(out, name, token, block.__name__)


def _declare(
    what: str, fn: Callable[..., Any], array: Any, dtype: Any, meta: Any, x64: Any
) -> tuple[Block, Any]:
    """Return the `Block` for a function, and an empty array of the type and dtype of its results."""
    if not callable(fn):
        raise TypeError(f"{what}() expected a function as its first argument, got {fn!r}.")
    if not isinstance(array, da.Array):
        advice = " Create one with to_dask(x, chunks)." if is_array(array) else ""
        name = type(array).__name__
        raise TypeError(f"{what}() expected a Dask array as its second argument, got {name}.{advice}")
    if x64 is not None:
        bool_option("x64", x64)
        if _x64_framework_of(fn) is None:
            raise ValueError(
                f"x64 is a setting of JAX, and {name_of(fn)} is not decorated with @jax. Omit x64=."
            )
    target = _framework_of_meta(meta)
    expected = "as declared"
    if dtype is None:
        expected = "the dtype of the array, since dtype= is missing" if meta is None else "the dtype of meta="
        dtype = array.dtype.newbyteorder("=") if meta is None else meta.dtype
        conversion = getattr(find_decorated(fn), "dtype_conversion", DtypeConversion.NATIVE_OUTPUT)
        if conversion not in (DtypeConversion.NATIVE_OUTPUT, DtypeConversion.PRESERVE_INPUT):
            dtype = np.dtype(conversion.value)
            expected = f"as {conversion} declares"
    else:
        dtype = dtype_names.dtype_of(dtype)
    # Dask has no public name for the meta array (2026.8; see dask/array/core.py).
    meta = array._meta if meta is None else meta  # noqa: SLF001
    empty = meta_from_array(meta, dtype=dtype)
    return Block(fn, empty.dtype, target, expected, x64), empty


def _x64_framework_of(fn: Callable[..., Any]) -> str | None:
    """Return the framework of a decorated function if it has an x64 setting; otherwise None."""
    placed = placement(fn)
    if placed is None or placed.framework is None or not registry.metadata_of(placed.framework).has_x64:
        return None
    return placed.framework


def _framework_of_meta(meta: Any) -> str | None:
    """Return the framework of ``meta=``, which must be a NumPy or CuPy array; None if it is omitted."""
    if meta is None:
        return None
    if not is_array(meta):
        raise TypeError(
            f"meta= expects an array of the type of the results, got {type(meta).__name__}. Omit meta=, and"
            " pass dtype= if it differs from the dtype of the array."
        )
    target = detect_memory_type(meta)
    if target not in ("numpy", "cupy"):
        raise TypeError(
            f"meta= is an array of {target}, but Dask chunks are NumPy or CuPy arrays. Omit meta=, and pass"
            " dtype= if it differs from the dtype of the array."
        )
    return target


# -- conversion to and from Dask -----------------------------------------------------------------------


@add_hints
def to_dask(x: Any, chunks: Any = "auto", *, name: str | None = None, grad: Any = "error") -> Any:
    """Convert an array of any framework to a Dask array.

    The chunks are NumPy arrays, or CuPy arrays if the array is on an NVIDIA GPU and CuPy is installed. Dask
    copies the array, so later writes to it have no effect.

    Args:
        x: An array.
        chunks: The chunk sizes, as for ``dask.array.from_array``: an int, a tuple with one entry per axis, or
            ``"auto"``.
        name: The name in the graph. Defaults to a hash of the values and the chunks.
        grad: As for `convert_memory`.

    Returns:
        A Dask array of the shape and dtype of ``x``.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        ValueError: If ``chunks`` is not valid for the shape.

    >>> import numpy as np
    >>> to_dask(np.zeros((4, 6)), chunks=(2, 3)).numblocks
    (2, 2)
    """
    on_gpu = device_of(x).kind == "gpu" and registry.load_or_none("cupy") is not None
    array = convert_memory(x, "cupy" if on_gpu else "numpy", grad=grad)
    try:
        blocks = da.core.normalize_chunks(chunks, array.shape, dtype=array.dtype)
        if any(size < 0 for sizes in blocks for size in sizes):
            raise ValueError("a size is negative")
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"chunks={chunks!r} is not valid for the shape {array.shape}. Pass a positive block size, one per"
            " axis, or 'auto'."
        ) from error
    except NotImplementedError as error:  # chunks="auto" for an object dtype
        raise ValueError(
            f"chunks={chunks!r} needs the size of an element, which dtype {array.dtype} does not have. Pass a"
            " block size, such as chunks=1000."
        ) from error
    # Dask copies the array, on the current GPU.
    with registry.framework(detect_memory_type(array)).runtime.device_guard(array):
        # Without asarray=False, Dask would convert arrays without __array_function__ to NumPy
        # (dask/dask#5074).
        return da.from_array(array, chunks=blocks, name=name, asarray=False)


#: The keywords of `convert_memory` that `from_dask` passes on.
_CONVERSION_OPTIONS = ("copy", "grad", "dtype", "device")


def from_dask(array: Any, framework: FrameworkLike, gpu_id: GpuId = None, **options: Any) -> Any:
    """Compute a Dask array, and return it as an array of a framework.

    Args:
        array: A Dask array. It must fit into memory, temporarily twice.
        framework: As for `convert_memory`.
        gpu_id: As for `convert_memory`.
        **options: ``copy``, ``grad``, ``dtype`` and ``device``, as for `convert_memory`.

    Returns:
        An array of the framework, of the shape and dtype of ``array``.

    Raises:
        TypeError: If ``array`` is not a Dask array, or an option does not exist.
        MemoryConversionError: As for `convert_memory`.

    >>> import numpy as np
    >>> from_dask(to_dask(np.arange(4), chunks=2) + 1, "torch")
    tensor([1, 2, 3, 4])
    """
    if not isinstance(array, da.Array):
        raise TypeError(
            f"from_dask() expected a Dask array, got {type(array).__name__}. For other arrays, use"
            " convert_memory()."
        )
    for option in options:
        if option not in _CONVERSION_OPTIONS:
            raise_unknown_option("from_dask() has no option", option, ("gpu_id", *_CONVERSION_OPTIONS))
    return convert_memory(_compute(array), framework, gpu_id=gpu_id, **options)


def _compute(array: da.Array) -> Any:
    """Return the values of a Dask array, on the GPU of its first block."""
    if array.npartitions != 1:
        return array.compute()
    # Dask 2026.8 would copy a single block, which may be part of the graph, on the current GPU.
    block = array.to_delayed().item().compute()
    return convert_memory(block, detect_memory_type(block), copy=True)
