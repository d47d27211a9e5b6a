"""Serialization for other processes: large arrays use shared memory, which is reused and freed at the end."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Device, device_map, framework, shared
from arraybridge.memory import serialization
from arraybridge.memory.segments import Exchange
from arraybridge.memory.shared_memory import SharedArray
from tests.helpers import require, run_python
from tests.memory.test_shared_memory import descriptors, linux
from tests.parallel import functions

LARGE = (1 << 20) + 8


def run(fn: Any, items: Any) -> Iterator[Any]:
    return device_map(fn, items, ["cpu"], processes=True)


def full(count: int) -> Iterator[np.ndarray]:
    return (np.full(LARGE, i % 100, np.uint8) for i in range(count))


def test_orders_dtypes_flags_and_values_outside_shared_memory() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    base = np.arange(2 * LARGE // 8, dtype=np.int64).reshape(2, -1)
    masked = np.ma.masked_greater(base, 5)
    items = [base, base.T, base[:, ::-1], base[:, 3:], base.astype(">i8"), base.astype(object)[:1], masked]
    items += [base.view("M8[s]"), base.astype(ml_dtypes.bfloat16), base[:, :0], np.array(3.0)]
    items.append(np.zeros(LARGE, [("a", "i4"), ("b", "f8")]))
    for item, result in zip(items, run(functions.same, items), strict=True):
        assert (type(result), result.dtype) == (type(item), item.dtype)
        assert result.flags.f_contiguous == item.flags.f_contiguous
        np.testing.assert_array_equal(result, item)
    twice, backwards = run(functions.same, [[base, base], base[0, ::-1]])
    assert twice[0] is twice[1]
    np.testing.assert_array_equal(backwards, base[0, ::-1])


def test_shared_items_use_the_same_memory() -> None:
    x = shared(np.zeros((3, LARGE // 8)))
    results = list(run(functions.filled, [x[i] for i in range(3)]))
    assert x[:, 0].tolist() == [1, 1, 1]
    assert all(np.shares_memory(result, x) for result in results)
    made = list(run(functions.make_shared, [1, 2]))
    assert [result.tolist() for result in made] == [[1, 1, 1], [2, 2, 2]]


def test_writes_of_a_process_to_its_item_stay_local() -> None:
    items = list(full(6))
    results = list(run(functions.scribbled, items))
    assert [int(before) for _, before in results] == [int(item[0]) for item in items] == [*range(6)]
    assert all((result == 7).all() for result, _ in results)


@linux
def test_segments_are_reused_and_retained_results_stay_intact() -> None:
    kept, seen = [], set()
    gc.collect()
    before = descriptors()
    for i, result in enumerate(run(functions.same, full(300))):
        assert (result[0], result[-1]) == (i % 100, i % 100)
        seen.add(result.ctypes.data)
        if i % 50 == 0:
            kept.append(result)
        assert descriptors() - before < 20
        del result
    assert len(seen) < 30
    assert [x[5] for x in kept] == [0, 50, 0, 50, 0, 50]
    gc.collect()
    assert descriptors() <= before + 1 + len(kept)


def test_segments_that_their_last_array_unmaps() -> None:
    """NumPy >= 2.5 releases the base of an array before it runs the finalizers of the array."""
    done = run_python("-W", "ignore", "-m", "tests.memory.released")
    assert done.stdout.split() == ["released"], (done.returncode, done.stderr)


def test_arrays_of_one_item_share_a_reused_segment() -> None:
    ours, theirs = Exchange(), Exchange()
    item = [np.full(LARGE, i, np.uint8) for i in range(12)]
    for _ in range(3):
        assert [int(x[-1]) for x in serialization.loads(serialization.dumps(item, ours), theirs)] == [
            *range(12)
        ]
        assert len(ours.segments) == 1
    serialization.loads(serialization.dumps(np.zeros(20 * LARGE), ours), theirs)
    assert len(ours.segments) == 1, "the segment that is too small must be freed"
    held = [serialization.loads(serialization.dumps(item, ours), theirs) for _ in range(5)]
    assert len(ours.segments) == 5
    held.clear()
    serialization.loads(serialization.dumps(item, ours), theirs)
    assert len(ours.segments) <= 1 + ours.SPARE


def test_many_retained_results_are_copied() -> None:
    ours, theirs = Exchange(), Exchange()
    kept = [
        serialization.loads(serialization.dumps(np.full(LARGE, i, np.uint8), ours), theirs) for i in range(30)
    ]
    assert [(x[0], x[-1]) for x in kept] == [(i, i) for i in range(30)]
    assert len(ours.segments) == 1 + ours.IN_USE


def test_unpicklable_items_do_not_leak_segments() -> None:
    ours, theirs = Exchange(), Exchange()
    large = [np.zeros(LARGE << i, np.uint8) for i in range(6)]
    for _ in range(3):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            serialization.dumps((large, lambda: 1), ours)
        assert [len(x) for x in serialization.loads(serialization.dumps(large, ours), theirs)] == [
            len(x) for x in large
        ]
        with pytest.raises(KeyError):  # after half of it was sent
            serialization.loads(serialization.dumps((large, functions.Unwelcome(), large), ours), theirs)
    assert len(ours.segments) == 1


@linux
def test_arrays_travel_with_few_descriptors() -> None:
    """Without free file descriptors, arrays are sent through the pipe."""
    done = run_python("-W", "ignore", "-m", "tests.parallel.few_descriptors")
    assert done.stdout.strip() == "True", done.stderr


FORKED = """
import os, sys
import numpy as np
from arraybridge import device_map
from tests.parallel.functions import same

if __name__ == "__main__":
    results = device_map(same, (np.full(1 << 20, i, np.uint8) for i in range(30)), ["cpu"], processes=True)
    first, second = next(results), next(results)
    child = os.fork()
    if child == 0:
        del first
        os._exit(0)
    os.waitpid(child, 0)
    print([int(x[0]) for x in results] == [*range(2, 30)], (first == 0).all())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_segments_dropped_by_a_fork_stay_in_use(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    done = run_python("-W", "ignore", str(script))
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_stages_in_processes() -> None:
    pipeline = arraybridge.Pipeline(functions.square, functions.with_process, processes=True)
    x = np.arange(LARGE, dtype=np.float64)
    results = list(pipeline.map([x, x + 1]))
    np.testing.assert_array_equal(results[1][0], (x + 1) ** 2)
    assert os.getpid() not in {pid for _, pid in results}
    assert all(result.view(SharedArray).segment is not None for result, _ in results), "not in shared memory"
    np.testing.assert_array_equal(arraybridge.Pipeline(functions.square, processes=True)(x), x**2)


# -- arrays on a GPU ---------------------------------------------------------------------------------


class Handle:
    """A stand-in for PyTorch's pickle of a GPU tensor: in this process, it is the tensor itself."""

    tensor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Handle, "tensor")

    @staticmethod
    def dumps(tensor: Any) -> bytes:
        Handle.tensor = tensor
        return pickle.dumps(Handle())


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_gpu_arrays_are_pickled_by_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are shared with child processes and copied from processes that may end first."""
    require("torch")
    owner, exchange = framework(require(name) and name), Exchange()
    x = arraybridge.convert_memory(np.arange(3.0), name)
    monkeypatch.setattr(serialization, "ForkingPickler", Handle)
    monkeypatch.setattr(type(owner.devices), "device_of", lambda self, x: Device("gpu", 0))
    data = serialization.dumps([x], exchange)
    monkeypatch.undo()
    tensor = Handle.tensor
    assert arraybridge.detect_memory_type(tensor) == "torch"
    assert (tensor is x) == (name == "torch")
    for outlives in (True, False):
        monkeypatch.setattr(serialization.os, "getppid", os.getpid if outlives else os.getppid)
        (arrived,) = serialization.loads(data, exchange)
        assert arraybridge.detect_memory_type(arrived) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(arrived), np.arange(3.0))
        assert np.shares_memory(arraybridge.to_numpy(arrived), arraybridge.to_numpy(tensor)) == outlives
        monkeypatch.undo()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: not supported"), None])
def test_arrays_that_torch_cannot_share_travel_through_the_host(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = require("torch")
    x = torch.arange(3.0, requires_grad=error is None)
    monkeypatch.setattr(
        serialization, "ForkingPickler", SimpleNamespace(dumps=functions.Raising(error or KeyError()))
    )
    monkeypatch.setattr(type(framework("torch").devices), "device_of", lambda self, x: Device("gpu", 0))
    data = serialization.dumps(x, Exchange())
    monkeypatch.undo()
    arrived = serialization.loads(data, Exchange())
    assert (arrived.tolist(), arrived.requires_grad) == ([0, 1, 2], x.requires_grad)


# -- shutdown ----------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_killed_transfers_leave_no_segments(victim: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.killed", victim]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        os.kill(worker if victim == "worker" else process.pid, signal.SIGKILL)
        said = process.stdout.read()
        process.wait(60)
    if victim == "worker":
        assert said.split() == ["ProcessDiedError", "exit", "code", "-9", "threads", "0", "maps", "0"]
    until = time.monotonic() + 60
    while Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < until, "the worker must end"
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())


@linux
@pytest.mark.slow
def test_ten_thousand_items_leak_no_memory_or_descriptors() -> None:
    def memory() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

    list(run(functions.same, full(2)))  # Python's own helper processes remain
    gc.collect()
    opened, results = descriptors(), run(functions.same, full(10_000))
    for _ in range(100):
        next(results)
    before = memory()
    for i, result in enumerate(results, 100):
        assert result[i] == i % 100
        del result
        if i == 9000:
            assert memory() < before + (32 << 20)
            assert descriptors() < opened + 20
    gc.collect()
    assert descriptors() <= opened
