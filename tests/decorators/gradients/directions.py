"""Helpers for the gradient tests: the six directions, and how each framework differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import arraybridge
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

FRAMEWORKS = ("torch", "jax", "tensorflow")
DIRECTIONS = [(caller, callee) for callee in FRAMEWORKS for caller in FRAMEWORKS if caller != callee]

X = np.linspace(0.1, 1.3, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)[::-1].copy()

#: The same function, written in each framework.
WAVE: dict[str, Callable[..., Any]] = {
    "torch": lambda x, y: torch.sin(x) * y + torch.exp(x) * x,
    "jax": lambda x, y: jnp.sin(x) * y + jnp.exp(x) * x,
    "tensorflow": lambda x, y: tf.sin(x) * y + tf.exp(x) * x,
}


def array(name: str, x: Any) -> Any:
    """Return an array of the framework in separate memory."""
    x = np.array(x)
    make: Any = {"torch": torch.from_numpy, "jax": jnp.array, "tensorflow": tf.constant}[name]
    return make(x)


def summed(total: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: jax.grad(total)(*xs).sum()


def grad(name: str, fn: Callable[..., Any], *arrays: Any, order: int = 1) -> list[np.ndarray]:
    """Return the derivatives of the sum of ``fn(*arrays)``, by the framework's own functions.

    A higher order is that of the sum of the first derivatives, with respect to the first argument only.
    """
    if name == "jax":

        def total(*xs: Any) -> Any:
            return fn(*xs).sum()

        for _ in range(order - 1):
            total = summed(total)
        found = jax.grad(total, argnums=tuple(range(len(arrays))))(*(array("jax", x) for x in arrays))
        return [np.asarray(g) for g in found]
    if name == "torch":
        xs = [array("torch", x).requires_grad_() for x in arrays]
        value = fn(*xs).sum()
        for _ in range(order - 1):
            (first,) = torch.autograd.grad(value, xs[:1], create_graph=True, materialize_grads=True)
            value = first.sum()
            if not value.requires_grad:  # the value is the same in every framework
                return [np.zeros_like(x) for x in arrays]
        return [
            g.detach().resolve_conj().numpy() for g in torch.autograd.grad(value, xs, materialize_grads=True)
        ]
    xs = [array("tensorflow", x) for x in arrays]
    return [np.asarray(g) for g in _nested(fn, xs, order)]


def _nested(fn: Callable[..., Any], xs: list[Any], order: int) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(xs)
        inner = fn(*xs) if order == 1 else _nested(fn, xs, order - 1)[0]
        value = tf.reduce_sum(inner)
    return tape.gradient(value, xs, unconnected_gradients="zero")


def flowing(callee: str, fn: Callable[..., Any]) -> Any:
    return getattr(arraybridge, callee)(grad="flow")(fn)


in_jax = arraybridge.jax(grad="flow")
in_tf = arraybridge.tensorflow(grad="flow")
in_torch = arraybridge.torch(grad="flow")

SIN: dict[str, Callable[[Any], Any]] = {"torch": torch.sin, "jax": jnp.sin, "tensorflow": tf.sin}

#: sin(x) x in each framework.
CALLEES: dict[str, Callable[..., Any]] = {
    "jax": in_jax(lambda x: jnp.sin(x) * x),
    "jitted": in_jax(jax.jit(lambda x: jnp.sin(x) * x)),
    "tensorflow": in_tf(lambda x: tf.sin(x) * x),
    "torch": in_torch(lambda x: torch.sin(x) * x),
}
TO_TORCH = ("jax", "jitted", "tensorflow")
TO_JAX = ("torch", "tensorflow")


def slope() -> np.ndarray[Any, Any]:
    """Return the derivative of sin(x) x at X, computed by hand."""
    return np.cos(X) * X + np.sin(X)


def tensor(requires_grad: bool = True) -> Any:
    return torch.from_numpy(X.copy()).requires_grad_(requires_grad)


def x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def place(x: Any) -> int:
    """Return the address of a plain array, read by its framework's own functions."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return np.asarray(memoryview(x)).__array_interface__["data"][0]


def pulled(caller: str, f: Callable[..., Any], xs: list[Any], cotangent: Any) -> tuple[Any, list[Any]]:
    """Return the result, and the gradients for a cotangent as arrays of the caller."""
    if caller == "jax":
        y, pull = jax.vjp(f, *xs)
        return y, list(pull(cotangent))
    if caller == "torch":
        xs = [x.requires_grad_() for x in xs]
        y = f(*xs)
        return y, list(torch.autograd.grad(y, xs, cotangent))
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    return y, tape.gradient(y, xs, output_gradients=cotangent)
