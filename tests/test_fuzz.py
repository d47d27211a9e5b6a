"""Random shapes, strides, dtypes, byte orders and pairs: values are preserved, and explain() is correct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CopyRequiredError, MemoryConversionError, convert_memory, explain
from tests import matrix_data as data
from tests.helpers import require

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("ml_dtypes")
from hypothesis import HealthCheck, event, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

#: An array, its values packed in native byte order, and the bytes of its memory if they are known.
Made = tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]


@dataclass(frozen=True)
class Recipe:
    """The layout of an array in a buffer, described in terms that NumPy and PyTorch share."""

    dtype: str
    #: For each axis of the buffer: extent of the result, first index, and step.
    axes: tuple[tuple[int, int, int], ...]
    permutation: tuple[int, ...]
    #: Extents that axes of length one are broadcast to, after the permutation.
    broadcast: tuple[int, ...]
    #: The start of the buffer, in bytes after a 64-byte boundary.
    offset: int
    swapped: bool
    read_only: bool

    @property
    def shape(self) -> tuple[int, ...]:
        extents = [self.axes[axis][0] for axis in self.permutation]
        return tuple(
            wide if extent == 1 else extent for extent, wide in zip(extents, self.broadcast, strict=True)
        )

    @property
    def fits_opencl(self) -> bool:
        return self.dtype in data.PYCLESPERANTO_DTYPES and 1 <= len(self.shape) <= 3 and 0 not in self.shape

    def buffer(self, offset: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return random bits that start this many bytes after a 64-byte boundary, and the array of all of
        them.
        """
        dtype = data.numpy_dtype(self.dtype)
        shape = tuple(first + extent * abs(step) for extent, first, step in self.axes)
        count = int(np.prod(shape, dtype=int))
        memory = data.aligned_bytes(count * dtype.itemsize, offset)
        memory[...] = data.random_bits(dtype, count).view(np.uint8)
        return memory, memory.view(dtype).reshape(shape)

    def slices(self, backwards: bool) -> tuple[Any, ...]:
        """Return slices of the buffer's axes; the ellipsis prevents a 0-d array from becoming a scalar."""
        slices = []
        for extent, first, step in self.axes:
            last = first + extent * abs(step)
            forwards = step > 0 or not backwards
            backward = slice(last - 1, first - 1 if first else None, step)
            slices.append(slice(first, last, abs(step)) if forwards else backward)
        return (*slices, ...)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    plain = draw(st.booleans())
    rank = draw(st.integers(0, 5))
    extent = st.sampled_from([0, 1, 1, 2, 3, 4, 7])
    first = st.just(0) if plain else st.integers(0, 2)
    step = st.sampled_from([1] if plain else [1, 1, 1, 2, 3, -1, -2])
    wide = st.sampled_from([1] if plain else [1, 1, 1, 2, 5])
    order = st.permutations(range(rank)) if draw(st.booleans()) else st.just(range(rank))
    return Recipe(
        dtype=draw(st.sampled_from(data.DTYPES)),
        axes=tuple((draw(extent), draw(first), draw(step)) for _ in range(rank)),
        permutation=tuple(draw(order)),
        broadcast=tuple(draw(wide) for _ in range(rank)),
        offset=draw(st.sampled_from([0, 0, 0, 16, 8, 1, 3])),
        swapped=draw(st.sampled_from([False, False, False, True])),
        read_only=draw(st.sampled_from([False, False, True])),
    )


def as_numpy(recipe: Recipe) -> Made:
    memory, array = recipe.buffer(recipe.offset)
    if recipe.swapped and recipe.dtype not in data.EXTENSION_DTYPES:  # ml_dtypes calls them native either way
        native = array.copy()
        array = array.view(array.dtype.newbyteorder("S"))
        array[...] = native
    array = array[recipe.slices(backwards=True)].transpose(recipe.permutation)
    if array.shape != recipe.shape:
        array = np.broadcast_to(array, recipe.shape)
    if recipe.read_only:
        array = array.view()
        array.flags.writeable = False
    packed = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    return array, packed, memory


def as_torch(recipe: Recipe) -> Made:
    """Return the same layout by PyTorch's own calls, with positive strides and element alignment."""
    torch = require("torch")
    size = data.numpy_dtype(recipe.dtype).itemsize
    memory, array = recipe.buffer(-(-recipe.offset // size) * size)
    tensor = torch.from_numpy(memory).view(getattr(torch, recipe.dtype)).reshape(array.shape)
    slices = recipe.slices(backwards=False)
    array = np.broadcast_to(array[slices].transpose(recipe.permutation), recipe.shape)
    tensor = tensor[slices].permute(recipe.permutation).expand(recipe.shape)
    return tensor, np.array(array, order="C", copy=True), memory


def build(framework: str, recipe: Recipe) -> Made:
    if framework == "torch":
        return as_torch(recipe)
    array, packed, memory = as_numpy(recipe)
    if framework == "numpy":
        return array, packed, memory
    if framework == "jax":
        jax = require("jax")
        with data.x64(jax):
            return jax.block_until_ready(jax.numpy.array(packed)), packed, None
    if framework == "tensorflow":
        return require("tensorflow").constant(packed), packed, None
    return data.cle_push(packed), packed, None


def bits(array: Any) -> bytes:
    """Return the values as C-order bytes; in PyTorch, axes of length one may have any stride."""
    if data.framework_of(array) == "torch":
        import torch

        array = array.clone(memory_format=torch.contiguous_format)
    return data.bits(array)


def check(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    for name in data.FRAMEWORKS:
        require(name)
    if source == "pyclesperanto" and not recipe.fits_opencl:
        source = "numpy"
    array, packed, memory = build(source, recipe)
    assert packed.shape == recipe.shape
    if target == "pyclesperanto" and not recipe.fits_opencl:
        event("refused")
        for call in (convert_memory, explain):
            with pytest.raises(MemoryConversionError):
                call(array, target, copy=copy)
        return
    try:
        route = explain(array, target, copy=copy)
    except CopyRequiredError:
        event("copy required")
        assert copy is False
        assert not explain(array, target).shares_memory
        with pytest.raises(CopyRequiredError):
            convert_memory(array, target, copy=copy)
        return
    event(f"{route.method}, {route.copies} copies")
    with arraybridge.trace() as log:
        traced = convert_memory(array, target, copy=copy)
    assert log.records == [route]
    assert route.nbytes == packed.nbytes
    assert route.shares_memory == (route.copies == 0)
    assert copy in (None, not route.shares_memory)
    for result in (traced, convert_memory(array, target, copy=copy)):
        assert (data.framework_of(result), data.dtype_name(result)) == (target, recipe.dtype)
        assert tuple(result.shape) == recipe.shape
        assert bits(result) == packed.tobytes()
        assert (result is array) == (route.method == "same")
        if packed.size and target != "pyclesperanto":
            check_memory(array, result, memory, route.shares_memory)


def check_memory(array: Any, result: Any, memory: np.ndarray[Any, Any] | None, shares: bool) -> None:
    address = data.address(result)
    assert address is not None
    if shares or memory is None:
        assert (address == data.address(array)) == shares
    else:
        begin = memory.__array_interface__["data"][0]
        assert not begin <= address < begin + memory.nbytes


arguments = given(
    recipe=recipes(),
    source=st.sampled_from(("numpy", *data.FRAMEWORKS)),
    target=st.sampled_from(data.FRAMEWORKS),
    copy=st.sampled_from([None, None, True, False]),
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@arguments
def test_random_arrays(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    check(recipe, source, target, copy)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@arguments
def test_ten_thousand_random_arrays(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    check(recipe, source, target, copy)
