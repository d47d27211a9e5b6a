"""Memory on a real GPU: real out-of-memory errors, freed bytes, and sums that agree with NVML.

With `ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu`, a missing GPU or framework is a failure.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, explain, free_memory, is_oom_error, memory_peak, memory_stats, pinned
from arraybridge.device import Device
from arraybridge.reasons import Cause, Reason
from tests.helpers import EMULATED, output_of, require, require_two_gpus

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GPU = Device("gpu", 0)
# Tolerance for other activity on a real GPU.
SLACK = 0 if EMULATED else 64 * MIB

of_each_framework = pytest.mark.parametrize("name", ["cupy", "torch"])


def bytes_of(name: str, count: int) -> Any:
    """Return an array of this many bytes on the GPU, made by the framework's own call."""
    module = require(name)
    if name == "torch":
        return module.empty(count, dtype=module.uint8, device="cuda")
    if name == "cupy":
        return module.empty(count, "uint8")
    three = module.device_put(module.numpy.zeros(3), module.devices("gpu")[0])
    return three.repeat(count // 12).block_until_ready()


def free() -> int:
    """Return the free bytes of the GPU after all caches are released."""
    free_memory()
    nbytes = memory_stats()["gpu:0"].free
    assert nbytes is not None
    return nbytes


@contextmanager
def cupy_allocates_by(allocator: Any) -> Iterator[None]:
    cuda = require("cupy").cuda
    before = cuda.get_allocator()
    cuda.set_allocator(allocator)
    try:
        yield
    finally:
        cuda.set_allocator(before)


@pytest.fixture(autouse=True)
def _release_caches() -> Iterator[None]:
    """Release cached memory between tests, since an emulated GPU is small."""
    yield
    if EMULATED:
        free_memory()


# -- failures, and released memory ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_real_oom_errors_are_recognized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error of an allocation eight times the size of the GPU's memory."""
    require(name)
    monkeypatch.setattr("arraybridge.hardware.gpus", lambda: ())
    # A GPU that no framework has initialized is listed only if NVML is installed.
    arraybridge.convert_memory(np.zeros(1, np.uint8), name, 0)
    total = memory_stats()["gpu:0"].total
    assert total is not None
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each framework raises its own exception type
        bytes_of(name, 8 * total)
    assert is_oom_error(caught.value), repr(caught.value)


def test_illegal_address_is_not_an_oom_error() -> None:
    """Run in a separate process, since CUDA is unusable afterwards."""
    require("cupy")
    said = output_of(
        "import cupy, arraybridge",
        "code = 'extern \"C\" __global__ void f(float* x) { x[0] = x[1ll << 40]; }'",
        "x = cupy.zeros(1, 'float32')",
        "try: cupy.RawKernel(code, 'f')((1,), (1,), (x,)); cupy.cuda.runtime.deviceSynchronize()",
        "except cupy.cuda.runtime.CUDARuntimeError as error: print(arraybridge.is_oom_error(error))",
    )
    assert said == "False"


@of_each_framework
def test_freed_bytes_match_the_driver(name: str) -> None:
    before = free()
    x, y = bytes_of(name, 128 * MIB), bytes_of(name, 64 * MIB)
    del y
    assert free_memory(name, gpu_id=0) == 64 * MIB
    assert free_memory() == 0
    del x
    assert free_memory() == 128 * MIB
    assert free() >= before - SLACK


def test_free_memory_affects_only_the_given_gpu() -> None:
    cuda = require_two_gpus().cuda
    for gpu in range(2):
        with cuda.Device(gpu):
            bytes_of("cupy", 16 * MIB)
    for gpu in (1, 0):
        before = [memory_stats()[f"gpu:{one}"].free for one in range(2)]
        assert free_memory("cupy", gpu_id=gpu) == 16 * MIB
        after = [memory_stats()[f"gpu:{one}"].free for one in range(2)]
        assert [now > then for now, then in zip(after, before, strict=True)] == [gpu == 0, gpu == 1]
    assert cuda.Device().id == 0


def test_free_memory_of_one_gpu_counts_all_that_torch_frees() -> None:
    """Check that PyTorch, which frees the caches of all GPUs at once, reports all of them."""
    require_two_gpus()
    torch = require("torch")
    free_memory()
    for gpu in range(2):
        torch.empty(32 * MIB, dtype=torch.uint8, device=f"cuda:{gpu}")
    assert free_memory("torch", gpu_id=1) == 64 * MIB
    assert [torch.cuda.memory_reserved(gpu) for gpu in range(2)] == [0, 0]


def test_live_memory_of_another_gpu_is_not_counted_as_freed() -> None:
    require_two_gpus()
    torch = require("torch")
    free_memory()
    alive = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.empty(8 * MIB, dtype=torch.uint8, device="cuda:1")
    assert free_memory("torch", gpu_id=1) < alive.numel()
    assert torch.cuda.memory_reserved(1) == 0


def fill_caches() -> None:
    """Leave cached memory of CuPy on both GPUs, and idle memory in no pool."""
    cupy = require_two_gpus()
    free_memory()
    for gpu in range(2):
        with cupy.cuda.Device(gpu):
            bytes_of("cupy", 4 * MIB)


def cached_bytes(gpu: int) -> int:
    cupy = require("cupy")
    with cupy.cuda.Device(gpu):
        return int(cupy.get_default_memory_pool().free_bytes())


@pytest.mark.parametrize("error", [False, True], ids=["left normally", "left by an error"])
def test_gpu_context_selects_its_gpu_and_frees_only_its_cache(error: bool) -> None:
    fill_caches()
    cuda = require("cupy").cuda
    with suppress(ZeroDivisionError), arraybridge.gpu_context(1) as gpu_id:
        assert (gpu_id, cuda.runtime.getDevice()) == (1, 1)
        if error:
            raise ZeroDivisionError
    assert (cuda.runtime.getDevice(), cached_bytes(1)) == (0, 0)
    assert cached_bytes(0) > 0


def test_recovery_frees_only_the_cache_of_its_gpu() -> None:
    fill_caches()
    calls = []

    def fails_once() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return 5

    assert arraybridge.run_with_oom_recovery(fails_once, gpu_id=1) == 5
    assert cached_bytes(1) == 0
    assert cached_bytes(0) > 0


def double_up_to_four_rows(x: Any) -> Any:
    if len(x) > 4:
        raise MemoryError
    with x.device:
        return x * 2


@pytest.mark.parametrize("gpu", [0, 1])
def test_parts_are_joined_on_their_gpu(gpu: int) -> None:
    require_two_gpus()
    x = arraybridge.convert_memory(np.arange(8, dtype=np.float32).reshape(8, 1), "cupy", gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # CuPy warns about access from another GPU
        y = arraybridge.split_and_retry(double_up_to_four_rows, x)
    assert (y.dtype, str(arraybridge.device_of(y))) == (np.float32, f"gpu:{gpu}")
    assert y.get().ravel().tolist() == [2.0 * i for i in range(8)]


def test_recovery_releases_the_cache_of_another_framework() -> None:
    """Check that the cache of one framework is released when another framework runs out of memory."""
    cupy, surplus = require("cupy"), free()
    bytes_of("torch", int(surplus * 0.7))
    x = arraybridge.run_with_oom_recovery(cupy.empty, int(surplus * 0.6), "uint8")
    assert x.size == int(surplus * 0.6)


def test_pinned_cache_of_torch_is_released_and_counted() -> None:
    torch = require("torch")
    if not hasattr(torch.accelerator, "empty_host_cache"):
        pytest.skip("not applicable: torch before 2.12 has no public call for its pinned memory")

    def pinned_bytes() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    torch.cuda.init()  # the statistics are empty before the first allocation
    free_memory()
    before = pinned_bytes()
    torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned_bytes() >= before + 64 * MIB
    assert free_memory("torch") >= 64 * MIB
    assert pinned_bytes() <= before


def test_pinned_cache_of_cupy_is_released() -> None:
    cupy = require("cupy")
    cupy.empty(1)
    pool = cupy.get_default_pinned_memory_pool()
    x = arraybridge.framework("cupy").memory.allocate_pinned(64)
    del x
    gc.collect()
    assert pool.n_free_blocks() > 0
    free_memory("cupy")
    assert pool.n_free_blocks() == 0


def test_custom_cupy_pool_is_freed() -> None:
    cupy = require("cupy")
    pool = cupy.cuda.MemoryPool()
    with cupy_allocates_by(pool.malloc):
        free_memory()
        bytes_of("cupy", 10 * MIB)
        cached = {row.device: row.cached for row in arraybridge.framework("cupy").memory.usage()}
        assert cached[GPU] >= 10 * MIB
        assert free_memory("cupy") >= 10 * MIB
        assert pool.total_bytes() == 0


# -- statistics ----------------------------------------------------------------------------------------


@of_each_framework
def test_memory_stats_add_up_to_the_drivers_total(name: str) -> None:
    x, y = bytes_of(name, 128 * MIB), bytes_of(name, 64 * MIB)
    del y
    gpu = memory_stats()["gpu:0"]
    assert gpu.total is not None
    assert gpu.free is not None
    held = sum((h.used or 0) + (h.cached or 0) for h in gpu.holdings)
    assert held + gpu.free == pytest.approx(gpu.total, abs=SLACK)
    (row,) = [h for h in gpu.holdings if h.holder == name]
    assert row.reserved == (row.used or 0) + (row.cached or 0) >= 192 * MIB
    assert row.fragmentation is not None
    assert 0.1 < row.fragmentation < 1
    del x


def test_peak_memory_of_torch_is_reported() -> None:
    bytes_of("torch", 3)
    with memory_peak() as m:
        bytes_of("torch", 300 * MIB)
    assert m["torch"].growth == pytest.approx(300 * MIB, rel=0.01)


def test_memory_that_was_cached_before_is_not_a_peak() -> None:
    cupy = require("cupy")
    cupy.empty(16 * MIB, np.uint8)
    with memory_peak() as measured:
        x = cupy.empty(MIB, np.uint8)
    assert measured["cupy"].growth <= 2 * MIB
    assert x.size == MIB


def test_another_pool_gets_the_stream_and_the_freed_address() -> None:
    require_two_gpus()
    said = output_of(
        "import cupy, arraybridge as ab",
        "blocks, calls, freed = {}, [], []",
        "def allocate(size, gpu, stream):",
        "    block = cupy.cuda.Memory(size)",
        "    blocks[block.ptr] = block; calls.append((gpu, stream)); return block.ptr",
        "def free(address): freed.append(address); del blocks[address]",
        "ab.framework('cupy').use_allocator(allocate, free)",
        "with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True) as stream:",
        "    x = cupy.empty(1000); address = x.data.ptr",
        "print(calls == [(1, stream.ptr)], freed == [])",
        "del x; print(freed == [address], blocks == {})",
    )
    assert said.split() == ["True"] * 4


def test_torch_and_cupy_share_one_pool() -> None:
    """Check that CuPy allocates from PyTorch's pool, and that switching fails while CuPy holds memory."""
    require("torch")
    require("cupy")
    said = output_of(
        "import cupy, torch, arraybridge as ab",
        "x = cupy.zeros(1 << 20, 'uint8')",
        "try: ab.share_gpu_memory('torch')",
        "except ab.SharedPoolError as error: print('free_memory' in str(error))",
        "del x; ab.free_memory('cupy'); ab.share_gpu_memory('torch')",
        "used = torch.cuda.memory_allocated",
        "before, y = used(), cupy.arange(1 << 20, dtype='float32')",
        "print(used() >= before + y.nbytes, float(y.sum()) > 0)",
        "del y; print(used() == before)",
    )
    assert said.split() == ["True"] * 4


# -- copies, pinned memory and pools -------------------------------------------------------------------


@pytest.mark.parametrize("locked", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_copies_are_complete_when_the_call_returns(name: str, locked: bool) -> None:
    """Check that the host may change its memory after the call, whether it is pinned or not."""
    require(name)
    host = np.random.default_rng(0).integers(0, 256, (4 if EMULATED else 70) * MIB, np.uint8)
    expected = host.copy()
    if locked:
        host = pinned(host)
    on_gpu = arraybridge.convert_memory(host, name, gpu_id=0)
    host[:] = 0
    np.testing.assert_array_equal(arraybridge.to_numpy(on_gpu), expected)


def test_managed_memory_is_copied_to_torch() -> None:
    """Check that managed memory is copied, since PyTorch does not import such capsules."""
    cupy = require("cupy")
    with cupy_allocates_by(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
        x = cupy.arange(6, dtype=np.float32)
        copied = arraybridge.framework("cupy").copy(x)
    copy_reason = arraybridge.framework("cupy").interchange.copy_reason
    assert copy_reason(x) == Cause(Reason.MANAGED_MEMORY)
    assert copy_reason(copied) is None
    assert copied.get().sum() == 15
    torch = require("torch")
    route = explain(x, "torch")
    assert (route.code, route.reason) == (Reason.MANAGED_MEMORY, "it is in managed memory")
    y = arraybridge.to_torch(x)
    assert (isinstance(y, torch.Tensor), y.is_cuda, y.tolist()) == (True, True, [0, 1, 2, 3, 4, 5])


@of_each_framework
def test_pool_waits_for_every_stream_before_reusing_a_buffer(name: str) -> None:
    module, pool = require(name), BufferPool()
    x = pool.take((MIB,), "float32", name, 0)
    side = module.cuda.Stream(non_blocking=True) if name == "cupy" else module.cuda.Stream()
    with side if name == "cupy" else module.cuda.stream(side):
        x[...] = 5
    pool.give(x)
    y = pool.take((MIB,), "float32", name, 0)
    y[...] = 9
    arraybridge.framework(name).interchange.block_until_ready(y)
    side.synchronize()
    assert (arraybridge.to_numpy(y) == 9).all()


@of_each_framework
def test_pool_waits_for_the_gpu_of_its_buffer(name: str) -> None:
    """Check the second GPU while the first one is open, too."""
    require_two_gpus()
    module, pool = require(name), BufferPool()
    first = bytes_of(name, 1)
    x = pool.take((MIB,), "float32", name, 1)
    with arraybridge.framework(name).devices.select(Device("gpu", 1)):
        side = module.cuda.Stream(non_blocking=True) if name == "cupy" else module.cuda.Stream()
        with side if name == "cupy" else module.cuda.stream(side):
            x[...] = 5
    pool.give(x)
    y = pool.take((MIB,), "float32", name, 1)
    with arraybridge.framework(name).devices.select(Device("gpu", 1)):
        y[...] = 9
        arraybridge.framework(name).interchange.block_until_ready(y)
        side.synchronize()
    assert (arraybridge.to_numpy(y) == 9).all()
    assert len(first) == 1


def test_pools_do_not_mix_gpus() -> None:
    require_two_gpus()
    pool = BufferPool()
    buffers = [pool.take((MIB,), "uint8", "cupy", gpu) for gpu in range(2)]
    for buffer in buffers:
        pool.give(buffer)
    again = pool.take((MIB,), "uint8", "cupy", 1)
    assert (str(arraybridge.device_of(again)), pool.nbytes) == ("gpu:1", 2 * MIB)
    pool.give(again)
    free_memory("cupy", gpu_id=1)
    assert pool.nbytes == MIB
    assert str(arraybridge.device_of(pool.take((MIB,), "uint8", "cupy", 0))) == "gpu:0"


@of_each_framework
def test_pools_reuse_memory_for_another_dtype(name: str) -> None:
    module, pool = require(name), BufferPool()
    own = arraybridge.framework(name)
    x = pool.take((3, 100), "float64", name, 0)
    address = own.interchange.address(x)
    pool.give(x)
    y = pool.take((700,), "int16", name, 0)
    assert (own.interchange.address(y), own.dtype_name(y), own.shape(y)) == (address, "int16", (700,))
    y[...] = module.zeros(700, dtype="int16") if name == "cupy" else 0
    assert (arraybridge.to_numpy(y) == 0).all()


def test_idle_buffers_return_to_the_driver() -> None:
    """Check that buffers are dropped before the framework's cache, in which they end, is freed."""
    pool_of_cupy = require("cupy").get_default_memory_pool()
    free_memory()
    held = pool_of_cupy.total_bytes()
    pool = BufferPool()
    pool.give(pool.take((4 * MIB,), "uint8", "cupy", 0))
    assert free_memory("cupy") >= 4 * MIB
    assert pool_of_cupy.total_bytes() == held
