"""`map_blocks` and `map_overlap`: margins, declarations, invalid input, and conversion to and from Dask."""

from __future__ import annotations

import functools
import re
from typing import Any

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    DeviceNotFoundError,
    DtypeConversion,
    GradientError,
    UnknownArrayError,
    convert_memory,
)
from arraybridge.dask import BlockError, from_dask, map_blocks, map_overlap, to_dask
from tests.dask import functions
from tests.dask.functions import CHUNKS, FILTERS, IMAGE, check_equal, computed, numbers
from tests.helpers import output_of, require

WHOLE = np.arange(12.0).reshape(3, 4)


def image() -> Any:
    return to_dask(IMAGE, CHUNKS)


@pytest.fixture(autouse=True)
def _in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


# -- results equal to the plain call -------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_results_equal_the_plain_call(name: str) -> None:
    require(name)
    functions.check_filter(name, "threads")


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64", "uint64"])
def test_a_jax_function_keeps_64_bit_blocks(dtype: str) -> None:
    """JAX narrows them by default, and map_blocks declares the dtype of the array."""
    require("jax")

    def shifted(x: Any) -> Any:
        return x + x[:1] - 1

    values = np.arange(12).reshape(6, 2).astype(dtype) + 2**40  # needs more than 32 bits
    expected = functions.blockwise(shifted, values, ((3, 3), (2,)))
    for fn in (arraybridge.jax(shifted), functools.partial(arraybridge.jax(shifted))):
        result = map_blocks(fn, to_dask(values, (3, 2))).compute()
        assert result.dtype == dtype
        assert np.array_equal(result, expected)
    overlapping = map_overlap(arraybridge.jax(np.negative), to_dask(values, (3, 2)), depth=1).compute()
    assert np.array_equal(overlapping, np.negative(values))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_a_jax_function_with_a_declared_dtype() -> None:
    """A declared 32-bit dtype is computed with JAX's setting, and a declared 64-bit one with x64 on."""
    jax = require("jax")
    seen: list[bool] = []

    @arraybridge.jax
    def halved(x: Any) -> Any:
        seen.append(jax.numpy.zeros(1).dtype == "float64")
        return x / 2

    @arraybridge.jax
    def positive(x: Any) -> Any:
        return (x > 0).sum(axis=1)

    doubles = to_dask(np.array([[1.0, -2.0], [3.0, 4.0]]), (1, 2))
    assert map_blocks(halved, doubles, dtype="float32").compute().tolist() == [[0.5, -1.0], [1.5, 2.0]]
    assert map_blocks(halved, doubles.astype("float32")).compute().dtype == "float32"
    assert set(seen) == {False}
    assert map_blocks(halved, doubles).compute().dtype == "float64"
    assert seen[-1]
    for one in (doubles, doubles.astype("float32")):
        counts = map_blocks(positive, one, dtype="int64", drop_axis=1).compute()
        assert counts.dtype == "int64"
        assert counts.tolist() == [1, 2]
    assert jax.numpy.zeros(1).dtype == "float32"  # the caller's setting is unchanged


def test_x64_of_a_jax_function() -> None:
    jax = require("jax")

    @arraybridge.jax
    def add(x: Any) -> Any:
        return (x + jax.numpy.asarray(1e-12)).astype("float32") * (jax.numpy.zeros(1).dtype == "float64")

    ones = to_dask(np.ones(4, "float32"), 2)
    for function, options in ((map_blocks, {}), (map_overlap, {"depth": 1})):
        on, off, unset = (
            function(add, ones, **options, **x64) for x64 in ({"x64": True}, {"x64": False}, {})
        )
        assert on.name != off.name
        assert [x.compute().tolist() for x in (on, off, unset)] == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
    with pytest.raises(ValueError, match="x64 is a setting of JAX, and negative is not decorated"):
        map_blocks(np.negative, ones, x64=True)
    with pytest.raises(TypeError, match="x64"):
        map_blocks(add, ones, x64="on")


def test_scheduler_does_not_import_frameworks() -> None:
    """The parts of a graph that the scheduler deserializes do not mention PyTorch, even for nested
    functions.
    """
    torch = require("torch")
    (array,) = dask.optimize(map_blocks(arraybridge.torch(lambda x: torch.add(x, 1)), numbers()))
    carried = cloudpickle.dumps(dict(array.__dask_graph__()))
    lines = ("import pickle, sys", f"pickle.loads({carried!r})", "print('torch' in sys.modules)")
    assert output_of(*lines) == "False"


# -- overlap -------------------------------------------------------------------------------------------

BOUNDARIES = {
    "none": {"mode": "constant"},  # the function's own boundary mode
    "reflect": {"mode": "symmetric"},
    "periodic": {"mode": "wrap"},
    "nearest": {"mode": "edge"},
    5: {"mode": "constant", "constant_values": 5},
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_filter_across_chunks(boundary: Any) -> None:
    require("torch")
    whole = np.arange(130, dtype=np.int64).reshape(13, 10) ** 2
    result = map_overlap(functions.sum_of_nine, to_dask(whole, CHUNKS), depth=1, boundary=boundary)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(whole, 1, **BOUNDARIES[boundary]), (3, 3))
    check_equal(computed(result), windows.sum((2, 3)))


def inner(b: Any) -> Any:
    return b[1:-1]


def test_filters_may_trim_their_own_margins() -> None:
    x, whole = to_dask(np.arange(10.0), 4), np.arange(10.0)
    options: dict[str, Any] = {"depth": 1, "boundary": "reflect", "trim": False, "name": "mine"}
    for fn in (inner, arraybridge.numpy(inner)):
        result = map_overlap(fn, x, **options)
        assert (result.chunks, result.name) == (((4, 4, 2),), "mine")
        check_equal(computed(result), whole)
    halves = map_overlap(lambda b: b[1:-1:2], x, chunks=((2, 2, 1),), **options)
    check_equal(computed(halves), whole[::2])
    for wrong in (lambda b: b, lambda b: np.concatenate([b, b]), lambda b: b[None]):
        with pytest.raises(BlockError, match="returned a block of shape"):
            map_overlap(wrong, x, **options).compute()


def test_chunks_of_unknown_size() -> None:
    require("torch")
    x = numbers()
    rows = x[x[:, 0] > 3]
    check_equal(map_blocks(functions.twice, rows).compute(), WHOLE[1:] * 2)
    with pytest.raises(BlockError, match=r"shape \(1, 3\), expected \(1, 2\)"):
        map_blocks(lambda b: np.ones((1, 3)), rows).compute()
    with pytest.raises(ValueError, match=r"not known.*compute_chunk_sizes\(\)"):
        map_overlap(functions.twice, rows, depth=1, boundary="reflect")


def test_margins_of_each_array_and_axis() -> None:
    """Every documented form is accepted, and the margins reach the function."""
    shapes: list[Any] = []

    def noted(*blocks: Any) -> Any:
        shapes.append([block.shape for block in blocks])
        return blocks[0]

    x, y = to_dask(np.ones((2, 4)), (2, 2)), to_dask(np.ones(4), 2)  # two blocks of (2, 2), and of (2,)
    for depth, expected in (
        (1, (4, 4)),
        (np.int64(1), (4, 4)),
        ((0, 2), (2, 6)),
        ({1: 1}, (2, 4)),
        ([(1, 0)], (4, 2)),
        (None, (2, 2)),
    ):
        shapes.clear()
        map_overlap(noted, x, depth=depth, boundary=0).compute()
        assert shapes == [[expected]] * 2, depth
    shapes.clear()
    map_overlap(noted, x, y, depth=[(0, 1), 1], boundary=["periodic", {0: 0.5}]).compute()
    assert shapes == [[(2, 4), (4,)]] * 2
    shapes.clear()
    map_overlap(noted, x, y, depth=(0, 1), boundary=("none", "reflect")).compute()
    assert [two[0] for two in shapes] == [(2, 4)] * 2
    shapes.clear()
    map_overlap(noted, x, depth={1: (0, 1)}).compute()  # the margin after the block only
    assert sorted(shapes) == [[(2, 2)], [(2, 3)]]


WRONG_DEPTHS = {
    "a str": ("x", TypeError, "depth='x' must be an int, at least 0."),
    "a float": (1.5, TypeError, "depth=1.5 must be an int, at least 0."),
    "a bool": (True, TypeError, "depth=True must be an int, at least 0."),
    "in a dict": ({0: 1.5}, TypeError, "depth=1.5 must be an int, at least 0."),
    "in a list": ([(1, "x")], TypeError, "depth='x' must be an int, at least 0."),
    "a negative int": (-1, ValueError, "depth=-1 must be at least 0."),
    "a negative pair": (((0, -1), 1), ValueError, "depth=-1 must be at least 0."),
    "too few axes": ((1,), ValueError, "depth=(1,) has 1 entry for 2 axes."),
    "too many axes": ((1, 1, 1), ValueError, "depth=(1, 1, 1) has 3 entries for 2 axes."),
    "an unknown axis": ({2: 1}, ValueError, "depth={2: 1} names the axis 2, but the number of axes is 2."),
    "a negative axis": ({-1: 1}, ValueError, "depth={-1: 1} names the axis -1, but the number of axes is 2."),
    "a named axis": ({"y": 1}, ValueError, "depth={'y': 1} names the axis 'y', but the number of axes is 2."),
    "too many arrays": ([1, 1], ValueError, "depth=[1, 1] has 2 entries for 1 array."),
}


@pytest.mark.parametrize("case", WRONG_DEPTHS)
def test_wrong_depths_raise_before_the_graph_is_built(case: str) -> None:
    depth, cls, problem = WRONG_DEPTHS[case]
    with pytest.raises(cls) as caught:
        map_overlap(pytest.fail, numbers(), depth=depth)
    assert str(caught.value) == (
        f"{problem} Pass an int of at least 0, a tuple or dict with one per axis, or a list of these with one"
        " per array."
    )


WRONG_BOUNDARIES = {
    "a mode of NumPy": ("wrap", ValueError, "boundary='wrap' has the unknown value 'wrap'."),
    "a typing mistake": (
        ("none", "periodc"),
        ValueError,
        "boundary=('none', 'periodc') has the unknown value 'periodc' (did you mean 'periodic'?).",
    ),
    "another type": ({0: b"0"}, ValueError, "boundary={0: b'0'} has the unknown value b'0'."),
    "too few axes": (("none",), ValueError, "boundary=('none',) has 1 entry for 2 axes."),
    "an unknown axis": ({2: 0}, ValueError, "boundary={2: 0} names the axis 2, but the number of axes is 2."),
    "too many arrays": ([0, 0], ValueError, "boundary=[0, 0] has 2 entries for 1 array."),
}


@pytest.mark.parametrize("case", WRONG_BOUNDARIES)
def test_wrong_boundaries_raise_before_the_graph_is_built(case: str) -> None:
    boundary, cls, problem = WRONG_BOUNDARIES[case]
    with pytest.raises(cls) as caught:
        map_overlap(pytest.fail, numbers(), depth=1, boundary=boundary)
    assert str(caught.value) == (
        f"{problem} Pass 'none', 'reflect', 'periodic', 'nearest' or a number, a tuple or dict with one per"
        " axis, or a list of these with one per array."
    )


# -- several arrays, and other arguments ---------------------------------------------------------------


def test_arguments_of_the_function() -> None:
    require("torch")

    @arraybridge.torch
    def line(b: Any, factor: Any = 1, offset: Any = 0) -> Any:
        return b * factor + offset

    @arraybridge.torch
    def less_sum(b: Any, table: Any) -> Any:
        """Check that NumPy arrays are passed whole, even with the same shape: only Dask arrays are split
        into blocks.
        """
        assert table.shape == (3, 4)
        return b - table.sum()

    x = numbers()
    for array, expected in (
        (map_blocks(line, x, factor=3, offset=0.5), WHOLE * 3 + 0.5),
        (map_blocks(line, x, 3), WHOLE * 3),
        (map_blocks(functools.partial(line, offset=2), x), WHOLE + 2),
        (map_blocks(line, x, factor=dask.delayed(np.array([7.0]))), WHOLE * 7),
        (map_overlap(line, x, depth=1, boundary=0, offset=4), WHOLE + 4),
        (map_blocks(less_sum, x, WHOLE), WHOLE - 66),
        (map_blocks(less_sum, x, table=WHOLE), WHOLE - 66),
    ):
        check_equal(computed(array), expected)


def test_several_arrays() -> None:
    a, b, c = np.arange(12, dtype="f4").reshape(3, 4), np.arange(4, dtype="f4"), np.ones((3, 1), "f4")
    arrays = to_dask(a, (2, 2)), to_dask(b, 2), to_dask(c, (2, 1))
    product = arraybridge.numpy(lambda a, b, c: a * b + c)
    check_equal(computed(map_blocks(product, *arrays)), a * b + c)
    # With equally many blocks of different sizes, blocks are matched by index, as in Dask.
    x, y = to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((3, 1),))
    check_equal(computed(map_blocks(lambda a, b: a + b.mean(), x, y)), np.array([1.0, 2.0, 5.0, 6.0]))
    with pytest.raises(BlockError, match="expected"):
        map_blocks(lambda a, b: b + a.sum(), x, y).compute()


@pytest.mark.parametrize(
    ("shape", "chunks", "counts"),
    [((6,), 2, "2 and 3 blocks along axis 1"), ((8, 6), (2, 3), "2 and 4 blocks along axis 0")],
)
def test_different_numbers_of_blocks_raise_at_once(shape: Any, chunks: Any, counts: str) -> None:
    x = to_dask(np.ones((4, 6)), chunks=(2, 3))
    y = to_dask(np.ones(shape), chunks=chunks)
    with pytest.raises(ValueError, match=rf"the arrays have {counts}\. .* y\.rechunk\(x\.chunks\)"):
        map_blocks(np.add, x, y)


@pytest.mark.parametrize(
    ("shape", "chunks"), [((6,), 3), ((1, 6), (1, 3)), ((4, 1), (2, 1)), ((), ()), ((2, 4, 6), (1, 2, 3))]
)
def test_aligned_and_single_blocks_are_broadcast(shape: Any, chunks: Any) -> None:
    numbers_of_y = np.arange(float(np.prod(shape))).reshape(shape)
    x = to_dask(np.ones((4, 6)), chunks=(2, 3))
    y = da.from_array(numbers_of_y, chunks=chunks)
    assert (map_blocks(np.add, x, y).compute() == np.ones((4, 6)) + numbers_of_y).all()


# -- declarations --------------------------------------------------------------------------------------


def test_functions_run_only_on_compute() -> None:
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
    check_equal(computed(arrays[0]), WHOLE * 2)
    # Each block once, and no empty block to infer the dtype.
    assert sorted(calls) == [(1, 2), (1, 2), (2, 2), (2, 2)]


def test_changed_shapes() -> None:
    require("torch")
    x = numbers()
    both_signs = arraybridge.numpy(lambda b: np.stack([b, -b]))
    for array, expected in (
        (map_blocks(functions.one_row, x, chunks=((1, 1), (2, 2))), WHOLE[::2]),
        (map_blocks(arraybridge.torch(lambda b: b.sum(0)), x[:2], drop_axis=0), WHOLE[:2].sum(0)),
        (map_blocks(arraybridge.torch(lambda b: b[None] + 1), x, new_axis=0), WHOLE[None] + 1),
        (map_blocks(both_signs, x, new_axis=0, chunks=(2, *x.chunks)), np.stack([WHOLE, -WHOLE])),
    ):
        check_equal(computed(array), expected)
    everything = map_blocks(arraybridge.torch(lambda b: b.sum()), x.rechunk((3, 4)), drop_axis=(0, 1))
    check_equal(np.asarray(computed(everything)), np.array(66.0))


def test_dtypes_and_names() -> None:
    require("torch")
    x = to_dask(np.array([0, 1, 2, 3], np.int16), chunks=2)
    floats = arraybridge.torch(lambda b: b.float() / 2)
    for declared in ({"dtype": "float32"}, {"meta": np.empty(0, np.float32)}):
        check_equal(computed(map_blocks(floats, x, **declared)), np.array([0, 0.5, 1, 1.5], np.float32))
    # As in the decorator: floating → integer fills the range of the dtype, block by block.
    for conversion, values, dtype in (
        (DtypeConversion.FLOAT32, [0, 0.5, 1, 1.5], np.float32),
        (DtypeConversion.PRESERVE_INPUT, [-32768, 32767] * 2, np.int16),
    ):
        halved = arraybridge.torch(dtype_conversion=conversion)(lambda b: b.double() / 2)
        check_equal(computed(map_blocks(halved, x)), np.array(values, dtype))
    # Dtypes that differ only in byte order are accepted as equal: FITS images are big-endian, but results
    # computed from them are not.
    big = np.arange(12, dtype=">f4").reshape(3, 4)
    np.testing.assert_array_equal(map_blocks(functions.twice, to_dask(big, (2, 2))).compute(), big * 2)
    name = map_blocks(functions.twice, x).name
    assert name == map_blocks(functions.twice, x).name != map_blocks(functions.twice, x + 1).name
    assert name.startswith("twice-")
    assert map_overlap(functions.twice, x, depth=1, boundary="none", name="mine").name == "mine"


# The returned value, the declaration, and the error message.
WRONG_BLOCKS = {
    "shape": (lambda b: b[:1], {}, ("(1, 2)", "(2, 2)", "chunks=, drop_axis= or new_axis=")),
    "rank": (lambda b: b[0], {}, ("(2,)", "drop_axis=")),
    "chunks": (lambda b: b[:1], {"chunks": (2, 2)}, ("(1, 2)", "(2, 2)", "chunks=")),
    "declared rank": (lambda b: b, {"drop_axis": 0}, ("(2, 2)", "expected (2,)")),
    "new axis": (lambda b: np.stack([b, b]), {"new_axis": 0}, ("(2, 2, 2)", "(1, 2, 2)", "new_axis=")),
    "dtype": (lambda b: b > 1, {}, ("bool", "float64", "the dtype of the array", "Pass dtype='bool'")),
    "declared dtype": (lambda b: b, {"dtype": "int8"}, ("float64", "int8", "as declared")),
    "dtype of meta": (lambda b: b, {"meta": np.empty((0, 0), "int8")}, ("float64", "the dtype of meta=")),
    "None": (lambda b: None, {}, ("NoneType", "one array")),
    "list": (lambda b: b.tolist(), {}, ("list", "one array")),
}


@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_blocks_that_differ_from_the_declaration_raise(kind: str) -> None:
    wrong, declared, words = WRONG_BLOCKS[kind]

    def culprit(b: Any) -> Any:
        return wrong(b)

    # A single block raises immediately, before Dask concatenates several.
    x = numbers()[:2, :2]
    for fn in (culprit, arraybridge.numpy(culprit)):
        with pytest.raises(BlockError) as caught:
            map_blocks(fn, x, **declared).compute()
        assert isinstance(caught.value, ValueError)
        for word in ("culprit()", *words):
            assert word in str(caught.value)


# -- invalid input and unusual arrays ------------------------------------------------------------------


@pytest.mark.parametrize("function", [map_blocks, functools.partial(map_overlap, depth=1)])
def test_non_functions_and_non_dask_arrays_raise(function: Any) -> None:
    require("torch")
    with pytest.raises(TypeError, match=r"expected a Dask array.*ndarray.*to_dask\(x, chunks\)"):
        function(functions.twice, np.zeros(3))
    with pytest.raises(TypeError, match=r"expected a Dask array.*list\.$"):
        function(functions.twice, [1, 2])
    with pytest.raises(TypeError, match=r"\(\) expected a function as its first argument, got "):
        function("twice", numbers())
    with pytest.raises(
        TypeError, match=r"^meta= expects an array of the type of the results, got list\. Omit meta="
    ):
        function(functions.twice, numbers(), meta=[1])
    with pytest.raises(TypeError, match="chunks are NumPy or CuPy arrays"):
        function(functions.twice, numbers(), meta=convert_memory(np.empty(0), "torch"))


def test_overlapping_arrays_must_be_dask_arrays() -> None:
    with pytest.raises(
        TypeError, match=r"map_overlap\(\) expected Dask arrays, got ndarray\. .*to_dask\(x, chunks"
    ):
        map_overlap(np.add, numbers(), WHOLE, depth=1)
    with pytest.raises(TypeError, match=r"got int\. Pass other arguments of the function by keyword\.$"):
        map_overlap(np.add, numbers(), 1, depth=1)


# -- conversion to and from Dask -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_conversion_to_dask_and_back(name: str) -> None:
    require(name)
    array = to_dask(convert_memory(IMAGE, name), chunks=(5, 6))
    assert (array.dtype, array.shape, array.chunks) == (np.float32, (13, 10), ((5, 5, 3), (6, 4)))
    assert type(array._meta) is np.ndarray
    check_equal(computed(array), IMAGE)
    back = from_dask(array, name)
    assert arraybridge.detect_memory_type(back) == name
    check_equal(convert_memory(back, "numpy"), IMAGE)
    check_equal(from_dask(array + 1, "numpy", dtype="float64"), IMAGE.astype("float64") + 1)


def test_odd_arrays() -> None:
    require("torch")
    empty = to_dask(np.zeros((0, 4), np.float32), chunks=(1, 2))
    check_equal(computed(map_blocks(functions.twice, empty)), np.zeros((0, 4), np.float32))
    # NumPy turns a 0-d block into a scalar.
    result = computed(map_blocks(arraybridge.numpy(lambda b: b * 2), to_dask(np.array(3.0), chunks=())))
    check_equal(np.asarray(result), np.array(6.0))
    masked = da.ma.masked_array(numbers(), numbers() > 3)
    with pytest.raises(ArrayNotSupportedError, match="mask would be lost"):
        map_blocks(functions.twice, masked).compute()


@pytest.mark.parametrize("chunks", [0, -2, -5, "big", 2.5, (2, 0), (1, 2, 3), None])
def test_invalid_chunks_raise(chunks: Any) -> None:
    given = re.escape(f"chunks={chunks!r}")
    text = rf"^{given} is not valid for the shape \(3, 4\)\. Pass a positive block size, one per axis,"
    with pytest.raises(ValueError, match=text):
        to_dask(WHOLE, chunks)


def test_automatic_chunks_of_objects_raise() -> None:
    with pytest.raises(ValueError, match=r"^chunks='auto' needs the size of an element, which dtype object"):
        to_dask(np.array([None, 1]), "auto")
    assert to_dask(np.array([None, 1]), 1).numblocks == (2,)


@pytest.mark.parametrize("chunks", [-1, "auto", "1MiB", {0: 3}, ((3,), (4,))])
def test_chunks_of_the_whole_array(chunks: Any) -> None:
    assert to_dask(WHOLE, chunks).chunks == ((3,), (4,))


def test_later_writes_to_the_source_have_no_effect() -> None:
    for chunks in (3, 6):
        x = np.arange(6.0)
        array = to_dask(x, chunks)
        x[:] = -1
        check_equal(computed(array), np.arange(6.0))


def test_arrays_that_cannot_be_converted_raise() -> None:
    torch = require("torch")
    for thing in ([1, 2], 3.0):
        with pytest.raises(UnknownArrayError, match="is not an array"):
            to_dask(thing)
    with pytest.raises(GradientError, match="grad='detach'"):
        to_dask(torch.ones(4, requires_grad=True))
    with pytest.raises(TypeError, match=r"expected a Dask array, got list.*convert_memory\(\)"):
        from_dask([1, 2], "torch")
    with pytest.raises(
        TypeError, match=r"^from_dask\(\) has no option 'cop' \(did you mean 'copy'\?\)\. Its opt"
    ):
        from_dask(numbers(), "torch", cop=True)
    with pytest.raises(DeviceNotFoundError, match="gpu:99"):
        from_dask(numbers(), "torch", 99)


def test_an_error_of_the_function_notes_the_blocks_and_options_that_it_got() -> None:
    x, y = da.ones(4, chunks=2), da.ones(4, chunks=4)
    with pytest.raises(ValueError, match="broadcast") as caught:
        map_blocks(np.subtract, x, da.ones(6, chunks=3)).compute()
    (note,) = caught.value.__notes__
    assert note.startswith("arraybridge: subtract() got 2 blocks of shape (2,) and (3,). If they should be")
    assert note.endswith("rechunk one of the arrays.")
    with pytest.raises(TypeError) as caught_type:
        map_blocks(np.sin, y, depth=2).compute()
    expected = "arraybridge: sin() got 1 block of shape (4,), and depth by keyword."
    assert caught_type.value.__notes__ == [expected]
