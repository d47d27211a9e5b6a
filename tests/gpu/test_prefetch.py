"""Page-locked memory from which `prefetch` copies to a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import cuda_driver, pinned, prefetch
from arraybridge.device import Device
from tests.helpers import EMULATED, output_of, require, require_two_gpus

pytestmark = pytest.mark.gpu

N = 1 << 12
of_each_framework = pytest.mark.parametrize("name", ["cupy", "torch"])


class Sent(NamedTuple):
    """A host array from which a framework copied to the GPU."""

    address: int
    is_page_locked: bool


@pytest.fixture
def sent(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Return a list that grows by each host array from which the framework copies to a GPU."""
    require(name)
    query = require("cupy").cuda.runtime.pointerGetAttributes
    own = arraybridge.framework(name)
    arrays: list[Sent] = []
    # CuPy copies a NumPy array, and PyTorch one of its CPU tensors.
    owner, method = (type(own), "from_host") if name == "cupy" else (type(own.devices), "to_device")
    right = getattr(owner, method)

    def record(self: Any, x: Any, device: Device) -> Any:
        address = x.ctypes.data if name == "cupy" else x.data_ptr()
        arrays.append(Sent(address, query(address).type == 1))  # cudaMemoryTypeHost
        return right(self, x, device)

    monkeypatch.setattr(owner, method, record)
    return arrays


@of_each_framework
def test_items_are_copied_from_page_locked_memory(name: str, sent: list[Sent]) -> None:
    items = [{"x": np.full(N, i, np.float32), "more": [np.full((2, 3), i)], "name": str(i)} for i in range(4)]
    results = list(prefetch(items, name, 0))
    assert [one.is_page_locked for one in sent] == [True] * 8
    for i, result in enumerate(results):
        assert arraybridge.detect_memory_type(result["x"]) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(result["x"]), np.full(N, i, np.float32))
        np.testing.assert_array_equal(arraybridge.to_numpy(result["more"][0]), np.full((2, 3), i))
        assert result["name"] == str(i)


@of_each_framework
def test_cpu_tensors_are_copied_from_page_locked_memory(name: str, sent: list[Sent]) -> None:
    torch = require("torch")
    results = list(prefetch([torch.full((2, 3), i) for i in range(4)], name, 0))
    assert [one.is_page_locked for one in sent] == [True] * 4
    assert [arraybridge.to_numpy(x).tolist() for x in results] == [[[i] * 3] * 2 for i in range(4)]


@of_each_framework
def test_items_for_the_freest_gpu_are_pinned_once_a_gpu_is_open(name: str, sent: list[Sent]) -> None:
    module = require(name)
    module.empty(1) if name == "cupy" else module.empty(1, device="cuda")
    results = list(prefetch([np.full(N, i) for i in range(4)], name, "auto"))
    assert [one.is_page_locked for one in sent] == [True] * 4
    assert [arraybridge.to_numpy(x)[-1] for x in results] == [0, 1, 2, 3]


@of_each_framework
def test_pinned_arrays_are_not_copied_again(name: str, sent: list[Sent]) -> None:
    x = pinned(np.arange(N))
    list(prefetch([x, x], name, 0))
    assert sent == [Sent(x.ctypes.data, True)] * 2


@pytest.mark.parametrize("name", ["torch"])
def test_memory_formats_are_preserved(name: str, sent: list[Sent]) -> None:
    """Check that a tensor of another layout is not pinned, since its copy would be C-contiguous."""
    torch = require("torch")
    x = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    (result,) = prefetch([x], name, 0)
    assert result.stride() == x.stride()
    assert [one.is_page_locked for one in sent] == [False]
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x.numpy())


@of_each_framework
def test_source_may_refill_its_buffer(name: str, sent: list[Sent]) -> None:
    buffer = np.empty(N, np.float32)

    def items() -> Iterator[np.ndarray]:
        for i in range(12):
            buffer[:] = i
            yield buffer
        buffer[:] = -1

    results = list(prefetch(items(), name, 0, depth=9))
    assert [one.is_page_locked for one in sent] == [True] * 12
    assert [np.unique(arraybridge.to_numpy(x)).tolist() for x in results] == [[i] for i in range(12)]


def test_only_page_locked_host_memory_counts_as_pinned() -> None:
    cupy = require("cupy")
    x = cupy.arange(3)
    locked = pinned(np.arange(3))
    addresses = [x.data.ptr, np.arange(3).ctypes.data, locked.ctypes.data, 0]
    assert [cuda_driver.is_page_locked(one) for one in addresses] == [False, False, True, False]


def test_dtypes_that_numpy_lacks_are_sent() -> None:
    """Check bfloat16, which NumPy supports only if ml_dtypes is installed."""
    torch = require("torch")
    x = torch.arange(3).to(torch.bfloat16)
    (result,) = prefetch([x], "torch", 0)
    assert result.dtype == torch.bfloat16
    assert result.cpu().tolist() == [0, 1, 2]


def test_source_may_resize_its_tensor() -> None:
    """Check that pinning a tensor does not fix the size of its storage, as `Tensor.numpy` does."""
    torch = require("torch")
    buffer = torch.zeros(2)

    def items() -> Iterator[Any]:
        for i in range(3):
            yield buffer.resize_(2 + i).fill_(i)

    results = [arraybridge.to_numpy(x).tolist() for x in prefetch(items(), "torch", 0)]
    assert results == [[0, 0], [1, 1, 1], [2, 2, 2, 2]]


def test_tensors_keep_their_gradients() -> None:
    torch = require("torch")
    (result,) = prefetch([torch.ones(2, requires_grad=True)], "torch", 0)
    assert result.requires_grad


def test_errors_name_the_item_and_the_place() -> None:
    require("cupy")
    torch = require("torch")
    results = prefetch([[torch.ones(2)], [torch.ones(2), torch.ones(2, requires_grad=True)]], "cupy", 0)
    next(results)
    with pytest.raises(arraybridge.GradientError, match=r"at \[1\]") as caught:
        next(results)
    assert "while converting item 1 to cupy" in caught.value.__notes__


@of_each_framework
def test_items_are_sent_even_if_no_memory_can_be_page_locked(
    name: str, sent: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = arraybridge.framework(name).memory
    right = memory.allocate_pinned

    def fail(self: Any, nbytes: int) -> Any:
        if nbytes > 1:
            raise memory.oom_error()
        return right(nbytes)

    monkeypatch.setattr(type(memory), "allocate_pinned", fail)
    results = list(prefetch([np.full(N, i) for i in range(3)], name, 0))
    assert [one.is_page_locked for one in sent] == [False] * 3
    assert [arraybridge.to_numpy(x)[-1] for x in results] == [0, 1, 2]


@pytest.mark.skipif(not EMULATED, reason="not applicable: CUDA does not count blocks of page-locked memory")
def test_page_locked_memory_is_bounded_and_freed() -> None:
    from tests.emulated_gpu import accounting

    require("cupy")
    accounting.empty_pools()
    before = accounting.pinned_blocks()
    for _ in prefetch((np.full(N, i) for i in range(50)), "cupy", 0, depth=9):
        # One for the query whether there is any, and one for the array that is being copied.
        assert accounting.pinned_blocks() <= before + 2
    results = prefetch((np.full(N, i) for i in range(50)), "cupy", 0, depth=9)
    next(results)
    results.close()  # type: ignore[attr-defined]
    del results
    gc.collect()
    assert accounting.pinned_blocks() == before + 2
    accounting.empty_pools()
    assert accounting.pinned_blocks() == before


def test_only_the_freest_gpu_is_opened() -> None:
    """Check that no memory is pinned before a GPU is chosen for each item."""
    require_two_gpus()
    said = output_of(
        "import numpy as np, cupy, arraybridge as ab",
        "from arraybridge import cuda_driver, hardware",
        "hardware.free_memory = lambda index: (1 << 20, 1 << 28)[index]",
        "results = list(ab.prefetch([np.ones(3)] * 4, 'cupy', 'auto'))",
        "print([ab.device_of(y).index for y in results], [cuda_driver.has_context(i) for i in range(2)])",
    )
    assert said == "[1, 1, 1, 1] [False, True]"


def test_errors_other_than_a_lack_of_pinned_memory_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = require("cupy")
    memory = arraybridge.framework("cupy").memory
    right = memory.allocate_pinned
    cupy.empty(1)

    def fail(self: Any, nbytes: int) -> Any:
        if nbytes > 1:
            raise cupy.cuda.runtime.CUDARuntimeError(700)  # an illegal address
        return right(nbytes)

    monkeypatch.setattr(type(memory), "allocate_pinned", fail)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        list(prefetch([np.ones(N)], "cupy", 0))
