"""Reusable arrays and pinned memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, PoolLimitError, free_memory, pinned
from arraybridge.testing import inject_oom
from tests.helpers import require
from tests.memory.fake import FakeFramework

# -- BufferPool ----------------------------------------------------------------------------------------


def where(x: Any) -> int:
    """The address of host memory; for an array of OpenCL, of its object."""
    return id(x) if arraybridge.detect_memory_type(x) == "pyclesperanto" else address(x)


def address(x: Any) -> int:
    return int(arraybridge.to_numpy(x, copy=False).ctypes.data)


@pytest.mark.parametrize("name", ["numpy", "torch", "pyclesperanto"])
def test_an_array_is_used_again(name: str) -> None:
    if name != "numpy":
        require(name)
    pool = BufferPool(1 << 20)
    x = pool.take((4, 5), "float32", name)
    assert arraybridge.detect_memory_type(x) == name
    assert tuple(x.shape) == (4, 5)
    assert arraybridge.framework(name).dtype_name(x) == "float32"
    assert pool.nbytes == 80
    other = pool.take((4, 5), "float32", name)
    assert other is not x
    pool.give(x)
    again = pool.take((4, 5), "float32", name)
    assert where(again) == where(x)
    assert pool.nbytes == 160
    assert "2 lent, 0 idle" in repr(pool)


def test_shapes_and_dtypes() -> None:
    pool = BufferPool(1 << 20)
    x = pool.take((4, 5), np.float32, "numpy")
    pool.give(x)
    other = pool.take((5, 4), "int32", "numpy")
    assert (other.dtype, other.shape, address(other)) == (np.int32, (5, 4), address(x))
    assert pool.take(7, bool, "numpy").shape == (7,)
    assert pool.take((), "int8", "numpy").shape == ()
    assert pool.take((0, 3), "int8", "numpy").shape == (0, 3)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128", "bfloat16"])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_larger_buffer_is_lent_as_a_smaller_array(name: str, dtype: str) -> None:
    require(name)
    pytest.importorskip("ml_dtypes")
    pool = BufferPool(1 << 20)
    large = pool.take((10, 30), "complex64", name)  # 2400 bytes
    pool.give(large)
    count = 2000 // np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
    small = pool.take((5, count // 5), dtype, name)
    assert (tuple(small.shape), address(small)) == ((5, count // 5), address(large))
    assert arraybridge.framework(name).dtype_name(small) == dtype
    assert pool.nbytes == 2400
    small[...] = 3
    assert bool((small == 3).all())
    again = pool.take((10, 30), "complex64", name)
    assert address(again) != address(large)  # that memory is lent
    pool.give(small)
    assert address(pool.take((10, 30), "complex64", name)) == address(large)
    with pytest.raises(ValueError, match="not lent"):
        pool.give(small)


TAKEN = [(n, "uint8") for n in (1001, 1001, 1001, 1001, 449, 450)] + [(1000, "int8")]


def test_the_best_fit_is_taken_and_none_over_twice_the_size() -> None:
    pool = BufferPool(1 << 20)
    made = {n: pool.take(n, "uint8", "numpy") for n in (1000, 1600, 1200, 2001, 900)}
    for x in made.values():
        pool.give(x)
    lent = [pool.take(n, kind, "numpy") for n, kind in TAKEN]
    whose = {address(x): n for n, x in made.items()}
    assert [whose.get(address(x)) for x in lent] == [1200, 1600, 2001, None, None, 900, 1000]
    assert pool.take(0, "uint8", "numpy").shape == (0,)
    assert pool.nbytes == 1000 + 1600 + 1200 + 2001 + 900 + 1001 + 449


def test_a_finaliser_gives_a_buffer_back_whenever_the_collector_runs() -> None:
    """In a process of its own, since it waited for its own lock."""
    code = """
import gc
import arraybridge

pool = arraybridge.BufferPool()

class Work:
    def __init__(self, n):
        self.buffer = pool.take((n,), "float32", "numpy")
        self.cycle = self
    def __del__(self):
        pool.give(self.buffer)

gc.set_threshold(3)
for i in range(2000):
    Work(100 + i % 50)
    if i % 100 == 0:
        pool.clear()
gc.collect()
assert pool.nbytes == pool.clear() > 0
assert pool.nbytes == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_what_was_done_to_an_array_is_nothing_to_the_next() -> None:
    torch = require("torch")
    pool = BufferPool(1 << 20)
    x = pool.take((4, 5), "float32", "numpy")
    x.flags.writeable = False
    pool.give(x)
    again = pool.take((4, 5), "float32", "torch")
    assert address(again) == address(x)
    again.requires_grad_()
    again.grad = torch.ones(4, 5)
    pool.give(again)
    third = pool.take((5, 4), "float32", "torch")
    assert third.is_contiguous()
    assert not third.requires_grad
    assert third.grad is None
    assert torch.zeros(5, 4, out=third).sum() == 0
    assert "1 lent, 0 idle" in repr(pool)


def test_the_bound() -> None:
    pool = BufferPool(100)
    first = pool.take(60, "uint8", "numpy")
    with pytest.raises(PoolLimitError, match="60 of the pool's 100 bytes are lent"):
        pool.take(50, "uint8", "numpy")
    assert pool.nbytes == 60
    pool.give(first)
    second = pool.take(90, "uint8", "numpy")  # drops the idle one
    assert len(second) == 90
    assert pool.nbytes == 90
    with pytest.raises(ValueError, match="101 bytes"):
        pool.take(101, "uint8", "numpy")
    assert not arraybridge.is_oom_error(PoolLimitError("full"))


@pytest.mark.parametrize("name", ["numpy", "torch", "pyclesperanto"])
def test_an_array_that_is_forgotten_is_not_counted(name: str) -> None:
    require(name)
    pool = BufferPool(100)
    x = pool.take((6, 10), "uint8", name)
    assert pool.nbytes == 60
    del x
    gc.collect()
    assert pool.nbytes == 0
    for _ in range(20):
        pool.take(100, "uint8", "numpy")
    assert pool.nbytes == 0


def test_what_cannot_be_given_back() -> None:
    pool = BufferPool(1000)
    x = pool.take(10, "uint8", "numpy")
    for wrong in (x[:5], x.copy(), np.zeros(10, np.uint8), None):
        with pytest.raises(ValueError, match="not lent"):
            pool.give(wrong)
    with pytest.raises(ValueError, match="not lent"):
        BufferPool(1000).give(x)
    pool.give(x)
    with pytest.raises(ValueError, match="not lent"):
        pool.give(x)


def test_clear_and_free_memory() -> None:
    pool, other = BufferPool(1000), BufferPool(1000)
    lent = pool.take(10, "uint8", "numpy")
    pool.give(pool.take(20, "uint8", "numpy"))
    other.give(other.take(30, "uint8", "numpy"))
    assert pool.clear() == 20
    assert pool.nbytes == 10
    assert free_memory("numpy") == 30
    assert other.nbytes == 0
    pool.give(lent)


def test_recovery_drops_idle_arrays() -> None:
    pool = BufferPool(1000)
    pool.give(pool.take(20, "uint8", "numpy"))
    with inject_oom("numpy"):
        arraybridge.run_with_oom_recovery(lambda: 1)
    assert pool.nbytes == 0


def test_bad_input() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_bytes"):
            BufferPool(bad)  # type: ignore[arg-type]
    pool = BufferPool(1000)
    with pytest.raises(ValueError, match="negative extent"):
        pool.take((2, -1), "uint8", "numpy")
    with pytest.raises(ValueError, match="gpu_id"):
        pool.take(2, "uint8", "numpy", gpu_id=-1)
    assert pool.nbytes == 0


@pytest.mark.parametrize("dtype", [object, "U5", [("a", "f4")], "nonsense", "V8"])
def test_buffers_are_for_numbers(dtype: Any) -> None:
    """Memory of references, lent as bytes and back, would end the process."""
    pool = BufferPool(1000)
    pool.give(pool.take(24, "uint8", "numpy"))
    with pytest.raises(arraybridge.DtypeNotSupportedError, match="numbers"):
        pool.take(3, dtype, "numpy")
    assert pool.nbytes == 24


def test_a_card(fake: FakeFramework) -> None:
    pool = BufferPool(1000)
    x = pool.take(10, "uint8", "fake", gpu_id=1)
    assert x.card == 1
    pool.give(x)
    other = pool.take(10, "uint8", "fake", gpu_id=0)
    assert other.card == 0
    pool.give(other)
    assert pool.take(10, "uint8", "fake", gpu_id=1) is x
    assert pool.take(10, "uint8", "fake", gpu_id=0) is other
    with pytest.raises(arraybridge.DeviceNotFoundError):
        pool.take(10, "uint8", "fake", gpu_id=2)
    assert pool.nbytes == 20


def test_threads() -> None:
    pool = BufferPool(4 * 800)
    errors: list[str] = []

    def work(number: int) -> None:
        for _ in range(200):
            x = pool.take(100, "int64", "numpy")
            x[...] = number
            if (x != number).any():
                errors.append("another thread wrote to a lent array")
            pool.give(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.nbytes <= 4 * 800
    assert "0 lent" in repr(pool)


# -- pinned ------------------------------------------------------------------------------------------


def test_without_a_card_nothing_is_pinned() -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    x = np.arange(5)
    assert pinned(x) is x
    t = torch.arange(5)
    assert pinned(t) is t


def test_pinned_buffers_are_refused_without_a_card() -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    pool = BufferPool(1000)
    for name in ("numpy", "torch"):
        with pytest.raises(arraybridge.DeviceNotFoundError, match=r"page-locked.*without pinned=True"):
            pool.take(10, "float32", name, pinned=True)
    assert pool.nbytes == 0
    cle = require("pyclesperanto")
    assert cle is not None
    with pytest.raises(ValueError, match="pinned memory is the host's"):
        pool.take(10, "float32", "pyclesperanto", pinned=True)


def test_pinned_buffers(fake: FakeFramework) -> None:
    pool = BufferPool(10_000)
    plain = pool.take((4, 100), "float32", "numpy")
    pool.give(plain)
    x = pool.take((4, 100), "float32", "numpy", pinned=True)
    assert (x.shape, x.dtype) == ((4, 100), np.float32)
    assert fake.most_pinned == 1600
    assert fake.locked[0] == (address(x), 1600)
    x[...] = 1
    pool.give(x)
    again = pool.take((4, 100), "float32", "numpy", pinned=True)
    assert address(again) == address(x)
    assert address(pool.take((4, 100), "float32", "numpy")) == address(plain)  # the two are kept apart
    pool.give(again)
    small = pool.take((4, 99), "float32", "numpy", pinned=True)
    assert address(small) == address(x)
    assert pool.take((0, 3), "float32", "numpy", pinned=True).shape == (0, 3)
    with pytest.raises(ValueError, match="on gpu:1"):
        pool.take(10, "uint8", "fake", gpu_id=1, pinned=True)


def test_what_cannot_be_pinned() -> None:
    with pytest.raises(arraybridge.UnknownArrayError):
        pinned([1, 2])
    cle = require("pyclesperanto")
    with pytest.raises(arraybridge.CopyRequiredError):
        pinned(cle.push(np.ones((2, 2), np.float32)))
