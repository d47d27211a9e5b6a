"""A function that runs again for its gradient draws what it drew before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.functions.gradients.directions import (
    X,
    grad,
    in_torch,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy


def test_the_random_state_is_left_as_after_one_run() -> None:
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
def test_the_random_numbers_are_those_of_torch_itself(caller: str, order: int) -> None:
    def body(x: Any) -> Any:
        return torch.nn.functional.dropout(x**3, 0.5)

    torch.manual_seed(3)
    wanted = grad("torch", body, X, order=order)[0]
    after = torch.rand(2)
    torch.manual_seed(3)
    np.testing.assert_array_equal(grad(caller, in_torch(body), X, order=order)[0], wanted)
    assert torch.equal(torch.rand(2), after)
