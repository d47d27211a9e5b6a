"""Convert JAX arrays that span two processes: this one, and a forked copy that is made before JAX starts.

Usage: jax_processes.py PORT
"""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arraybridge as ab
from arraybridge.testing import inject_oom

PORT = int(sys.argv[1])
VALUES = np.arange(8, dtype="float32")


def distribute(*axes: str) -> jax.Array:
    """Return the values on all devices of both processes, replicated or split along the axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(VALUES.shape, sharding, lambda index: VALUES[index])


def check_devices() -> None:
    local = jax.local_devices()
    for i, native in enumerate(local):
        on_cpu = ab.convert_memory(VALUES, "jax", device=f"cpu:{i}")
        assert on_cpu.devices() == {native}
        assert ab.device_of(on_cpu) == ab.Device("cpu", i)
        assert ab.convert_memory(VALUES, "jax", device=native).devices() == {native}
    other = next(device for device in jax.devices() if device not in local)
    with pytest.raises(ValueError, match="another process"):
        ab.convert_memory(VALUES, "jax", device=other)


def check_replicated() -> None:
    x = distribute()
    assert ab.device_of(x) == "cpu"
    for _ in range(2):
        view = ab.to_numpy(x)
        assert view.tolist() == VALUES.tolist()
        assert not view.flags.writeable
        tensor = ab.to_torch(x)
        tensor.zero_()
        assert ab.to_numpy(ab.to_jax(x, device="cpu")).tolist() == VALUES.tolist()
    assert ab.explain(x, "numpy", copy=False).shares_memory
    assert not ab.explain(x, "torch").shares_memory
    assert ab.convert_memory(x, out=np.zeros_like(VALUES)).tolist() == VALUES.tolist()
    copied = ab.to_numpy(x, copy=True)
    copied[:] = 0
    assert all(np.array_equal(shard.data, VALUES) for shard in x.addressable_shards)
    assert ab.explain(x, "torch", copy=True).nbytes == VALUES.nbytes
    check_is_not_split(x)


def check_sharded() -> None:
    x = distribute("all")
    assert ab.to_jax(x) is x
    assert ab.jax(lambda a: a)(x) is x
    with ab.trace() as log:
        copied = ab.to_jax(x, copy=True)
    assert log.total_bytes_copied == VALUES.nbytes // 2, "the bytes of the other process are counted"
    assert [shard.data.tolist() for shard in copied.addressable_shards] == [
        shard.data.tolist() for shard in x.addressable_shards
    ]
    out = np.zeros_like(VALUES)
    ab.convert_memory(jnp.asarray(VALUES), out=out)  # so that there is a plan
    for call in (
        ab.to_numpy,
        ab.to_torch,
        lambda x: ab.to_jax(x, device="cpu"),
        lambda x: ab.convert_memory(x, out=out),
    ):
        with pytest.raises(ab.ArrayNotSupportedError) as caught:
            call(x)
    (expression,) = caught.value.expressions
    gathered = eval(expression, {"x": x, "jax": jax})  # noqa: S307  # the expression of the library itself
    assert ab.to_torch(gathered).tolist() == VALUES.tolist()
    check_is_not_split(x)


def check_is_not_split(x: jax.Array) -> None:
    with pytest.raises(ab.CannotSplitError, match="processes"), inject_oom("jax", above_rows=2):
        ab.split_and_retry(lambda batch: batch, x)


child = os.fork()
jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=int(child == 0))
assert ab.to_torch(jnp.arange(3.0)).tolist() == [0, 1, 2]  # an unrelated array, so that there are plans
check_devices()
check_replicated()
check_sharded()
jax.distributed.shutdown()
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0
print("done", flush=True)
