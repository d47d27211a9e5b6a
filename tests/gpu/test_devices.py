"""Devices, device maps and pipelines on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, devices, use_device
from tests.helpers import output_of, require

pytestmark = pytest.mark.gpu

GPU = ("cupy", "torch", "jax")


@pytest.mark.parametrize("name", GPU)
def test_gpu_reports_name_uuid_and_memory(name: str) -> None:
    require("torch")
    require(name)
    # opened, since an unopened GPU does not report its memory
    arraybridge.convert_memory(np.zeros(2, np.float32), name, 0)
    gpu, of_torch = (next(d for d in devices(one) if d == "gpu:0") for one in (name, "torch"))
    assert gpu.identity == of_torch.identity
    assert of_torch.name
    assert of_torch.identity.startswith(("GPU-", "MIG-"))
    assert of_torch.total > 0
    assert of_torch.free is None or 0 < of_torch.free <= of_torch.total


def test_device_queries_do_not_open_a_gpu() -> None:
    """Check CUDA's state of each primary context, with the frameworks imported but unused."""
    said = output_of(
        "import ctypes, arraybridge",
        "arraybridge.gpu_available(); arraybridge.device_info(); arraybridge.least_used_gpu()",
        "for name in ('numpy', 'torch', 'cupy', 'jax'):",
        "    try: arraybridge.devices(name)",
        "    except arraybridge.FrameworkNotInstalledError: continue",
        "arraybridge.memory_stats(); arraybridge.gpu_utilization(); arraybridge.free_memory()",
        "with arraybridge.memory_peak(): pass",
        "driver = ctypes.CDLL('libcuda.so.1'); driver.cuInit(0)",
        "count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()",
        "driver.cuDeviceGetCount(ctypes.byref(count))",
        "for i in range(count.value):",
        "    driver.cuDevicePrimaryCtxGetState(i, ctypes.byref(flags), ctypes.byref(active))",
        "    print(active.value)",
    )
    assert set(said.split()) == {"0"}


def test_pipeline_of_several_frameworks_on_the_gpu() -> None:
    for name in GPU:
        require(name)
    stages = [arraybridge.framework(name).decorator(gpu_id=0)(lambda x: x * 2 + 1) for name in GPU]
    x = np.arange(4096, dtype=np.float32).reshape(64, 64)
    for _ in range(10):
        result = Pipeline(*stages, microbatches=16)(x)
        np.testing.assert_array_equal(arraybridge.to_numpy(result), x * 8 + 7)
    with use_device("gpu"):
        assert arraybridge.to_gpu(result) is result
