"""Unusual sources: arrays without their own memory, with less of it, or with that of another object."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    CannotSplitError,
    CopyRequiredError,
    MemoryConversionError,
    convert_memory,
    explain,
)
from arraybridge.testing import inject_oom
from tests import matrix_data as data
from tests.helpers import jax_with, require

HOST = ("numpy", "torch", "jax", "tensorflow")
targets = pytest.mark.parametrize("target", HOST)
of_torch = pytest.mark.parametrize("target", ["numpy", "jax", "tensorflow"])


def refusal(x: Any, target: str, **options: Any) -> str:
    """Return the error that both calls raise for a rejected array."""
    message = ""
    for call in (convert_memory, explain, convert_memory):
        with pytest.raises(MemoryConversionError) as caught:
            call(x, target, **options)
        message = str(caught.value)
    return message


# ---- PyTorch: storage that is missing or was freed -------------------------------------------------------


@of_torch
def test_tensors_without_memory_raise(target: str) -> None:
    """Check tensors under functionalize, fake tensors, and tensors whose storage was freed."""
    torch = require("torch")
    require(target)
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(4)
    convert_memory(real, target)  # so that the fast path is taken

    def body(x: Any) -> Any:
        for options in ({}, {"copy": True}):
            assert "torch.func" in refusal(x + 1, target, **options)
        return x + 1

    assert torch.func.functionalize(body)(real).tolist() == [2.0] * 4
    with FakeTensorMode():
        fake = torch.zeros(3)
        assert "FakeTensorMode" in refusal(fake, target)
    assert "FakeTensorMode" in refusal(fake, target)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(1000).to(dtype)
        x.untyped_storage().resize_(0)
        for options in ({}, {"copy": True}, {"copy": False}, {"device": "cpu"}):
            assert "storage" in refusal(x, target, **options)
    assert convert_memory(x, "torch") is x
    with pytest.raises(ArrayNotSupportedError, match="storage"):
        convert_memory(x, "torch", copy=True)


def test_distributed_tensors_raise() -> None:
    torch = require("torch")
    distributed = pytest.importorskip("torch.distributed")
    tensors = pytest.importorskip("torch.distributed.tensor")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = tensors.init_device_mesh("cpu", (1,))
        spread = tensors.distribute_tensor(torch.arange(4.0), mesh, [tensors.Shard(0)])
        message = refusal(spread, "numpy")
        assert convert_memory(spread, "torch") is spread
        assert convert_memory(spread.to_local(), "numpy").tolist() == [0, 1, 2, 3]
        for placement in (tensors.Shard(0), tensors.Replicate()):
            batch = tensors.distribute_tensor(torch.arange(4.0), mesh, [placement])
            # Other processes would not split their parts, and the results would be wrong.
            with pytest.raises(CannotSplitError, match="other processes"), inject_oom("torch", above_rows=2):
                arraybridge.split_and_retry(lambda rows: rows, batch)
    finally:
        distributed.destroy_process_group()
    for words in ("DTensor", "to_local()", "full_tensor()"):
        assert words in message


# ---- NumPy -----------------------------------------------------------------------------------------------


@targets
def test_shared_sources_cannot_be_resized(target: str) -> None:
    torch = require("torch")
    require(target)
    if target != "numpy":
        numbers = np.arange(4096.0)
        for source in (numbers, numbers[-numbers.ctypes.data % 64 // 8 :]):
            result = convert_memory(source, target)
            del source
            with pytest.raises(ValueError, match="resize"):
                numbers.resize(1 << 16)
            del result
    if target == "torch":
        return
    owner = torch.arange(4096.0)
    result = convert_memory(owner, target)
    for count in (0, 1 << 16):
        with pytest.raises(RuntimeError, match="resiz"):
            owner.untyped_storage().resize_(count)
    assert data.bits(result) == np.arange(4096, dtype=np.float32).tobytes()


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow"])
def test_c_types_of_equal_size_are_equivalent(target: str) -> None:
    require(target)
    for code in ("longlong", "ulonglong", "long", "ulong"):
        array = np.arange(5, dtype=code) + np.array(2**62, code)
        for copy in (None, True, None):
            result = convert_memory(array, target, copy=copy)
            assert (data.bits(result), data.dtype_name(result)) == (array.tobytes(), array.dtype.name)


@targets
def test_numpy_scalars_are_0d_arrays(target: str) -> None:
    require(target)
    for scalar in (np.float32(3), np.int8(-3), np.uint64(2**63), np.bool_(True), np.complex64(1 - 2j)):
        assert arraybridge.detect_memory_type(scalar) == "numpy"
        for _ in range(2):
            result = convert_memory(scalar, target)
            assert (data.framework_of(result), tuple(result.shape)) == (target, ())
            assert (data.dtype_name(result), data.bits(result)) == (scalar.dtype.name, scalar.tobytes())
            with pytest.raises(CopyRequiredError):
                convert_memory(scalar, target, copy=False)


# ---- JAX and TensorFlow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow"])
def test_deleted_arrays_raise(target: str) -> None:
    jnp = require("jax").numpy
    require(target)

    def gone() -> Any:
        x = jnp.arange(4.0) + 1
        x.delete()
        return x

    for options in ({}, {"copy": True}, {"device": "cpu"}):
        assert "deleted" in refusal(gone(), target, **options)
        convert_memory(jnp.arange(4.0), target, **options)
        assert "deleted" in refusal(gone(), target, **options)
    stays = gone()
    assert convert_memory(stays, "jax") is stays
    with pytest.raises(MemoryConversionError, match="deleted"):
        convert_memory(stays, "jax", copy=True)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("device", ["cpu:0", "cpu", "cpu:1"])
def test_sharded_arrays_stay_unless_a_device_is_given(device: str, replicated: bool) -> None:
    jax = jax_with(2)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    spec = jax.sharding.PartitionSpec(None if replicated else "x")
    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.sharding.NamedSharding(mesh, spec))
    assert convert_memory(x, "jax") is convert_memory(x, "jax", "jax") is x
    moved = [convert_memory(x, "jax", device=device) for _ in range(2)]
    for result, place in ((moved[0], device), (moved[1], device), (arraybridge.to_cpu(x), "cpu")):
        assert (str(arraybridge.device_of(result)), len(result.devices())) == (place.removesuffix(":0"), 1)
        assert np.asarray(result).tolist() == list(range(8))
    route = explain(x, "jax", device=device)
    if replicated:
        assert (route.method, route.copies) == ("view", 0)
        return
    assert (route.method, route.copies) == ("host", 1)
    with pytest.raises(CopyRequiredError):
        convert_memory(x, "jax", device=device, copy=False)


@targets
def test_rare_float8_types_convert_if_both_frameworks_have_them(target: str) -> None:
    require(target)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
        source = np.arange(5).astype(getattr(ml_dtypes, dtype))
        for x in (source, require("tensorflow").constant(source)):
            result = convert_memory(x, target, copy=True)
            assert (data.dtype_name(result), data.bits(result)) == (dtype, source.tobytes())


@targets
@pytest.mark.parametrize("shape", [[None, 4], [3, None], None])
def test_variables_of_unknown_shape_have_the_shape_of_their_value(target: str, shape: Any) -> None:
    require(target)
    tf = require("tensorflow")
    for values in (np.arange(12, dtype="float32").reshape(3, 4), np.array([[True] * 4] * 3)):
        x = tf.Variable(values, shape=tf.TensorShape(shape))
        for options in ({}, {"copy": True}, {"dtype": "float32"}):
            route = explain(x, target, **options)
            assert route.nbytes == values.nbytes
            with arraybridge.trace() as log:
                result = convert_memory(x, target, **options)
            assert log.records == [route]
            assert log.total_bytes_copied == route.copies * values.nbytes
            result = convert_memory(x, target, **options)
            assert (
                arraybridge.to_numpy(result).astype("float32").tolist() == values.astype("float32").tolist()
            )


def test_copies_of_variables_of_unknown_shape_take_other_shapes() -> None:
    tf = require("tensorflow")
    x = tf.Variable(tf.ones((2, 3)), shape=tf.TensorShape([None, 3]), trainable=False)
    copied = convert_memory(x, "tensorflow", copy=True)
    assert not copied.trainable
    copied.assign(tf.zeros((5, 3)))
    assert x.numpy().tolist() == [[1.0] * 3] * 2
    scalar = tf.Variable(3.0, shape=tf.TensorShape(None))
    assert explain(scalar, "numpy").nbytes == 4
    assert convert_memory(scalar, "numpy").shape == ()
