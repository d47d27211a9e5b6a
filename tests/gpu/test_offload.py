"""`@gpu` on a GPU: the choice of the device, the results, and the measurements."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.offload.gpu_decorator import gpu
from tests.helpers import needs_kernels_of, require, require_two_gpus

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
    result = fn(arraybridge.to_torch(diagonal, 0))
    assert (isinstance(result, torch.Tensor), result.is_cuda) == (True, True)
    assert np.allclose(result.cpu(), diagonal)


def scale(x: Any) -> Any:
    """Compute elementwise, which needs no library of CUDA, for longer than a transfer takes."""
    for _ in range(40):
        x = x * 1.5 + 1
    return x


def recorded(**options: Any) -> tuple[Any, list[str]]:
    """Return an offloaded function in CuPy, and the list of devices on which it has run."""
    seen: list[str] = []

    def fn(x: Any) -> Any:
        seen.append("cpu" if isinstance(x, np.ndarray) else str(arraybridge.device_of(x)))
        return scale(x)

    return gpu(backend="cupy", **options)(fn), seen


@pytest.mark.parametrize("how", ["gpu_id", "use_device"])
def test_work_runs_on_the_chosen_gpu(how: str) -> None:
    cupy = require_two_gpus()
    fn, seen = recorded(**({"gpu_id": 1} if how == "gpu_id" else {}))
    x = np.ones(1 << 20, np.float32)
    with arraybridge.use_device("gpu:1") if how == "use_device" else nullcontext():
        for _ in range(5):
            np.testing.assert_allclose(fn(x), scale(x), rtol=1e-6)
    assert {device for device in seen if device != "cpu"} == {"gpu:1"}
    assert cupy.cuda.runtime.getDevice() == 0


def test_arrays_of_another_gpu_are_not_already_there() -> None:
    require_two_gpus()
    fn, _ = recorded(gpu_id=0)
    for index in range(2):
        x = arraybridge.convert_memory(np.ones(1 << 20, np.float32), "cupy", index)
        assert ("already on the GPU" in fn.explain(x).reasons[0]) == (index == 0)
