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
        barrier.wait(600)
        for _ in range(10):
            found, expected = one(i)
            assert np.unique(found).tolist() == [expected]

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("caller", ["torch", "cupy"])
def test_the_input_is_made_and_the_result_read_on_a_side_stream(
    caller: str, name: str, work: dict[str, Any]
) -> None:
    module = require(caller)
    f = arraybridge.framework(name).decorator(output_type=caller)(lambda x: slow(x, work[name]))

    def full(value: float) -> Any:
        if caller == "torch":
            return module.full((SIZE,), value, device="cuda")
        return module.full(SIZE, value, np.float32)

    def one(i: int) -> tuple[Any, float]:
        stream = module.cuda.Stream() if caller == "torch" else module.cuda.Stream(non_blocking=True)
        with module.cuda.stream(stream) if caller == "torch" else stream:
            x = slow(full(float(i)), work[caller])
            y = f(x)
            del x  # its memory may be taken again by what is queued from here on
            full(-1.0)
            z = slow(y, work[caller])
            return z.cpu().numpy() if caller == "torch" else z.get(), i + 3.0

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
        barrier.wait(600)
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
    with pytest.raises(ZeroDivisionError):  # which leaves the stream as it was
        arraybridge.framework(name).decorator(gpu_id=0)(lambda x: 1 // 0)(image)
    if find_spec("torch") is None:
        return
    on_card = arraybridge.convert_memory(image, "torch", 0)
    again = double(on_card)
    assert type(again) is type(on_card)
    assert device_of(again) == "gpu:0"
    assert (to_numpy(again) == 2).all()
