"""What two worker processes compute and tell each other; the one cluster serves all these tests.

It starts once, since each of its workers imports every framework.
"""

from __future__ import annotations

import functools
import os
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
    DeviceNotFoundError,
    DtypeNotSupportedError,
    GradientError,
    machine,
)
from arraybridge.dask import BlockError, cluster, map_blocks, map_overlap, recoveries, to_dask
from tests import matrix_data as data
from tests.dask import functions
from tests.dask.functions import (
    CHUNKS,
    FRAMEWORKS,
    IMAGE,
    bits,
    built,
    check_equal,
    computed,
    numbers,
)
from tests.helpers import require

SCHEDULERS = ("threads", "cluster")


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Client]:
    before = os.environ.get("PYTHONWARNINGS")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "cards", lambda: ())
        # Port 0: two runs at a time must not quarrel about 8787, which None stands for.
        workers = cluster(
            2, threads_per_worker=1, dashboard_address="127.0.0.1:0", env={"PYTHONWARNINGS": "error"}
        )
    with workers, Client(workers, set_as_default=False) as client:
        client.wait_for_workers(2)
        assert os.environ.get("PYTHONWARNINGS") == before  # that of the workers is theirs alone
        yield client


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> Any:
    """What Dask's ``compute(scheduler=...)`` takes."""
    return request.getfixturevalue("two_workers") if request.param == "cluster" else request.param


# -- map_blocks and map_overlap: the bits of the plain call, also on threads ----------------------------


def image() -> Any:
    return to_dask(IMAGE, CHUNKS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_bits_of_the_plain_call(name: str, scheduler: Any) -> None:
    """Of a filter, on each chunk; and of another one after it."""
    require(name)
    filtered = functions.blockwise(functions.FILTERS[name], IMAGE, CHUNKS)
    assert not np.array_equal(filtered, IMAGE)
    check_equal(computed(map_blocks(functions.FILTERS[name], image()), scheduler), filtered)
    both = map_blocks(functions.normalise, map_blocks(functions.FILTERS[name], image()))
    check_equal(computed(both, scheduler), functions.blockwise(functions.normalise, filtered, CHUNKS))


def test_functions_by_value(scheduler: Any) -> None:
    """What stands inside a function travels with its framework, its closure and its defaults."""
    torch = require("torch")
    weights = np.array([1, 10], np.float32)

    @arraybridge.torch
    def weighted(x: Any, factor: float = 4) -> Any:
        return torch.multiply(x, float(weights[1]) * factor)

    check_equal(computed(map_blocks(weighted, image()), scheduler), IMAGE * np.float32(40))


BOUNDARIES = {
    "none": {"mode": "constant"},  # what the function itself takes for its edges
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
    result = map_overlap(functions.sum_of_nine, to_dask(whole, CHUNKS), depth=1, boundary=boundary)
    check_equal(computed(result, scheduler), sums_of_nine(np.pad(whole, 1, **BOUNDARIES[boundary])))


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
    a, b, c = np.arange(12, dtype="f4").reshape(3, 4), np.arange(4, dtype="f4"), np.ones((3, 1), "f4")
    arrays = to_dask(a, (2, 2)), to_dask(b, 2), to_dask(c, (2, 1))
    product = arraybridge.numpy(lambda a, b, c: a * b + c)
    check_equal(computed(map_blocks(product, *arrays), scheduler), a * b + c)


def test_several_arrays_of_equally_many_blocks_of_other_sizes(scheduler: Any) -> None:
    """They meet by their numbers, as in Dask."""
    x, y = to_dask(np.arange(4.0), 2), to_dask(np.arange(4.0), ((3, 1),))
    result = map_blocks(lambda a, b: a + b.mean(), x, y)
    assert result.chunks == ((2, 2),)
    check_equal(computed(result, scheduler), np.array([1.0, 2.0, 5.0, 6.0]))
    other = map_blocks(lambda a, b: b + a.sum(), x, y, chunks=y.chunks)
    check_equal(computed(other, scheduler), np.array([1.0, 2.0, 3.0, 8.0]))
    with pytest.raises(BlockError, match=r"shape \([31],\) where \(2,\) was expected"):
        map_blocks(lambda a, b: b + a.sum(), x, y).compute(scheduler="synchronous")


def test_kinds_of_functions(scheduler: Any) -> None:
    require("torch")
    require("jax")
    for fn in (
        lambda b: b + b,
        arraybridge.gpu(lambda b: b + b),
        functools.partial(functions.twice),
        functions.Model(2).scaled,
        functools.partial(np.multiply, 2),
        arraybridge.torch(output_type="jax")(lambda b: b * 2),
    ):
        check_equal(computed(map_blocks(fn, numbers()), scheduler), np.arange(0, 24, 2.0).reshape(3, 4))


# What a function gives back, what is declared, and what the error says.
WRONG_BLOCKS = {
    "shape": (lambda b: b[:1], {}, ("(1, 2)", "(2, 2)", "chunks=, drop_axis= or new_axis=")),
    "rank": (lambda b: b[0], {}, ("(2,)", "drop_axis=")),
    "chunks": (lambda b: b[:1], {"chunks": (2, 2)}, ("(1, 2)", "(2, 2)", "chunks=")),
    "declared rank": (lambda b: b, {"drop_axis": 0}, ("(2, 2)", "where (2,) was expected")),
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


def test_chunks_whose_sizes_nobody_knows(scheduler: Any) -> None:
    require("torch")
    x = numbers()
    rows = x[x[:, 0] > 3]
    whole = np.arange(4, 12.0).reshape(2, 4)
    # Computed, shapes are known; the declared one is (nan, 4).
    check_equal(map_blocks(functions.twice, rows).compute(scheduler=scheduler), whole * 2)
    narrow = map_blocks(lambda b: b[:, :1] * 1, rows, chunks=(rows.chunks[0], (1, 1)))
    check_equal(narrow.compute(scheduler=scheduler), whole[:, ::2])
    with pytest.raises(BlockError, match=r"shape \(1, 3\) where \(1, 2\) was expected"):
        map_blocks(lambda b: np.ones((1, 3)), rows).compute(scheduler=scheduler)
    with pytest.raises(BlockError, match=r"shape \(1, 1\) where \(nan, 2\) was expected"):
        map_blocks(lambda b: b[:, :1], rows, chunks=rows.chunks).compute(scheduler=scheduler)


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


def inner(b: Any) -> Any:
    return b[1:-1]


def test_a_filter_that_cuts_its_margins_off_itself(scheduler: Any) -> None:
    x, whole = to_dask(np.arange(10.0), 4), np.arange(10.0)
    for fn in (inner, arraybridge.numpy(inner)):
        result = map_overlap(fn, x, depth=1, boundary="reflect", trim=False)
        assert result.chunks == ((4, 4, 2),)
        check_equal(computed(result, scheduler), whole)
    narrow = {"depth": 1, "boundary": "reflect", "trim": False, "name": "mine"}
    halves = map_overlap(lambda b: b[1:-1:2], x, chunks=((2, 2, 1),), **narrow)
    assert halves.name == "mine"
    check_equal(computed(halves, scheduler), whole[::2])
    wrong = map_overlap(lambda b: b[::2], x, chunks=((2, 2, 1),), **narrow)
    with pytest.raises(BlockError, match=r"shape \([32],\) where \([21],\) was expected"):
        wrong.compute(scheduler="synchronous")
    for grows in (lambda b: np.concatenate([b, b]), lambda b: b[None]):
        with pytest.raises(BlockError, match="returned a block of shape"):
            map_overlap(grows, x, depth=1, trim=False).compute(scheduler="synchronous")
    named = map_overlap(inner, x, depth=1, boundary="reflect", trim=False, name="mine")
    assert named.name == "mine"
    check_equal(computed(named), whole)


def test_a_filter_that_drops_an_axis(scheduler: Any) -> None:
    whole = np.arange(24.0).reshape(4, 6)
    padded = np.pad(whole, ((1, 1), (0, 0)), mode="symmetric")
    options: dict[str, Any] = {"depth": {0: 1, 1: 0}, "boundary": "reflect", "drop_axis": -1}
    three_rows = lambda b: np.convolve(b.sum(1), np.ones(3), "same")  # noqa: E731
    array = map_overlap(three_rows, to_dask(whole, (2, 6)), **options)
    assert array.chunks == ((2, 2),)
    check_equal(computed(array, scheduler), sum(padded[i : i + 4].sum(1) for i in range(3)))


# -- arrays between workers ---------------------------------------------------------------------------


def facts(x: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    return data.framework_of(x), data.dtype_name(x), tuple(x.shape), bits(x)


def make(framework: str, dtype: str) -> list[Any]:
    require(framework)
    return [data.build(framework, "aligned", dtype).array]


def first_of(items: list[Any]) -> Any:
    return items[0]


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint64"])
def test_arrays_travel_between_workers(framework: str, dtype: str, two_workers: Any) -> None:
    if data.inexpressible(framework, "aligned", dtype) is not None:
        dtype = "uint8"
    source = built(framework, "aligned", dtype)
    first, second = two_workers.scheduler_info()["workers"]
    kept = two_workers.scatter(source.array, workers=[first], hash=False)
    expected = (framework, dtype, source.shape, source.values)
    # From its worker to the other one, and back to the client.
    there = two_workers.submit(facts, kept, workers=[second], pure=False)
    assert there.result(60) == expected
    assert list(two_workers.who_has(there)[there.key]) == [second]
    assert facts(kept.result(60)) == expected
    # What a worker made, inside a list, and the other one used.
    made = two_workers.submit(make, framework, dtype, workers=[first], pure=False)
    moved = two_workers.submit(first_of, made, workers=[second], pure=False)
    assert facts(moved.result(60)) == expected


# -- what workers say, and what they keep --------------------------------------------------------------

ERRORS: dict[str, tuple[type[Exception], str, dict[str, str]]] = {
    "one_row": (BlockError, r"one_row\(\) returned a block of shape \(1, 2\)", {"target_type": "numpy"}),
    "with_graph": (GradientError, "no_grad", {"source_type": "torch", "target_type": "numpy"}),
    "clesperanto_identity": (
        DtypeNotSupportedError,
        r"clesperanto_identity\(\).*float64",
        {"source_type": "numpy", "target_type": "pyclesperanto"},
    ),
    "on_a_card_that_is_not_there": (DeviceNotFoundError, "gpu:99", {"target_type": "torch"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_arrive_with_their_class_and_attributes(name: str, two_workers: Client) -> None:
    require("pyclesperanto" if name.startswith("clesperanto") else "torch")
    cls, words, attributes = ERRORS[name]
    with pytest.raises(cls, match=words) as caught:
        map_blocks(getattr(functions, name), numbers()).compute(scheduler=two_workers)
    assert type(caught.value) is cls
    assert {key: getattr(caught.value, key) for key in attributes} == attributes
    assert caught.value.reason  # type: ignore[attr-defined]


def test_a_block_that_does_not_fit_is_split_on_the_worker(two_workers: Client) -> None:
    require("torch")
    whole = np.arange(64, dtype=np.float32).reshape(32, 2)
    before = two_workers.run(functions.begin_rehearsal, 2)
    here = recoveries()
    try:
        result = map_blocks(functions.plus_one, to_dask(whole, (8, 2))).compute(scheduler=two_workers)
    finally:
        two_workers.run(functions.end_rehearsal)
    np.testing.assert_array_equal(result, whole + 1, strict=True)
    after = two_workers.run(recoveries)
    gained = {step: sum(after[w][step] - before[w][step] for w in after) for step in ("retry", "split")}
    # Each of the four blocks: 8 rows, 8 again, then 4, then 2 and 2 and 2 and 2.
    assert gained == {"retry": 4, "split": 8}
    assert recoveries() == here
    logs = two_workers.get_worker_logs()
    for worker, counts in after.items():
        lines = [message for _, message in logs[worker] if "ran out of memory" in message]
        assert len(lines) == sum(counts.values())
        if counts["split"]:
            assert any("8 rows" in line and "4 rows at a time" in line for line in lines)


def test_jax_compiles_once_in_a_worker(two_workers: Client) -> None:
    jax = require("jax")

    @jax.jit
    def inner(x: Any) -> Any:
        functions.traces.append(1)  # runs while JAX traces, and then no more
        return x * 3

    @arraybridge.jax
    def tripled(x: Any) -> Any:
        return inner(x)

    two_workers.run(functions.forget_traces)
    whole = np.arange(40, dtype=np.float32)
    for _ in range(2):
        result = map_blocks(tripled, to_dask(whole, 2)).compute(scheduler=two_workers)
        np.testing.assert_array_equal(result, whole * 3, strict=True)
    assert set(two_workers.run(functions.number_of_traces).values()) == {1}
