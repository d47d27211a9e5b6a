"""map_blocks and map_overlap: the same bits as the plain call, on threads and on worker processes."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    DtypeConversion,
    DtypeNotSupportedError,
    GradientError,
    UnknownArrayError,
    UnknownFrameworkError,
    convert_memory,
)
from arraybridge.dask import BlockError, cluster, from_dask, map_blocks, map_overlap, mapping, to_dask
from arraybridge.dask import block as block_of
from arraybridge.frameworks import cards
from tests.dask import functions
from tests.dask.functions import CHUNKS, FRAMEWORKS, IMAGE
from tests.helpers import require

SCHEDULERS = ("synchronous", "threads", "cluster")


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "cards", lambda: ())
        # Port 0: two runs at a time must not quarrel about 8787, which None stands for.
        workers = cluster(2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with workers, Client(workers, set_as_default=False) as client:
        yield client


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> Any:
    """What Dask's ``compute(scheduler=...)`` takes."""
    return request.getfixturevalue("two_workers") if request.param == "cluster" else request.param


def image() -> Any:
    return to_dask(IMAGE, CHUNKS)


def numbers() -> Any:
    """Whole numbers, float64: [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], in blocks of 2 × 2."""
    return to_dask(np.arange(12.0).reshape(3, 4), chunks=(2, 2))


def computed(array: Any, scheduler: Any = "synchronous") -> np.ndarray:
    """The values, which NumPy arrays of the declared dtype and shape hold."""
    result = array.compute(scheduler=scheduler)
    assert isinstance(result, np.ndarray | np.generic)
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    return result


def check_equal(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found, expected, strict=True)


# -- real functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_filters_give_the_bits_of_the_plain_call(name: str, scheduler: Any) -> None:
    require(name)
    fn = functions.FILTERS[name]
    expected = functions.blockwise(fn, IMAGE, CHUNKS)
    assert not np.array_equal(expected, IMAGE)
    check_equal(computed(map_blocks(fn, image()), scheduler), expected)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_pointwise_functions_give_the_bits_of_the_plain_call_on_the_whole(name: str, scheduler: Any) -> None:
    require(name)
    fn = functions.POINTWISE[name]
    expected = np.maximum(IMAGE, np.float32(9))
    check_equal(convert_memory(fn(IMAGE), "numpy"), expected)
    check_equal(computed(map_blocks(fn, image()), scheduler), expected)


def test_functions_in_a_row(scheduler: Any) -> None:
    """Each in a framework of its own."""
    require("torch")
    require("jax")
    x = image()
    for fn in (functions.twice, functions.jax_raised, functions.numpy_raised):
        x = map_blocks(fn, x)
    expected = np.maximum(IMAGE * 2, np.float32(9))
    check_equal(computed(x, scheduler), expected)


def test_functions_by_value(scheduler: Any) -> None:
    """What stands inside a function travels with its framework, its closure and its defaults."""
    torch = require("torch")
    weights = np.array([1, 10], np.float32)

    @arraybridge.torch
    def weighted(x: Any, factor: float = 4) -> Any:
        return torch.multiply(x, float(weights[1]) * factor)

    check_equal(computed(map_blocks(weighted, image()), scheduler), IMAGE * np.float32(40))


# -- with a margin -----------------------------------------------------------------------------------

BOUNDARIES = {
    "reflect": {"mode": "symmetric"},
    "periodic": {"mode": "wrap"},
    "nearest": {"mode": "edge"},
    5: {"mode": "constant", "constant_values": 5},
}


def sums_of_nine(padded: np.ndarray) -> np.ndarray:
    """Each element and its eight neighbours; the result lacks the outermost rows and columns."""
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))
    return windows.sum((2, 3))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_filter_across_chunks(boundary: Any, scheduler: Any) -> None:
    require("torch")
    whole = np.arange(130, dtype=np.int64).reshape(13, 10) ** 2
    found = map_overlap(functions.sum_of_nine, to_dask(whole, CHUNKS), depth=1, boundary=boundary)
    check_equal(computed(found, scheduler), sums_of_nine(np.pad(whole, 1, **BOUNDARIES[boundary])))


def test_filter_by_hand() -> None:
    require("torch")
    x = to_dask(np.array([[1, 2], [3, 4]]), chunks=1)
    # Reflected: 1 1 2 2 / 1 1 2 2 / 3 3 4 4 / 3 3 4 4.
    found = map_overlap(functions.sum_of_nine, x, depth=1, boundary="reflect")
    check_equal(computed(found), np.array([[16 + 1 * 2, 21], [24, 27]]))


def test_without_a_boundary_the_edges_are_the_functions(scheduler: Any) -> None:
    require("torch")
    whole = np.arange(130, dtype=np.int64).reshape(13, 10)
    plain = convert_memory(functions.sum_of_nine(whole), "numpy")
    check_equal(plain, sums_of_nine(np.pad(whole, 1)))
    found = map_overlap(functions.sum_of_nine, to_dask(whole, CHUNKS), depth=1)
    check_equal(computed(found, scheduler), plain)


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
    found = computed(map_overlap(opposite, to_dask(whole, (4, 3)), depth=depth, boundary=boundary))
    check_equal(found, np.roll(np.pad(whole, ((0, 0), (0, 1)), constant_values=-1), (2, -1), (0, 1))[:, :6])
    assert shapes == [(4 + 2 * 2, 3 + 2 * 1)] * 4


def test_depth_on_one_side() -> None:
    @arraybridge.numpy
    def differences(x: Any) -> Any:
        return np.diff(x, prepend=0)

    x = to_dask(np.array([1, 4, 9, 16, 25]), chunks=2)
    found = map_overlap(differences, x, depth={0: (1, 0)}, boundary="none")
    check_equal(computed(found), np.array([1, 3, 5, 7, 9]))


def test_chunks_smaller_than_the_margin() -> None:
    """Dask merges them; where it may not, it says so."""

    @arraybridge.numpy
    def three_before(x: Any) -> Any:
        return np.roll(x, 3)

    whole = np.arange(10)
    x = to_dask(whole, chunks=2)
    found = map_overlap(three_before, x, depth=3, boundary="periodic")
    check_equal(computed(found), np.roll(whole, 3))
    with pytest.raises(ValueError, match="allow_rechunk=True"):
        map_overlap(three_before, x, depth=3, boundary="periodic", allow_rechunk=False)


def test_margins_of_several_arrays() -> None:
    @arraybridge.numpy
    def neighbour_and_other(x: Any, y: Any) -> Any:
        return np.roll(x, -1) + y

    x, y = np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])
    found = map_overlap(neighbour_and_other, to_dask(x, 2), to_dask(y, 2), depth=1, boundary="periodic")
    check_equal(computed(found), np.array([12, 23, 34, 41]))


def test_margins_are_kept_where_asked() -> None:
    x = to_dask(np.array([1, 2, 3, 4]), chunks=2)
    kept = map_overlap(lambda b: b, x, depth=1, boundary="reflect", trim=False)
    check_equal(kept.compute(scheduler="synchronous"), np.array([1, 1, 2, 3, 2, 3, 4, 4]))


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
    x = to_dask(np.zeros((0, 4), np.float32), chunks=(1, 2))
    check_equal(computed(map_blocks(functions.POINTWISE["numpy"], x)), np.zeros((0, 4), np.float32))


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


def test_dtypes_of_the_decorator() -> None:
    require("torch")
    x = to_dask(np.array([0, 1, 2, 3], np.int16), chunks=2)

    def halved(conversion: DtypeConversion) -> Any:
        return arraybridge.torch(dtype_conversion=conversion)(lambda b: b.double() / 2)

    fixed = map_blocks(halved(DtypeConversion.FLOAT32), x)
    assert fixed.dtype == np.float32
    check_equal(computed(fixed), np.array([0, 0.5, 1, 1.5], np.float32))
    # Floating → integer fills the range of the dtype, block by block.
    kept = map_blocks(halved(DtypeConversion.PRESERVE_INPUT), x)
    assert kept.dtype == np.int16
    check_equal(computed(kept), np.array([-32768, 32767] * 2, np.int16))
    stretched = map_blocks(halved(DtypeConversion.UINT8), x)
    assert stretched.dtype == np.uint8
    check_equal(computed(stretched), np.array([0, 255] * 2, np.uint8))
    overlapping = map_overlap(halved(DtypeConversion.FLOAT32), x, depth=1, boundary="reflect")
    check_equal(computed(overlapping), np.array([0, 0.5, 1, 1.5], np.float32))


def test_the_decorators_dtype_is_seen_through_a_partial() -> None:
    require("torch")
    fn = arraybridge.torch(dtype_conversion=DtypeConversion.FLOAT32)(lambda b, k: b * k)
    array = map_blocks(functools.partial(fn, k=3), numbers())
    assert array.dtype == np.float32
    check_equal(computed(array), (np.arange(12.0).reshape(3, 4) * 3).astype(np.float32))


def test_changed_shapes(scheduler: Any) -> None:
    require("torch")
    x = numbers()
    rows = map_blocks(functions.one_row, x, chunks=((1, 1), (2, 2)))
    check_equal(computed(rows, scheduler), np.array([[0.0, 1, 2, 3], [8, 9, 10, 11]]))
    sums = map_blocks(arraybridge.torch(lambda b: b.sum(0)), x[:2], drop_axis=0)
    check_equal(computed(sums, scheduler), np.array([4.0, 6, 8, 10]))
    more = map_blocks(arraybridge.torch(lambda b: b[None] + 1), x, new_axis=0)
    check_equal(computed(more, scheduler), np.arange(1, 13.0).reshape(1, 3, 4))
    pairs = map_blocks(arraybridge.numpy(lambda b: np.stack([b, -b])), x, new_axis=0, chunks=(2, *x.chunks))
    whole = np.arange(12.0).reshape(3, 4)
    check_equal(computed(pairs, scheduler), np.stack([whole, -whole]))
    everything = map_blocks(arraybridge.torch(lambda b: b.sum()), x.rechunk((3, 4)), drop_axis=(0, 1))
    check_equal(np.asarray(computed(everything, scheduler)), np.array(66.0))


def test_the_number_of_the_block(scheduler: Any) -> None:
    require("torch")

    @arraybridge.torch
    def numbered(b: Any, block_id: Any = None) -> Any:
        return b * 0 + block_id[0] * 10 + block_id[1]

    @arraybridge.torch
    def placed(b: Any, block_info: Any = None) -> Any:
        (top, _), (left, _) = block_info[0]["array-location"]
        assert block_info[None]["dtype"] == np.float64
        return b * 0 + top * 10 + left

    x = numbers()
    ids = np.array([[0.0, 0, 1, 1], [0, 0, 1, 1], [10, 10, 11, 11]])
    check_equal(computed(map_blocks(numbered, x), scheduler), ids)
    check_equal(computed(map_overlap(numbered, x, depth=1, boundary="reflect"), scheduler), ids)
    starts = np.array([[0.0, 0, 2, 2], [0, 0, 2, 2], [20, 20, 22, 22]])
    check_equal(computed(map_blocks(placed, x), scheduler), starts)


def test_arguments_of_the_function(scheduler: Any) -> None:
    require("torch")

    @arraybridge.torch
    def line(b: Any, factor: Any = 1, offset: Any = 0) -> Any:
        return b * factor + offset

    x, whole = numbers(), np.arange(12.0).reshape(3, 4)
    check_equal(computed(map_blocks(line, x, factor=3, offset=0.5), scheduler), whole * 3 + 0.5)
    check_equal(computed(map_blocks(line, x, 3), scheduler), whole * 3)
    check_equal(computed(map_blocks(functools.partial(line, offset=2), x), scheduler), whole + 2)
    weights = dask.delayed(np.array([7.0]))
    check_equal(computed(map_blocks(line, x, factor=weights), scheduler), whole * 7)
    check_equal(computed(map_overlap(line, x, depth=1, boundary=0, offset=4), scheduler), whole + 4)


def test_a_literal_array_is_handed_whole(scheduler: Any) -> None:
    """One of the same shape, too: only Dask arrays come in blocks."""
    require("torch")

    @arraybridge.torch
    def less_sum(b: Any, table: Any) -> Any:
        assert table.shape == (3, 4)
        return b - table.sum()

    whole = np.arange(12.0).reshape(3, 4)
    check_equal(computed(map_blocks(less_sum, numbers(), whole), scheduler), whole - 66)
    check_equal(computed(map_blocks(less_sum, numbers(), table=whole), scheduler), whole - 66)


def test_several_arrays_are_broadcast(scheduler: Any) -> None:
    require("jax")

    @arraybridge.jax
    def product(a: Any, b: Any, c: Any) -> Any:
        return a * b + c

    a, b, c = np.arange(12, dtype="f4").reshape(3, 4), np.arange(4, dtype="f4"), np.ones((3, 1), "f4")
    x, y, z = to_dask(a, (2, 2)), to_dask(b, 2), to_dask(c, (2, 1))
    for arrays in ((x, y, z), (y, x, z)):
        check_equal(computed(map_blocks(product, *arrays), scheduler), a * b + c)


def test_several_arrays_of_equally_many_blocks_of_other_sizes(scheduler: Any) -> None:
    """They meet by their numbers, as in Dask."""
    x, y = to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((3, 1),))
    found = map_blocks(lambda a, b: a + b.mean(), x, y)
    assert found.chunks == ((2, 2),)
    check_equal(computed(found, scheduler), np.array([1.0, 2.0, 5.0, 6.0]))
    other = map_blocks(lambda a, b: b + a.sum(), x, y, chunks=y.chunks)
    check_equal(computed(other, scheduler), np.array([1.0, 2.0, 3.0, 8.0]))
    with pytest.raises(BlockError, match=r"shape \([31],\), and its declared chunks say \(2,\)"):
        map_blocks(lambda a, b: b + a.sum(), x, y).compute(scheduler="synchronous")


def test_several_arrays_of_other_numbers_of_blocks() -> None:
    x, y = to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((2, 1, 1),))
    with pytest.raises(ValueError, match="chunks"):
        map_blocks(lambda a, b: a + b.mean(), x, y).compute(scheduler="synchronous")


def test_kinds_of_functions(scheduler: Any) -> None:
    require("torch")
    x, whole = numbers(), np.arange(12.0).reshape(3, 4)
    kinds = {
        "plain": lambda b: b + b,
        "@gpu": arraybridge.gpu(lambda b: b + b),
        "partial": functools.partial(functions.twice),
        "method": functions.Model(2).scaled,
        "ufunc": functools.partial(np.multiply, 2),
        "output_type": arraybridge.torch(output_type="jax")(lambda b: b * 2),
    }
    for kind, fn in kinds.items():
        if kind == "output_type":
            require("jax")
        check_equal(computed(map_blocks(fn, x), scheduler), whole * 2)


@pytest.mark.parametrize("decorated", [False, True])
def test_blocks_without_axes(decorated: bool) -> None:
    """NumPy makes scalars of them."""
    fn = lambda b: b * 2  # noqa: E731
    x = to_dask(np.array(3.0), chunks=())
    found = map_blocks(arraybridge.numpy(fn) if decorated else fn, x)
    check_equal(np.asarray(computed(found)), np.array(6.0))


def test_a_sum_of_numpy_is_a_block_without_axes() -> None:
    x = numbers().rechunk((3, 4))
    found = map_blocks(arraybridge.numpy(lambda b: b.sum()), x, drop_axis=(0, 1))
    check_equal(np.asarray(computed(found)), np.array(66.0))


def test_byte_order_is_no_other_dtype() -> None:
    """FITS images are big-endian, and what is computed from them is not."""
    require("torch")
    whole = np.arange(12, dtype=">f4").reshape(3, 4)
    for fn in (functions.twice, arraybridge.numpy(lambda b: b * 2)):
        found = map_blocks(fn, to_dask(whole, (2, 2))).compute(scheduler="synchronous")
        np.testing.assert_array_equal(found, np.arange(0, 24, 2).reshape(3, 4))


def test_names() -> None:
    """Of the graph: the function's unless told, the same for the same call, and another for another one."""
    require("torch")
    x = numbers()
    plain = map_blocks(functions.twice, x)
    assert plain.name.startswith("twice-")
    assert plain.name == map_blocks(functions.twice, x).name
    others = [
        map_blocks(functions.one_row, x),
        map_blocks(functions.twice, x, dtype="float32"),
        map_blocks(functions.twice, x + 1),
        map_overlap(functions.twice, x, depth=1, boundary="reflect"),
    ]
    assert len({plain.name, *(other.name for other in others)}) == 5
    assert map_blocks(functions.twice, x, name="mine").name == "mine"
    assert map_blocks(functions.twice, x, token="mine").name.startswith("mine-")  # noqa: S106
    assert map_blocks(functions.one_row, x, name="mine", chunks=((1, 1), (2, 2))).name == "mine"


# -- bad input ---------------------------------------------------------------------------------------

# What a function gives back, what is declared, and what the error says.
WRONG_BLOCKS = {
    "shape": (lambda b: b[:1], {}, ("(1, 2)", "(2, 2)", "chunks=, drop_axis= or new_axis=")),
    "rank": (lambda b: b[0], {}, ("(2,)", "drop_axis=")),
    "chunks": (lambda b: b[:1], {"chunks": (2, 2)}, ("(1, 2)", "(2, 2)", "correct chunks=")),
    "declared rank": (lambda b: b, {"drop_axis": 0}, ("(2, 2)", "correct")),
    "new axis": (lambda b: np.stack([b, b]), {"new_axis": 0}, ("(2, 2, 2)", "(1, 2, 2)", "new_axis=")),
    "dtype": (lambda b: b > 1, {}, ("bool", "float64", "pass dtype='bool'")),
    "declared dtype": (lambda b: b, {"dtype": "int8"}, ("float64", "int8", "declared")),
    "None": (lambda b: None, {}, ("NoneType", "one array")),
    "tuple": (lambda b: (b, b), {}, ("tuple", "one array")),
    "list": (lambda b: b.tolist(), {}, ("list", "one array")),
    "str": (lambda b: "block", {}, ("str", "one array")),
}


@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_blocks_that_were_not_declared(kind: str, scheduler: Any) -> None:
    wrong, declared, words = WRONG_BLOCKS[kind]

    def culprit(b: Any) -> Any:
        return wrong(b)

    # One block that gives itself away, before Dask puts several together.
    x = numbers()[:2, :2]
    for fn in (culprit, arraybridge.numpy(culprit)):
        with pytest.raises(BlockError) as caught:
            map_blocks(fn, x, **declared).compute(scheduler=scheduler)
        assert isinstance(caught.value, ValueError)
        for word in ("culprit()", *words):
            assert word in str(caught.value)


def test_a_filter_keeps_its_shape() -> None:
    with pytest.raises(BlockError, match=r"returned a block of shape .* for one of shape"):
        map_overlap(lambda b: b[1:], numbers(), depth=1, boundary="reflect").compute(scheduler="synchronous")


def test_chunks_whose_sizes_nobody_knows(scheduler: Any) -> None:
    require("torch")
    x = numbers()
    rows = x[x[:, 0] > 3]
    whole = np.arange(4, 12.0).reshape(2, 4)
    # Computed, shapes are known; the declared one is (nan, 4).
    check_equal(map_blocks(functions.twice, rows).compute(scheduler=scheduler), whole * 2)
    narrow = map_blocks(lambda b: b[:, :1] * 1, rows, chunks=(rows.chunks[0], (1, 1)))
    check_equal(narrow.compute(scheduler=scheduler), whole[:, ::2])
    with pytest.raises(BlockError, match=r"shape \(1, 3\) for one of shape \(1, 2\)"):
        map_blocks(lambda b: np.ones((1, 3)), rows).compute(scheduler=scheduler)
    with pytest.raises(BlockError, match=r"shape \(1, 1\), and its declared chunks say \(nan, 2\)"):
        map_blocks(lambda b: b[:, :1], rows, chunks=rows.chunks).compute(scheduler=scheduler)


def test_margins_of_chunks_whose_sizes_nobody_knows() -> None:
    require("torch")
    x = numbers()
    rows = x[x[:, 0] > 3]
    for arrays in ((rows,), (x, rows)):
        with pytest.raises(ValueError, match=r"not known.*compute_chunk_sizes\(\)"):
            map_overlap(functions.twice, *arrays, depth=1, boundary="reflect")
    with dask.config.set(scheduler="synchronous"):
        found = computed(map_overlap(functions.twice, rows.compute_chunk_sizes(), depth=1, boundary=0))
    check_equal(found, np.arange(8, 24, 2.0).reshape(2, 4))


@pytest.mark.parametrize("function", [map_blocks, functools.partial(map_overlap, depth=1)])
def test_arrays_of_objects(function: Any) -> None:
    require("torch")
    x = da.from_array(np.array([1, None, "x"], object), chunks=2)
    numeric = to_dask(np.zeros(3), 2)
    for arrays in ((x,), (numeric, x)):
        words = r"twice.*torch.*object.*astype\('float32'\)"
        with pytest.raises(DtypeNotSupportedError, match=words) as caught:
            function(functions.twice, *arrays)
        assert isinstance(caught.value, TypeError)
        assert caught.value.target_type == "torch"
        assert caught.value.source_type == "numpy"
    # In NumPy they have a place.
    found = computed(map_blocks(arraybridge.numpy(lambda b: b[:]), x))
    assert found.tolist() == [1, None, "x"]


def test_an_array_of_objects_is_seen_through_a_partial() -> None:
    require("torch")
    x = da.from_array(np.array([1, None, "x"], object), chunks=2)
    with pytest.raises(DtypeNotSupportedError, match="astype"):
        map_blocks(functools.partial(functions.twice), x)


def test_what_is_no_dask_array() -> None:
    require("torch")
    for function in (map_blocks, functools.partial(map_overlap, depth=1)):
        with pytest.raises(TypeError, match=r"a Dask array second.*ndarray.*to_dask\(x, chunks\)"):
            function(functions.twice, np.zeros(3))
        for other in ([1, 2], None, 3.0, dask.delayed(np.zeros(3))):
            with pytest.raises(TypeError, match=f"a Dask array second.*{type(other).__name__}$"):
                function(functions.twice, other)


async def coroutine(b: Any) -> Any:
    return b


def generator(b: Any) -> Iterator[Any]:
    yield b


async def asynchronous_generator(b: Any) -> Any:
    yield b


def test_what_is_no_plain_function() -> None:
    require("torch")
    for function in (map_blocks, functools.partial(map_overlap, depth=1)):
        for thing in (3, "twice", None, np.zeros(3)):
            with pytest.raises(TypeError, match=r"\(\) takes a function first, and .* cannot be called"):
                function(thing, numbers())
        for thing in (coroutine, generator, asynchronous_generator):
            for fn in (thing, arraybridge.torch(thing), functools.partial(thing)):
                with pytest.raises(TypeError, match=f"{thing.__name__} is a coroutine or generator"):
                    function(fn, numbers())


def test_a_result_that_requires_grad(scheduler: Any) -> None:
    require("torch")
    with pytest.raises(GradientError, match=r"with_graph\(\).*torch\.no_grad\(\)") as caught:
        map_blocks(functions.with_graph, numbers()).compute(scheduler=scheduler)
    assert (caught.value.source_type, caught.value.target_type) == ("torch", "numpy")


def test_what_the_function_raises_comes_out(scheduler: Any) -> None:
    def failing(b: Any) -> Any:
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match=r"^of its own$"):
        map_blocks(failing, numbers()).compute(scheduler=scheduler)


def test_masked_blocks(scheduler: Any) -> None:
    """Refused where the mask would be lost."""
    require("torch")
    x = da.ma.masked_array(numbers(), numbers() > 3)
    with pytest.raises(ArrayNotSupportedError, match="mask would be lost"):
        map_blocks(functions.twice, x).compute(scheduler=scheduler)


def test_a_meta_that_is_no_array() -> None:
    with pytest.raises(UnknownArrayError, match="list is no array"):
        map_blocks(functions.twice, numbers(), meta=[1])


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


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow"])
@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_there_and_back_without_axes_or_elements(name: str, shape: tuple[int, ...]) -> None:
    require(name)
    values = np.full(shape, 2.5, np.float32)
    array = to_dask(convert_memory(values, name))
    assert array.shape == shape
    with dask.config.set(scheduler="synchronous"):
        check_equal(convert_memory(from_dask(array, name), "numpy"), values)


def test_there_and_back_in_bfloat16() -> None:
    torch = require("torch")
    require("ml_dtypes")
    x = torch.arange(6).to(torch.bfloat16) / 4
    array = to_dask(x, chunks=4)
    assert str(array.dtype) == "bfloat16"
    with dask.config.set(scheduler="synchronous"):
        assert torch.equal(from_dask(array, "torch"), x)
        assert torch.equal(from_dask(map_blocks(functions.twice, array), "torch"), x * 2)


@pytest.mark.parametrize("chunks", [3, 6])
def test_later_writes_change_nothing(chunks: int) -> None:
    torch = require("torch")
    for x in (np.arange(6.0), torch.arange(6.0, dtype=torch.float64)):
        array = to_dask(x, chunks)
        x[:] = -1
        check_equal(computed(array), np.arange(6.0))


def test_names_of_arrays() -> None:
    torch = require("torch")
    x = np.arange(6.0)
    assert to_dask(x, 3).name == to_dask(torch.arange(6.0, dtype=torch.float64), 3).name
    assert to_dask(x, 3).name != to_dask(x + 1, 3).name
    assert to_dask(x, 3, name="mine").name == "mine"


def test_a_result_without_axes_leaves() -> None:
    """What Dask computes of it is a scalar of NumPy, and no array."""
    require("torch")
    with dask.config.set(scheduler="synchronous"):
        total = from_dask(numbers().sum(), "torch")
    assert (total.ndim, total.item(), str(total.dtype)) == (0, 66, "torch.float64")


def test_what_cannot_enter() -> None:
    torch = require("torch")
    for thing in ([1, 2], 3.0, None, "x"):
        with pytest.raises(UnknownArrayError, match="is no array"):
            to_dask(thing)
    with pytest.raises(DtypeNotSupportedError, match="object"):
        to_dask(np.array([None, 1]))
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


def test_chunks_are_of_numpy_or_cupy() -> None:
    torch = require("torch")
    with pytest.raises(TypeError, match="chunks of a Dask array are of numpy or cupy"):
        map_blocks(functions.twice, numbers(), meta=torch.empty(0))


# -- what belongs together ---------------------------------------------------------------------------


def test_one_array_cut_in_two_ways_is_two_arrays() -> None:
    x = np.arange(4.0)
    halves, whole = to_dask(x, 2), to_dask(x, 4)
    assert halves.name != whole.name
    check_equal(
        computed(map_blocks(lambda a, b: a + b[: a.size], halves, whole)), np.array([0.0, 2.0, 2.0, 4.0])
    )


def test_an_array_of_one_chunk_is_handed_over_whole() -> None:
    """Beside images of one chunk each, and before and after them."""
    images = to_dask(np.arange(24.0).reshape(3, 2, 4), (1, 2, 4))
    stack = to_dask(np.ones((3, 2, 4)), (3, 2, 4))
    with pytest.raises(BlockError, match="chunks say"):
        map_blocks(arraybridge.numpy(lambda a, b: a + b), images, stack).compute(scheduler="synchronous")
    expected = np.arange(24.0).reshape(3, 2, 4) + 24
    check_equal(computed(map_blocks(lambda a, b: a + b.sum(), images, stack)), expected)
    check_equal(computed(map_blocks(lambda b, a: a + b.sum(), stack, images)), expected)
    with pytest.raises(BlockError, match="chunks say"):
        map_blocks(lambda b, a: b + a.sum(), stack, images).compute(scheduler="synchronous")


def test_every_two_arrays_have_to_meet() -> None:
    one, u, v = to_dask(np.ones(1), 1), to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((1, 2, 1),))
    with pytest.raises(ValueError, match="do not meet"):
        map_blocks(lambda a, b, c: a + b + c.mean(), one, u, v)
    with pytest.raises(ValueError, match="do not meet"):
        map_overlap(lambda a, b: a + b.mean(), u, v, depth=0, align_arrays=False)
    # By default Dask cuts them alike.
    found = map_overlap(lambda a, b: a + b, u, v, depth=0)
    check_equal(computed(found), np.arange(0.0, 8.0, 2.0))


def test_margins_of_another_array() -> None:
    """Each with its own depth; the result is of the shape that the array with the margin to cut off has."""
    a, b = to_dask(np.arange(3.0), 1), to_dask(np.arange(3.0) * 10, 1)
    found = map_overlap(lambda x, y: x + y[1:-1], a, b, depth=[0, 1], boundary="reflect")
    check_equal(computed(found), np.array([0.0, 11.0, 22.0]))
    with pytest.raises(BlockError):
        map_overlap(lambda x, y: x + y, a, b, depth=[0, 1], boundary="reflect").compute(
            scheduler="synchronous"
        )


def inner(b: Any) -> Any:
    return b[1:-1]


def test_a_filter_that_cuts_its_margins_off_itself(scheduler: Any) -> None:
    x, whole = to_dask(np.arange(10.0), 4), np.arange(10.0)
    for fn in (inner, arraybridge.numpy(inner)):
        found = map_overlap(fn, x, depth=1, boundary="reflect", trim=False)
        assert found.chunks == ((4, 4, 2),)
        check_equal(computed(found, scheduler), whole)
    narrow = {"depth": 1, "boundary": "reflect", "trim": False, "name": "mine"}
    halves = map_overlap(lambda b: b[1:-1:2], x, chunks=((2, 2, 1),), **narrow)
    assert halves.name == "mine"
    check_equal(computed(halves, scheduler), whole[::2])
    wrong = map_overlap(lambda b: b[::2], x, chunks=((2, 2, 1),), **narrow)
    with pytest.raises(BlockError, match=r"shape \([32],\), and its declared chunks say \([21],\)"):
        wrong.compute(scheduler="synchronous")
    for grows in (lambda b: np.concatenate([b, b]), lambda b: b[None]):
        with pytest.raises(BlockError, match="returned a block of shape"):
            map_overlap(grows, x, depth=1, trim=False).compute(scheduler="synchronous")
    named = map_overlap(inner, x, depth=1, boundary="reflect", trim=False, name="mine")
    assert named.name == "mine"
    check_equal(computed(named), whole)


def test_a_filter_that_changes_the_number_of_axes(scheduler: Any) -> None:
    whole = np.arange(24.0).reshape(4, 6)
    x = to_dask(whole, (2, 6))
    padded = np.pad(whole, ((1, 1), (0, 0)), mode="symmetric")
    sums = sum(padded[i : i + 4].sum(1) for i in range(3))

    def three_rows(b: Any) -> Any:
        rows = b.sum(1)
        return np.convolve(rows, np.ones(3), "same")

    for axis in (1, -1, [1]):
        found = map_overlap(three_rows, x, depth={0: 1, 1: 0}, boundary="reflect", drop_axis=axis)
        assert found.chunks == ((2, 2),)
        check_equal(computed(found, scheduler), sums)
    kept = map_overlap(lambda b: b, x, depth={0: 1, 1: 0}, boundary="reflect", drop_axis=1)
    with pytest.raises((BlockError, ValueError, IndexError)):
        kept.compute(scheduler="synchronous")
    twice = map_overlap(
        lambda b: np.stack([b, -b]), x, depth={0: 1, 1: 0}, boundary="reflect", new_axis=0, chunks=(2, 4, 6)
    )
    assert twice.ndim == 3


def test_what_a_filter_cannot_say() -> None:
    x = numbers()
    with pytest.raises(TypeError, match="takes Dask arrays"):
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


def test_functions_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps what it has opened, but not for ever."""
    monkeypatch.setattr(block_of, "_MAX_BYTES", 100_000)
    monkeypatch.setattr(block_of, "_functions", {})
    for number in range(5):
        held = np.full(5_000, float(number))  # 40 kB
        block, _ = mapping._declared("map_blocks", lambda b, h=held: b + h[0], (numbers(),), None, None)
        again = pickle.loads(pickle.dumps(block))
        check_equal(again(np.zeros(2)), np.full(2, float(number)))
    assert len(block_of._functions) == 2
