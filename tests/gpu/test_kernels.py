"""Kernels of one's own on a card, as docs/kernels.md shows them: launched where the arrays are ordered.

What needs no card (numba's simulator, PoCL, Pallas interpreted) is in tests/conversion/test_kernel_arrays.py
and runs with the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import device_of, to_numpy
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

N = 1 << 12
SCALE = r"""
extern "C" __global__ void scale(const float* x, float* out, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * by;
}
"""


@pytest.fixture
def cupy() -> Iterator[Any]:
    """CuPy, on the default stream of each card before and after."""
    module = require("cupy")
    try:
        yield module
    finally:
        module.cuda.Stream.null.use()
        module.cuda.Device(0).synchronize()


def launch(cupy: Any, x: Any, by: float) -> Any:
    out = cupy.empty_like(x)
    kernel = cupy.RawKernel(SCALE, "scale")
    kernel(((x.size + 127) // 128,), (128,), (x, out, np.float32(by), np.int32(x.size)))
    return out


def late(cupy: Any, value: float) -> Any:
    """An array whose values come by way of several kernels that wait in the current stream."""
    x = cupy.zeros(N, np.float32)
    for _ in range(4):
        x += np.float32(value / 4)
    return x


# -- CuPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_raw_kernel(cupy: Any, stream: bool) -> None:
    @arraybridge.cupy(gpu_id=0, output_type="input", stream=stream)
    def scaled(x: Any, by: float) -> Any:
        assert device_of(x) == "gpu:0"
        return launch(cupy, x, by)

    x = np.arange(N, dtype=np.float32)
    result = scaled(x, 3)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, x * 3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_raw_kernel_is_ordered_with_its_caller(cupy: Any, stream: bool) -> None:
    """Values that are not there yet when the kernel is queued; whichever of the two streams it is on."""
    scaled = arraybridge.cupy(stream=stream)(lambda x: launch(cupy, x, 3))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(3):
            x = late(cupy, 2)
            y = scaled(x)
            x.fill(-1)  # after the kernel has read it
            z = y + 1  # after the kernel has written
            assert (to_numpy(z) == 7).all()


def test_a_kernel_on_the_default_stream_wants_stream_false(cupy: Any) -> None:
    """As numba.cuda and PyCUDA launch: on the legacy default stream, whatever CuPy's current one is."""
    seen = []

    @arraybridge.cupy(stream=False)
    def scaled(x: Any) -> Any:
        seen.append(cupy.cuda.get_current_stream())
        with cupy.cuda.Stream.null:
            return launch(cupy, x, 3)

    for _ in range(3):
        x = late(cupy, 2)
        y = scaled(x)
        x.fill(-1)
        assert (to_numpy(y) == 6).all()
    assert all(stream == cupy.cuda.Stream.null for stream in seen)


# -- numba.cuda --------------------------------------------------------------------------------------


def numba_kernel() -> tuple[Any, Any]:
    needs_kernels_of("numba")
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba.cuda finds no card, or lacks a part of CUDA (pip install numba-cuda)")

    @cuda.jit
    def add_one(x: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] += 1

    return cuda, add_one


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_numba_under_a_decorator(name: str) -> None:
    require(name)
    _, add_one = numba_kernel()

    def plus_one(x: Any) -> Any:
        out = x.clone() if name == "torch" else x.copy()
        add_one.forall(N)(out)
        return out

    decorated = arraybridge.framework(name).decorator(gpu_id=0, stream=False, output_type="input")(plus_one)
    x = np.arange(N, dtype=np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(decorated(x), x + 1)


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_an_array_of_numba_is_shared(name: str) -> None:
    require(name)
    cuda, add_one = numba_kernel()
    there = cuda.to_device(np.zeros(N, np.float32))
    add_one.forall(N)(there)
    shared = arraybridge.convert_memory(there, name)
    assert device_of(shared) == "gpu:0"
    assert (to_numpy(shared) == 1).all()
    shared += 4
    np.testing.assert_array_equal(to_numpy(there), np.full(N, 5, np.float32))


# -- torch, Triton, JAX ------------------------------------------------------------------------------


def test_an_operator_of_torch() -> None:
    needs_kernels_of("torch")
    torch = require("torch")

    @torch.library.custom_op("arraybridge_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @arraybridge.torch(gpu_id=0, output_type="input")
    def twice_and_one(x: Any) -> Any:
        return twice(x) + 1

    assert twice_and_one(np.arange(3.0)).tolist() == [1.0, 3.0, 5.0]


def test_triton() -> None:
    needs_kernels_of("triton")
    torch = require("torch")
    pytest.importorskip("triton")
    from tests.gpu.triton_kernel import plus_one

    decorated = arraybridge.torch(gpu_id=0, output_type="input")(plus_one)
    x = np.arange(3001, dtype=np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(decorated(x), x + 1)
    there = torch.zeros(3001, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        there += 2
        result = decorated(there)
        assert (to_numpy(result) == 3).all()


def test_pallas() -> None:
    needs_kernels_of("jax")
    jax = require("jax")
    from jax.experimental import pallas

    def double_and_one(x: Any, out: Any) -> None:
        out[...] = x[...] * 2 + 1

    @arraybridge.jax(gpu_id=0, output_type="input")
    def line(x: Any) -> Any:
        assert device_of(x) == "gpu:0"
        return pallas.pallas_call(double_and_one, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(line(x), x * 2 + 1)
