"""`BufferPool` and pinned memory."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, PoolLimitError, free_memory, pinned
from arraybridge.testing import inject_oom
from tests.helpers import require
from tests.memory.fake_framework import FakeFramework

# -- BufferPool ----------------------------------------------------------------------------------------


def address(x: Any) -> int:
    """Return the address of host memory; for an OpenCL array, of its object."""
    if arraybridge.detect_memory_type(x) == "pyclesperanto":
        return id(x)
    return int(arraybridge.to_numpy(x, copy=False).ctypes.data)


def test_a_pickled_pool_arrives_without_buffers() -> None:
    pool = BufferPool(64)
    pool.give(pool.take(4, "float64", "numpy"))
    again = pickle.loads(pickle.dumps(pool))
    assert (pool.nbytes, again.nbytes, again.max_bytes) == (32, 0, 64)
    assert again.take(8, "float64", "numpy").shape == (8,)  # its lock is free


@pytest.mark.parametrize("name", ["numpy", "torch", "pyclesperanto"])
def test_memory_is_reused(name: str) -> None:
    require(name)
    pool = BufferPool(1 << 20)
    x = pool.take((4, 5), "float32", name)
    assert arraybridge.detect_memory_type(x) == name
    assert (tuple(x.shape), arraybridge.framework(name).dtype_name(x)) == ((4, 5), "float32")
    other = pool.take((4, 5), "float32", name)
    pool.give(x)
    again = pool.take((4, 5), "float32", name)
    assert address(again) == address(x) != address(other)
    assert (pool.nbytes, repr(pool)) == (160, "<BufferPool: 2 in use, 0 idle, 160 of 1048576 bytes>")
    del x, other, again  # dropped arrays are not counted
    gc.collect()
    assert pool.nbytes == 0


def test_changes_to_an_array_do_not_affect_the_next() -> None:
    torch = require("torch")
    pool = BufferPool(1 << 20)
    x = pool.take((4, 5), "float32", "numpy")
    x.flags.writeable = False
    pool.give(x)
    with torch.inference_mode():
        again = pool.take((4, 5), "float32", "torch")
    assert address(again) == address(x)
    again.requires_grad_()
    again.grad = torch.ones(4, 5)
    pool.give(again)
    third = pool.take((5, 4), torch.float32, "torch")
    assert (third.is_contiguous(), third.requires_grad, third.grad) == (True, False, None)
    assert torch.zeros(5, 4, out=third).sum() == 0


def test_larger_buffers_serve_smaller_arrays_of_any_dtype() -> None:
    torch = require("torch")
    pool = BufferPool(1 << 20)
    large = pool.take((10, 30), "complex64", "torch")  # 2400 bytes
    pool.give(large)
    small = pool.take((5, 200), "bfloat16", "torch")
    assert (tuple(small.shape), small.dtype, address(small)) == ((5, 200), torch.bfloat16, address(large))
    small[...] = 3
    assert bool((small == 3).all())
    assert address(pool.take((10, 30), "complex64", "torch")) != address(large)  # that memory is in use


class Work:
    """An object that returns its buffer when the garbage collector finds it."""

    def __init__(self, pool: BufferPool, n: int) -> None:
        self.pool, self.cycle = pool, self
        self.buffer = pool.take((n,), "float32", "numpy")

    def __del__(self) -> None:
        self.pool.give(self.buffer)


def test_finalizers_may_return_buffers_during_collection() -> None:
    """Check for a deadlock with the pool's own lock."""
    pool, before = BufferPool(), gc.get_threshold()
    gc.set_threshold(3)
    try:
        for i in range(1000):
            Work(pool, 100 + i % 50)
            if i % 100 == 0:
                pool.clear()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert pool.nbytes == pool.clear() > 0
    assert pool.nbytes == 0


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(100)
    first = pool.take(60, "uint8", "numpy")
    with pytest.raises(PoolLimitError, match="60 of the pool's 100 bytes are in use"):
        pool.take(50, "uint8", "numpy")
    pool.give(first)
    second = pool.take(90, "uint8", "numpy")  # drops the idle buffer
    assert (len(second), pool.nbytes) == (90, 90)
    pool.give(second)
    with pytest.raises(
        PoolLimitError, match=r"101 bytes does not fit: the pool is limited to 100 .* larger max"
    ):
        pool.take(101, "uint8", "numpy")
    assert pool.nbytes == 90  # no idle buffer is dropped for a request that can never fit
    assert not arraybridge.is_oom_error(PoolLimitError("full"))


def test_arrays_that_cannot_be_returned() -> None:
    pool = BufferPool(1000)
    x = pool.take(10, "uint8", "numpy")
    for wrong in (x[:5], x.copy(), None):
        with pytest.raises(ValueError, match="not in use"):
            pool.give(wrong)
    pool.give(x)
    with pytest.raises(ValueError, match="not in use"):
        pool.give(x)


def test_idle_memory_is_dropped() -> None:
    pool, other = BufferPool(1000), BufferPool(1000)
    taken = pool.take(10, "uint8", "numpy")
    for one in (pool, other):
        one.give(one.take(20, "uint8", "numpy"))
    assert (pool.clear(), pool.nbytes) == (20, 10)
    assert (free_memory("numpy"), other.nbytes) == (20, 0)
    pool.give(taken)
    with inject_oom("numpy"):
        arraybridge.run_with_oom_recovery(lambda: 1)
    assert pool.nbytes == 0


def test_bad_input() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="max_bytes"):
            BufferPool(bad)  # type: ignore[arg-type]
    pool: Any = BufferPool(1000)
    for shape, error in (((2, -1), ValueError), (2.5, TypeError), ("3", TypeError), (None, TypeError)):
        with pytest.raises(error):
            pool.take(shape, "uint8", "numpy")
    with pytest.raises(ValueError, match=r"take\(\) does not accept gpu_id=-1\."):
        pool.take(2, "uint8", "numpy", gpu_id=-1)
    for name in ("jax", "tensorflow"):
        require(name)
        with pytest.raises(ValueError, match="immutable"):
            pool.take(3, "float32", name)
    # reusing memory of object references would crash the process
    for dtype in (object, "U5", [("a", "f4")], "nonsense"):
        with pytest.raises(arraybridge.DtypeNotSupportedError, match="Pass one of"):
            pool.take(3, dtype, "numpy")
    assert pool.nbytes == 0


def test_dtypes_that_a_framework_lacks_are_not_to_be_cast(fake: FakeFramework) -> None:
    """A new array has no values, so the advice for conversions does not apply."""
    fake.dtypes = frozenset({"uint8", "float32"})
    for dtype in ("float64", "complex64", torch_dtype("complex64")):
        with pytest.raises(arraybridge.DtypeNotSupportedError) as caught:
            BufferPool(1000).take(3, dtype, "fake")
        name = str(dtype).removeprefix("torch.")
        assert str(caught.value) == f"fake has no dtype {name}. Pass one of 'float32', 'uint8'."
        assert (caught.value.target_type, caught.value.cast) == ("fake", None)


def torch_dtype(name: str) -> Any:
    return getattr(require("torch"), name)


def test_gpu_buffers_are_reused(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(fake.memory, "synchronize", lambda: waited.append(1))
    pool = BufferPool(1000)
    x, other = (pool.take(10, "uint8", "fake", gpu_id=i) for i in (1, 0))
    assert (x.gpu, other.gpu) == (1, 0)
    pool.give(x)
    assert waited == [1]  # for every stream of the GPU, before the memory is reused
    pool.give(other)
    assert pool.take(10, "uint8", "fake", gpu_id=1) is x
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
                errors.append("another thread wrote to a taken array")
            pool.give(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert "0 in use" in repr(pool)


# -- pinned ------------------------------------------------------------------------------------------


def test_memory_is_not_pinned_without_a_gpu() -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    for x in (np.arange(5), torch.arange(5)):
        assert pinned(x) is x


@pytest.mark.parametrize("dtype", ["uint8", "complex64", "bool"])
def test_pinned_values(fake: FakeFramework, dtype: str) -> None:
    x = np.arange(24).reshape(2, 3, 4).astype(dtype).transpose(2, 0, 1)
    result = pinned(x)
    assert result is not x
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x)
    assert fake.most_pinned == x.nbytes


def test_carriers_and_arrays_of_unknown_libraries_are_not_pinned(fake: FakeFramework) -> None:
    """Not even if a conversion would copy or read them."""
    pandas = pytest.importorskip("pandas")
    zarr = pytest.importorskip("zarr")

    class OnAnotherDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (8, 0)

        def __dlpack__(self, **_: Any) -> Any:
            pytest.fail("it was exported")

    separate_columns = pandas.DataFrame({"a": [1.0]}).assign(b=2.0)
    for x in (separate_columns, zarr.array(np.ones(3)), memoryview(np.ones(3)), OnAnotherDevice()):
        assert pinned(x) is x
    assert fake.most_pinned == 0


def test_arrays_that_cannot_be_pinned() -> None:
    with pytest.raises(arraybridge.UnknownArrayError):
        pinned([1, 2])
    cle = require("pyclesperanto")
    with pytest.raises(arraybridge.CopyRequiredError):
        pinned(cle.push(np.ones((2, 2), np.float32)))
