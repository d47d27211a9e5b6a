"""Memory that processes share: arrays that are sent by reference, and cleanup."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import platform
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import shared
from arraybridge.memory import segments, shared_memory
from tests.helpers import require, run_python
from tests.parallel import functions

LINUX = sys.platform == "linux"
linux = pytest.mark.skipif(not LINUX, reason="descriptors are counted in /proc")


@pytest.fixture(params=["anonymous", "named"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the implementation for Linux, or the one for other systems."""
    if request.param == "anonymous" and not LINUX:
        pytest.skip("needs Linux")
    monkeypatch.setattr(segments, "_ANONYMOUS", request.param == "anonymous")
    return str(request.param)


def in_another_process(x: Any, code: str) -> str:
    """Return the output of code in another process that receives ``x`` by pickle."""
    script = f"import pickle, sys\nx = pickle.load(sys.stdin.buffer)\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(x), capture_output=True, check=False, timeout=120
    )
    return (done.stdout + done.stderr).decode().strip()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- shared arrays -----------------------------------------------------------------------------------


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
    with pytest.raises(TypeError, match=r"np.asarray\(\[4, 5\]\).*tuple \(4, 5\)"):
        shared([4, 5])
    for bad in (np.array([object()]), [[1, 2], [3]], [1.5, 2.5], "word"):
        with pytest.raises((TypeError, ValueError)):
            shared(bad)
    with pytest.raises(arraybridge.ArrayNotSupportedError, match=r"x\.filled\(0\)"):
        shared(np.ma.masked_array([1, 2], [True, False]))


BAD_SHAPES: list[tuple[Any, type[Exception]]] = [
    *((shape, TypeError) for shape in (True, (True, 2), (2, 2.5), [[1, 2]], [1, "a"], (None,))),
    *((shape, ValueError) for shape in (-1, (-1,), (2, -3), (2**62, 2**62), (1,) * 65)),
]


@pytest.mark.parametrize(("shape", "error"), BAD_SHAPES)
def test_a_bad_shape_names_the_argument(shape: Any, error: type[Exception]) -> None:
    """`shared`, `aligned` and `BufferPool.take` raise the same errors."""
    pool = arraybridge.BufferPool()
    for make in (shared, arraybridge.aligned, functions.Taking(pool)):
        with pytest.raises(error, match=r"^shape=.* is not a valid shape\. .*non-negative integer.*\.$"):
            make(shape)


def test_text_is_not_a_shape() -> None:
    for text in ("12", b"x", bytearray(b"x")):
        with pytest.raises(TypeError, match="valid shape"):
            arraybridge.aligned(text)  # type: ignore[arg-type]


def test_stack_slices_takes_several_arrays() -> None:
    for slices in (3, None, object()):
        with pytest.raises(TypeError, match="slices must be an iterable of arrays"):
            arraybridge.stack_slices(slices, "numpy")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_the_dtype_of_a_framework(framework: str, name: str) -> None:
    module = require(framework)
    dtype = getattr(module.numpy if framework == "jax" else module, name)
    x = shared((2, 3), dtype)
    assert (x.shape, x.dtype.name) == ((2, 3), name)
    x = shared(np.ones((2, 3)), dtype)
    assert (x.shape, x.dtype.name, float(x[1, 2])) == ((2, 3), name, 1.0)


def test_dtypes_by_name_and_bad_ones() -> None:
    assert shared(3).dtype == np.float64
    assert shared(3, "torch.int16").dtype == np.int16
    assert shared(3, ">i4").dtype == np.dtype(">i4")
    for dtype in ("no dtype", 5, 3.5, (2,), "f4,,"):
        for make in (shared, arraybridge.aligned):
            with pytest.raises(TypeError, match=r"^dtype=.* is not understood\. Pass a NumPy dtype"):
                make((2, 3), dtype)
    for unsupported in (object, "U3", "M8[s]", [("a", "i4")]):
        with pytest.raises(arraybridge.DtypeNotSupportedError):
            shared((2, 3), np.dtype(unsupported))


def test_a_converted_array_pickles_by_value() -> None:
    torch = require("torch")
    x = shared(np.zeros(3))
    assert isinstance(x, np.ndarray)
    tensor = arraybridge.to_torch(x)
    arrived = pickle.loads(pickle.dumps(tensor))
    x[:] = 1
    assert tensor.tolist() == [1, 1, 1]
    assert (type(arrived), arrived.tolist()) == (torch.Tensor, [0, 0, 0])


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


def read_only(x: np.ndarray) -> np.ndarray:
    view = x[1:]
    view.flags.writeable = False
    return view


VIEWS: dict[str, Any] = {
    "whole": lambda x: x,
    "slice": lambda x: x[1:, 2],
    "transpose": lambda x: x.T,
    "reversed": lambda x: x[::-1, ::-2],
    "broadcast": lambda x: np.broadcast_to(x, (2, 3, 4), subok=True),
    "other dtype": lambda x: x.view("uint8"),
    "reshaped": lambda x: x.reshape(2, 6),
    "function": lambda x: np.split(np.moveaxis(x, 0, 1), 2)[1],
    "0-d": lambda x: x[1, 2, ...],
    "read-only": read_only,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.usefixtures("implementation")
def test_views_travel_by_reference(view: Any) -> None:
    x = shared(np.arange(12.0).reshape(3, 4))
    seen = view(x)
    data = pickle.dumps(seen)
    back, again = pickle.loads(data), pickle.loads(data)
    assert len(data) < 1000
    np.testing.assert_array_equal(back, seen)
    assert (back.strides, back.flags.writeable) == (seen.strides, seen.flags.writeable)
    assert np.shares_memory(back, x)
    assert np.shares_memory(again, x)


def test_empty_arrays_travel() -> None:
    for seen in (shared((3, 0))[::-1], shared((0, 3))[:, ::-1], shared((2, 3))[:, 1:1].T):
        back = pickle.loads(pickle.dumps(seen))
        assert (type(back), back.shape, back.dtype) == (type(seen), seen.shape, seen.dtype)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mean(0),
        lambda x: x[[0, 1]],
        lambda x: x[x > 3],
        lambda x: np.concatenate([x, x]),
        lambda x: x @ x.T,
        lambda x: x.copy(),
        copy.copy,
        copy.deepcopy,
        lambda x: x.astype("f4"),
        lambda x: np.sort(x),
        lambda x: x.T.reshape(-1),
        lambda x: np.split(np.roll(x, 1), 3)[1],
        lambda x: np.zeros_like(x),
    ],
)
def test_results_of_numpy_are_ordinary_arrays(compute: Any) -> None:
    plain = np.arange(12.0).reshape(3, 4)
    x = shared(plain)
    assert type(compute(x)) is np.ndarray
    assert not np.shares_memory(compute(x), x)
    np.testing.assert_array_equal(compute(x), compute(plain))
    assert isinstance(x.sum(), float)
    x += 1
    assert np.shares_memory(pickle.loads(pickle.dumps(x)), x)


# -- between processes -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_process_pools_and_a_writing_process(method: Any) -> None:
    """Also check that results can be sent to another pool, and that workers may end after each task."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    x = shared(np.zeros((4, 1000)))
    done = run_python("-W", "ignore", "-m", "tests.memory.pools", method)
    words = ["Pool", "short-lived", "executor", "result", "onwards", "held there", "Process"]
    assert done.stdout.splitlines() == words, done.stderr
    assert in_another_process(x[1], "x[:] = 5") == ""
    assert x.sum(1).tolist() == [0, 5000, 0, 0]


def test_joblib() -> None:
    joblib = pytest.importorskip("joblib")
    x = shared(np.zeros((4, 200_000)))  # above the size from which joblib writes files
    joblib.Parallel(n_jobs=2)(joblib.delayed(functions.fill)(x[i], i) for i in range(4))
    assert x[:, ::1000].sum(1).tolist() == [0, 200, 400, 600]
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(functions.kept_by_loky)(i) for i in [3]) == [1]
    made = joblib.Parallel(n_jobs=2)(joblib.delayed(functions.make_shared)(i) for i in range(4))
    assert [one.tolist() for one in made] == [[i, i, i] for i in range(4)]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_pickles_that_never_arrive_leak_no_memory(method: Any) -> None:
    """Examples are pickles for a hash or a cache."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    done = run_python("-W", "ignore", "-m", "tests.memory.never_arrives", method)
    words = ["Pool 0 0", "executor 0 0", "device_map 0 0", "returned [2.0, 2.0, 2.0]"]
    # With a limit of 1 MB and of 3 segments: the memory that is kept, and the values of all arrays.
    words += ["kept True True", "arrived [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]", "large 1 True"]
    assert done.stdout.splitlines() == words, done.stderr


def test_freed_memory_raises(implementation: str) -> None:
    x = shared(np.ones(10))
    data, key = pickle.dumps(x), x.segment.key  # type: ignore[attr-defined]
    del x
    gc.collect()
    with pytest.raises(segments.SharedMemoryGoneError, match="Keep the array until it has arrived"):
        pickle.loads(data)
    if implementation == "named":
        with pytest.raises(FileNotFoundError):
            SharedMemory(key)


@linux
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": "elsewhere"}, "another machine, elsewhere"),
        ({"process": 2**22 + 1}, "No such file"),
        ({"process": os.getpid()}, "no longer exists"),
        ({"process": 1}, "Permission denied"),  # another user's segment
    ],
)
def test_unreachable_memory_raises(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"machine": platform.node(), "process": os.getpid(), "key": "arraybridge-gone"}
    if changes == {"process": 1}:
        monkeypatch.setattr(Path, "iterdir", functions.Raising(PermissionError(13, "Permission denied")))
    with pytest.raises(segments.SharedMemoryGoneError, match=words) as caught:
        segments._find(**{**place, **changes})
    assert isinstance(caught.value, arraybridge.MemoryConversionError)


def test_full_shared_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shared_memory, "make_segment", functions.Raising(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space") as caught:
        shared((3,))
    assert "ulimit -n" in caught.value.__notes__[0]
    assert "--shm-size" in caught.value.__notes__[0]


@linux
def test_each_segment_takes_one_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SharedMemory", functions.Raising(OSError(28, "full")))
    gc.collect()
    before = descriptors()
    arrays = [shared((1000,)) for _ in range(100)]
    assert descriptors() - before == 100, "one each"
    count = "len(os.listdir('/proc/self/fd'))"
    error_text = in_another_process(arrays, f"import os; n = {count}; x.clear(); print(n - {count})")
    assert error_text == "100"
    arrays.clear()
    gc.collect()
    assert descriptors() == before
