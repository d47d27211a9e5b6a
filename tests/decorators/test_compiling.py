"""Compilers and transformations of the frameworks, around and inside decorated functions."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError, DtypeConversion, compilers
from tests.decorators.cases import identity
from tests.helpers import jax_with, require, run_python


def test_jax_transformations_around_a_jax_function() -> None:
    jax = require("jax")
    f = arraybridge.jax(lambda x, y: {"z": (x * x * y).sum()})
    x = jax.numpy.array([1.0, 2.0])
    assert float(jax.jit(f)(x, x)["z"]) == 9.0
    assert jax.grad(lambda v: f(v, 2.0)["z"])(x).tolist() == [4.0, 8.0]
    assert jax.vmap(f)(x, x)["z"].tolist() == [1.0, 8.0]
    one_constant = jax.jit(lambda v: f(v, np.ones(2, np.float32))["z"])
    assert float(one_constant(x)) == 5.0


def primitives(fn: Any, x: Any) -> list[str]:
    """Return the names of the operations that JAX records."""
    return [equation.primitive.name for equation in require("jax").make_jaxpr(fn)(x).eqns]


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}])
def test_traced_values_convert_to_the_device_of_the_trace(options: Any) -> None:
    jax = require("jax")
    x = jax.numpy.ones(3)

    def alone(a: Any) -> Any:
        return arraybridge.to_jax(a, **options) * 2

    def in_a_tree(a: Any) -> Any:
        return arraybridge.convert_tree([a], "jax", **options)[0] * 2

    for f in (alone, in_a_tree):
        assert primitives(f, x) == ["mul"]
        assert jax.jit(f)(x).tolist() == [2.0] * 3


def test_another_device_than_that_of_the_trace_raises() -> None:
    jax = jax_with(2)
    x = jax.numpy.ones(3)
    decorated = arraybridge.jax(device="cpu:1")(identity)
    assert arraybridge.device_of(decorated(x)) == "cpu:1"
    for traced in (decorated, lambda a: arraybridge.to_jax(a, device="cpu:1")):
        for transformed in (jax.jit(traced), jax.vmap(traced), jax.make_jaxpr(traced)):
            with pytest.raises(ArrayNotSupportedError, match=r"to cpu:1: .* device, cpu\. .*device_put"):
                transformed(x)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}])
def test_a_first_call_under_a_trace_leaves_no_tracer_behind(options: Any) -> None:
    jax, torch = require("jax"), require("torch")
    f = arraybridge.jax(output_type="input", **options)(lambda a: a * 2)
    x = jax.numpy.ones(3)
    assert jax.jit(f)(x).tolist() == [2.0] * 3
    for value in (np.ones(3, np.float32), torch.ones(3), x):
        result = f(value)
        assert type(result) is type(value)
        assert result.tolist() == [2.0] * 3
    assert primitives(f, x) == ["mul"]


def test_shard_map_over_several_devices() -> None:
    jax = jax_with(4)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    for options in ({}, {"device": "cpu"}, {"output_type": "input"}):
        f = arraybridge.jax(**options)(lambda a: a - a.mean())
        sharded = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
        for call in (sharded, jax.jit(sharded)):
            assert call(jax.numpy.arange(8.0)).tolist() == [-0.5, 0.5] * 4


def test_jax_jit_around_another_framework_raises() -> None:
    jax = require("jax")
    require("torch")
    for refusing in (
        arraybridge.numpy(identity),
        arraybridge.torch(identity),
        arraybridge.jax(output_type="numpy")(identity),
        arraybridge.jax(dtype_conversion=DtypeConversion.UINT8)(identity),
    ):
        with pytest.raises(ArrayNotSupportedError, match=r"identity\(\).*outside jax\.jit"):
            jax.jit(refusing)(jax.numpy.ones(2))


@pytest.mark.parametrize("name", ["torch", "tensorflow"])
@pytest.mark.parametrize("transformation", ["jit", "grad", "vmap"])
def test_the_advice_for_traced_jax_values_works(transformation: str, name: str) -> None:
    jax = require("jax")
    require(name)
    decorator: Any = getattr(arraybridge, name)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = jax.numpy.asarray(x[1] if transformation == "grad" else x)
    transform = getattr(jax, transformation)

    def first(row: Any) -> Any:
        return row[0] * row[0]

    with pytest.raises(ArrayNotSupportedError, match=rf"in a function .* @{name}\(grad='flow'\)"):
        transform(decorator(first))(data)
    expected = {"jit": x[0] * x[0], "grad": [2 * x[1, 0], 0, 0], "vmap": x[:, 0] * x[:, 0]}[transformation]
    np.testing.assert_array_equal(np.asarray(transform(decorator(grad="flow")(first))(data)), expected)


def test_tf_function_and_gradients_around_a_tensorflow_function() -> None:
    tf = require("tensorflow")
    f = arraybridge.tensorflow(lambda x: {"y": x * x})
    assert tf.function(lambda x: f(x)["y"])(tf.constant([2.0])).numpy().tolist() == [4.0]
    with tf.GradientTape() as tape:
        x = tf.Variable([3.0])
        y = f(x)["y"]
    assert tape.gradient(y, x).numpy().tolist() == [6.0]
    refused = arraybridge.numpy(identity)
    with pytest.raises(ArrayNotSupportedError, match=r"outside tf\.function"):
        tf.function(refused, autograph=False)(tf.constant([2.0]))


def test_torch_training_is_unchanged_by_the_decorator() -> None:
    torch = require("torch")
    x = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
    models[1].load_state_dict(models[0].state_dict())
    decorated = arraybridge.torch(lambda x: models[0](x).square().mean())
    models[1](torch.tensor(x)).square().mean().backward()
    tensor = torch.tensor(x, requires_grad=True)
    for loss in (
        lambda: decorated(x),
        lambda: torch.utils.checkpoint.checkpoint(decorated, tensor, use_reentrant=True),
        lambda: torch.utils.checkpoint.checkpoint(decorated, tensor, use_reentrant=False),
    ):
        models[0].zero_grad()
        loss().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert tensor.grad is not None
    with torch.no_grad():
        assert not decorated(x).requires_grad
    with torch.inference_mode():
        assert decorated(x).is_inference()


def compiled(fn: Any, **options: Any) -> Any:
    torch = require("torch")
    torch.compiler.reset()
    return torch.compile(fn, backend="eager", **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"output_type": "input"}])
def test_torch_compile_breaks_its_graph_at_a_decorated_function(options: Any) -> None:
    torch = require("torch")
    f = arraybridge.torch(**options)(lambda x, k=2.0: {"y": torch.sin(x) * k})
    weights = torch.ones(3, requires_grad=True)
    for _ in range(2):
        weights.grad = None
        compiled(lambda x: f(x)["y"].sum())(weights).backward()
        assert torch.allclose(weights.grad, 2 * torch.cos(torch.ones(3)))
    with pytest.raises(RuntimeError, match=r"outside of a graph\. Do not pass fullgraph=True"):
        compiled(f, fullgraph=True)(weights)


def test_a_full_graph_raises_an_error_with_the_reason_at_the_first_traced_call() -> None:
    torch = require("torch")
    if "msg" not in inspect.signature(torch._dynamo.graph_break).parameters:
        pytest.skip("this PyTorch shows no reason of a graph break")
    compilers._untraced_call.cache_clear()
    f = arraybridge.numpy(output_type="input")(lambda x: x + 1)
    with pytest.raises(RuntimeError, match=r"Do not pass fullgraph=True\. .* write @torch\.compile below"):
        compiled(lambda x: f(x), fullgraph=True)(torch.ones(2))
    assert compiled(lambda x: f(x))(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("target", ["numpy", "jax"])
def test_a_full_graph_around_a_conversion_raises_an_error_with_the_reason(target: str) -> None:
    torch = require("torch")
    if "msg" not in inspect.signature(torch._dynamo.graph_break).parameters:
        pytest.skip("this PyTorch shows no reason of a graph break")
    require(target)

    def convert(x: Any) -> Any:
        return arraybridge.convert_memory(x.cos(), target)

    with pytest.raises(RuntimeError, match=r"outside of a graph\. Do not pass fullgraph=True"):
        compiled(convert, fullgraph=True)(torch.zeros(2))
    assert compiled(convert)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_a_full_graph_raises_that_error_if_the_plan_cache_contains_dtypes_of_tensorflow() -> None:
    torch = require("torch")
    if "msg" not in inspect.signature(torch._dynamo.graph_break).parameters:
        pytest.skip("this PyTorch shows no reason of a graph break")
    tensorflow = require("tensorflow")
    # torch.compile cannot trace lookups in a dict with such keys.
    arraybridge.convert_memory(np.zeros(2), "tensorflow", dtype=tensorflow.float32)
    with pytest.raises(RuntimeError, match=r"outside of a graph\. Do not pass fullgraph=True"):
        compiled(lambda x: arraybridge.to_numpy(x.cos()), fullgraph=True)(torch.zeros(2))


#: Calls in a compiled function, with the results that they print.
FIRST_CALLS = {
    "arraybridge.convert_memory(x, 'numpy').tolist()": "[1.0, 1.0]",
    "arraybridge.convert_tree({'a': x}, 'numpy')['a'].tolist()": "[1.0, 1.0]",
    "arraybridge.numpy(lambda y: y + 1)(x).tolist()": "[2.0, 2.0]",
    "arraybridge.detect_memory_type(x)": "torch",
    "arraybridge.explain(x, 'numpy').method": "view",
}
#: Each call is in a forked process that has imported the compiler after arraybridge.
FIRST = """
import os, sys, warnings
import torch, arraybridge, torch._dynamo
warnings.simplefilter("error")
for call in sys.argv[1:]:
    if os.fork() == 0:
        try:
            function = eval(f"lambda zeros: (x := zeros.cos(), {call})[1]")
            result = torch.compile(function, backend="eager")(torch.zeros(2))
        except Exception as error:
            result = " ".join(repr(error).split())
        print(call, result, sep="\\t", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def results_of_first_calls() -> dict[str, str]:
    require("torch")
    if not hasattr(os, "fork"):
        pytest.skip("the program forks, which this system cannot")
    done = run_python("-c", FIRST, *FIRST_CALLS, imported=True)
    return dict(line.split("\t") for line in done.stdout.splitlines())


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_the_first_call_in_a_compiled_function_causes_no_warning(
    call: str, results_of_first_calls: dict[str, str]
) -> None:
    assert results_of_first_calls[call] == FIRST_CALLS[call]


def test_graphs_break_in_releases_whose_graph_break_takes_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = require("torch")
    compilers._untraced_call.cache_clear()
    monkeypatch.setattr(torch._dynamo, "graph_break", torch.compiler.disable(lambda: None))
    f = arraybridge.numpy(output_type="input")(lambda x: x + 1)
    assert compiled(lambda x: f(x.cos()) * 2)(torch.zeros(2)).tolist() == [4.0, 4.0]


def test_torch_compile_compiles_code_around_a_decorated_function() -> None:
    torch = require("torch")
    f = arraybridge.numpy(output_type="input")(lambda x: x + 1)
    around = compiled(lambda x: f(x.cos()) * 2)
    for x in (torch.tensor([0.0, 1.0]), torch.ones(3)):
        assert torch.allclose(around(x), (torch.cos(x) + 1) * 2)
    assert compiled(f)(np.ones(2)).tolist() == [2.0, 2.0]


def test_compiled_functions_share_a_decorated_compiled_function() -> None:
    torch = require("torch")
    f = arraybridge.torch(output_type="numpy")(compiled(lambda x: x * 2))
    assert isinstance(compiled(lambda x: f(x))(torch.ones(2)), np.ndarray)
    assert arraybridge.torch(compiled(torch.sin))(np.zeros(2)).tolist() == [0.0, 0.0]
