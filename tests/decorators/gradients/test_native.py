"""A framework's features work around an operation of another framework as around its own operations."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.decorators.gradients.directions import (
    CALLEES,
    DIRECTIONS,
    SIN,
    TO_JAX,
    TO_TORCH,
    X,
    Y,
    array,
    flowing,
    grad,
    in_jax,
    slope,
    tensor,
    x64,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy


@pytest.mark.parametrize("callee", TO_TORCH)
def test_retain_graph(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * slope(), rtol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("callee", TO_TORCH)
def test_create_graph_and_hooks(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x)
    seen: list[Any] = []
    y.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    np.testing.assert_allclose(g.detach().numpy(), 2 * slope(), rtol=1e-5)
    np.testing.assert_array_equal(seen[0].numpy(), np.ones_like(X))
    (second,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(second.numpy(), 2 * (2 * np.cos(X) - np.sin(X) * X), rtol=1e-4)


@pytest.mark.parametrize("callee", TO_TORCH)
@pytest.mark.parametrize("times", [1, 2])
def test_checkpoint(callee: str, times: int) -> None:
    from torch.utils.checkpoint import checkpoint

    x = tensor()
    calls = []

    def block(x: Any) -> Any:
        calls.append(1)
        return CALLEES[callee](torch.exp(x)) * 2

    plain = block(x).sum()
    (expected,) = torch.autograd.grad(plain, x)
    y = checkpoint(block, x, use_reentrant=False).sum()
    for _ in range(times):
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(g, expected)
    reentrant = checkpoint(block, x, use_reentrant=True).sum()
    reentrant.backward()
    assert torch.equal(x.grad, expected)
    y = checkpoint(CALLEES[callee], x, use_reentrant=False).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(second.numpy(), 2 * np.cos(X) - np.sin(X) * X, rtol=1e-4)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_residuals_on_the_cpu(callee: str) -> None:
    x = tensor()
    with torch.autograd.graph.save_on_cpu():
        y = CALLEES[callee](x).sum()
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), slope(), rtol=1e-5)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_sparse_cotangents_of_torch(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x)
    torch.nn.functional.embedding(torch.tensor([0, 0, 2]), y, sparse=True).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), slope() * np.array([[2], [0], [1]]), rtol=1e-5)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_func_grad(callee: str) -> None:
    f = CALLEES[callee]
    x = tensor(False)
    g = torch.func.grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose(g.numpy(), slope(), rtol=1e-5)
    value, pull = torch.func.vjp(f, x)
    np.testing.assert_allclose(pull(torch.ones_like(value))[0].numpy(), slope(), rtol=1e-5)
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x)
    np.testing.assert_allclose(second.numpy(), 2 * np.cos(X) - np.sin(X) * X, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself
@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_compile_breaks_its_graph(callee: str) -> None:
    f = CALLEES[callee]

    @torch.compile(backend="eager")
    def model(x: Any) -> Any:
        return f(x * 2).sum() + 1

    x = tensor()
    for _ in range(3):
        x.grad = None
        model(x).backward()
        np.testing.assert_allclose(
            x.grad.numpy(), 2 * (np.cos(2 * X) * 2 * X + np.sin(2 * X)), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("callee", TO_TORCH)
def test_gradcheck(callee: str) -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with x64():
        assert torch.autograd.gradcheck(CALLEES[callee], (x,))
        assert torch.autograd.gradgradcheck(CALLEES[callee], (x,))


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
@pytest.mark.parametrize("callee", ["jax", "jitted"])
def test_x64_applies_to_the_backward_in_any_thread(caller: str, callee: str) -> None:
    x0 = np.linspace(0.1, 1.3, 5)
    x: Any = torch.tensor(x0, requires_grad=True) if caller == "torch" else tf.constant(x0)
    with x64(), tf.GradientTape() as tape:
        tape.watch(x if caller == "tensorflow" else ())
        y = CALLEES[callee](x)
    ones = torch.ones(5, dtype=torch.float64)
    backward = (
        (lambda: torch.autograd.grad(y, x, ones)[0]) if caller == "torch" else (lambda: tape.gradient(y, x))
    )
    with ThreadPoolExecutor(1) as pool:
        gradient = pool.submit(backward).result()
    np.testing.assert_allclose(np.asarray(gradient), np.cos(x0) * x0 + np.sin(x0), rtol=1e-14)


AS_FLOAT: dict[str, Callable[[Any], Any]] = {
    "torch": lambda x: x.to(torch.float32),
    "jax": lambda x: x.astype(jnp.float32),
    "tensorflow": lambda x: tf.cast(x, tf.float32),
}


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_integer_and_boolean_arguments_have_no_gradient(caller: str, callee: str) -> None:
    f = flowing(callee, lambda x, m, c: x * AS_FLOAT[callee](m) * AS_FLOAT[callee](c))
    mask, count = X > 0.5, np.arange(12, dtype=np.int32).reshape(3, 4)
    xs = [array(caller, one) for one in (X, mask, count)]
    if caller == "torch":
        f(xs[0].requires_grad_(), *xs[1:]).sum().backward()
        gradients = [x.grad for x in xs]
    elif caller == "tensorflow":
        with tf.GradientTape() as tape:
            tape.watch(xs[0])
            y = f(*xs)
        gradients = tape.gradient(y, xs)
    else:
        own = jax.grad(lambda *xs: f(*xs).sum(), argnums=(0, 1, 2), allow_int=True)
        for run in (own, jax.jit(own)):
            gradients = [None if g.dtype == jax.dtypes.float0 else g for g in run(*xs)]
    np.testing.assert_array_equal(np.asarray(gradients[0]), mask * count.astype(np.float32))
    assert gradients[1:] == [None, None]


def test_context_variables_and_settings_apply_to_the_backward() -> None:
    from arraybridge.settings import missing_gpu

    depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
    seen: list[Any] = []

    @jax.custom_vjp
    def spy(x: Any) -> Any:
        return x * 2

    def backward(_: Any, g: Any) -> Any:
        seen.append((depth.get(), arraybridge.get_device(), jax.config.jax_enable_x64, missing_gpu()))
        seen.append(threading.get_ident())
        return (g * 2,)

    spy.defvjp(lambda x: (x * 2, None), backward)
    f = arraybridge.jax(grad="flow")(lambda x: spy(x))
    x = tensor()
    depth.set(3)
    words = "cpu:1" if len(jax.devices("cpu")) > 1 else "cpu"
    with arraybridge.use_device(words) as device, arraybridge.settings(missing_gpu="host"), x64():
        y = f(x)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert seen[0] == (3, device, True, "host")
    assert seen[1] != threading.get_ident()


@pytest.mark.parametrize("callee", TO_JAX)
def test_jit_vmap_scan_checkpoint(callee: str) -> None:
    f = CALLEES[callee]
    x = jnp.asarray(X)

    def total(x: Any) -> Any:
        return f(x).sum()

    for run in (
        jax.grad(total),
        jax.jit(jax.grad(total)),
        jax.grad(jax.jit(total)),
        jax.grad(jax.checkpoint(total)),
        jax.jit(jax.grad(jax.checkpoint(total))),
        jax.vmap(jax.grad(total)),
        jax.jit(jax.vmap(jax.grad(total))),
        jax.grad(lambda x: jax.vmap(f)(x).sum()),
        jax.grad(lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x)[1].sum()),
        jax.jit(
            jax.grad(lambda x: jax.lax.scan(jax.checkpoint(lambda c, row: (c, f(row))), 0.0, x)[1].sum())
        ),
        jax.grad(lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x).sum()),
        jax.grad(lambda x: jax.lax.map(f, x).sum()),
    ):
        np.testing.assert_allclose(np.asarray(run(x)), slope(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(jax.vmap(f)(x)), np.sin(X) * X, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(jax.jit(f)(x)), np.sin(X) * X, rtol=1e-5)
    jacobian = jax.jacrev(f)(x[0])
    np.testing.assert_allclose(np.asarray(jacobian), np.diag(slope()[0]), rtol=1e-5)
    hessian = jax.jacrev(jax.jacrev(lambda x: f(x).sum()))(x[0])
    np.testing.assert_allclose(
        np.asarray(hessian), np.diag(2 * np.cos(X[0]) - np.sin(X[0]) * X[0]), rtol=1e-4
    )


def test_jitted_callees_compile_once_per_structure() -> None:
    traced, pulled = [], []

    @jax.custom_vjp
    def spied(x: Any) -> Any:
        return x

    spied.defvjp(lambda x: (x, None), lambda _, g: (pulled.append(1) or g,))

    @arraybridge.jax(grad="flow")
    @jax.jit
    def energy(params: Any, x: Any, scale: float = 1.0) -> Any:
        traced.append(1)
        return spied(params["w"] * x * scale + params["b"]).sum()

    def step(n: int, scale: float) -> None:
        params = {"w": torch.rand(n, requires_grad=True), "b": torch.rand(n, requires_grad=True)}
        x = torch.rand(n)
        energy(params, x, scale).backward()
        np.testing.assert_allclose(params["w"].grad.numpy(), scale * x.numpy(), rtol=1e-6)

    for k in range(5):
        step(4, 0.5 + k)
    assert len(traced) == 1
    assert len(pulled) == 1
    step(5, 1.0)
    assert len(traced) == len(pulled) == 2
    step(4, 7.0)
    assert len(traced) == 2


def test_equal_keys_of_other_types_are_distinguished() -> None:
    def double(items: Any) -> Any:
        return {key: x * 2 for key, x in items.items()}

    from_torch = arraybridge.jax(grad="flow")(double)
    from_jax = arraybridge.torch(grad="flow")(double)
    for key in (1, True, 1.0):
        x = torch.ones(2, requires_grad=True)
        result = from_torch({key: x})
        assert [type(one) for one in result] == [type(key)]
        result[key].sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2]
        traced = jax.jit(lambda items: from_jax(items))({key: jnp.ones(2)})
        assert [type(one) for one in traced] == [type(key)]


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_persistent_tapes_and_variables(callee: str) -> None:
    f = CALLEES[callee]
    v = tf.Variable(X)
    with tf.GradientTape(persistent=True) as tape:
        y = f(v)
        z = tf.reduce_sum(y * y)
    np.testing.assert_allclose(tape.gradient(y, v), slope(), rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(z, v), 2 * np.sin(X) * X * slope(), rtol=1e-5)
    v.assign_add(tf.ones_like(v))  # after the forward pass
    np.testing.assert_allclose(tape.gradient(y, v), slope(), rtol=1e-5)
    frozen = tf.Variable(X, trainable=False)
    with tf.GradientTape() as tape:
        y = f(frozen)
    assert tape.gradient(y, frozen) is None
    np.testing.assert_allclose(f(v), np.sin(X + 1) * (X + 1), rtol=1e-5)  # without a tape


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_jacobian_of_a_tape(callee: str) -> None:
    x = tf.constant(X[0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = CALLEES[callee](x)
    jacobian = tape.jacobian(y, x, experimental_use_pfor=False)
    np.testing.assert_allclose(jacobian, np.diag(slope()[0]), rtol=1e-5)


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_numbers_next_to_a_static_argument_do_not_recompile(caller: str) -> None:
    compiled: list[str] = []
    f = in_jax(functools.partial(jax.jit, static_argnums=2)(lambda x, rate, n: rate * x**n))
    grad(caller, lambda x: f(x, 0.5, 3), X)
    counting = True
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if counting and "backend_compile" in event else None
    )
    for rate in (0.25, 2.0, 3.0):
        found = grad(caller, lambda x, r=rate: f(x, r, 3), X)[0]
        np.testing.assert_allclose(found, rate * 3 * X**2, rtol=1e-5)
    counting = False
    assert not compiled


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_vmap_of_one_argument_and_of_the_gradient(callee: str) -> None:
    f = flowing(callee, lambda x, y: SIN[callee](x) * y * y)
    g = jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))
    mapped = jax.vmap(g, in_axes=(1, None), out_axes=(1, 0))
    for run in (mapped, jax.jit(mapped)):
        gx, gy = run(jnp.asarray(X), jnp.asarray(Y[:, 0]))
        np.testing.assert_allclose(gx, np.cos(X) * Y[:, :1] ** 2, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gy, (np.sin(X) * 2 * Y[:, :1]).T, rtol=1e-5, atol=1e-7)


def test_gradients_of_an_array_that_a_carrier_holds() -> None:
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")

    @arraybridge.torch(grad="flow")
    def square(x: Any) -> Any:
        return x * x

    computed = jax.grad(lambda x: square(xarray.DataArray(x)).sum())(jnp.asarray([1.0, 3.0]))
    assert np.asarray(computed).tolist() == [2, 6]


def test_gradients_of_a_variable_of_keras() -> None:
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras runs on another framework")
    variable = keras.Variable(np.array([1.0, 3.0], np.float32))
    square = arraybridge.jax(grad="flow")(lambda x: x * x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(square(variable))
    assert tape.gradient(loss, variable.value).numpy().tolist() == [2, 6]
    assert square(variable).numpy().tolist() == [1, 9]
