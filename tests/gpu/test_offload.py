"""@gpu on a card: where calls run, what comes back, and what is measured and kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.offload.decorator import gpu, stay_on_gpu
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

BACKENDS = ("cupy", "torch", "jax")


def heavy(x: Any) -> Any:
    """Seconds on a CPU, milliseconds on a card."""
    for _ in range(8):
        x = x @ x / 1000
    return x


@pytest.mark.parametrize("backend", BACKENDS)
def test_heavy_work_goes_to_the_card_and_comes_back(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    expected = heavy(x)
    for _ in range(5):
        result = fn(x)
        assert type(result) is np.ndarray
        assert result.dtype == np.float32
        # Cards may multiply in fewer digits (TF32).
        assert np.allclose(result, expected, rtol=5e-2)
    decision = fn.explain(x)
    assert decision.on_gpu, str(decision)
    assert decision.backend == backend
    assert decision.device == "gpu:0"


@pytest.mark.parametrize("backend", BACKENDS)
def test_cheap_work_stays_on_the_cpu(backend: str) -> None:
    require(backend)
    fn = gpu(backend=backend)(lambda x: x + 1)
    x = np.zeros(1000)
    for _ in range(6):
        assert fn(x)[0] == 1.0
    assert not fn.explain(x).on_gpu


@pytest.mark.parametrize("backend", BACKENDS)
def test_staying_on_the_card(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = np.eye(1024, dtype=np.float32) * 1000
    for _ in range(4):
        fn(x)
    with stay_on_gpu():
        first = fn(x)
        second = fn(first)
    assert arraybridge.detect_memory_type(first) == backend
    assert arraybridge.device_of(second) == "gpu:0"
    assert np.allclose(arraybridge.to_numpy(second), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_on_the_card_stays_a_tensor_there(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = torch.eye(1024, device="cuda") * 1000
    result = fn(x)
    assert isinstance(result, torch.Tensor)
    assert result.is_cuda
    assert torch.allclose(result, x)


def test_use_device_cpu_keeps_it_off_the_card() -> None:
    needs_kernels_of("cuBLAS")
    require("torch")
    fn = gpu(backend="torch")(heavy)
    x = np.eye(1024, dtype=np.float32)
    for _ in range(4):
        fn(x)
    with arraybridge.use_device("cpu"):
        assert not fn.explain(x).on_gpu
        fn(x)
