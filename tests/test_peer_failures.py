"""What was seen to go wrong on the direct peer, each as a test of ours.

Those of its failures that belong elsewhere live there. With the decorators: an integer image halved by a
`@numpy` function, decorators that convert nothing and take no `gpu_id`. With the memory tests: an illegal
address taken for an out-of-memory error, a cleanup that frees one framework's pool only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arraybridge import CopyRequiredError, MemoryConversionError, convert_memory, explain, trace
from tests import matrix_data as data
from tests.helpers import require

HOST = ("numpy", "torch", "jax", "tensorflow")


@pytest.mark.parametrize("source", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize(
    "values",
    [
        np.array([2**32 + 5, -(2**40)]),
        np.array([2**63 + 1], np.uint64),
        np.array([1e300, 0.1]),
        np.array([0.1 + 1e300j]),
    ],
    ids=["int64", "uint64", "float64", "complex128"],
)
def test_wide_dtypes_are_not_narrowed_on_the_way_to_jax(source: str, values: np.ndarray[Any, Any]) -> None:
    jax = require("jax")
    require(source)
    assert not jax.config.jax_enable_x64
    result = convert_memory(convert_memory(values, source), "jax")
    assert result.dtype.name == values.dtype.name
    assert np.asarray(result).tobytes() == values.tobytes()


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow", "pyclesperanto"])
def test_a_mask_is_not_dropped(target: str) -> None:
    require(target)
    masked = np.ma.masked_equal(np.array([1.0, -999.0, 3.0], np.float32), -999.0)
    with pytest.raises(MemoryConversionError, match=r"(?i)mask") as caught:
        convert_memory(masked, target)
    assert "filled" in str(caught.value), "what to pass instead belongs into the message"


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow", "pyclesperanto"])
@pytest.mark.parametrize("dtype", [">f4", ">i2", ">u4"])
def test_big_endian_arrays_arrive(target: str, dtype: str) -> None:
    require(target)
    result = convert_memory(np.array([1, 2, 300], dtype), target)
    assert data.bits(result) == np.array([1, 2, 300], dtype[1:]).tobytes()
    assert data.dtype_name(result) == np.dtype(dtype).name


def test_bfloat16_travels_from_torch_to_numpy() -> None:
    torch = require("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = torch.tensor([1.0, -2.5, float("inf"), 3.0e38], dtype=torch.bfloat16)
    array = convert_memory(tensor, "numpy")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(np.float32).tolist() == tensor.float().tolist()
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    back = convert_memory(array, "torch")
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, tensor)


def test_nothing_writes_through_to_a_jax_array_by_way_of_numpy() -> None:
    jax = require("jax")
    source = jax.block_until_ready(jax.numpy.arange(8.0))
    array = convert_memory(source, "numpy")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 99.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    copied = convert_memory(source, "numpy", copy=True)
    copied[0] = 99.0
    assert float(source[0]) == 0.0


def test_nothing_writes_through_to_a_tensorflow_tensor_by_way_of_numpy() -> None:
    tf = require("tensorflow")
    source = tf.range(8.0)
    array = convert_memory(source, "numpy")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 99.0
    copied = convert_memory(source, "numpy", copy=True)
    copied[0] = 99.0
    assert float(source[0]) == 0.0


def _flagged() -> np.ndarray[Any, Any]:
    array = np.arange(8.0)
    array.setflags(write=False)
    return array


def _from_bytes() -> np.ndarray[Any, Any]:
    return np.frombuffer(np.arange(8.0).tobytes())


def _broadcast() -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.arange(8.0), (1, 8))[0]


@pytest.mark.parametrize("make", [_flagged, _from_bytes, _broadcast])
def test_nothing_writes_through_to_read_only_numpy_memory(make: Callable[[], np.ndarray[Any, Any]]) -> None:
    require("torch")
    array = make()
    assert not array.flags.writeable
    assert not explain(array, "torch").shares_memory
    tensor = convert_memory(array, "torch")
    tensor.zero_()
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("target", HOST)
@pytest.mark.parametrize("source", HOST)
def test_no_full_copy_between_host_frameworks(source: str, target: str) -> None:
    """4 MiB of aligned float32, both ways with TensorFlow too: shared, and reported so."""
    require(source)
    require(target)
    memory = data.aligned_bytes(4 * 2**20).view(np.float32)
    memory[...] = np.arange(memory.size)
    array = convert_memory(memory, source, copy=False)
    with trace() as log:
        result = convert_memory(array, target, copy=False)
    assert data.address(result) == data.address(memory)
    assert log.total_bytes_copied == 0
    assert data.bits(result) == memory.tobytes()


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow"])
def test_a_tensor_of_tensorflow_is_not_copied_either(target: str) -> None:
    """A tensor in TensorFlow's own memory, not one that came from elsewhere."""
    tf = require("tensorflow")
    require(target)
    source = tf.random.stateless_uniform((1024, 1024), seed=(1, 2))
    try:
        result = convert_memory(source, target, copy=False)
    except CopyRequiredError as error:
        pytest.fail(f"TensorFlow's own memory was not shared with {target}: {error}")
    assert data.address(result) == data.address(source)
