"""Kernels of one's own on a card, as docs/kernels.md shows them: launched where the arrays are ordered.

What needs no card (numba on the host, PoCL, Pallas interpreted) runs with the page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.gpu.test_ordering import _as_it_was, is_all, late  # noqa: F401
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

N = 1 << 12
SCALE = r"""
extern "C" __global__ void scale(const float* x, float* out, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * by;
}
"""


def scaled(x: Any, by: float = 3) -> Any:
    """By a raw kernel of CuPy."""
    cupy = require("cupy")
    out = cupy.empty_like(x)
    kernel = cupy.RawKernel(SCALE, "scale")
    kernel(((x.size + 127) // 128,), (128,), (x, out, np.float32(by), np.int32(x.size)))
    return out


# -- CuPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_raw_kernel_is_ordered_with_its_caller(stream: bool) -> None:
    """Values that are not there yet when the kernel is queued; whichever of the two streams it is on."""
    x = np.arange(N, dtype=np.float32)
    result = arraybridge.cupy(gpu_id=0, output_type="input", stream=stream)(scaled)(x, 3)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, x * 3)
    triple = arraybridge.cupy(stream=stream)(scaled)
    with require("cupy").cuda.Stream(non_blocking=True):
        for _ in range(3):
            x = late(2)
            y = triple(x)
            x.fill(-1)  # after the kernel has read it
            assert is_all(y + 1, 7)  # after the kernel has written


def test_a_kernel_on_the_default_stream_wants_stream_false() -> None:
    """As numba.cuda and PyCUDA launch: on the legacy default stream, whatever CuPy's current one is."""
    cuda = require("cupy").cuda
    seen = []

    @arraybridge.cupy(stream=False)
    def triple(x: Any) -> Any:
        seen.append(cuda.get_current_stream())
        with cuda.Stream.null:
            return scaled(x)

    for _ in range(3):
        x = late(2)
        y = triple(x)
        x.fill(-1)
        assert is_all(y, 6)
    assert seen == [cuda.Stream.null] * 3


# -- numba.cuda --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_numba_under_a_decorator_and_its_arrays(name: str) -> None:
    require(name)
    needs_kernels_of("numba")
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba.cuda finds no card, or lacks a part of CUDA (pip install numba-cuda)")

    @cuda.jit
    def add_one(x: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] += 1

    @arraybridge.framework(name).decorator(gpu_id=0, stream=False, output_type="input")
    def plus_one(x: Any) -> Any:
        out = x.clone() if name == "torch" else x.copy()
        add_one.forall(N)(out)
        return out

    x = np.arange(N, dtype=np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(plus_one(x), x + 1)
