"""Memory on a real card: real failures, bytes that really come back, and sums that agree with NVML.

`ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu` makes a missing card or framework a failure.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, free_memory, is_oom_error, memory_peak, memory_stats, pinned
from arraybridge.conversion import staging
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
    monkeypatch.setattr("arraybridge.memory.nvml.library", lambda: None)
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
    framework = arraybridge.framework("torch")
    assert framework.pinning is not None
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch tells nothing of its pinned memory")
    assert framework.pinning.is_counted
    torch.cuda.init()  # before that there are no numbers
    free_memory()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    block = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    del block
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= before + 64 * MIB
    assert free_memory("torch") >= 64 * MIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before


def test_pinned_memory_is_pinned() -> None:
    torch = require("torch")
    x = np.arange(MIB, dtype=np.float32)
    there = pinned(x)
    np.testing.assert_array_equal(there, x)
    assert torch.from_numpy(there).is_pinned()
    assert pinned(torch.arange(10)).is_pinned()


@pytest.mark.parametrize("size", [1, 3 * MIB + 5, 150 * MIB + 1])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_staged_bytes_arrive(name: str, size: int) -> None:
    require(name)
    framework = arraybridge.framework(name)
    host = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    there = staging.send_through(host, framework, GPU)
    np.testing.assert_array_equal(framework.to_host(there), host)
    back = staging.fetch_through(there, framework, np.empty_like(host))
    np.testing.assert_array_equal(back, host)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays go through the ring whatever a trial would say, for every framework that can."""
    monkeypatch.setattr(staging, "_proofs", {})
    monkeypatch.setattr(staging, "_least", lambda _: dict.fromkeys(staging.WAYS, staging.STAGE_FROM))
    monkeypatch.setattr(staging, "MAKE_AFTER", 0)


def queued_copies(framework: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The ways of the copies that are queued from now on: True to the host."""
    ways: list[bool] = []
    enqueue = framework.pinning.enqueue_copy

    def count(host: Any, x: Any, offset: int, to_host: bool) -> Any:
        ways.append(to_host)
        return enqueue(host, x, offset, to_host)

    monkeypatch.setattr(framework.pinning, "enqueue_copy", count)
    return ways


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("name", ["torch", "cupy"])
@pytest.mark.usefixtures("forced")
def test_large_arrays_arrive(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in both ways, around the sizes of chunks and buffers."""
    require(name)
    framework = arraybridge.framework(name)
    staging.prove(framework, GPU)
    ways = queued_copies(framework, monkeypatch)
    itemsize = np.dtype(dtype).itemsize
    for nbytes in (MIB, MIB + itemsize, 4 * MIB - itemsize, 64 * MIB, 64 * MIB + itemsize, 77_777_776):
        bits = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        host = bits % 2 == 1 if dtype == "bool" else bits.view(dtype)
        ways.clear()
        there = arraybridge.convert_memory(host, name, gpu_id=0)
        assert ways
        assert not any(ways)
        assert framework.to_host(there).tobytes() == host.tobytes()
        ways.clear()
        back = arraybridge.convert_memory(there, "numpy")
        assert ways
        assert all(ways)
        assert (back.dtype, back.tobytes()) == (host.dtype, host.tobytes())


@pytest.mark.usefixtures("forced")
def test_large_tensors_within_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    framework = arraybridge.framework("torch")
    staging.prove(framework, GPU)
    ways = queued_copies(framework, monkeypatch)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        x = torch.randint(0, 100, (4 * MIB,)).to(dtype)
        ways.clear()
        there = arraybridge.to_gpu(x, 0)
        assert there.is_cuda
        back = arraybridge.to_cpu(there)
        assert set(ways) == {False, True}
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))
        back.resize_(5 * MIB)
        x.resize_(5 * MIB)
    ways.clear()
    leaf = torch.ones(MIB, requires_grad=True)
    arraybridge.to_gpu(leaf, 0).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(MIB))
    assert ways == []


@pytest.mark.parametrize("name", ["torch", "cupy"])
@pytest.mark.usefixtures("forced")
def test_pinned_arrays_go_by_the_plain_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(name)
    framework = arraybridge.framework(name)
    staging.prove(framework, GPU)
    ways = queued_copies(framework, monkeypatch)
    host = np.arange(4 * MIB, dtype=np.float32)
    memory = framework.pinning.pinned_bytes(host.nbytes)
    assert memory is not None
    for locked in (pinned(host), memory.view(np.float32)):
        locked[:] = host
        there = arraybridge.convert_memory(locked, name, gpu_id=0)
        assert ways == []
        np.testing.assert_array_equal(framework.to_host(there), host)
    assert not framework.pinning.is_pinned(host.view(np.uint8))


@pytest.mark.usefixtures("forced")
def test_a_value_of_torch_is_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels before a transfer, and those behind it, on a stream that is not the default one."""
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    framework = arraybridge.framework("torch")
    staging.prove(framework, GPU)
    ways = queued_copies(framework, monkeypatch)
    busy = torch.ones(4096, 4096, device="cuda") / 4096
    x = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    host = np.full(32 * MIB, 3, np.uint8)
    torch.cuda.synchronize()
    for number in range(1, 4):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                busy = busy @ busy
            x.fill_(number)
            result = arraybridge.to_numpy(x)
            assert (result == number).all()
            there = arraybridge.convert_memory(host, "torch", gpu_id=0)
            host[:] += 1  # complete on return: what is changed now did not travel
            doubled = there * 2
            assert (doubled.cpu() == 2 * (int(host[0]) - 1)).all()
    assert set(ways) == {False, True}


@pytest.mark.usefixtures("forced")
def test_a_value_of_cupy_is_not_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels_of("cuBLAS")
    cupy = require("cupy")
    framework = arraybridge.framework("cupy")
    staging.prove(framework, GPU)
    ways = queued_copies(framework, monkeypatch)
    busy = cupy.ones((4096, 4096), "float32") / 4096
    x = cupy.zeros(32 * MIB, "uint8")
    host = np.full(32 * MIB, 3, np.uint8)
    cupy.cuda.Device(0).synchronize()
    for number in range(1, 4):
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(20):
                busy = busy @ busy
            x.fill(number)
            result = arraybridge.to_numpy(x)
            assert (result == number).all()
            there = arraybridge.convert_memory(host, "cupy", gpu_id=0)
            host[:] += 1
            doubled = there * 2
            assert (doubled.get() == 2 * (int(host[0]) - 1)).all()
    assert set(ways) == {False, True}


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_the_ring_is_tried_and_the_verdict_is_logged(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real trial; wrong bytes would be a warning, and so an error here."""
    require(name)
    monkeypatch.setattr(staging, "_proofs", {})
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        least = staging.prove(arraybridge.framework(name), GPU)
    assert least is not None
    words = [record.getMessage() for record in caplog.records]
    assert [
        f"{name} on gpu:0, {way}: staging buffers are" in line
        for way, line in zip(staging.WAYS, words, strict=True)
    ] == [True, True]
    assert "Error" not in caplog.text, caplog.text
    assert "plain" in caplog.text
    if least:
        assert staging.drop(None) in (0, 64 * MIB)  # torch counts its own


@pytest.mark.usefixtures("forced")
def test_torch_and_cupy_share_one_ring() -> None:
    torch, cupy = require("torch"), require("cupy")
    free_memory()
    for name in ("torch", "cupy"):
        staging.prove(arraybridge.framework(name), GPU)
    assert sum(ring.nbytes for ring in staging._rings.values()) == 64 * MIB
    host = np.random.default_rng(0).integers(0, 256, 70 * MIB, np.uint8)
    there = arraybridge.to_torch(host, 0), arraybridge.to_cupy(host, 0)
    assert isinstance(there[0], torch.Tensor)
    assert isinstance(there[1], cupy.ndarray)
    for x in there:
        np.testing.assert_array_equal(arraybridge.to_numpy(x), host)


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
def test_a_larger_buffer_on_the_card_is_lent_as_a_smaller_array(name: str) -> None:
    require(name)
    framework, pool = arraybridge.framework(name), BufferPool(1 << 20)
    large = pool.take((10, 30), "complex64", name, 0)
    pool.give(large)
    small = pool.take((20, 25), "float32", name, 0)
    assert framework.address(small) == framework.address(large)
    assert (tuple(small.shape), framework.dtype_name(small)) == ((20, 25), "float32")
    assert arraybridge.device_of(small) == "gpu:0"
    small[...] = 3
    assert (arraybridge.to_numpy(small) == 3).all()
    pool.give(small)
    assert pool.take((10, 30), "complex64", name, 0) is large
    assert pool.nbytes == 2400


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_pinned_buffers(name: str) -> None:
    """Locked by whichever framework is there, for NumPy."""
    require(name)
    framework, pool = arraybridge.framework(name), BufferPool(1 << 20)
    x = pool.take((100, 30), "float32", "numpy", pinned=True)
    assert framework.pinning is not None
    assert framework.pinning.is_pinned(x.view(np.uint8).reshape(-1))
    x[...] = 2
    assert (arraybridge.to_numpy(arraybridge.convert_memory(x, name, 0)) == 2).all()
    pool.give(x)
    assert pool.take((100, 30), "float32", "numpy", pinned=True) is x
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
