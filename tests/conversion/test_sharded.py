"""JAX arrays that are sharded over the devices of one process, meshes in scope, and several processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, CopyRequiredError, convert_memory, explain
from tests import matrix_data
from tests.helpers import jax_with, output_of, require, run_python

KINDS = ("Auto", "Explicit")
VALUES = np.arange(64, dtype="float32").reshape(8, 8)
PROCESSES = str(Path(__file__).parent / "scripts" / "jax_processes.py")

kinds = pytest.mark.parametrize("kind", KINDS)


def mesh_of(kind: str, shape: tuple[int, ...] = (2, 2)) -> Any:
    """Return a mesh of four CPU devices whose axes, x and y, are of this kind."""
    jax = jax_with(4)
    if kind == "Explicit" and not hasattr(jax, "set_mesh"):
        pytest.skip("JAX 0.7.0 has no jax.set_mesh")
    names = ("x", "y")[: len(shape)]
    # jax.make_mesh makes Explicit axes since JAX 0.9.
    types = {} if kind == "Auto" else {"axis_types": (jax.sharding.AxisType.Explicit,) * len(shape)}
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(shape), names, **types)


def place(values: Any, mesh: Any, *axes: Any) -> Any:
    jax = require("jax")
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


def use(mesh: Any) -> Any:
    jax = require("jax")
    return (jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh)(mesh)


# ---- conversions -----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("axes", [("x",), (None, "y"), ("x", "y"), (("x", "y"),)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_sharded_arrays_are_copied_once(kind: str, axes: Any, dtype: str) -> None:
    """Some of the shards are replicated: over y in the first case, and over x in the second."""
    require("torch")
    require("tensorflow")
    values = VALUES.astype(matrix_data.numpy_dtype(dtype))
    x = place(values, mesh_of(kind), *axes)
    for target in ("numpy", "torch", "tensorflow"):
        for _ in range(2):
            result = convert_memory(x, target)
            assert matrix_data.bits(result) == values.tobytes()
            assert (matrix_data.address(result) or 1) % 64 == 0
        assert explain(x, target).copies == 1
        with pytest.raises(CopyRequiredError):
            convert_memory(x, target, copy=False)
    one = convert_memory(x, "jax", device="cpu:1")
    assert arraybridge.device_of(one) == "cpu:1"
    assert matrix_data.bits(one + 0 if dtype != "bool" else ~~one) == values.tobytes()
    own = arraybridge.framework("jax")
    moved = own.devices.to_device(x, arraybridge.Device("cpu", 2))
    assert np.array_equal(np.asarray(own.copy(moved)), values)


@kinds
@pytest.mark.parametrize("axes", [(), ("x",), (None, "y"), ("x", "y")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_arrays_are_written_to_an_array(kind: str, axes: Any, dtype: str) -> None:
    torch = require("torch")
    values = VALUES.astype(matrix_data.numpy_dtype(dtype))
    x = place(values, mesh_of(kind), *axes)
    strided = np.zeros((16, 8), values.dtype)[::2, ::-1]
    tensor = torch.zeros(8, 16, dtype=getattr(torch, dtype))[:, ::2]
    for out in (np.zeros_like(values), strided, tensor):
        for _ in range(2):
            out[...] = 0
            assert explain(x, out=out).copies == 1
            assert convert_memory(x, out=out) is out
            assert matrix_data.bits(out) == values.tobytes()
    with pytest.raises(ArrayNotSupportedError, match="out"):
        convert_memory(x, out=np.zeros_like(values, shape=(4, 8)))
    cast = np.zeros(VALUES.shape, "int8")
    assert np.array_equal(convert_memory(x, out=cast, dtype="int8"), VALUES)


def test_a_sharded_array_needs_one_copy_of_its_bytes_and_keeps_none() -> None:
    jax_with(4)
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux resets the peak of a process's memory")
    lines = (
        "import gc, jax, numpy as np, arraybridge",
        "from pathlib import Path",
        "def mebibytes(key):",
        "    lines = Path('/proc/self/status').read_text().splitlines()",
        "    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024",
        "mesh = jax.make_mesh((4,), ('x',))",
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))",
        "arraybridge.to_numpy(jax.device_put(np.zeros((4, 4)), sharding))",
        "x = jax.block_until_ready(jax.device_put(np.zeros((4096, 4096), 'float32'), sharding))",  # 64 MiB
        "gc.collect()",
        "Path('/proc/self/clear_refs').write_text('5')",  # resets the peak
        "before = mebibytes('VmRSS')",
        "result = arraybridge.to_numpy(x)",
        "peak = mebibytes('VmHWM') - before",
        "Path('/proc/self/clear_refs').write_text('5')",
        "arraybridge.convert_memory(x, out=result)",
        "peak_of_output = mebibytes('VmHWM') - before",
        "del result",
        "print(peak, peak_of_output, mebibytes('VmRSS') - before)",
    )
    peak, peak_of_output, remaining = map(float, output_of(*lines, imported=True).split())
    assert peak < 80
    assert peak_of_output < 80, "the values are gathered before they are written to the array"
    assert remaining < 16


# ---- within a mesh ---------------------------------------------------------------------------------------


@kinds
def test_calls_within_a_mesh(kind: str) -> None:
    """Conversions have their own tests in tests/test_surroundings.py."""
    jax = jax_with(4)
    mesh = mesh_of(kind)
    x = arraybridge.to_jax(VALUES.copy())
    with use(mesh):
        assert np.array_equal(arraybridge.stack_slices([x, VALUES], "jax"), [VALUES, VALUES])
        assert np.array_equal(arraybridge.unstack_slices(VALUES[None], "jax")[0], VALUES)
        assert arraybridge.benchmark(lambda: None, runs=1)
        arraybridge.free_memory()
        double = arraybridge.jax(lambda part: jax.device_put(part, x.sharding) * 1)
        with pytest.raises(ValueError, match="incompatible devices"):  # as documented
            double(VALUES)
        placed = place(VALUES, mesh, "x")
        assert np.array_equal(arraybridge.jax(lambda a: a * 2)(placed), VALUES * 2)


@kinds
def test_slices_over_several_devices_are_stacked(kind: str) -> None:
    mesh = mesh_of(kind)
    for axes in ((), ("x",)):
        x = place(VALUES, mesh, *axes)
        stack = arraybridge.stack_slices([x, VALUES, x], "jax")
        assert np.array_equal(stack, [VALUES] * 3)
        assert arraybridge.device_of(stack) == "cpu"


@kinds
@pytest.mark.parametrize("in_scope", [False, True])
def test_gradients_of_functions_that_use_a_mesh(kind: str, in_scope: bool) -> None:
    """The cotangent comes from PyTorch, and the result is on all devices."""
    jax = jax_with(4)
    torch = require("torch")
    mesh = mesh_of(kind)

    @arraybridge.jax(grad="flow")
    def square(x: Any) -> Any:
        return place(x, mesh) ** 2

    x = torch.arange(8.0, requires_grad=True)
    with use(mesh) if in_scope else jax.default_matmul_precision("highest"):
        square(x).sum().backward()
    assert x.grad.tolist() == (2 * x.detach()).tolist()


@kinds
def test_complex_gradients_within_a_mesh(kind: str) -> None:
    jax = jax_with(4)
    require("torch")
    mesh = mesh_of(kind)
    square = arraybridge.torch(grad="flow")(lambda x: x**2)
    x = place(np.arange(8) * np.complex64(1j), mesh)
    with use(mesh):
        result, pullback = jax.vjp(square, x)
        (gradient,) = pullback(place(np.ones(8, "complex64"), mesh))
    assert np.array_equal(result, np.asarray(x) ** 2)
    assert np.array_equal(gradient, 2 * np.asarray(x))


# ---- several processes -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks, which this system cannot")
@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_that_span_processes(devices: int) -> None:
    require("jax")
    require("torch")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = run_python(PROCESSES, str(port), env=env, timeout=300, imported=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n" * 2)


# ---- deleted arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "tensorflow", "jax"])
def test_a_deleted_array_says_so_in_every_form_of_call(target: str) -> None:
    jax = require("jax")
    require(target)
    x = jax.numpy.arange(3.0)
    convert_memory(x, target, copy=True)  # so that there is a plan
    convert_memory(x, target, dtype="int32")
    out = np.ones(3, "float32")
    convert_memory(x, out=out)
    x.delete()
    with pytest.raises(ArrayNotSupportedError, match="deleted"):
        convert_memory(x, out=out)
    forms: list[dict[str, Any]] = [{"copy": True}, {"dtype": "int32"}, {"copy": True, "dtype": "int32"}]
    if target != "jax":
        forms += [{}, {"copy": False}, {"device": "cpu"}]
    elif len(jax.devices("cpu")) > 1:
        forms += [{"device": "cpu:1"}]
    for options in forms:
        for call in (convert_memory, explain, convert_memory):
            with pytest.raises(ArrayNotSupportedError, match="deleted"):
                call(x, target, **options)
    if target != "jax":
        with pytest.raises(ArrayNotSupportedError, match="deleted"):
            getattr(arraybridge, target)(lambda a: a)(x)
        with pytest.raises(ArrayNotSupportedError, match="deleted"):
            arraybridge.convert_tree([x], target)
