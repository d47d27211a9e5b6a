"""JAX arrays on several devices: replicated ones are treated as one array, and views of a replica are
read-only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import CopyRequiredError, Device, convert_memory, explain, trace
from arraybridge.testing import inject_oom
from tests.helpers import require

VALUES = np.arange(64, dtype="float32").reshape(8, 8)


def placed(*axes: str | None, values: Any = VALUES) -> Any:
    """Return the values on all CPU devices of JAX (a mesh with axes x and y), split along these axes."""
    jax = require("jax")
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("JAX has fewer than four CPU devices here")
    mesh = jax.sharding.Mesh(np.array(devices[:4]).reshape(2, 2), ("x", "y"))
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def addresses(x: Any) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def unchanged(x: Any, values: Any = VALUES) -> bool:
    return all(np.array_equal(np.asarray(shard.data), values[shard.index]) for shard in x.addressable_shards)


def test_numpy_views_one_replica_read_only() -> None:
    x = placed()
    for _ in range(2):
        view = convert_memory(x, "numpy")
        assert not view.flags.writeable
        assert view.ctypes.data in addresses(x)
        assert np.array_equal(view, VALUES)
    assert explain(x, "numpy", copy=False).shares_memory


@pytest.mark.parametrize("axes", [(), ("x",), (None, "y"), ("x", "y"), (("x", "y"),)])
def test_copies_change_no_device(axes: Any) -> None:
    require("torch")
    for _ in range(2):
        x = placed(*axes)
        copied = convert_memory(x, "numpy", copy=True)
        copied[...] = 5
        tensor = convert_memory(x, "torch")
        tensor[...] = 7
        convert_memory(x, "torch", copy=True)[...] = 8
        assert unchanged(x)
        assert not explain(x, "torch").shares_memory
        with pytest.raises(CopyRequiredError):
            convert_memory(x, "torch", copy=False)


@pytest.mark.parametrize("values", [np.float32(3), np.zeros((0, 3), "float32"), VALUES.astype("float16")])
def test_replicated_arrays_of_any_shape(values: Any) -> None:
    require("torch")
    x = placed(values=values)
    for target in ("numpy", "torch"):
        result = arraybridge.to_numpy(convert_memory(x, target))
        assert (result.dtype, result.shape) == (values.dtype, values.shape)
        assert result.tobytes() == values.tobytes()


def test_tensorflow_shares_a_replica_without_writable_views() -> None:
    require("torch")
    require("tensorflow")
    x = placed()
    tensor = convert_memory(x, "tensorflow", copy=False)
    assert arraybridge.to_numpy(tensor).ctypes.data in addresses(x)
    convert_memory(tensor, "torch").zero_()
    assert unchanged(x)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_jax_on_one_of_the_devices_shares_its_replica(index: int) -> None:
    require("torch")
    x = placed()
    own = x.addressable_shards[index].data.unsafe_buffer_pointer()
    for _ in range(2):
        one = convert_memory(x, "jax", device=f"cpu:{index}")
        assert one.unsafe_buffer_pointer() == own
        assert arraybridge.device_of(one) == Device.parse(f"cpu:{index}")
        convert_memory(one, "torch").zero_()
        copied = convert_memory(x, "jax", device=f"cpu:{index}", copy=True)
        assert copied.unsafe_buffer_pointer() not in addresses(x)
        assert arraybridge.device_of(copied) == Device.parse(f"cpu:{index}")
    assert explain(x, "jax", device=f"cpu:{index}").shares_memory
    assert unchanged(x)


def test_the_same_framework_keeps_the_array() -> None:
    x = placed()
    assert convert_memory(x, "jax") is x
    copied = convert_memory(x, "jax", copy=True)
    assert copied.sharding == x.sharding
    assert not addresses(copied) & addresses(x)
    assert arraybridge.to_cpu(x).unsafe_buffer_pointer() in addresses(x)
    assert arraybridge.to_cpu(x, copy=True).unsafe_buffer_pointer() not in addresses(x)


@pytest.mark.parametrize("axes", [(), ("x",), ("x", "y")])
@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_explain_and_trace_agree(target: str, copy: bool | None, axes: Any) -> None:
    require(target)
    x = placed(*axes)
    for device in (None, *(["cpu", "cpu:1"] if target == "jax" else [])):
        route = explain(x, target, copy=copy, device=device)
        with trace() as log:
            result = convert_memory(x, target, copy=copy, device=device)
        assert log.records == [route]
        if target == "numpy":
            assert (result.ctypes.data in addresses(x)) == route.shares_memory
            assert result.flags.writeable != route.shares_memory
        if target == "torch":
            assert (result.data_ptr() in addresses(x)) == route.shares_memory
        if target == "jax":
            assert bool(addresses(result) & addresses(x)) == route.shares_memory


def test_framework_methods_copy_replicas() -> None:
    x = placed()
    own = arraybridge.framework("jax")
    own.to_host(x)[...] = 5
    moved = own.devices.to_device(x, arraybridge.Device("cpu", 1))
    assert moved.unsafe_buffer_pointer() not in addresses(x)
    assert unchanged(x)


@pytest.mark.parametrize("axes", [(), ("x",)])
def test_rows_of_arrays_over_several_devices_are_split_and_joined(axes: Any) -> None:
    x = placed(*axes)
    with inject_oom("jax", above_rows=2):
        result = arraybridge.split_and_retry(arraybridge.jax(lambda part: part * 2), x)
    assert np.array_equal(np.asarray(result), VALUES * 2)
    assert unchanged(x)


def test_decorated_functions_do_not_write_to_replicas() -> None:
    require("torch")
    x = placed()

    @arraybridge.torch(output_type="input")
    def change(tensor: Any) -> Any:
        return tensor.mul_(0)

    assert not np.asarray(change(x)).any()
    assert unchanged(x)


@pytest.mark.parametrize("axes", [(), ("x",)])
def test_gradients_of_arrays_over_several_devices(axes: Any) -> None:
    jax = require("jax")
    require("torch")
    x, factor = placed(*axes), placed(*axes)

    @arraybridge.torch(grad="flow")
    def square(tensor: Any) -> Any:
        return tensor**2

    result, pullback = jax.vjp(square, x)
    (gradient,) = pullback(factor)
    assert np.array_equal(np.asarray(result), VALUES**2)
    assert np.array_equal(np.asarray(gradient), 2 * VALUES * VALUES)
    assert unchanged(x)
    assert unchanged(factor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_parts_and_joins_keep_the_bits_of_nans(dtype: str) -> None:
    require("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has these dtypes through ml_dtypes")
    element = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.arange(256**element.itemsize, dtype=f"uint{8 * element.itemsize}").reshape(16, -1)
    own, x = arraybridge.framework("jax"), convert_memory(bits.view(element), "jax")

    def read(result: Any) -> Any:
        return arraybridge.to_numpy(result).view(bits.dtype).tolist()

    assert read(own.batching.slice_axis(x, 1, 3, 9)) == bits[:, 3:9].tolist()
    assert read(own.batching.slice_axis(x, 0, -3, 99)) == bits[-3:].tolist()
    assert read(own.batching.slice_axis(x, -1, 3, 3)) == bits[:, :0].tolist()
    assert read(own.batching.stack(own.batching.unstack(x))) == bits.tolist()
    parts = [own.batching.slice_axis(x, 0, 0, 5), own.batching.slice_axis(x, 0, 5, 16)]
    assert read(own.batching.concatenate(parts, 0)) == bits.tolist()
