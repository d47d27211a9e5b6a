"""map_blocks and map_overlap in one process: margins, what is declared, bad input, in and out of Dask.

That worker processes and threads give the bits of the plain call stands in test_on_workers.py.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

import arraybridge
from arraybridge import (
    DtypeConversion,
    DtypeNotSupportedError,
    GradientError,
    UnknownArrayError,
    UnknownFrameworkError,
    convert_memory,
)
from arraybridge.dask import BlockError, from_dask, map_blocks, map_overlap, to_dask
from tests.dask import functions
from tests.dask.functions import FRAMEWORKS, IMAGE, check_equal, computed, numbers
from tests.helpers import require

# -- with a margin -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [(2, 1), {0: 2, 1: 1}])
def test_depth_and_boundary_for_each_axis(depth: Any) -> None:
    shapes = []

    @arraybridge.numpy
    def opposite(x: Any) -> Any:
        """What stands two rows above and one column to the right."""
        shapes.append(x.shape)
        return np.roll(x, (2, -1), (0, 1))

    whole = np.arange(48).reshape(8, 6)
    boundary = {0: "periodic", 1: -1}
    result = computed(map_overlap(opposite, to_dask(whole, (4, 3)), depth=depth, boundary=boundary))
    check_equal(result, np.roll(np.pad(whole, ((0, 0), (0, 1)), constant_values=-1), (2, -1), (0, 1))[:, :6])
    assert shapes == [(4 + 2 * 2, 3 + 2 * 1)] * 4


# -- the function waits ------------------------------------------------------------------------------


def test_nothing_is_called_before_it_is_computed() -> None:
    calls: list[tuple[int, ...]] = []

    def noted(*blocks: Any) -> Any:
        calls.append(blocks[0].shape)
        return blocks[0] * 2.0

    x = numbers()
    arrays = [
        map_blocks(noted, x),
        map_blocks(arraybridge.numpy(noted), x, x),
        map_blocks(noted, x, chunks=((2, 1), (2, 2))),
        map_blocks(noted, x, meta=np.empty((0, 0))),
        map_overlap(noted, x, depth=1, boundary="reflect"),
        map_overlap(arraybridge.numpy(noted), x, x, depth=1, boundary="none"),
    ]
    for array in arrays:
        repr(array)
        assert (array.shape, array.dtype) == ((3, 4), np.float64)
        assert len(array.dask) > 0
    assert calls == []
    check_equal(computed(arrays[0]), np.arange(12.0).reshape(3, 4) * 2)
    # Each block once, and no empty one to find out about its dtype.
    assert sorted(calls) == [(1, 2), (1, 2), (2, 2), (2, 2)]


def test_an_empty_array_is_no_obstacle() -> None:
    require("torch")
    x = to_dask(np.zeros((0, 4), np.float32), chunks=(1, 2))
    check_equal(computed(map_blocks(functions.twice, x)), np.zeros((0, 4), np.float32))


# -- what is declared --------------------------------------------------------------------------------


def test_dtypes() -> None:
    require("torch")
    x = to_dask(np.array([0, 1, 2, 3], np.int16), chunks=2)
    floats = arraybridge.torch(lambda b: b.float() / 2)
    default = map_blocks(functions.twice, x)
    by_argument = map_blocks(floats, x, dtype="float32")
    by_meta = map_blocks(floats, x, meta=np.empty(0, np.float32))
    both = map_blocks(floats, x, dtype=np.float32, meta=np.empty(0, np.int8))
    expected = np.array([0, 0.5, 1, 1.5], np.float32)
    check_equal(computed(default), np.array([0, 2, 4, 6], np.int16))
    for array in (by_argument, by_meta, both):
        assert array.dtype == np.float32
        check_equal(computed(array), expected)


def test_a_dtype_that_nobody_declared_is_said_to_be_that_of_the_array() -> None:
    mean = lambda b: b.mean(0).astype("float32")  # noqa: E731  # as of JAX, which narrows
    array = map_overlap(mean, to_dask(np.ones((4, 6)), chunks=(4, 3)), depth=0, drop_axis=0)
    with pytest.raises(
        BlockError, match=r"float64 was expected \(that of the array, since dtype= was left out\)"
    ):
        array.compute(scheduler="synchronous")


@pytest.mark.parametrize("decorated", [False, True])
def test_blocks_without_axes(decorated: bool) -> None:
    """NumPy makes scalars of them."""
    fn = lambda b: b * 2  # noqa: E731
    x = to_dask(np.array(3.0), chunks=())
    result = map_blocks(arraybridge.numpy(fn) if decorated else fn, x)
    check_equal(np.asarray(computed(result)), np.array(6.0))


def test_dtypes_of_the_decorator() -> None:
    require("torch")
    x = to_dask(np.array([0, 1, 2, 3], np.int16), chunks=2)
    # Floating → integer fills the range of the dtype, block by block.
    for conversion, values, dtype in (
        (DtypeConversion.FLOAT32, [0, 0.5, 1, 1.5], np.float32),
        (DtypeConversion.PRESERVE_INPUT, [-32768, 32767] * 2, np.int16),
        (DtypeConversion.UINT8, [0, 255] * 2, np.uint8),
    ):
        halved = arraybridge.torch(dtype_conversion=conversion)(lambda b: b.double() / 2)
        for fn in (halved, functools.partial(halved)):
            array = map_blocks(fn, x)
            assert array.dtype == dtype
            check_equal(computed(array), np.array(values, dtype))


def test_byte_order_is_no_other_dtype() -> None:
    """FITS images are big-endian, and what is computed from them is not."""
    require("torch")
    whole = np.arange(12, dtype=">f4").reshape(3, 4)
    for fn in (functions.twice, arraybridge.numpy(lambda b: b * 2)):
        result = map_blocks(fn, to_dask(whole, (2, 2))).compute(scheduler="synchronous")
        np.testing.assert_array_equal(result, np.arange(0, 24, 2).reshape(3, 4))


def test_names() -> None:
    """Of the graph: the function's by default, the same for the same call, and another for another one."""
    require("torch")
    x = numbers()
    plain = map_blocks(functions.twice, x)
    assert plain.name.startswith("twice-")
    assert plain.name == map_blocks(functions.twice, x).name != map_blocks(functions.twice, x + 1).name
    assert map_blocks(functions.one_row, x, name="mine", chunks=((1, 1), (2, 2))).name == "mine"
    assert map_blocks(functions.twice, x, token="mine").name.startswith("mine-")  # noqa: S106
    whole = np.arange(6.0)
    assert to_dask(whole, 3).name == to_dask(convert_memory(whole, "torch"), 3).name
    assert to_dask(whole, 3).name not in (to_dask(whole, 6).name, to_dask(whole + 1, 3).name)
    assert to_dask(whole, 3, name="mine").name == "mine"


# -- bad input ---------------------------------------------------------------------------------------


async def coroutine(b: Any) -> Any:
    return b


def generator(b: Any) -> Iterator[Any]:
    yield b


@pytest.mark.parametrize("function", [map_blocks, functools.partial(map_overlap, depth=1)])
def test_what_is_no_function_or_no_dask_array(function: Any) -> None:
    require("torch")
    with pytest.raises(TypeError, match=r"a Dask array second.*ndarray.*to_dask\(x, chunks\)"):
        function(functions.twice, np.zeros(3))
    with pytest.raises(TypeError, match=r"a Dask array second.*list$"):
        function(functions.twice, [1, 2])
    with pytest.raises(TypeError, match=r"\(\) takes a function first, and .* cannot be called"):
        function("twice", numbers())
    for fn in (coroutine, generator):
        decorated = [arraybridge.torch(fn)] if fn is coroutine else []  # generators cannot be decorated
        for culprit in (fn, functools.partial(fn), *decorated):
            with pytest.raises(TypeError, match=f"{fn.__name__} is a coroutine or generator"):
                function(culprit, numbers())
    with pytest.raises(UnknownArrayError, match="list is no array"):
        function(functions.twice, numbers(), meta=[1])
    with pytest.raises(TypeError, match="chunks of a Dask array are of numpy or cupy"):
        function(functions.twice, numbers(), meta=convert_memory(np.empty(0), "torch"))


def test_a_filter_keeps_its_shape() -> None:
    with pytest.raises(BlockError, match=r"returned a block of shape .* was expected"):
        map_overlap(lambda b: b[1:], numbers(), depth=1, boundary="reflect").compute(scheduler="synchronous")


def test_margins_of_chunks_whose_sizes_nobody_knows() -> None:
    require("torch")
    x = numbers()
    rows = x[x[:, 0] > 3]
    for arrays in ((rows,), (x, rows)):
        with pytest.raises(ValueError, match=r"not known.*compute_chunk_sizes\(\)"):
            map_overlap(functions.twice, *arrays, depth=1, boundary="reflect")
    with dask.config.set(scheduler="synchronous"):
        result = computed(map_overlap(functions.twice, rows.compute_chunk_sizes(), depth=1, boundary=0))
    check_equal(result, np.arange(8, 24, 2.0).reshape(2, 4))


def test_arrays_of_objects() -> None:
    require("torch")
    x = da.from_array(np.array([1, None, "x"], object), chunks=2)
    with pytest.raises(DtypeNotSupportedError, match="object"):
        map_blocks(functions.twice, x).compute(scheduler="synchronous")
    result = computed(map_blocks(arraybridge.numpy(lambda b: b[:]), x))
    assert result.tolist() == [1, None, "x"]


# -- in and out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_there_and_back(name: str) -> None:
    require(name)
    x = convert_memory(IMAGE, name)
    array = to_dask(x, chunks=(5, 6))
    assert (array.dtype, array.shape, array.chunks) == (np.float32, (13, 10), ((5, 5, 3), (6, 4)))
    assert type(array._meta) is np.ndarray
    check_equal(computed(array), IMAGE)
    with dask.config.set(scheduler="synchronous"):
        back = from_dask(array, name)
        other = from_dask(array + 1, "numpy", dtype="float64")
    assert arraybridge.detect_memory_type(back) == name
    check_equal(convert_memory(back, "numpy"), IMAGE)
    check_equal(other, IMAGE.astype("float64") + 1)


def test_without_axes_or_elements() -> None:
    """What Dask computes of an array without axes is a scalar of NumPy, and no array."""
    require("torch")
    for shape in ((), (0, 4), (1,)):
        values = np.full(shape, 2.5, np.float32)
        with dask.config.set(scheduler="synchronous"):
            back = from_dask(to_dask(convert_memory(values, "torch")), "torch")
        assert arraybridge.detect_memory_type(back) == "torch"
        check_equal(convert_memory(back, "numpy"), values)


def test_later_writes_change_nothing() -> None:
    for chunks in (3, 6):
        x = np.arange(6.0)
        array = to_dask(x, chunks)
        x[:] = -1
        check_equal(computed(array), np.arange(6.0))


def test_there_and_back_in_bfloat16() -> None:
    torch = require("torch")
    require("ml_dtypes")
    x = torch.arange(6).to(torch.bfloat16) / 4
    array = to_dask(x, chunks=4)
    assert str(array.dtype) == "bfloat16"
    with dask.config.set(scheduler="synchronous"):
        assert torch.equal(from_dask(array, "torch"), x)
        assert torch.equal(from_dask(map_blocks(functions.twice, array), "torch"), x * 2)


def test_what_cannot_enter() -> None:
    torch = require("torch")
    for thing in ([1, 2], 3.0, None, "x"):
        with pytest.raises(UnknownArrayError, match="is no array"):
            to_dask(thing)
    with pytest.raises(ValueError, match="Chunks do not add up to shape"):
        to_dask(np.zeros(4), chunks=((2, 1),))
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(GradientError, match="grad='detach'"):
        to_dask(x)
    check_equal(computed(to_dask(x, 2, grad="detach")), np.ones(4, np.float32))


def test_what_cannot_leave() -> None:
    require("torch")
    for thing in ([1, 2], np.zeros(3), None):
        words = rf"takes a Dask array.*{type(thing).__name__}.*convert_memory\(\)"
        with pytest.raises(TypeError, match=words):
            from_dask(thing, "torch")
    with pytest.raises(UnknownFrameworkError, match="did you mean 'torch'"):
        from_dask(numbers(), "toch")
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:99"):
        from_dask(numbers(), "torch", 99)


# -- what belongs together ---------------------------------------------------------------------------


def test_an_array_of_one_chunk_is_handed_over_whole() -> None:
    """Beside images of one chunk each, and before and after them."""
    images = to_dask(np.arange(24.0).reshape(3, 2, 4), (1, 2, 4))
    stack = to_dask(np.ones((3, 2, 4)), (3, 2, 4))
    with pytest.raises(BlockError, match="was expected"):
        map_blocks(arraybridge.numpy(lambda a, b: a + b), images, stack).compute(scheduler="synchronous")
    expected = np.arange(24.0).reshape(3, 2, 4) + 24
    check_equal(computed(map_blocks(lambda a, b: a + b.sum(), images, stack)), expected)
    check_equal(computed(map_blocks(lambda b, a: a + b.sum(), stack, images)), expected)
    with pytest.raises(BlockError, match="was expected"):
        map_blocks(lambda b, a: b + a.sum(), stack, images).compute(scheduler="synchronous")


def test_every_two_arrays_have_to_meet() -> None:
    one, u, v = to_dask(np.ones(1), 1), to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((1, 2, 1),))
    with pytest.raises(ValueError, match="do not align"):
        map_blocks(lambda a, b, c: a + b + c.mean(), one, u, v).compute()
    with pytest.raises(ValueError, match="do not align"):
        map_overlap(lambda a, b: a + b.mean(), u, v, depth=0, align_arrays=False).compute()
    # By default Dask cuts them alike.
    result = map_overlap(lambda a, b: a + b, u, v, depth=0)
    check_equal(computed(result), np.arange(0.0, 8.0, 2.0))


def test_margins_of_another_array() -> None:
    """Each with its own depth; the result is of the shape that the array with the margin to cut off has."""
    a, b = to_dask(np.arange(3.0), 1), to_dask(np.arange(3.0) * 10, 1)
    result = map_overlap(lambda x, y: x + y[1:-1], a, b, depth=[0, 1], boundary="reflect")
    check_equal(computed(result), np.array([0.0, 11.0, 22.0]))
    with pytest.raises(BlockError):
        map_overlap(lambda x, y: x + y, a, b, depth=[0, 1], boundary="reflect").compute(
            scheduler="synchronous"
        )


def test_what_a_filter_cannot_say() -> None:
    x = numbers()
    with pytest.raises(TypeError, match="must be arrays"):
        map_overlap(lambda a, b: a, x, np.ones(3), depth=1)
    named = map_overlap(lambda a: a + 1, x, depth=1, name="mine")
    assert named.name == "mine"
    check_equal(computed(named), np.arange(12.0).reshape(3, 4) + 1)


def test_a_function_that_cannot_travel_runs_on_threads() -> None:
    lock = multiprocessing.get_context("spawn").Lock()

    def guarded(block: Any) -> Any:
        with lock:
            return block + 1

    check_equal(computed(map_blocks(guarded, numbers())), np.arange(12.0).reshape(3, 4) + 1)
