"""Gradients of MLX and PaddlePaddle through other frameworks, compared with PyTorch and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError
from tests.helpers import require
from tests.test_more_frameworks import needed

X = np.linspace(0.1, 1.3, 6, dtype=np.float32).reshape(2, 3)
Y = np.linspace(-1.0, 2.0, 6, dtype=np.float32).reshape(2, 3)
ALL = ("torch", "jax", "mlx", "paddle")
DIRECTIONS = [(a, b) for a in ALL for b in ALL if a != b and {a, b} & {"mlx", "paddle"}]


def namespace(name: str) -> Any:
    """Return sin, exp and similar functions of a framework, or skip."""
    if name == "jax":
        return require("jax").numpy
    return require("torch") if name == "torch" else needed(name)


def flowing(name: str, fn: Callable[..., Any]) -> Any:
    return arraybridge.framework(name).decorator(grad="flow")(fn)


def tensors(name: str, *arrays: np.ndarray[Any, Any]) -> list[Any]:
    """Return arrays that PyTorch or Paddle differentiate."""
    if name == "torch":
        return [namespace(name).tensor(a, requires_grad=True) for a in arrays]
    return [namespace(name).to_tensor(a, stop_gradient=False) for a in arrays]


def grad(name: str, fn: Callable[..., Any], *arrays: Any, order: int = 1) -> list[np.ndarray[Any, Any]]:
    """Return the derivatives of the sum of ``fn(*arrays)``, by the framework's own functions.

    For a higher order, the sum of the first derivative is differentiated again.
    """
    if name in ("torch", "paddle"):
        own: Any = namespace("paddle").grad if name == "paddle" else namespace("torch").autograd.grad
        xs = tensors(name, *arrays)
        value = fn(*xs).sum()
        for _ in range(order - 1):
            value = own(value, xs[:1], create_graph=True)[0].sum()
        return [g.resolve_conj().numpy() if name == "torch" else g.numpy() for g in own(value, xs)]
    derive: Any = require("jax").grad if name == "jax" else needed("mlx").grad

    def total(*xs: Any) -> Any:
        return fn(*xs).sum()

    def summed(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: derive(inner)(*xs).sum()

    for _ in range(order - 1):
        total = summed(total)
    found = derive(total, argnums=tuple(range(len(arrays))))(*(namespace(name).array(a) for a in arrays))
    # MLX returns a single gradient without a tuple.
    return [np.asarray(g) for g in (found if isinstance(found, (tuple, list)) else [found])]


def wave(name: str) -> Callable[..., Any]:
    xp = namespace(name)
    return lambda x, y: xp.sin(x) * y + xp.exp(x) * x


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_equal_the_callees_own_bit_for_bit(caller: str, callee: str, order: int) -> None:
    namespace(caller)
    found = grad(caller, flowing(callee, wave(callee)), X, Y, order=order)
    for a, b in zip(found, grad(callee, wave(callee), X, Y, order=order), strict=True):
        np.testing.assert_array_equal(a, b)
    native = (
        [np.cos(X) * Y + np.exp(X) * (1 + X), np.sin(X)]
        if order == 1
        else [-np.sin(X) * Y + np.exp(X) * (2 + X), np.cos(X)]
    )
    for a, b in zip(found, native, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_complex_numbers_follow_the_callers_convention(caller: str, callee: str) -> None:
    z = np.array([1 + 2j, -0.5 + 0.25j], np.complex64)

    def body(name: str) -> Callable[..., Any]:
        xp = namespace(name)
        return lambda z: xp.abs(z * z * (1 + 2j) * z)

    namespace(caller)
    found = grad(caller, flowing(callee, body(callee)), z)[0]
    wanted = grad("torch", body("torch"), z)[0]
    np.testing.assert_allclose(found, wanted.conj() if caller == "jax" else wanted, rtol=1e-4)


# -- Paddle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [lambda x: x.scale_(2.0), lambda x: x.reshape([-1]).scale_(2.0), lambda x: x.__setitem__(0, 0.0)],
    ids=["itself", "a view of it", "its elements"],
)
def test_paddle_writes_to_an_argument_before_the_backward_raise(write: Callable[[Any], Any]) -> None:
    namespace("torch")
    inner = tensors("paddle", X)[0] * 1
    y = flowing("torch", lambda x: x * x)(inner).sum()
    write(inner)
    # Paddle replaces exceptions from a PyLayer with its own class.
    with pytest.raises(OSError, match=r"GradientError.*writes to an argument"):
        y.backward()


def test_paddle_some_arguments_retained_graphs_hooks_and_no_grad() -> None:
    paddle = needed("paddle")
    namespace("torch")
    f = flowing("torch", lambda x, y: x * y * y)
    x, y = tensors("paddle", X, Y)
    z = f(x, y)
    seen: list[Any] = []
    z.register_hook(lambda g: seen.append(g.tolist()) or g * 2)
    for _ in range(2):
        (g,) = paddle.grad(z.sum(), [y], retain_graph=True)
        np.testing.assert_allclose(g.numpy(), 4 * X * Y, rtol=1e-6)
    assert len(seen) == 2
    z.sum().backward(retain_graph=True)
    np.testing.assert_allclose(x.grad.numpy(), 2 * Y * Y, rtol=1e-6)
    # A second backward pass would crash the process.
    with pytest.raises(OSError, match=r"GradientError.*paddle\.grad"):
        z.sum().backward()
    (h,) = paddle.grad(f(x, y).sum(), [x], create_graph=True)
    (second,) = paddle.grad(h.sum(), [y])
    np.testing.assert_allclose(second.numpy(), 2 * Y, rtol=1e-6)
    with paddle.no_grad():
        z = f(x, y)
    assert z.stop_gradient
    np.testing.assert_allclose(z.numpy(), X * Y * Y, rtol=1e-6)


def test_paddle_captured_parameters_and_written_arguments_raise() -> None:
    paddle = needed("paddle")
    layer = paddle.nn.Linear(3, 2)
    (x,) = tensors("torch", X)
    f = flowing("paddle", layer.forward)
    with pytest.raises(GradientError, match="trainable"):
        f(x)
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    f(x).sum().backward()
    np.testing.assert_allclose(
        x.grad.numpy(), np.broadcast_to(layer.weight.numpy().sum(1), X.shape), rtol=1e-5
    )
    with pytest.raises(GradientError, match="clone"):
        flowing("paddle", lambda x: x.detach().scale_(2.0) * x)(tensors("torch", X)[0])


# -- MLX --------------------------------------------------------------------------------------------------


def test_mlx_transformations() -> None:
    mx = needed("mlx")
    namespace("torch")
    f = flowing("torch", lambda x: x * x)
    x = mx.array(X)
    np.testing.assert_allclose(np.asarray(mx.grad(mx.checkpoint(lambda x: f(x).sum()))(x)), 2 * X, rtol=1e-6)
    with pytest.raises(GradientError, match="reverse mode"):
        mx.jvp(f, [x], [x])
    for run in (mx.vmap(f), mx.compile(f), mx.compile(mx.grad(lambda x: f(x).sum()))):
        with pytest.raises(arraybridge.ArrayNotSupportedError, match="traced MLX value"):
            run(x)


# -- MLX and Paddle as callees -----------------------------------------------------------------------------


@pytest.mark.parametrize("callee", ["mlx", "paddle"])
def test_random_numbers_are_the_same_in_the_backward(callee: str) -> None:
    xp = namespace(callee)
    torch = namespace("torch")
    draw = {"mlx": lambda s: xp.random.uniform(shape=s), "paddle": lambda s: xp.rand(s)}[callee]
    f = flowing(callee, lambda x: x * x * draw(x.shape))
    (x,) = tensors("torch", X)
    y = f(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(g * x / 2, y, rtol=1e-5, atol=1e-6)
    g.sum().backward()
    torch.testing.assert_close(x.grad * x * x / 2, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("callee", ["mlx", "paddle"])
def test_jax_jit_and_arrays_of_two_frameworks_raise(callee: str) -> None:
    namespace(callee)
    jax = require("jax")
    f = flowing(callee, lambda x: x * x)
    with pytest.raises(GradientError, match=r"outside of jax\.jit"):
        jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    needed("paddle")
    with pytest.raises(GradientError, match="paddle and torch"):
        flowing("jax", lambda x, y: x * y)(*tensors("paddle", X), *tensors("torch", X))


@pytest.mark.parametrize("callee", ["torch", "jax"])
def test_paddle_nested_backward_raises(callee: str) -> None:
    paddle = needed("paddle")
    inner = flowing("paddle", lambda x, y: x * x * y)
    outer = flowing(callee, lambda x, y: inner(x, y) * y * x)
    x, y = tensors("paddle", np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(OSError, match="a backward pass of Paddle started another one"):
        paddle.grad(outer(x, y).sum(), [x, y])
    # The engine is free again.
    torch = require("torch")
    a, b = (torch.ones(3, requires_grad=True) for _ in "ab")
    (g,) = torch.autograd.grad(inner(a, b).sum(), [a])
    assert g.tolist() == [2, 2, 2]


def mlx_double() -> Callable[..., Any]:
    """Return a function whose derivative returns an array that it retains."""
    mx = needed("mlx")
    kept = mx.full((4096,), 2.0)
    double = mx.custom_function(lambda x: x * 2)
    double.vjp(lambda *_: kept)
    return double  # type: ignore[no-any-return]


def paddle_double() -> Callable[..., Any]:
    paddle = needed("paddle")
    kept = paddle.full([4096], 2.0)

    class Double(paddle.autograd.PyLayer):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(*_: Any) -> Any:
            return kept

    return Double.apply


@pytest.mark.parametrize("callee", ["mlx", "paddle"])
def test_writes_to_the_first_gradient_do_not_change_the_second(callee: str) -> None:
    double = {"mlx": mlx_double, "paddle": paddle_double}[callee]()
    f = flowing(callee, lambda x: double(x))
    (x,) = tensors("torch", np.ones(4096, np.float32))
    y = f(x)
    grad = require("torch").autograd.grad
    (first,) = grad(y, x, y.detach(), retain_graph=True)
    first.mul_(0)
    (second,) = grad(y, x, y.detach())
    np.testing.assert_array_equal(second.numpy(), np.full(4096, 2, np.float32))
