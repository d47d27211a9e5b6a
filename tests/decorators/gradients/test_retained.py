"""Gradients are separate from memory that the differentiated function retains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, UnknownFrameworkError
from tests.helpers import require, run_python

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

CONSTANT = jnp.full(4096, 2.0)
TORCH_CONSTANT = torch.full((64, 64), 2.0)


def jax_double(backward: Callable[..., Any]) -> Any:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2

    double.defvjp(lambda x: (x * 2, jnp.full(x.shape, 2.0)), backward)
    return double


def tf_double(x: Any) -> Any:
    @tf.custom_gradient
    def double(x: Any) -> Any:
        factor = tf.fill(x.shape, tf.constant(2.0, x.dtype))
        return x * 2, lambda _: factor

    return double(x)


class TorchDouble(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.factor = torch.full_like(x, 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return ctx.factor


def residual(kept: Any, _: Any) -> Any:
    return (kept,)


def constant(_keep_alives: Any, _: Any) -> Any:
    return (CONSTANT,)


VIEWS: list[Any] = []


def logged(_keep_alives: Any, _: Any) -> Any:
    gradient = jnp.full(4096, 2.0)
    VIEWS.append(np.asarray(gradient))
    return (gradient,)


CALLEES = {
    "residual": arraybridge.jax(grad="flow")(jax_double(residual)),
    "constant": arraybridge.jax(grad="flow")(jax_double(constant)),
    "rematerialized": arraybridge.jax(grad="flow")(jax.checkpoint(jax_double(constant))),
    "logged": arraybridge.jax(grad="flow")(jax_double(logged)),
    "logged in a jitted function": arraybridge.jax(grad="flow")(lambda x: jax.jit(jax_double(constant))(x)),
    "batched": arraybridge.jax(grad="flow")(
        lambda x: jax.vmap(jax_double(constant))(x.reshape(1, -1)).reshape(-1)
    ),
    "jitted": arraybridge.jax(grad="flow")(jax.jit(jax_double(constant))),
    "tensorflow": arraybridge.tensorflow(grad="flow")(tf_double),
    "reshaped": arraybridge.tensorflow(grad="flow")(
        lambda x: tf.reshape(tf_double(tf.reshape(x, [64, 64])), [-1])
    ),
}


@pytest.mark.parametrize("callee", CALLEES)
def test_writes_to_the_first_gradient_do_not_change_the_second(callee: str) -> None:
    x = torch.ones(4096, requires_grad=True)
    y = CALLEES[callee](x)
    (first,) = torch.autograd.grad(y, x, torch.ones(4096), retain_graph=True)
    first.mul_(0)
    (second,) = torch.autograd.grad(y, x, torch.ones(4096))
    np.testing.assert_array_equal(second.numpy(), np.full(4096, 2, np.float32))
    assert all((view == 2).all() for view in VIEWS)


UNCOPIED = {
    "products": lambda x: jax.nn.softmax(jnp.tanh(x @ x) @ x).sum(-1),
    "jitted parts": lambda x: jnp.where(x > 0, jnp.sort(x), x),
    "loop": lambda x: jax.lax.scan(lambda total, row: (total + row, total * row), x[0], x)[1],
    "rematerialized": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "unchanged": lambda x: x,
}


@pytest.mark.parametrize("body", UNCOPIED)
def test_gradients_are_not_copied_if_no_python_function_computes_them(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(jax.vjp(jnp.sin, 1.0)[1], "jaxpr"):
        pytest.skip(f"JAX {jax.__version__} does not show which operations compute a gradient")
    values = np.random.default_rng(0).random((8, 8), np.float32)
    expected = jax.vjp(UNCOPIED[body], values)[1](jnp.ones_like(UNCOPIED[body](values)))[0]
    monkeypatch.setattr("arraybridge.frameworks.jax.gradients._copy", lambda _: pytest.fail("copied"))
    x = torch.from_numpy(values).requires_grad_()
    y = arraybridge.jax(grad="flow")(UNCOPIED[body])(x)
    cotangent = torch.ones_like(y)
    for _ in range(2):  # a write to a gradient does not change other arrays
        (gradient,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)
        gradient.zero_()
    assert cotangent.min() == 1
    assert np.array_equal(x.detach().numpy(), values)


def reshaped(x: Any) -> Any:
    return TorchDouble.apply(x.reshape(64, 64)).reshape(-1)


def hooked(x: Any) -> Any:
    y = x.reshape(64, 64)
    y.register_hook(lambda _: TORCH_CONSTANT)
    return y.reshape(-1) * 3


@pytest.mark.parametrize("body", [TorchDouble.apply, reshaped, hooked])
def test_gradients_of_a_torch_function_are_separate(body: Callable[..., Any]) -> None:
    _, pull = jax.vjp(arraybridge.torch(grad="flow")(lambda x: body(x)), jnp.ones(4096))
    first, second = (np.asarray(pull(jnp.ones(4096))[0]) for _ in range(2))
    np.testing.assert_array_equal(first, np.full(4096, 2, np.float32))
    assert not np.shares_memory(first, second)


def test_numpy_scalars_are_arguments_of_one_program() -> None:
    traces = 0

    @jax.jit
    def body(x: Any, s: Any) -> Any:
        nonlocal traces
        traces += 1
        return jnp.where(s == 0, jnp.arctan2(s, -1.0) * x, x * s)

    f = arraybridge.jax(grad="flow")(body)
    x = torch.ones(3, requires_grad=True)
    values = [0.0, -0.0, float("nan"), float("nan"), *range(2, 40)]
    expected = [np.pi, -np.pi, np.nan, np.nan, *range(2, 40)]
    for value, slope in zip(values, expected, strict=True):
        (gradient,) = torch.autograd.grad(f(x, np.float32(value)).sum(), x)
        np.testing.assert_allclose(gradient.numpy(), np.full(3, slope, np.float32), rtol=1e-6)
    assert traces == 1


def test_static_numbers_are_compiled_once() -> None:
    traces = 0

    @partial(jax.jit, static_argnames=("count", "shape"))
    def body(x: Any, count: int, shape: Any, rate: float) -> Any:
        nonlocal traces
        traces += 1
        for _ in range(count):
            x = x * rate
        return x.reshape(shape)

    f = arraybridge.jax(grad="flow")(body)
    x = torch.ones(4, requires_grad=True)
    for rate in range(1, 20):
        (gradient,) = torch.autograd.grad(f(x, 2, (2, 2), float(rate)).sum(), x)
        np.testing.assert_array_equal(gradient.numpy(), np.full(4, rate**2, np.float32))
    first = traces
    f(x, 2, (2, 2), 50.0)
    assert traces == first
    with pytest.raises(TypeError, match="reshape"):
        f(x, 2, (3, 2), 1.0)
    assert f(x, 3, (4, 1), 2.0).tolist() == [[8.0]] * 4


def test_batched_backward_passes_raise_with_working_advice() -> None:
    f = arraybridge.jax(grad="flow")(lambda a: a**3)
    a = torch.arange(3.0, requires_grad=True)
    x = a.detach()
    for run in (
        lambda: torch.autograd.grad(f(a), a, torch.eye(3), is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(f, a, vectorize=True),
        lambda: torch.func.jacrev(f)(x),
        lambda: torch.func.vmap(torch.func.vjp(f, x)[1])(torch.eye(3)),
    ):
        with pytest.raises(GradientError, match=r"torch\.func\.jacrev\(f, chunk_size=1\)\(x\)"):
            run()
    expected = np.diag([0, 3, 12])
    np.testing.assert_array_equal(torch.func.jacrev(f, chunk_size=1)(x).numpy(), expected)
    np.testing.assert_array_equal(torch.autograd.functional.jacobian(f, x).numpy(), expected)

    def g(x: Any) -> Any:
        return f(x).sum()

    hessian = torch.func.jacrev(torch.func.jacrev(g, chunk_size=1), chunk_size=1)(x)
    np.testing.assert_array_equal(hessian.numpy(), np.diag([0, 6, 12]))


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"grad": "flow"}, {"dtype": "float32"}])
def test_traces_contain_only_the_operations_of_the_function(options: Any) -> None:
    f = arraybridge.jax(**options)(lambda a: a * 2)
    names = [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones(3)).eqns]
    assert names == ["mul"]
    assert jax.jit(f)(jnp.ones(3)).tolist() == [2] * 3
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    assert jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(4)).tolist() == [2] * 4


@pytest.mark.parametrize("value", [np.ones(3), [1, 2]])
def test_arrays_as_options_raise_with_the_option_name(value: Any) -> None:
    with pytest.raises(ValueError, match="grad="):
        arraybridge.convert_memory(np.ones(3), "torch", grad=value)
    with pytest.raises((TypeError, ValueError), match=r"framework|output_type"):
        arraybridge.torch(output_type=value)(lambda x: x)


@pytest.mark.parametrize("call", [arraybridge.convert_memory, arraybridge.explain])
def test_arrays_in_place_of_a_framework_raise(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="Expected a framework name"):
        call(np.ones(2), np.ones(2), "torch")
    with pytest.raises(TypeError, match="Expected a framework name"):
        arraybridge.devices(np.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [arraybridge.convert_memory, arraybridge.explain])
def test_a_declared_source_is_validated_before_the_data(call: Callable[..., Any]) -> None:
    with pytest.raises(UnknownFrameworkError, match="'tensors' is not a known framework"):
        call("a text", "tensors", "torch")


PEAK = """
import resource
import tensorflow as tf, torch
import arraybridge

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

@arraybridge.tensorflow(grad="flow")
def f(x):
    for _ in range(20):
        x = tf.tanh(x) * 1.5
    return x

for size in (4, 1 << 22):  # the first pass loads code, and the second one is measured: 16 MiB
    x = torch.ones(size, requires_grad=True)
    y = f(x)
    before = peak()
    torch.autograd.grad(y, x, torch.ones(size))
print(peak() - before)
"""


def test_a_backward_pass_of_tensorflow_does_not_keep_its_intermediate_arrays() -> None:
    # If the 40 operations keep their arrays, the peak is 672 MiB. Without them it is 112 MiB, but TensorFlow
    # frees arrays late while its threads wait for a CPU, so other processes add up to 160 MiB.
    assert _peak_of_backward_pass() < 30 * 16


def _peak_of_backward_pass() -> float:
    done = run_python("-c", PEAK, imported=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)
