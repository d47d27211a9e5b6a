"""A function that runs again for its gradient draws the same random numbers as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError
from tests.decorators.gradients.directions import (
    X,
    grad,
    in_torch,
    tensor,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy


def test_random_state_advances_as_after_one_run() -> None:
    f = arraybridge.torch(grad="flow")(lambda x: x * torch.rand_like(x))
    x = jnp.ones(5)
    torch.manual_seed(3)
    jax.grad(lambda x: f(x).sum())(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.rand(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
@pytest.mark.parametrize("order", [1, 2])
def test_random_numbers_equal_those_of_torch_itself(caller: str, order: int) -> None:
    def body(x: Any) -> Any:
        return torch.nn.functional.dropout(x**3, 0.5)

    torch.manual_seed(3)
    wanted = grad("torch", body, X, order=order)[0]
    after = torch.rand(2)
    torch.manual_seed(3)
    np.testing.assert_array_equal(grad(caller, in_torch(body), X, order=order)[0], wanted)
    assert torch.equal(torch.rand(2), after)


def drops(x: Any) -> Any:
    return torch.nn.functional.dropout(x, 0.5) ** 3


@pytest.mark.parametrize("jitted", [False, True])
def test_pullbacks_of_all_orders_draw_the_forward_numbers(jitted: bool) -> None:
    f = in_torch(drops)

    def derivatives(x: Any) -> Any:
        y = f(x)
        g, pull = jax.vjp(jax.grad(lambda x: f(x).sum()), x)
        return y, g, pull(jnp.ones_like(x))[0], jax.value_and_grad(lambda x: f(x).sum())(x)

    masks = set()
    for _ in range(3):
        _, g, h, (value, own) = (jax.jit(derivatives) if jitted else derivatives)(jnp.ones(64))
        assert ((np.asarray(g) != 0) == (np.asarray(h) != 0)).all()
        np.testing.assert_allclose(np.asarray(own).sum(), 3 * value, rtol=1e-5)  # the derivative of x**3 at 1
        masks.add(np.asarray(g).tobytes())
    assert len(masks) == 3  # different numbers in each call


def test_pullbacks_returned_by_a_program_draw_the_same_numbers() -> None:
    y, pull = jax.jit(lambda x: jax.vjp(in_torch(drops), x))(jnp.ones(64))
    for _ in range(2):
        assert ((np.asarray(y) != 0) == (np.asarray(pull(jnp.ones(64))[0]) != 0)).all()


def test_tensorflow_draws_once_or_raises() -> None:
    f = arraybridge.tensorflow(grad="flow")(lambda x: x * tf.random.uniform(x.shape))
    x = tensor()
    y = f(x)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy() * X, y.detach().numpy(), rtol=1e-6)
    y = f(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(first, g)
    for again in (g.sum().backward, lambda: jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.ones(4))):
        with pytest.raises(GradientError, match="stateless"):
            again()
    fixed = arraybridge.tensorflow(grad="flow")(lambda x: x**2 * tf.random.stateless_uniform(x.shape, [1, 2]))
    (g,) = torch.autograd.grad(fixed(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(h * x.detach(), g.detach(), rtol=1e-5)
