"""Decorated functions on a GPU: their devices and streams. (For ordering, see test_ordering.py.)

With `ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu`, a missing GPU or framework is a failure.
"""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import array_namespace, detect_memory_type, device_of, to_numpy
from tests.helpers import require, require_two_gpus

pytestmark = pytest.mark.gpu

THREADS = 8


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_each_thread_uses_a_separate_stream_and_the_callers_is_restored(name: str) -> None:
    module = require(name)
    current = {
        "torch": lambda: module.cuda.current_stream().cuda_stream,
        "cupy": lambda: module.cuda.get_current_stream().ptr,
    }[name]
    f = arraybridge.framework(name).decorator(gpu_id=0)(lambda x: (current(), threading.get_ident()))
    before = current()
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        barrier.wait(600)
        return f(np.zeros(2, np.float32)), f(np.zeros(2, np.float32))

    with ThreadPoolExecutor(THREADS) as pool:
        pairs = list(pool.map(run, range(THREADS)))
    assert all(first == second for first, second in pairs)
    assert len({first[0] for first, _ in pairs}) == len({first[1] for first, _ in pairs})
    assert before not in {first[0] for first, _ in pairs}
    assert current() == before


def test_threads_reuse_idle_streams_only() -> None:
    """Check three threads at the same time, after two that have ended and left a stream."""
    module = require("cupy")
    f = arraybridge.cupy(gpu_id=0)(lambda x: module.cuda.get_current_stream().ptr)
    for _ in range(2):
        thread = threading.Thread(target=f, args=(np.zeros(3),))
        thread.start()
        thread.join()
    del thread
    gc.collect()
    barrier, seen = threading.Barrier(3), []

    def run() -> None:
        seen.append(f(np.zeros(3)))
        barrier.wait(60)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 3


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_gpu_id_and_original_device_of_results(name: str) -> None:
    require(name)
    seen = []

    @arraybridge.framework(name).decorator(gpu_id=0, output_type="input")
    def double(x: Any) -> Any:
        seen.append((detect_memory_type(x), str(device_of(x))))
        return array_namespace(x).add(x, x)

    image = np.ones((3, 4), np.float32)
    for x in (image, arraybridge.convert_memory(image, "cupy", 0)):
        result = double(x)
        assert (type(result), device_of(result)) == (type(x), device_of(x))
        assert (to_numpy(result) == 2).all()
    assert seen == [(name, "gpu:0")] * 2


@pytest.mark.parametrize("options", [{}, {"gpu_id": 1}, {"stream": False}, {"stream": False, "gpu_id": 1}])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_functions_run_on_the_gpu_of_their_input(name: str, options: dict[str, Any]) -> None:
    """Check new arrays, and operations, which CuPy warns about if they run on another GPU."""
    require_two_gpus()
    module = require(name)

    @arraybridge.framework(name).decorator(**options)
    def create(x: Any) -> list[Any]:
        new = module.empty(3) if name == "cupy" else module.empty(3, device="cuda")
        return [new, x * 2 if name == "cupy" else x]

    x = arraybridge.convert_memory(np.arange(6.0), name, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [create(x), create(x)]
    assert [str(device_of(y)) for result in results for y in result] == ["gpu:1"] * 4


def test_function_that_changes_the_current_gpu_returns_its_result() -> None:
    cupy = require_two_gpus()
    before = cupy.cuda.runtime.getDevice()

    @arraybridge.cupy(gpu_id=1)
    def leaves(x: Any) -> Any:
        result = cupy.empty_like(x)
        result.set(np.full(x.shape, 5, np.float32))
        cupy.cuda.runtime.setDevice(0)
        return result

    result = leaves(np.zeros(3, np.float32))
    assert str(device_of(result)) == "gpu:1"
    assert to_numpy(result).tolist() == [5, 5, 5]
    assert cupy.cuda.runtime.getDevice() == before


def test_the_random_state_of_pytorch_includes_every_gpu() -> None:
    require_two_gpus()
    torch = require("torch")
    for index in range(2):
        torch.empty(1, device=f"cuda:{index}")  # starts CUDA on it
    autodiff = arraybridge.framework("torch").autodiff
    torch.cuda.manual_seed_all(5)
    expected = torch.cuda.get_rng_state_all()
    state = autodiff.random_state()
    torch.cuda.manual_seed_all(9)
    autodiff.set_random_state(state)
    restored = torch.cuda.get_rng_state_all()
    assert [one.tolist() for one in restored] == [one.tolist() for one in expected]
