"""Decorated functions over Dask arrays, on the threads of one machine or on a cluster of many.

>>> import numpy as np, arraybridge
>>> from arraybridge.dask import map_blocks, to_dask
>>> @arraybridge.torch
... def halve(block):
...     return block / 2  # a torch tensor here
>>> images = to_dask(np.arange(6.0), chunks=3)
>>> map_blocks(halve, images).compute()
array([0. , 0.5, 1. , 1.5, 2. , 2.5])

Dask does the scheduling, the transport and the chunking; what is added is what happens inside a block, and
what Dask has to know of arrays (`arraybridge.dask_arrays`). Install it with the extra ``dask``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from arraybridge import dask_arrays, placement
from arraybridge.conversion.convert import convert_memory, detect_memory_type, device_of
from arraybridge.errors import (
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
)
from arraybridge.frameworks import registry
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.memory import cleanup, oom
from arraybridge.trees import is_array, prefix
from arraybridge.types import FrameworkLike, GpuId

try:
    import cloudpickle
    import dask
    import dask.array as da
    from dask.array.utils import meta_from_array
    from dask.layers import ArraySliceDep
    from distributed import LocalCluster, WorkerPlugin, get_worker
except ModuleNotFoundError as error:
    raise FrameworkNotInstalledError(
        'arraybridge.dask needs Dask and distributed; run pip install "arraybridge[dask]".', reason=str(error)
    ) from error

__all__ = [
    "BlockError",
    "cluster",
    "from_dask",
    "map_blocks",
    "map_overlap",
    "prepare",
    "recoveries",
    "to_dask",
]

dask_arrays.register()


class BlockError(MemoryConversionError, ValueError):
    """A function did not give the block that was declared: another shape, another dtype, or no array."""


# -- over blocks -------------------------------------------------------------------------------------


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
        *arrays: more Dask arrays, cut alike along their last axes. One that has a single chunk along an axis
            is handed over whole along it. Anything else is handed whole to every call.
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
        ValueError: the chunks of two arrays do not meet.
        DtypeNotSupportedError: an array holds Python objects, and ``fn`` runs in another framework than
            NumPy.

    While it is computed:
        BlockError: a block has another shape or dtype than declared, or is no array.
        FrameworkNotInstalledError: the worker, which is named, lacks the framework.

    >>> import numpy as np, arraybridge
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
    block.keeps_shape = not reshapes and _are_cut_alike(cut)
    kwargs.setdefault("token", block.name)
    name = None if block.keeps_shape else kwargs.pop("name", None)
    out = da.map_blocks(block, array, *arrays, dtype=meta.dtype, meta=meta, **kwargs)
    return out if block.keeps_shape else _with_checked_shape(out, block.name, name)


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
        fn: as for `map_blocks`; it returns an array of the shape of its block.
        array: a Dask array, whose chunk sizes are known.
        *arrays: more Dask arrays.
        depth: elements of margin: an int for all axes, a tuple or dict for each, or a list of these for each
            array.
        boundary: what lies beyond the array's edges: ``"none"``, ``"reflect"``, ``"periodic"``, ``"nearest"``
            or a number; a tuple or dict for each axis.
        dtype: as for `map_blocks`.
        meta: as for `map_blocks`.
        **kwargs: ``trim``, ``allow_rechunk`` and ``align_arrays`` mean what they do in
            ``dask.array.map_overlap``, ``name`` and ``token`` what they do in `map_blocks`; all others are
            handed to ``fn``.

    Raises:
        ValueError: the chunk sizes of an array are not known.
        TypeError: an argument says that the shape changes, or one of the arrays is no Dask array.
        and what `map_blocks` raises.

    >>> import numpy as np, arraybridge
    >>> @arraybridge.numpy
    ... def differences(block):
    ...     return block - np.roll(block, 1)
    >>> x = to_dask(np.array([1, 4, 9, 16]), chunks=2)
    >>> map_overlap(differences, x, depth=1, boundary="periodic").compute()
    array([-15,   3,   5,   7])
    """
    block, meta = _declared("map_overlap", fn, (array, *arrays), dtype, meta)
    for word in _RESHAPING:
        if kwargs.get(word) is not None:
            raise TypeError(
                f"map_overlap() has no {word}=: its blocks keep their shape, so that the margins can be cut"
                " off; change the shape by map_blocks() afterwards"
            )
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
    name = kwargs.pop("name", None)
    # The margins of several arrays may differ; what is left of the block tells.
    block.keeps_shape = not arrays
    out = da.map_overlap(
        block, array, *arrays, depth=depth, boundary=boundary, dtype=meta.dtype, meta=meta, **kwargs
    )
    return out if block.keeps_shape and name is None else _with_checked_shape(out, block.name, name)


def _declared(
    what: str, fn: Callable[..., Any], arrays: tuple[Any, ...], dtype: Any, meta: Any
) -> tuple[_Block, Any]:
    """The function for the blocks, and an empty array like its results."""
    if not callable(fn):
        raise TypeError(f"{what}() takes a function first, and {fn!r} cannot be called")
    for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if kind(fn):
            raise TypeError(f"{what}() takes plain functions, and {_name(fn)} is a coroutine or generator")
    array = arrays[0]
    if not isinstance(array, da.Array):
        advice = "; make one with to_dask(x, chunks)" if is_array(array) else ""
        raise TypeError(f"{what}() takes a Dask array second, and this is a {type(array).__name__}{advice}")
    decorated = fn
    while isinstance(decorated, functools.partial):
        decorated = decorated.func
    framework = getattr(decorated, "execution_memory_type", "numpy")
    for one in arrays:
        if isinstance(one, da.Array) and one.dtype.hasobject and framework != "numpy":
            raise DtypeNotSupportedError(
                f"{_name(fn)} runs in {framework}, and an array of dtype {one.dtype} holds Python objects,"
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
        conversion = getattr(decorated, "dtype_conversion", DtypeConversion.NATIVE_OUTPUT)
        if conversion not in (DtypeConversion.NATIVE_OUTPUT, DtypeConversion.PRESERVE_INPUT):
            dtype = np.dtype(conversion.value)
    made = meta_from_array(array._meta if meta is None else meta, dtype=dtype)
    return _Block(fn, made.dtype, target), made


def _check_chunks(arrays: list[Any]) -> None:
    """Refuse arrays whose blocks are paired by their number and yet lie elsewhere."""
    for first, other in itertools.combinations(arrays, 2):
        for mine, its in zip(reversed(first.chunks), reversed(other.chunks), strict=False):
            if len(mine) > 1 and len(its) > 1 and not _same(mine, its):
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


def _name(fn: Any) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", None) or type(inner).__name__


class _Block:
    """A function of blocks: it brings each result back into the type of its chunk, and checks it.

    It travels as bytes that are only opened where a block is computed, so that the scheduler, which opens
    everything else in a graph, needs no framework; and they are opened once in a process, so that what a
    function keeps, as what JAX has compiled for it, is there for the next block.
    """

    def __init__(self, fn: Callable[..., Any], dtype: np.dtype[Any], target: str | None) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._carried: tuple[str, bytes] | None = None
        self.name = _name(fn)
        self.dtype = dtype
        self.target = target
        self.keeps_shape = True
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

    def __dask_tokenize__(self) -> tuple[Hashable, ...]:
        function = dask_arrays.function_token(self._function())
        return (function, str(self.dtype), self.target, self.keeps_shape)

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
        _arrive()
        # A block without axes is a scalar to NumPy, and no array.
        blocks = tuple([np.asarray(x) if isinstance(x, np.generic) else x for x in blocks])
        try:
            result = self._function()(*blocks, **kwargs)
        except FrameworkNotInstalledError as error:
            prefix(error, f"{self.name}(){_on_worker()}")
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
        if self.keeps_shape:
            expected = blocks[0].shape
            if result.shape != expected:
                raise BlockError(
                    f"{self.name}() returned a block of shape {result.shape} for one of shape {expected}: say"
                    " what it does to the shape, with chunks=, drop_axis= or new_axis= of map_blocks()",
                    target_type=target,
                )
        return result


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return False


def _checked_shape(block: Any, slices: tuple[slice, ...], name: str) -> Any:
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
            f'{names[0]} is not installed; run pip install "arraybridge[{registry.extra_of(names[0])}]".',
            target_type=names[0],
            reason=str(error),
        ) from error
    return fn


# -- in and out --------------------------------------------------------------------------------------


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
    on_card = device_of(x).kind == "gpu" and registry.is_installed("cupy")
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


# -- clusters ----------------------------------------------------------------------------------------


def cluster(
    n_workers: int | None = None,
    *,
    threads_per_worker: int | None = None,
    cards: bool | None = None,
    share_memory: bool = False,
    fraction: float | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Workers on this machine: one for each NVIDIA card, or, where there is none, for its processors.

    Each worker is a process that starts with the settings of `coexist`, before any framework is imported
    there, and that knows arrays of every framework.

    Args:
        n_workers: how many; None: one for each card, or as Dask sees fit. No more than there are cards.
        threads_per_worker: None: one on a card, or as Dask sees fit.
        cards: False: workers for the processors, on a machine with cards too. None: for the cards if there
            are any.
        share_memory: whether torch and CuPy take memory from one pool, see `share_gpu_memory`. Needs cards.
        fraction: as for `coexist`.
        env: more environment variables of the workers.
        **options: for ``dask_cuda.LocalCUDACluster`` or ``distributed.LocalCluster``.

    Returns:
        a ``LocalCUDACluster`` or a ``LocalCluster``: close it, or use it in a ``with`` statement. The workers
        are spawned: in a script this belongs under ``if __name__ == "__main__":``.

    Raises:
        FrameworkNotInstalledError: there are cards, and dask-cuda is missing.
        DeviceNotFoundError: ``share_memory`` without a card.
    """
    from arraybridge.frameworks.cards import cards as cards_of_cuda

    on_cards = bool(cards_of_cuda()) if cards is None else cards
    environment = {**cleanup.coexistence(fraction), **(env or {})}
    plugins = [
        *options.pop("plugins", ()),
        WorkerSetup(share_memory=share_memory and on_cards, own_card=on_cards),
    ]
    if threads_per_worker is not None:
        options["threads_per_worker"] = threads_per_worker
    if share_memory and not on_cards:
        registry.framework("torch").find_device(registry.framework("torch").accelerator(0))  # raises
    # `env` reaches a worker once it has imported the script that started it, which may import frameworks;
    # these are there before. Workers that are added later get them by `env`.
    early = {**dask.config.get("distributed.nanny.pre-spawn-environ", {}), **environment}
    with dask.config.set({"distributed.nanny.pre-spawn-environ": early}):
        if on_cards:
            started = _cuda_cluster(environment, plugins, n_workers=n_workers, **options)
        else:
            started = LocalCluster(n_workers=n_workers, env=environment, plugins=plugins, **options)
    dask_arrays.agree(started.scheduler_address)
    return started


def _cuda_cluster(environment: dict[str, str], plugins: list[Any], **options: Any) -> Any:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:  # it imports half where the bindings of its extras cu12 and cu13 are missing
        raise FrameworkNotInstalledError(
            "There are NVIDIA cards, for which cluster() needs dask-cuda; run pip install"
            ' "arraybridge[dask-cuda13x]" (or [dask-cuda12x], for CUDA 12), or pass cards=False for workers'
            " without cards.",
            reason=str(error),
        ) from error

    class Cluster(LocalCUDACluster):  # type: ignore[misc]
        """Its own environment and plugins take the place of ours, so that ours are added to each worker's."""

        def new_worker_spec(self) -> dict[Any, Any]:
            return prepared(super().new_worker_spec(), environment, plugins)

    Cluster.__name__ = LocalCUDACluster.__name__
    return Cluster(**options)


def prepared(spec: dict[Any, Any], environment: Mapping[str, str], plugins: list[Any]) -> dict[Any, Any]:
    """The specification of workers with this environment, where it says nothing itself, and more plugins."""
    for worker in spec.values():
        options = worker["options"]
        options["env"] = {**environment, **options.get("env", {})}
        options["plugins"] = [*options.get("plugins", ()), *plugins]
    return spec


def prepare(client: Any, *, share_memory: bool = False, own_card: bool | None = None) -> None:
    """Do for the workers of a cluster that was started otherwise what `cluster` does for its own.

    `map_blocks` runs without this; but then arrays of torch, JAX and TensorFlow that travel by themselves, as
    results of ``client.submit``, are pickled, and those of pyclesperanto cannot travel. Other clients of that
    cluster have to import `arraybridge.dask` too.

    Args:
        client: a ``distributed.Client``. Workers that join later are prepared as well.
        share_memory: whether torch and CuPy take memory from one pool in the workers.
        own_card: whether every ``gpu_id`` of a decorator means the first card that a worker sees. None: where
            dask-cuda started the worker, which makes that card its own.
    """
    client.register_plugin(WorkerSetup(share_memory=share_memory, own_card=own_card))
    dask_arrays.agree(client.scheduler.address)


class WorkerSetup(WorkerPlugin):  # type: ignore[misc]
    """The plugin that `cluster` and `prepare` give to workers.

    Args:
        share_memory: whether torch and CuPy take memory from one pool in the worker.
        own_card: whether every ``gpu_id`` of a decorator means the worker's first card, which dask-cuda makes
            its own. None: where dask-cuda started the worker.
    """

    name = "arraybridge"

    def __init__(self, *, share_memory: bool = False, own_card: bool | None = None) -> None:
        self.share_memory = share_memory
        self.own_card = own_card

    def __repr__(self) -> str:
        return f"WorkerSetup(share_memory={self.share_memory}, own_card={self.own_card})"

    def setup(self, worker: Any) -> None:
        """Called by Dask when the worker has started. The import of this module has registered the arrays."""
        global _arrived
        if worker is not None:
            dask_arrays.agree(worker.scheduler.address)
        _arrived = True  # the first block has nothing to find out any more
        self.take_card()
        if self.share_memory:
            cleanup.share_gpu_memory("torch")

    def take_card(self) -> None:
        own = "dask_cuda" in sys.modules if self.own_card is None else self.own_card
        placement.only_card = 0 if own else None


def _worker() -> Any:
    """The Dask worker on which this runs, or None."""
    try:
        return get_worker()
    except ValueError:  # what it raises outside a worker
        return None


def _on_worker() -> str:
    worker = _worker()
    return "" if worker is None else f" on worker {worker.address}"


_arrived = False


def _arrive() -> None:
    """Before the first block of a process: the card of a worker that dask-cuda started is its own."""
    global _arrived
    if not _arrived:
        if _worker() is not None:
            WorkerSetup().take_card()
        _arrived = True


# -- what was recovered ------------------------------------------------------------------------------

_counts = {"retry": 0, "split": 0}
_counts_lock = threading.Lock()
# Below "distributed.worker", whose messages `client.get_worker_logs()` shows.
_log = logging.getLogger("distributed.worker.arraybridge")


def _note(step: str, message: str) -> None:
    if step in _counts:
        with _counts_lock:
            _counts[step] += 1
    if _worker() is not None:
        _log.info(message)


oom.watchers.append(_note)


def recoveries() -> dict[str, int]:
    """How often, in this process, something ran out of memory and was tried again, whole or in halves.

    On a cluster, ``client.run(recoveries)`` asks every worker; the steps stand in
    ``client.get_worker_logs()``.

    Returns:
        ``{"retry": …, "split": …}``, counted since `arraybridge.dask` was imported.

    >>> sorted(recoveries())
    ['retry', 'split']
    """
    with _counts_lock:
        return dict(_counts)
