"""``settings(missing_gpu="host")``: it reaches every call that names a GPU, and each warns once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import BufferPool, Device, MissingGpuWarning, Pipeline, device_map, prefetch, settings
from tests.helpers import require

NOWHERE = 77
X = np.arange(8, dtype=np.float32).reshape(4, 2)


def three(x: Any, y: Any, *, z: Any) -> Any:
    assert all(str(arraybridge.device_of(one)) == "cpu" for one in (x, y[0], z))
    return x + y[0] + z


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    "call",
    [
        lambda: arraybridge.convert_tree({"a": X, "b": [X, X]}, "torch", NOWHERE)["b"][1],
        lambda: arraybridge.convert_tree([X, X], "torch", device=f"cuda:{NOWHERE}")[1],
        lambda: arraybridge.torch(gpu_id=NOWHERE)(three)(X, [X], z=X) / 3,
        lambda: arraybridge.torch(gpu_id="auto")(three)(X, [X], z=X) / 3,
        lambda: arraybridge.torch(device=f"gpu:{NOWHERE}", oom_recovery=True)(three)(X, [X], z=X) / 3,
        lambda: list(prefetch([X, {"x": X}, X], "torch", NOWHERE))[2],
        lambda: list(prefetch([X, X], "torch", "auto"))[1],
        lambda: list(prefetch([X, X], "torch", device=f"gpu:{NOWHERE}"))[1],
        lambda: Pipeline(arraybridge.torch(gpu_id=NOWHERE)(same), microbatches=4)(X),
        lambda: list(device_map(arraybridge.torch(gpu_id=NOWHERE)(same), [X, X, X]))[2],
        lambda: list(device_map(same, [X, X], [f"gpu:{NOWHERE}"]))[1],
        lambda: list(device_map(arraybridge.torch(same), [X, X], [f"gpu:{NOWHERE}"]))[1],
        lambda: arraybridge.torch(gpu_id=NOWHERE)(lambda: arraybridge.to_torch(X))(),
        lambda: arraybridge.stack_slices(list(X[:, None]), "torch", NOWHERE)[:, 0],
    ],
    ids=[
        *("convert_tree", "convert_tree-device", "decorated", "decorated-auto", "decorated-device"),
        *("prefetch", "prefetch-auto", "prefetch-device", "Pipeline", "device_map-decorated"),
        *("device_map-plain", "device_map-framework", "no-arrays", "stack_slices"),
    ],
)
def test_a_call_warns_once_and_runs_on_the_host(call: Callable[[], Any]) -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("the freest card is there")
    for _ in range(2):
        with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = call()
        assert [w.category for w in seen] == [MissingGpuWarning]
        assert "gpu:" in str(seen[0].message)
        assert str(arraybridge.device_of(result)) == "cpu"
        np.testing.assert_array_equal(arraybridge.to_numpy(result), X)
    with pytest.raises(arraybridge.DeviceNotFoundError):
        call()


def test_a_buffer_and_the_device_of_a_framework() -> None:
    torch = require("torch")
    pool = BufferPool()
    with settings(missing_gpu="host"):
        with pytest.warns(MissingGpuWarning, match=f"gpu:{NOWHERE} is missing") as seen:
            buffer = pool.take((3,), "float32", "torch", gpu_id=NOWHERE)
        assert (len(seen), seen[0].filename) == (1, __file__)
        assert buffer.device == torch.device("cpu")
        pool.give(buffer)
        assert pool.take((3,), "float32", "torch") is buffer  # one place, and so one buffer
        with pytest.warns(MissingGpuWarning, match=f"gpu:{NOWHERE} is missing") as seen:
            native = Device("gpu", NOWHERE).native("torch")
        assert (len(seen), seen[0].filename) == (1, __file__)
        assert native == torch.device("cpu")
        with pytest.raises(arraybridge.DeviceNotFoundError):
            Device("cpu", NOWHERE).native("torch")
    for ask in (
        lambda: pool.take((3,), "float32", "torch", gpu_id=NOWHERE),
        lambda: Device("gpu", NOWHERE).native("torch"),
    ):
        with pytest.raises(arraybridge.DeviceNotFoundError, match='missing_gpu="host"'):
            ask()


def test_what_has_no_host_arrays_is_refused_all_the_same() -> None:
    require("pyclesperanto")
    with settings(missing_gpu="host"), pytest.raises(arraybridge.DeviceNotFoundError):
        Device("opencl", NOWHERE).native("pyclesperanto")


def test_a_call_with_gradients_warns_once() -> None:
    torch = require("torch")
    require("jax")

    @arraybridge.jax(grad="flow", gpu_id=NOWHERE)
    def total(x: Any, y: Any, z: Any) -> Any:
        return (x * y + z).sum()

    args = [torch.ones(3, requires_grad=True) for _ in range(3)]
    with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert total(*args).tolist() == 6
    assert len(seen) == 1


def test_one_call_after_another_warns_anew() -> None:
    require("torch")

    @arraybridge.torch(gpu_id=NOWHERE)
    def inner(x: Any) -> Any:
        return x

    with settings(missing_gpu="host"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            inner(inner(X))
    assert len(seen) == 6
