"""Random shapes, strides, dtypes, byte orders and pairs: the bits arrive, and explain() tells the truth."""

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


@dataclass(frozen=True)
class Recipe:
    """How to lay out an array in a buffer, told in words that NumPy and torch both understand."""

    dtype: str
    #: For each axis of the buffer: extent of the result, first index, and step.
    axes: tuple[tuple[int, int, int], ...]
    permutation: tuple[int, ...]
    #: Extents that axes of length one are broadcast to, after the permutation.
    broadcast: tuple[int, ...]
    #: Where the buffer begins, in bytes after a 64-byte boundary.
    offset: int
    swapped: bool
    read_only: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            wide if self.axes[axis][0] == 1 else self.axes[axis][0]
            for axis, wide in zip(self.permutation, self.broadcast, strict=True)
        )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    dtype = draw(st.sampled_from(data.DTYPES))
    rank = draw(st.integers(0, 5))
    step = st.sampled_from([1, 1, 1, 2, 3, -1, -2])
    plain = draw(st.booleans())
    axes = tuple(
        (
            draw(st.sampled_from([0, 1, 1, 2, 3, 4, 7])),
            *((0, 1) if plain else (draw(st.integers(0, 2)), draw(step))),
        )
        for _ in range(rank)
    )
    wide = st.sampled_from([1, 1, 1, 2, 5])
    return Recipe(
        dtype=dtype,
        axes=axes,
        permutation=tuple(draw(st.permutations(range(rank)))) if draw(st.booleans()) else tuple(range(rank)),
        broadcast=tuple(1 if plain else draw(wide) for _ in range(rank)),
        offset=draw(st.sampled_from([0, 0, 0, 16, 8, 1, 3])),
        swapped=draw(st.sampled_from([False, False, False, True])),
        read_only=draw(st.sampled_from([False, False, True])),
    )


def _buffer(recipe: Recipe, offset: int) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """Random bits in memory that begins ``offset`` bytes after a 64-byte boundary, and the buffer's shape."""
    dtype = data.numpy_dtype(recipe.dtype)
    shape = tuple(first + extent * abs(step) for extent, first, step in recipe.axes)
    count = int(np.prod(shape, dtype=int))
    memory = data.aligned_bytes(count * dtype.itemsize, offset)
    memory[...] = data.random_bits(dtype, count).view(np.uint8)
    return memory, shape


def _slices(recipe: Recipe, backwards: bool) -> tuple[Any, ...]:
    found: list[slice] = []
    for extent, first, step in recipe.axes:
        if step > 0 or not backwards:
            found.append(slice(first, first + extent * abs(step), abs(step)))
        else:
            last = first + extent * -step
            found.append(slice(last - 1, first - 1 if first else None, step))
    return (*found, ...)  # the dots keep a 0-d array from turning into a scalar


def as_numpy(recipe: Recipe) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The array, its values packed in native byte order, and the bytes that it lies in."""
    memory, shape = _buffer(recipe, recipe.offset)
    native = memory.view(data.numpy_dtype(recipe.dtype)).reshape(shape)
    array = native
    if recipe.swapped and recipe.dtype not in data.EXTENSION_DTYPES:  # ml_dtypes calls them native either way
        array = native.view(native.dtype.newbyteorder("S"))
        array[...] = native.copy()
    array = array[_slices(recipe, backwards=True)].transpose(recipe.permutation)
    if array.shape != recipe.shape:
        array = np.broadcast_to(array, recipe.shape)
    if recipe.read_only:
        array = array.view()
        array.flags.writeable = False
    packed = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    return array, packed, memory


def as_torch(recipe: Recipe) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The same layout by torch's own calls, forwards, and aligned to the element as torch wants it."""
    torch = require("torch")
    size = data.numpy_dtype(recipe.dtype).itemsize
    memory, shape = _buffer(recipe, -(-recipe.offset // size) * size)
    tensor = torch.from_numpy(memory).view(getattr(torch, recipe.dtype)).reshape(shape)
    tensor = tensor[_slices(recipe, backwards=False)].permute(recipe.permutation).expand(recipe.shape)
    array = memory.view(data.numpy_dtype(recipe.dtype)).reshape(shape)
    array = array[_slices(recipe, backwards=False)].transpose(recipe.permutation)
    return tensor, np.array(np.broadcast_to(array, recipe.shape), order="C", copy=True), memory


def build(framework: str, recipe: Recipe) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
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


def opencl_holds(recipe: Recipe) -> bool:
    return recipe.dtype in data.PYCLESPERANTO_DTYPES and 1 <= len(recipe.shape) <= 3 and 0 not in recipe.shape


def check(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    if source == "pyclesperanto" and not opencl_holds(recipe):
        source = "numpy"
    array, packed, memory = build(source, recipe)
    assert packed.shape == recipe.shape
    if target == "pyclesperanto" and not opencl_holds(recipe):
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
    with arraybridge.trace() as log:
        traced = convert_memory(array, target, copy=copy)
    result = convert_memory(array, target, copy=copy)
    event(f"{route.method}, {route.copies} copies")
    assert log.records == [route]
    assert route.nbytes == packed.nbytes
    assert route.shares_memory == (route.copies == 0)
    assert not (copy is True and route.shares_memory)
    assert not (copy is False and not route.shares_memory)
    for got in (traced, result):
        assert data.framework_of(got) == target
        assert data.dtype_name(got) == recipe.dtype
        assert tuple(got.shape) == recipe.shape
        assert bits(got) == packed.tobytes()
        assert (got is array) == (route.method == "same")
        if packed.size and target != "pyclesperanto":
            check_memory(array, got, memory, route.shares_memory)


def check_memory(array: Any, got: Any, memory: np.ndarray[Any, Any] | None, shares: bool) -> None:
    address = data.address(got)
    assert address is not None
    if shares:
        assert address == data.address(array)
    elif memory is not None:
        start = data.address(memory)
        assert start is not None
        assert not start <= address < start + memory.nbytes
    else:
        assert address != data.address(array)


def bits(array: Any) -> bytes:
    """The values as C-order bytes; to torch, an axis of length one may have any stride and be contiguous."""
    if data.framework_of(array) == "torch":
        import torch

        array = array.clone(memory_format=torch.contiguous_format)
    return data.bits(array)


def need_all() -> None:
    for name in data.FRAMEWORKS:
        require(name)


arguments = given(
    recipe=recipes(),
    source=st.sampled_from(("numpy", *data.FRAMEWORKS)),
    target=st.sampled_from(data.FRAMEWORKS),
    copy=st.sampled_from([None, None, True, False]),
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@arguments
def test_random_arrays(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    need_all()
    check(recipe, source, target, copy)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@arguments
def test_ten_thousand_random_arrays(recipe: Recipe, source: str, target: str, copy: bool | None) -> None:
    need_all()
    check(recipe, source, target, copy)
