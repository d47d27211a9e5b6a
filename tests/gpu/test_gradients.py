"""Gradients between PyTorch and JAX on a GPU: in the backward thread, and without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import require

pytestmark = pytest.mark.gpu


def test_torch_gradients_flow_through_jax() -> None:
    torch, jax = require("torch"), require("jax")
    jnp = jax.numpy
    f = arraybridge.jax(grad="flow")(jax.jit(lambda x: jnp.sin(x) * x))
    places: list[Any] = []

    def spied(x: Any) -> Any:
        places.append(x)
        return f(x)

    x = torch.linspace(0, 1, 1 << 20, device="cuda", requires_grad=True)
    y = spied(x * 1)
    assert y.is_cuda
    y.backward(torch.ones_like(y))
    wanted = torch.cos(x) * x + torch.sin(x)
    torch.testing.assert_close(x.grad, wanted.detach(), rtol=1e-4, atol=1e-5)
    with arraybridge.trace() as log:
        spied(x.detach().requires_grad_()).sum().backward()
    assert not [record for record in log.records if record.nbytes >= 1 << 20 and record.copies]


def test_jax_gradients_flow_through_torch() -> None:
    torch, jax = require("torch"), require("jax")
    f = arraybridge.torch(grad="flow")(lambda x: torch.sin(x) * x)
    x = jax.device_put(np.linspace(0, 1, 4096, dtype=np.float32), jax.devices("gpu")[0])
    g = jax.grad(lambda x: f(x).sum())(x)
    assert g.devices() == x.devices()
    np.testing.assert_allclose(np.asarray(g), np.cos(x) * x + np.sin(x), rtol=1e-4, atol=1e-5)
