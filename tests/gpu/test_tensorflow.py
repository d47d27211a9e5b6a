"""TensorFlow on a GPU: conversions to and from each framework, memory, and out-of-memory errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory, device_of, explain, is_oom_error, memory_stats
from arraybridge.host import dlpack_capsules
from tests.helpers import EMULATED, require

pytestmark = pytest.mark.gpu

tf: Any = None  # imported with the first test, not at collection
others = pytest.mark.parametrize("other", ["cupy", "torch", "jax"])


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    global tf
    if EMULATED:
        pytest.skip("the emulated GPU does not support TensorFlow")
    tf = require("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("this TensorFlow finds no GPU")


def values(dtype: str) -> np.ndarray:
    return (np.arange(2 << 10) % 100).astype(dtype).reshape(2, -1)


def address_of(x: Any) -> int:
    owner = arraybridge.framework(arraybridge.detect_memory_type(x))
    if owner.name == "tensorflow":
        return dlpack_capsules.capsule_address(x.__dlpack__())
    return int(owner.interchange.address(x))


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64"])
@others
def test_gpu_arrays_are_shared_in_both_directions(other: str, dtype: str) -> None:
    require(other)
    host = values(dtype)
    for source, target in (("tensorflow", other), (other, "tensorflow")):
        x = convert_memory(host, source, 0)
        route = explain(x, target)
        y = convert_memory(x, target)
        assert str(device_of(y)) == "gpu:0"
        assert (route.shares_memory, address_of(y) == address_of(x)) == (True, True)
        np.testing.assert_array_equal(arraybridge.to_numpy(y), host, strict=True)


@others
def test_results_of_late_work_arrive(other: str) -> None:
    """Check that a conversion waits for the source's work, and that the source outlives the target's work."""
    require(other)
    for source, target in (("tensorflow", other), (other, "tensorflow")):
        for value in range(5):
            x = convert_memory(np.full((512, 512), value / 512, np.float32), source, 0)
            for _ in range(3):
                x = x @ x * 0 + value
            y = convert_memory(x, target)
            z = y * 1
            del x, y
            assert (arraybridge.to_numpy(z) == value).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "bool"])
def test_transfers_keep_all_bits(dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    host = arraybridge.to_numpy(tf.cast(values("float32"), dtype))
    x = convert_memory(host, "tensorflow", 0)
    assert (str(device_of(x)), x.dtype.name) == ("gpu:0", dtype)
    assert arraybridge.to_numpy(x).tobytes() == host.tobytes()
    assert str(device_of(arraybridge.to_cpu(x))) == "cpu"


def test_decorated_functions_run_on_the_gpu() -> None:
    seen = []

    @arraybridge.tensorflow(gpu_id=0, output_type="input")
    def double(x: Any) -> Any:
        seen.append(str(device_of(x)))
        return x * 2

    np.testing.assert_array_equal(double(values("float32")), values("float32") * 2)
    assert seen == ["gpu:0"]


def test_memory_is_reported() -> None:
    x = convert_memory(np.zeros(1 << 22, np.uint8), "tensorflow", 0)
    (row,) = [row for row in memory_stats()["gpu:0"].holdings if row.holder == "tensorflow"]
    assert row.used is not None
    assert row.used >= 1 << 22
    assert x.shape == (1 << 22,)


def test_real_oom_errors_are_recognized() -> None:
    total = memory_stats()["gpu:0"].total
    assert total is not None
    with pytest.raises(Exception) as caught, tf.device("/GPU:0"):  # noqa: PT011
        tf.zeros([8 * total], tf.uint8) + 1
    assert is_oom_error(caught.value), repr(caught.value)
