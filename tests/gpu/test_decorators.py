"""Decorated functions on a card: where they run, and that each thread's stream is ordered with its caller's.

`ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu` makes a missing card or framework a failure.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import device_of, to_numpy
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

THREADS = 8
SIZE = 1 << 20


def slow(x: Any, work: Any) -> Any:
    """``x + 1``, ready some milliseconds after the kernels were queued: the work before it is all zeros."""
    for _ in range(20):
        work = work @ work
    return x + (1 + work[0, 0])


@pytest.fixture
def work() -> dict[str, Any]:
    """Square matrices of zeros on the card, to keep it busy."""
    needs_kernels_of("cuBLAS")
    torch, cupy, jax = require("torch"), require("cupy"), require("jax")
    return {
        "torch": torch.zeros(2048, 2048, device="cuda"),
        "cupy": cupy.zeros((2048, 2048), np.float32),
        "jax": jax.block_until_ready(
            jax.device_put(np.zeros((2048, 2048), np.float32), jax.devices("gpu")[0])
        ),
    }


def in_threads(one: Any) -> None:
    """Run ``one(i)`` in eight threads at once; it returns values that must be all alike, and which."""
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> None:
        barrier.wait(60)
        for _ in range(10):
            found, expected = one(i)
            assert np.unique(found).tolist() == [expected]

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_streams_from_torch(name: str, work: dict[str, Any]) -> None:
    """The input is produced, and the result consumed, on a side stream of torch."""
    torch = require("torch")
    f = arraybridge.framework(name).decorator(output_type="torch")(lambda x: slow(x, work[name]))

    def one(i: int) -> tuple[Any, float]:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = slow(torch.full((SIZE,), float(i), device="cuda"), work["torch"])
            y = f(x)
            del x  # its memory may be taken again by what is queued from here on
            torch.full((SIZE,), -1.0, device="cuda")
            z = slow(y, work["torch"])
            return z.cpu().numpy(), i + 3.0

    in_threads(one)


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_streams_from_cupy(name: str, work: dict[str, Any]) -> None:
    cupy = require("cupy")
    f = arraybridge.framework(name).decorator(output_type="cupy")(lambda x: slow(x, work[name]))

    def one(i: int) -> tuple[Any, float]:
        with cupy.cuda.Stream(non_blocking=True):
            x = slow(cupy.full(SIZE, i, np.float32), work["cupy"])
            y = f(x)
            del x
            cupy.full(SIZE, -1, np.float32)
            z = slow(y, work["cupy"])
            return z.get(), i + 3.0

    in_threads(one)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_each_thread_has_a_stream_of_its_own_and_the_caller_s_stays(name: str) -> None:
    module = require(name)
    current = {
        "torch": lambda: module.cuda.current_stream().cuda_stream,
        "cupy": lambda: module.cuda.get_current_stream().ptr,
    }[name]
    f = arraybridge.framework(name).decorator(gpu_id=0)(lambda x: (current(), threading.get_ident()))
    before = current()
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        barrier.wait(60)
        return f(np.zeros(2, np.float32)), f(np.zeros(2, np.float32))

    with ThreadPoolExecutor(THREADS) as pool:
        pairs = list(pool.map(run, range(THREADS)))
    assert all(first == second for first, second in pairs)
    assert len({first[0] for first, _ in pairs}) == len({first[1] for first, _ in pairs})
    assert before not in {first[0] for first, _ in pairs}
    assert current() == before


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_gpu_id_and_the_way_home(name: str) -> None:
    require(name)
    seen = []

    @arraybridge.framework(name).decorator(gpu_id=0, output_type="input")
    def double(x: Any) -> Any:
        seen.append(device_of(x))
        return x + x

    image = np.ones((3, 4), np.float32)
    result = double(image)
    assert seen == ["gpu:0"]
    assert isinstance(result, np.ndarray)
    assert (result == 2).all()
    if find_spec("torch") is None:
        return
    on_card = arraybridge.convert_memory(image, "torch", 0)
    again = double(on_card)
    assert type(again) is type(on_card)
    assert device_of(again) == "gpu:0"
    assert (to_numpy(again) == 2).all()


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_an_error_leaves_the_stream_as_it_was(name: str) -> None:
    require(name)

    @arraybridge.framework(name).decorator(gpu_id=0)
    def fail(x: Any) -> Any:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail(np.zeros(2, np.float32))
    plain = arraybridge.framework(name).decorator(gpu_id=0, output_type="numpy")(lambda x: x + 1)
    assert plain(np.zeros(2, np.float32)).tolist() == [1.0, 1.0]
