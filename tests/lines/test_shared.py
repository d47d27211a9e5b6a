"""Memory that processes share: what travels by its place, and what is left when somebody dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import device_map, shared
from arraybridge.lines.exchange import Exchange
from arraybridge.memory import shared as room
from tests.helpers import require, run_python
from tests.lines import functions

LINUX = sys.platform == "linux"
linux = pytest.mark.skipif(not LINUX, reason="descriptors are counted in /proc")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way of Linux, and the one of other systems."""
    monkeypatch.setattr(room, "_ANONYMOUS", request.param == "anonymous")
    return str(request.param)


def in_another_process(x: Any, code: str) -> str:
    """What the code prints of ``x``, which arrives there by pickle."""
    script = f"import pickle, sys\nx = pickle.load(sys.stdin.buffer)\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(x), capture_output=True, check=False, timeout=120
    )
    return (done.stdout + done.stderr).decode().strip()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- the array ---------------------------------------------------------------------------------------


def test_values_shape_dtype_and_alignment() -> None:
    source = np.arange(12, dtype=">i4").reshape(3, 4).T
    x = shared(source)
    assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == ((4, 3), source.dtype, True, True)
    np.testing.assert_array_equal(x, source)
    assert x.ctypes.data % 64 == 0
    empty = shared((2, 3), "uint8")
    assert (empty.shape, empty.dtype) == ((2, 3), np.dtype("uint8"))
    assert shared(5).shape == (5,)
    assert shared((0, 3)).shape == shared(np.zeros((0, 3))).shape == (0, 3)
    assert shared(np.float64(2)) == 2
    for bad in (np.array([object()]), [[1, 2], [3]], "word"):
        with pytest.raises((TypeError, ValueError)):
            shared(bad)


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])
def test_frameworks_share_it(name: str) -> None:
    require(name)
    x = shared(arraybridge.convert_memory(np.arange(6, dtype=np.float32), name))
    y = arraybridge.convert_memory(x, name)
    assert arraybridge.explain(x, name).shares_memory
    x[2] = 9
    assert arraybridge.to_numpy(y).tolist() == [0, 1, 9, 3, 4, 5]
    assert in_another_process(x, "x[0] = 7") == ""
    assert arraybridge.to_numpy(y)[0] == 7


VIEWS: dict[str, Any] = {
    "whole": lambda x: x,
    "slice": lambda x: x[1:, 2],
    "transpose": lambda x: x.T,
    "reversed": lambda x: x[::-1, ::-2],
    "other dtype": lambda x: x.view("uint8"),
    "reshaped": lambda x: x.reshape(2, 6),
    "function": lambda x: np.split(np.moveaxis(x, 0, 1), 2)[1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("way", ["anonymous", "named"], indirect=True)
def test_views_travel_by_their_place(view: Any, way: str) -> None:
    if way == "anonymous" and not LINUX:
        pytest.skip("needs Linux")
    x = shared(np.arange(12.0).reshape(3, 4))
    seen = view(x)
    data = pickle.dumps(seen)
    back = pickle.loads(data)
    assert len(data) < 1000
    np.testing.assert_array_equal(back, seen)
    assert back.strides == seen.strides
    assert np.shares_memory(back, x)


COMPUTED: dict[str, Any] = {
    "ufunc": lambda x: x + 1,
    "reduction": lambda x: x.mean(0),
    "copy": lambda x: x.copy(),
    "cast": lambda x: x.astype("f4"),
    "fancy": lambda x: x[[0, 1]],
    "mask": lambda x: x[x > 3],
    "concatenate": lambda x: np.concatenate([x, x]),
    "sort": lambda x: np.sort(x),
    "flatten": lambda x: x.flatten(),
    "transposed and flat": lambda x: x.T.reshape(-1),
    "matmul": lambda x: x @ x.T,
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_what_numpy_computes_is_an_ordinary_array(compute: Any) -> None:
    plain = np.arange(12.0).reshape(3, 4)
    x = shared(plain)
    assert type(compute(x)) is np.ndarray
    np.testing.assert_array_equal(compute(x), compute(plain))
    assert isinstance(x.sum(), float)
    x += 1
    assert np.shares_memory(pickle.loads(pickle.dumps(x)), x)


# -- between processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_writes_and_the_other_one_sees_it(method: Any) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    x = shared(np.zeros((4, 1000)))
    done = run_python("-W", "ignore", "-m", "tests.lines.pools", method)
    assert done.stdout.split() == ["Pool", "executor", "result", "Process"], done.stderr
    assert in_another_process(x[1], "x[:] = 5") == ""
    assert x.sum(1).tolist() == [0, 5000, 0, 0]


def test_joblib() -> None:
    joblib = pytest.importorskip("joblib")
    x = shared(np.zeros((4, 200_000)))  # above the bytes from which joblib writes files
    joblib.Parallel(n_jobs=2)(joblib.delayed(functions.fill)(x[i], i) for i in range(4))
    assert x[:, ::1000].sum(1).tolist() == [0, 200, 400, 600]


def test_dask() -> None:
    pytest.importorskip("distributed")
    done = run_python("-W", "ignore", "-m", "tests.lines.dask_workers", timeout=200)
    assert done.stdout.splitlines() == ["place True", "written 1000.0", "disk [1.0, 1.0, 1.0]"], done.stderr


@pytest.mark.parametrize("way", ["anonymous", "named"], indirect=True)
def test_memory_that_went(way: str) -> None:
    x = shared(np.ones(10))
    data = pickle.dumps(x)
    del x
    gc.collect()
    with pytest.raises(room.SharedMemoryGoneError, match="keep it until it has arrived"):
        pickle.loads(data)


@linux
def test_another_machine_another_file_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = room.make_segment(100)
    other = room.make_segment(100)
    place = segment.place._replace(key="arraybridge-other")
    for changed, words in (
        (place._replace(machine="of somebody else"), "another machine"),
        (place._replace(descriptor=other.place.descriptor), "let go of the array"),
        (place._replace(process=2**22 + 1), "has ended"),
    ):
        with pytest.raises(room.SharedMemoryGoneError, match=words) as caught:
            room.open_segment(changed)
        assert isinstance(caught.value, arraybridge.MemoryConversionError)

    def refuse(*_: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(room.os, "open", refuse)
    with pytest.raises(room.SharedMemoryGoneError, match="another user"):
        room.open_segment(place)


def test_a_mask_is_refused() -> None:
    with pytest.raises(arraybridge.ArrayNotSupportedError, match=r"x\.filled\(value\)"):
        shared(np.ma.masked_array([1, 2], [True, False]))


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    for name in ("_make_anonymous", "_make_named"):
        monkeypatch.setattr(room, name, refuse)
    with pytest.raises(OSError, match="No space") as caught:
        shared((3,))
    assert "ulimit -n" in caught.value.__notes__[0]


@linux
def test_a_hundred_segments_take_a_descriptor_each_where_they_were_made_and_none_elsewhere() -> None:
    gc.collect()
    before = descriptors()
    arrays = [shared((1000,)) for _ in range(100)]
    assert descriptors() - before == 100, "one each"
    count = "len(os.listdir('/proc/self/fd'))"
    told = in_another_process(arrays, f"import os; n = {count}; print(len(x), n < 20)")
    assert told == "100 True"
    arrays.clear()
    gc.collect()
    assert descriptors() == before


def test_a_name_goes_with_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_ANONYMOUS", False)
    x = shared((3,))
    name = x._segment.place.key  # type: ignore[attr-defined]
    SharedMemory(name).close()
    del x
    gc.collect()
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)


# -- device_map and Pipeline -------------------------------------------------------------------------

LARGE = (1 << 20) + 8


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow"])
def test_large_arrays_travel_both_ways(name: str) -> None:
    require(name)
    values = np.arange(LARGE // 4, dtype=np.float32)
    item = {"x": [arraybridge.convert_memory(values, name)], "n": 3, "small": np.arange(3)}
    results = list(device_map(functions.same, [item] * 3, ["cpu"], processes=True))
    for result in results:
        assert arraybridge.detect_memory_type(result["x"][0]) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(result["x"][0]), values)
        assert (result["n"], result["small"].tolist()) == (3, [0, 1, 2])


def test_orders_dtypes_and_what_does_not_go_by_shared_memory() -> None:
    base = np.arange(2 * LARGE // 8, dtype=np.int64).reshape(2, -1)
    masked = np.ma.masked_greater(base, 5)
    items = [
        base,
        base.T,
        base[:, ::-1],
        base.astype(">i8"),
        base.astype(object)[:1],
        masked,
        base.view("M8[s]"),
    ]
    for item, result in zip(items, device_map(functions.same, items, ["cpu"], processes=True), strict=True):
        assert (type(result), result.dtype, result.flags.f_contiguous) == (
            *(type(item), item.dtype),
            item.flags.f_contiguous,
        )
        np.testing.assert_array_equal(result, item)


def test_an_item_that_is_shared_is_the_same_memory() -> None:
    x = shared(np.zeros((3, LARGE // 8)))
    results = list(device_map(functions.filled, [x[i] for i in range(3)], ["cpu"], processes=True))
    assert x[:, 0].tolist() == [1, 1, 1]
    assert all(np.shares_memory(result, x) for result in results)
    made = list(device_map(functions.make_shared, [1, 2], ["cpu"], processes=True))
    assert [result.tolist() for result in made] == [[1, 1, 1], [2, 2, 2]]


@linux
def test_segments_are_used_again_and_results_that_are_kept_stay_as_they_are() -> None:
    items = (np.full(LARGE, i % 100, np.uint8) for i in range(300))
    kept, seen = [], set()
    before = descriptors()
    for i, result in enumerate(device_map(functions.same, items, ["cpu"], processes=True)):
        assert (result[0], result[-1]) == (i % 100, i % 100)
        seen.add(result.ctypes.data)
        if i % 50 == 0:
            kept.append(result)
        assert descriptors() - before < 20
        del result
    assert len(seen) < 30
    assert [x[5] for x in kept] == [0, 50, 0, 50, 0, 50]
    gc.collect()
    assert descriptors() <= before + 1


def test_an_item_that_does_not_pickle_beside_large_ones_costs_no_segment() -> None:
    ours, theirs = Exchange(), Exchange()
    large = [np.zeros(LARGE << i, np.uint8) for i in range(6)]
    for _ in range(3):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            ours.dumps((large, lambda: 1))
        sizes = [len(x) for x in theirs.loads(ours.dumps(large))]
        assert sizes == [len(x) for x in large]
        assert ours.loads(theirs.dumps("more")) == "more"
    assert len(ours._spare) <= 4


def test_stages_in_processes() -> None:
    pipeline = arraybridge.Pipeline(functions.square, functions.with_process, processes=True)
    x = np.arange(LARGE, dtype=np.float64)
    results = list(pipeline.map([x, x + 1]))
    np.testing.assert_array_equal(results[1][0], (x + 1) ** 2)
    assert os.getpid() not in {pid for _, pid in results}
    np.testing.assert_array_equal(arraybridge.Pipeline(functions.square, processes=True)(x), x**2)


# -- ends --------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_kill_in_the_midst_of_a_transfer_leaves_nothing(victim: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.lines.killed", victim], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        os.kill(worker if victim == "worker" else process.pid, signal.SIGKILL)
        said = process.stdout.read()
        process.wait(60)
    if victim == "worker":
        assert said.split() == ["ProcessDiedError", "exit", "code", "-9", "threads", "0", "maps", "0"]
    until = time.monotonic() + 60
    while Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < until, "the worker lives on"
        time.sleep(0.01)


@linux
@pytest.mark.slow
def test_ten_thousand_items_leave_memory_and_descriptors_as_they_were() -> None:
    def memory() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

    def run(count: int) -> Iterator[Any]:
        items = (np.full(LARGE, i % 100, np.uint8) for i in range(count))
        return device_map(functions.same, items, ["cpu"], processes=True)

    results = run(10_000)
    for _ in range(100):
        next(results)
    before, opened = memory(), descriptors()
    for i, result in enumerate(results, 100):
        assert result[i] == i % 100
        del result
        if i == 9000:
            assert memory() < before + (32 << 20)
            assert descriptors() <= opened
