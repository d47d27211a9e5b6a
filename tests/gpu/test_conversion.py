"""Conversions on a card: cupy, torch and jax share its memory, streams are ordered, nothing is lost.

`ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu` makes a missing card or framework a failure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import needs_kernels_of, require

pytestmark = pytest.mark.gpu

CARD = ("cupy", "torch", "jax")
HOST = ("numpy", "torch", "jax")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def values(dtype: str, shape: tuple[int, ...] = (6, 8)) -> np.ndarray:
    """Values that a narrower dtype could not hold, written down by NumPy."""
    count = int(np.prod(shape))
    numbers = np.arange(count, dtype=np.int64)
    if dtype == "bool":
        return (numbers % 3 == 0).reshape(shape)
    if np.dtype(dtype).kind in "iu":
        # Computed in the dtype itself: the largest uint64 is more than any int64 holds.
        below = (numbers % 100).astype(dtype)
        return (np.full(count, np.iinfo(dtype).max, dtype) - below).reshape(shape)
    return (numbers * (1 + 2**-30)).astype(dtype).reshape(shape)


def on_card(framework: str, array: np.ndarray) -> Any:
    """The array on card 0, put there by the framework's own call."""
    module = require(framework)
    if framework == "cupy":
        return module.asarray(array)
    if framework == "torch":
        return module.from_numpy(array.copy()).to("cuda:0")
    with module.enable_x64(True):
        return module.device_put(array, module.devices("gpu")[0])


def off_card(framework: str, x: Any) -> np.ndarray:
    """The values, fetched by the framework's own call."""
    return {"cupy": lambda: x.get(), "torch": lambda: x.cpu().numpy(), "jax": lambda: np.asarray(x)}[
        framework
    ]()


def address(framework: str, x: Any) -> int:
    return {
        "cupy": lambda: x.data.ptr,
        "torch": lambda: x.data_ptr(),
        "jax": lambda: x.unsafe_buffer_pointer(),
    }[framework]()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize("source", CARD)
def test_card_to_card_shares(source: str, target: str, dtype: str) -> None:
    require(target)
    expected = values(dtype)
    array = on_card(source, expected)
    foretold = arraybridge.explain(array, target)
    result = arraybridge.convert_memory(array, target)
    assert arraybridge.detect_memory_type(result) == target
    assert address(target, result) == address(source, array)
    assert off_card(target, result).tobytes() == expected.tobytes()
    assert off_card(target, result).dtype == expected.dtype
    assert foretold.shares_memory
    assert foretold.method == ("same" if source == target else "dlpack")
    assert foretold.device == "gpu:0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize("source", HOST)
def test_host_to_card_and_back(source: str, target: str, dtype: str) -> None:
    require(target)
    require(source)
    expected = values(dtype)
    array = arraybridge.convert_memory(expected, source)
    result = arraybridge.convert_memory(array, target, gpu_id=0)
    assert arraybridge.device_of(result) == "gpu:0"
    assert off_card(target, result).tobytes() == expected.tobytes()
    back = arraybridge.to_numpy(result)
    assert back.dtype == expected.dtype
    assert back.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize(
    "layout", ["transposed", "strided", "negative", "broadcast", "big-endian", "empty", "0-d"]
)
def test_host_layouts_reach_the_card(target: str, layout: str) -> None:
    require(target)
    base = values("float64")
    array = {
        "transposed": lambda: base.T,
        "strided": lambda: base[::2, ::3],
        "negative": lambda: base[::-1, ::-2],
        "broadcast": lambda: np.broadcast_to(base[0], (4, 8)),
        "big-endian": lambda: base.astype(">f8"),
        "empty": lambda: base[:0],
        "0-d": lambda: np.array(base[1, 1]),
    }[layout]()
    assert type(array) is np.ndarray
    result = arraybridge.convert_memory(array, target, gpu_id=0)
    assert np.array_equal(off_card(target, result), array)
    assert off_card(target, result).shape == array.shape


@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize("source", ["cupy", "torch"])
def test_card_layouts(source: str, target: str) -> None:
    """Strided, transposed, reversed and misaligned memory of the card: shared or copied, never wrong."""
    require(target)
    needs_kernels_of(source, target)
    expected = values("float32", (16, 32))
    array = on_card(source, expected)
    views = [(array.T, expected.T), (array[::2, 1::3], expected[::2, 1::3]), (array[:, 1:], expected[:, 1:])]
    views.append((array.reshape(-1)[1:], expected.reshape(-1)[1:]))
    if source == "cupy":
        views.append((array[::-1], expected[::-1]))
    for view, wanted in views:
        foretold = arraybridge.explain(view, target)
        result = arraybridge.convert_memory(view, target)
        assert np.array_equal(off_card(target, result), wanted)
        assert (address(target, result) == address(source, view)) == foretold.shares_memory
        # Kernels that load several elements at once end with a misaligned address where nobody looked.
        assert np.array_equal(off_card(target, result * 2), wanted * 2)


@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize("source", CARD)
def test_copy_true_never_shares_and_copy_false_never_copies(source: str, target: str) -> None:
    require(target)
    expected = values("float32")
    array = on_card(source, expected)
    copied = arraybridge.convert_memory(array, target, copy=True)
    assert address(target, copied) != address(source, array)
    assert np.array_equal(off_card(target, copied), expected)
    shared = arraybridge.convert_memory(array, target, copy=False)
    assert address(target, shared) == address(source, array)
    with pytest.raises(arraybridge.CopyRequiredError):
        arraybridge.convert_memory(array, "numpy", copy=False)


def test_bfloat16_travels_between_torch_and_jax() -> None:
    torch, _ = require("torch"), require("jax")
    tensor = torch.arange(32, device="cuda", dtype=torch.bfloat16)
    result = arraybridge.to_jax(tensor)
    assert result.dtype.name == "bfloat16"
    assert result.unsafe_buffer_pointer() == tensor.data_ptr()
    with pytest.raises(arraybridge.DtypeNotSupportedError):
        arraybridge.to_cupy(tensor)


def test_scalars_of_jax_are_copied_for_torch() -> None:
    require("torch")
    scalar = on_card("jax", np.float32(2.0).reshape(()))
    tensor = arraybridge.to_torch(scalar)
    tensor.fill_(5.0)
    assert float(scalar) == 2.0


@pytest.mark.parametrize("target", ["cupy", "jax", "torch"])
def test_the_consumer_waits_for_the_producers_stream(target: str) -> None:
    """The source is still being computed on a side stream when it is converted."""
    require(target)
    torch = require("torch")
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds
            tensor = torch.full((1 << 20,), 3.0, device="cuda")
            result = arraybridge.convert_memory(tensor, target)
        if target == "torch":
            side.synchronize()
        assert float(off_card(target, result).min()) == 3.0
        tensor.fill_(0)
        torch.cuda.synchronize()


def test_nothing_else_changes() -> None:
    torch, cupy, jax = require("torch"), require("cupy"), require("jax")
    before = (torch.cuda.current_device(), cupy.cuda.Device().id, jax.config.jax_enable_x64)
    stream = torch.cuda.current_stream()
    for target in CARD:
        for source in CARD:
            arraybridge.convert_memory(on_card(source, values("int64")), target)
    assert (torch.cuda.current_device(), cupy.cuda.Device().id, jax.config.jax_enable_x64) == before
    assert torch.cuda.current_stream() == stream


def test_a_cuda_array_interface_is_a_source() -> None:
    cupy = require("cupy")

    class Foreign:
        def __init__(self, array: Any) -> None:
            self.array = array

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return self.array.__cuda_array_interface__

    array = cupy.arange(10, dtype=cupy.int32)
    assert arraybridge.detect_memory_type(Foreign(array)) == "cupy"
    assert arraybridge.to_numpy(Foreign(array)).tolist() == list(range(10))
    assert address("cupy", arraybridge.to_cupy(Foreign(array))) == array.data.ptr


@pytest.mark.parametrize("framework", CARD)
def test_a_missing_card_is_an_error(framework: str) -> None:
    require(framework)
    with pytest.raises(arraybridge.DeviceNotFoundError, match="gpu:0"):
        arraybridge.convert_memory(values("float32"), framework, gpu_id=99)


@pytest.mark.parametrize("framework", CARD)
def test_auto_chooses_a_card(framework: str) -> None:
    require(framework)
    result = arraybridge.convert_memory(values("float32"), framework, gpu_id="auto")
    assert arraybridge.device_of(result).kind == "gpu"


@pytest.mark.parametrize("target", CARD)
@pytest.mark.parametrize("source", CARD)
def test_from_one_card_to_another(source: str, target: str) -> None:
    require(target)
    torch = require("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    expected = values("float64")
    result = arraybridge.convert_memory(on_card(source, expected), target, gpu_id=1)
    assert arraybridge.device_of(result) == "gpu:1"
    assert off_card(target, result).tobytes() == expected.tobytes()
