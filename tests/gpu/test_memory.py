"""Memory on a real card: real failures, bytes that really come back, and sums that agree with NVML.

`ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu` makes a missing card or framework a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, explain, free_memory, is_oom_error, memory_peak, memory_stats, pinned
from arraybridge.types import Device
from tests.helpers import EMULATED, needs_kernels_of, require, run_script

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GPU = Device("gpu", 0)


def hog(name: str) -> Any:
    """Ask a framework for eight times the card's memory."""
    # What no framework has opened is listed only where NVML is installed.
    arraybridge.convert_memory(np.zeros(1, np.uint8), name, 0)
    total = memory_stats()["gpu:0"].total
    assert total is not None
    count = 8 * total
    if name == "torch":
        return require("torch").empty(count, dtype=require("torch").uint8, device="cuda")
    if name == "cupy":
        return require("cupy").empty(count, "uint8")
    jax = require("jax")
    return jax.device_put(jax.numpy.zeros(3), jax.devices("gpu")[0]).repeat(count // 12).block_until_ready()


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """What frameworks cache of one test is not in the way of the next: an emulated card is small."""
    yield
    if EMULATED:
        free_memory()


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_real_failures_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(name)
    monkeypatch.setattr("arraybridge.machine.cards", lambda: ())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each framework has its own
        hog(name)
    assert is_oom_error(caught.value), repr(caught.value)


def test_an_illegal_address_is_no_oom() -> None:
    done = run_script("illegal_address.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_what_is_freed_is_what_nvml_sees() -> None:
    torch, cupy = require("torch"), require("cupy")
    free_memory()
    before = memory_stats()["gpu:0"].free
    x, y = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda"), cupy.empty(64 * MIB, "uint8")
    assert x.is_cuda
    assert y.size
    del x, y
    assert free_memory(gpu_id=0) >= 192 * MIB
    after = memory_stats()["gpu:0"].free
    assert before is not None
    assert after is not None
    assert after >= before - 64 * MIB


def test_another_frameworks_cache_is_given_up_for_this_one() -> None:
    """The night run that died: one framework's cache was in the way of another."""
    torch, cupy = require("torch"), require("cupy")
    free_memory()
    free = memory_stats()["gpu:0"].free
    assert free is not None
    cached = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
    del cached
    x = arraybridge.run_with_oom_recovery(cupy.empty, int(free * 0.6), "uint8")
    assert x.size == int(free * 0.6)
    del x
    free_memory()


def test_a_batch_that_does_not_fit_is_split() -> None:
    torch = require("torch")
    free_memory()
    free = memory_stats()["gpu:0"].free
    assert free is not None
    x = torch.arange(16, device="cuda", dtype=torch.float32).reshape(16, 1)
    wide = free // 4 // 6  # each row takes a sixth of what is free

    def rows(part: Any) -> Any:
        return part.expand(-1, wide).clone().amax(1, keepdim=True) * 2

    result = arraybridge.split_and_retry(rows, x)
    assert torch.equal(result, x * 2)


def test_the_sum_agrees_with_nvml() -> None:
    torch, cupy = require("torch"), require("cupy")
    x, y = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda"), cupy.empty(64 * MIB, "uint8")
    card = memory_stats()["gpu:0"]
    assert card.total is not None
    assert card.free is not None
    held = sum((h.used or 0) + (h.cached or 0) for h in card.holdings)
    assert held + card.free == pytest.approx(card.total, rel=0.02)
    used = {h.holder: h.used or 0 for h in card.holdings}
    assert used["torch"] >= x.numel()
    assert used["cupy"] >= y.size


def test_nothing_opens_a_context() -> None:
    for name in ("cupy", "torch", "pynvml"):
        require(name)
    done = run_script("memory_opens_nothing.py")
    assert done.returncode == 0, done.stderr


def test_the_peak_of_torch() -> None:
    torch = require("torch")
    torch.empty(3, device="cuda")
    with memory_peak() as m:
        x = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        del x
    assert m["torch"].growth == pytest.approx(300 * MIB, rel=0.01)


def test_one_pool_for_torch_and_cupy() -> None:
    require("torch")
    require("cupy")
    done = run_script("shared_pool.py")
    assert done.returncode == 0, done.stderr


def test_the_pinned_cache_of_torch_is_given_back_and_counted() -> None:
    torch = require("torch")
    if not hasattr(torch.accelerator, "empty_host_cache"):
        pytest.skip("torch before 2.12 has no public call for its pinned memory")
    torch.cuda.init()  # before that there are no numbers
    free_memory()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    block = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    del block
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= before + 64 * MIB
    assert free_memory("torch") >= 64 * MIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before


@pytest.mark.parametrize("locked", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_what_was_copied_is_complete_when_the_call_returns(name: str, locked: bool) -> None:
    """The host may change its memory afterwards, page-locked or not."""
    require(name)
    host = np.random.default_rng(0).integers(0, 256, 70 * MIB, np.uint8)
    expected = host.copy()
    if locked:
        host = pinned(host)
    on_card = arraybridge.convert_memory(host, name, gpu_id=0)
    host[:] = 0
    np.testing.assert_array_equal(arraybridge.to_numpy(on_card), expected)


def test_buffers_of_a_card_are_settled_before_they_are_used_again() -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    pool = arraybridge.BufferPool(64 * MIB)
    work = torch.zeros(2048, 2048, device="cuda")
    wrong = []

    def use(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                x = pool.take((MIB,), "float32", "torch", gpu_id=0)
                busy = work
                for _ in range(5):
                    busy = busy @ work
                x.fill_(number)
                if not bool((x == number).all()):
                    wrong.append(number)
                pool.give(x)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_pinned_buffers(name: str) -> None:
    """Locked by whichever framework is there, for NumPy."""
    require(name)
    pool = BufferPool(1 << 20)
    x = pool.take((100, 30), "float32", "numpy", pinned=True)
    attributes = require("cupy").cuda.runtime.pointerGetAttributes(x.ctypes.data)
    assert attributes.type == require("cupy").cuda.runtime.memoryTypeHost
    x[...] = 2
    assert (arraybridge.to_numpy(arraybridge.convert_memory(x, name, 0)) == 2).all()
    pool.give(x)
    assert pool.take((100, 30), "float32", "numpy", pinned=True).ctypes.data == x.ctypes.data
    with pytest.raises(ValueError, match="would be on gpu:0"):
        pool.take(3, "float32", name, 0, pinned=True)


def test_fragmentation_of_cupy() -> None:
    cupy = require("cupy")
    free_memory()
    kept = cupy.zeros(MIB, "uint8")
    del kept
    kept = cupy.zeros(MIB // 4, "uint8")
    assert kept.size
    (held,) = (h for h in memory_stats()["gpu:0"].holdings if h.holder == "cupy")
    assert held.fragmentation is not None
    assert held.reserved == (held.used or 0) + (held.cached or 0)
    assert 0 < held.fragmentation < 1


def test_the_pool_that_a_user_gave_to_cupy_is_freed() -> None:
    cupy = require("cupy")
    before = cupy.cuda.get_allocator()
    pool = cupy.cuda.MemoryPool()
    try:
        cupy.cuda.set_allocator(pool.malloc)
        free_memory()
        cupy.ones(10 * MIB, np.uint8)
        cached = {row.device: row.cached for row in arraybridge.framework("cupy").pool.usage()}
        assert cached[GPU] >= 10 * MIB
        assert free_memory("cupy") >= 10 * MIB
        assert pool.total_bytes() == 0
    finally:
        cupy.cuda.set_allocator(before)


def test_managed_memory_is_copied_on_its_way_to_torch() -> None:
    cupy, torch = require("cupy"), require("torch")
    before = cupy.cuda.get_allocator()
    try:
        cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
        x = cupy.arange(6, dtype=np.float32)
    finally:
        cupy.cuda.set_allocator(before)
    assert explain(x, "torch").reason == "it lies in managed memory"
    y = arraybridge.to_torch(x)
    assert isinstance(y, torch.Tensor)
    assert y.is_cuda
    assert y.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_pool_waits_for_every_stream_before_it_lends_again(name: str) -> None:
    module, pool = require(name), BufferPool()
    x = pool.take((1 << 20,), "float32", name, 0)
    if name == "cupy":
        side = module.cuda.Stream(non_blocking=True)
        with side:
            x.fill(5)
    else:
        side = module.cuda.Stream()
        with module.cuda.stream(side):
            x.fill_(5)
    pool.give(x)
    y = pool.take((1 << 20,), "float32", name, 0)
    y[...] = 9
    arraybridge.framework(name).settle(y)
    side.synchronize()
    assert (arraybridge.to_numpy(y) == 9).all()
