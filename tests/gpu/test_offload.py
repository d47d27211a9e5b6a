"""`@gpu` on a GPU: the choice of the device, the results, and the measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.offload.gpu_decorator import gpu, stay_on_gpu
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

backends = pytest.mark.parametrize("backend", ["cupy", "torch", "jax"])


def heavy(x: Any) -> Any:
    """Compute for seconds on a CPU and milliseconds on a GPU."""
    for _ in range(8):
        x = x @ x / 1000
    return x


@backends
def test_heavy_work_runs_on_the_gpu_and_returns_the_original_type(backend: str) -> None:
    needs_kernels_of("cuBLAS")
    torch = require("torch")
    require(backend)
    fn = gpu(backend=backend)(heavy)
    x = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    expected = heavy(x)
    for _ in range(5):
        result = fn(x)
        assert (type(result), result.dtype) == (np.ndarray, np.float32)
        # GPUs may multiply with reduced precision (TF32).
        assert np.allclose(result, expected, rtol=5e-2)
    decision = fn.explain(x)
    assert decision.on_gpu, str(decision)
    assert (decision.backend, decision.device) == (backend, "gpu:0")
    assert not fn.explain(x[:8, :8]).on_gpu
    with arraybridge.use_device("cpu"):
        assert not fn.explain(x).on_gpu
        fn(x)
    diagonal = np.eye(1024, dtype=np.float32) * 1000
    with stay_on_gpu():
        second = fn(fn(diagonal))
    assert arraybridge.detect_memory_type(second) == backend
    assert arraybridge.device_of(second) == "gpu:0"
    assert np.allclose(arraybridge.to_numpy(second), diagonal)
    result = fn(arraybridge.to_torch(diagonal, 0))
    assert (isinstance(result, torch.Tensor), result.is_cuda) == (True, True)
    assert np.allclose(result.cpu(), diagonal)
