"""Conversions on a GPU: CuPy, PyTorch and JAX share memory, streams are ordered, and values are preserved.

With `ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu`, a missing GPU or framework is a failure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import hardware
from arraybridge.host.dtype_names import PLAIN
from arraybridge.memory import serialization
from tests.gpu.test_ordering import ForeignInterface
from tests.helpers import needs_kernels_of, require, require_two_gpus
from tests.matrix_data import random_bits

pytestmark = pytest.mark.gpu

GPU = ("cupy", "torch", "jax")
dtypes = pytest.mark.parametrize("dtype", sorted(PLAIN))
targets = pytest.mark.parametrize("target", GPU)
sources = pytest.mark.parametrize("source", GPU)


def values(dtype: str) -> np.ndarray:
    """Return random bits that a narrower dtype could not hold."""
    return random_bits(np.dtype(dtype), 48).reshape(6, 8)


def on_gpu(framework: str, array: np.ndarray) -> Any:
    """Return the array on GPU 0, copied there by the framework's own call."""
    module = require(framework)
    if framework == "cupy":
        return module.asarray(array)
    if framework == "torch":
        return module.from_numpy(array.copy()).to("cuda:0")
    with module.enable_x64(True):
        return module.device_put(array, module.devices("gpu")[0])


def off_gpu(x: Any) -> np.ndarray:
    """Return the values, copied to the host by the framework's own call."""
    if hasattr(x, "get"):
        return x.get()
    return x.cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)


def address(x: Any) -> int:
    for name in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(x, name):
            return int(getattr(x, name)())
    return int(x.data.ptr)


@dtypes
@targets
@sources
def test_gpu_to_gpu_conversions_share_memory(source: str, target: str, dtype: str) -> None:
    require(target)
    expected = values(dtype)
    array = on_gpu(source, expected)
    predicted = arraybridge.explain(array, target)
    result = arraybridge.convert_memory(array, target)
    assert arraybridge.detect_memory_type(result) == target
    assert address(result) == address(array)
    np.testing.assert_array_equal(off_gpu(result), expected, strict=True)
    assert predicted.shares_memory
    assert (predicted.method, predicted.device) == ("same" if source == target else "dlpack", "gpu:0")


@dtypes
@targets
@pytest.mark.parametrize("source", ["numpy", "torch", "jax"])
def test_values_survive_host_to_gpu_and_back(source: str, target: str, dtype: str) -> None:
    require(target)
    require(source)
    expected = values(dtype)
    result = arraybridge.convert_memory(arraybridge.convert_memory(expected, source), target, gpu_id=0)
    assert arraybridge.device_of(result) == "gpu:0"
    for array in (off_gpu(result), arraybridge.to_numpy(result)):
        np.testing.assert_array_equal(array, expected, strict=True)
    if len(hardware.gpus()) > 1:
        moved = arraybridge.convert_memory(result, source if source != "numpy" else target, gpu_id=1)
        assert arraybridge.device_of(moved) == "gpu:1"
        np.testing.assert_array_equal(off_gpu(moved), expected, strict=True)


HOST_LAYOUTS: dict[str, Any] = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::2, ::3],
    "negative": lambda x: x[::-1, ::-2],
    "broadcast": lambda x: np.broadcast_to(x[0], (4, 8)),
    "big-endian": lambda x: x.astype(">f8"),
    "empty": lambda x: x[:0],
    "0-d": lambda x: np.array(x[1, 1]),
}


@targets
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_host_layouts_are_copied_to_the_gpu(target: str, layout: str) -> None:
    require(target)
    array = HOST_LAYOUTS[layout](values("float64"))
    result = arraybridge.convert_memory(array, target, gpu_id=0)
    np.testing.assert_array_equal(off_gpu(result), array)
    assert tuple(result.shape) == array.shape


@targets
@pytest.mark.parametrize("source", ["cupy", "torch"])
def test_gpu_layouts_are_shared_or_copied(source: str, target: str) -> None:
    """Check that strided, transposed, reversed and misaligned GPU memory is shared or copied correctly."""
    require(target)
    needs_kernels_of(source, target)
    expected = np.arange(512, dtype=np.float32).reshape(16, 32)
    array = on_gpu(source, expected)
    views = [[x.T, x[::2, 1::3], x[:, 1:], x.reshape(-1)[1:], x[:0], x[1, 1]] for x in (array, expected)]
    if source == "cupy":
        views = [[*views[0], array[::-1]], [*views[1], expected[::-1]]]
    for view, wanted in zip(*views, strict=True):
        predicted = arraybridge.explain(view, target)
        result = arraybridge.convert_memory(view, target)
        assert np.array_equal(off_gpu(result), wanted)
        assert (address(result) == address(view)) == predicted.shares_memory
        if len(hardware.gpus()) > 1:
            assert np.array_equal(off_gpu(arraybridge.convert_memory(view, target, gpu_id=1)), wanted)
        # Kernels that load several elements at a time fail later, with a misaligned-address error.
        assert np.array_equal(off_gpu(result * 2), wanted * 2)


@targets
@sources
def test_copy_true_never_shares_and_copy_false_never_copies(source: str, target: str) -> None:
    require(target)
    expected = values("float32")
    array = on_gpu(source, expected)
    copied = arraybridge.convert_memory(array, target, copy=True)
    assert address(copied) != address(array)
    assert off_gpu(copied).tobytes() == expected.tobytes()
    assert address(arraybridge.convert_memory(array, target, copy=False)) == address(array)
    with pytest.raises(arraybridge.CopyRequiredError):
        arraybridge.convert_memory(array, "numpy", copy=False)


def test_bfloat16_and_scalars_convert_between_torch_and_jax() -> None:
    torch, _ = require("torch"), require("jax")
    tensor = torch.arange(32, device="cuda", dtype=torch.bfloat16)
    result = arraybridge.to_jax(tensor)
    assert (result.dtype.name, address(result)) == ("bfloat16", address(tensor))
    with pytest.raises(arraybridge.DtypeNotSupportedError):
        arraybridge.to_cupy(tensor)
    scalar = on_gpu("jax", np.float32(2.0).reshape(()))
    arraybridge.to_torch(scalar).fill_(5.0)
    assert float(scalar) == 2.0


def test_conversion_preserves_global_state() -> None:
    torch, cupy, jax = require("torch"), require("cupy"), require("jax")

    def state() -> tuple[Any, ...]:
        torchs = (torch.cuda.current_device(), torch.cuda.current_stream())
        return (*torchs, cupy.cuda.Device().id, cupy.cuda.get_current_stream(), jax.config.jax_enable_x64)

    before = state()
    for target in GPU:
        for source in GPU:
            arraybridge.convert_memory(on_gpu(source, values("int64")), target)
    assert state() == before


def test_cuda_array_interface_objects_convert() -> None:
    array = require("cupy").arange(10, dtype=np.int32)
    assert arraybridge.detect_memory_type(ForeignInterface(array)) == "cupy"
    assert arraybridge.to_numpy(ForeignInterface(array)).tolist() == list(range(10))
    assert address(arraybridge.to_cupy(ForeignInterface(array))) == address(array)


@targets
def test_missing_gpu_raises_and_auto_selects_a_gpu(target: str) -> None:
    require(target)
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:0"):
        arraybridge.convert_memory(values("float32"), target, gpu_id=99)
    result = arraybridge.convert_memory(values("float32"), target, gpu_id="auto")
    assert arraybridge.device_of(result).kind == "gpu"


def test_transposed_arrays_are_cast_by_value() -> None:
    x = require("cupy").asarray(values("float32")).T
    y = arraybridge.convert_memory(x, "cupy", dtype="float64")
    np.testing.assert_array_equal(y.get(), values("float32").T.astype("float64"))


@pytest.mark.parametrize("layout", ["compact", "transposed", "strided", "0-d", "empty"])
def test_copies_are_new_compact_arrays_of_equal_values(layout: str) -> None:
    whole = require("cupy").asarray(values("float32"))
    views = {"transposed": whole.T, "strided": whole[::2, 1::3], "0-d": whole[0, 0], "empty": whole[:0]}
    x = views.get(layout, whole)
    expected = x.get()
    y = arraybridge.convert_memory(x, "cupy", copy=True)
    assert y.flags.c_contiguous
    whole[...] = -1
    np.testing.assert_array_equal(y.get(), expected, strict=True)


def test_strided_arrays_keep_their_strides_in_torch() -> None:
    cupy, _ = require("cupy"), require("torch")
    x = cupy.arange(24.0).reshape(4, 6)[:, ::2]
    y = arraybridge.to_torch(x)
    assert (y.stride(), address(y)) == ((6, 2), address(x))


def test_cupy_has_no_host_arrays_that_could_replace_a_gpu() -> None:
    require("cupy")
    with arraybridge.settings(missing_gpu="host"), pytest.raises(arraybridge.DeviceNotFoundError):
        arraybridge.convert_memory(values("float32"), "cupy", 99)


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_serialized_arrays_are_restored_on_their_gpu(name: str) -> None:
    require_two_gpus()
    require(name)
    x = arraybridge.convert_memory(values("float32"), name, 1)
    y = serialization.load(*serialization.save(x))
    assert str(arraybridge.device_of(y)) == "gpu:1"
    np.testing.assert_array_equal(off_gpu(y), values("float32"))
