"""`convert_memory(x, out=buffer)` with GPU arrays: no temporary copies, in the order of the streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from arraybridge import convert_memory, explain
from tests.gpu.test_conversion import GPU, off_gpu, on_gpu
from tests.helpers import EMULATED, require

pytestmark = pytest.mark.gpu

VALUES = np.arange(48, dtype="float32").reshape(6, 8)
MUTABLE = ("cupy", "torch")
targets = pytest.mark.parametrize("target", MUTABLE)


def zeros(framework: str, shape: tuple[int, ...] = VALUES.shape) -> Any:
    return on_gpu(framework, np.zeros(shape, "float32"))


@targets
@pytest.mark.parametrize("source", ["numpy", "torch", *GPU])
def test_values_are_written_to_the_gpu(source: str, target: str) -> None:
    require(source)
    for place in ("host", "gpu") if source == "torch" else ("host" if source == "numpy" else "gpu",):
        x = on_gpu(source, VALUES) if place == "gpu" else convert_memory(VALUES.copy(), source, device="cpu")
        out = zeros(target)
        route = explain(x, out=out)
        assert (route.copies, route.method, str(route.device)) == (1, "device", "gpu:0")
        assert convert_memory(x, out=out) is out
        assert off_gpu(out).tolist() == VALUES.tolist()


@targets
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "cast"])
def test_values_are_read_from_the_gpu(target: str, layout: str) -> None:
    x = on_gpu(target, VALUES)
    out = np.zeros(VALUES.shape[::-1], "float32").T if layout == "transposed" else np.zeros_like(VALUES)
    options = {"dtype": "float64"} if layout == "cast" else {}
    out = out.astype(options.get("dtype", "float32"))
    route = explain(x, out=out, **options)
    is_direct = layout == "contiguous" or (layout == "transposed" and target == "torch")
    assert (route.copies, route.method) == (1 if is_direct else 2, "host")
    assert convert_memory(x, out=out, **options).tolist() == VALUES.tolist()


@targets
def test_strided_and_other_dtypes_on_the_gpu(target: str) -> None:
    if EMULATED and target == "torch":
        pytest.skip("the emulated GPU cannot run machine code of PyTorch")
    whole = zeros(target, (12, 16))
    out = whole[::2, 3:11]
    for x in (VALUES, VALUES[::-1], VALUES.astype("int16"), on_gpu(target, VALUES)):
        options = {} if x.dtype == whole.dtype else {"dtype": "float32"}
        whole[...] = 0
        route = explain(x, out=out, **options)
        assert route.copies == (1 if x is not VALUES and not isinstance(x, np.ndarray) else 2)
        convert_memory(x, out=out, **options)
        assert off_gpu(out).tolist() == off_or_host(x).tolist()
        assert off_gpu(whole).sum() == VALUES.sum()


def off_or_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else off_gpu(x)


def test_the_device_needs_no_temporary_memory() -> None:
    cupy = require("cupy")
    out = cupy.zeros(1 << 20, "float32")
    x = np.ones(1 << 20, "float32")
    ab.free_memory("cupy")
    pool = cupy.get_default_memory_pool()
    used = pool.total_bytes()
    convert_memory(x, out=out)
    back = np.zeros_like(x)
    convert_memory(out, out=back)
    assert pool.total_bytes() == used
    assert back.sum() == x.sum()


def test_a_source_may_change_after_the_call() -> None:
    cupy = require("cupy")
    x = cupy.cuda.alloc_pinned_memory(VALUES.nbytes)
    pinned = np.frombuffer(x, "float32", VALUES.size).reshape(VALUES.shape)
    pinned[...] = VALUES
    out = zeros("cupy")
    convert_memory(pinned, out=out)
    pinned[...] = -1
    assert off_gpu(out).tolist() == VALUES.tolist()


def test_overlapping_memory_on_the_gpu() -> None:
    cupy = require("cupy")
    whole = cupy.arange(16, dtype="float32")
    convert_memory(whole[:-1], out=whole[1:])
    assert whole.get().tolist() == [0, *range(15)]


def test_writing_to_another_gpu() -> None:
    cupy = require("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    x = on_gpu("cupy", VALUES)
    with cupy.cuda.Device(1):
        out = cupy.zeros(VALUES.shape, "float32")
        strided = cupy.zeros((6, 16), "float32")[:, ::2]
    assert explain(x, out=out).copies == 1
    assert explain(x, out=strided).copies == 2
    for y in (out, strided):
        assert convert_memory(x, out=y) is y
        assert y.get().tolist() == VALUES.tolist()
    with pytest.raises(ValueError, match="gpu:1"):
        convert_memory(VALUES, out=out, gpu_id=0)
