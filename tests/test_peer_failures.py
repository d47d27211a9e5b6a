"""What was seen to go wrong on the direct peer, each as a test of ours.

Those of its failures that belong elsewhere live there. With the decorators: an integer image halved by a
`@numpy` function, decorators that convert nothing and take no `gpu_id`. With the memory tests: an illegal
address taken for an out-of-memory error, a cleanup that frees one framework's pool only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraybridge import MemoryConversionError, convert_memory, explain
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


def test_bfloat16_is_shared_between_torch_and_numpy() -> None:
    torch = require("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = torch.tensor([1.0, -2.5, float("inf"), 3.0e38], dtype=torch.bfloat16)
    array = convert_memory(tensor, "numpy", copy=False)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(np.float32).tolist() == tensor.float().tolist()
    assert torch.equal(convert_memory(array, "torch"), tensor)


@pytest.mark.parametrize("source", ["jax", "tensorflow"])
def test_nothing_writes_through_numpy_to_an_immutable_array(source: str) -> None:
    require(source)
    held = convert_memory(np.arange(8.0), source, copy=True)
    array = convert_memory(held, "numpy")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 99.0
    copied = convert_memory(held, "numpy", copy=True)
    copied[0] = 99.0
    assert convert_memory(held, "numpy")[0] == 0.0


def test_nothing_writes_through_to_read_only_memory_of_numpy() -> None:
    require("torch")
    flagged = np.arange(8.0)
    flagged.setflags(write=False)
    for array in (flagged, np.frombuffer(flagged.tobytes()), np.broadcast_to(np.arange(8.0), (1, 8))[0]):
        assert not explain(array, "torch").shares_memory
        convert_memory(array, "torch").zero_()
        assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("target", HOST)
@pytest.mark.parametrize("source", HOST)
def test_no_full_copy_between_host_frameworks(source: str, target: str) -> None:
    """4 MiB of aligned float32, and what TensorFlow made by itself."""
    require(source)
    require(target)
    memory = data.aligned_bytes(4 * 2**20).view(np.float32)
    arrays = [convert_memory(memory, source, copy=False)]
    if source == "tensorflow":
        arrays.append(require("tensorflow").random.stateless_uniform((1024, 1024), seed=(1, 2)))
    for array in arrays:
        assert data.address(convert_memory(array, target, copy=False)) == data.address(array)
