"""torch's tools of a training loop around and inside decorated functions: as without the decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests.helpers import require

torch: Any = None
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
Y = X.sum(1, keepdims=True)


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    global torch
    torch = require("torch")
    yield
    assert torch.is_grad_enabled()


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def both() -> tuple[Any, Callable[..., Any], Any, Callable[..., Any]]:
    """A model and its loss under the decorator, from NumPy arrays; and twins in plain torch."""
    model, twin = make_model(), make_model()
    decorated = arraybridge.torch(lambda x, y: torch.nn.functional.mse_loss(model(x), y))

    def plain(x: Any, y: Any) -> Any:
        return torch.nn.functional.mse_loss(twin(torch.tensor(x)), torch.tensor(y))

    return model, decorated, twin, plain


def gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_loss_keeps_its_graph() -> None:
    model, decorated, twin, plain = both()
    decorated(X, Y).backward()
    plain(X, Y).backward()
    assert same(gradients(model), gradients(twin))


def test_without_a_graph() -> None:
    _, decorated, _, plain = both()
    with torch.no_grad():
        assert not decorated(X, Y).requires_grad
    with torch.inference_mode():
        loss = decorated(X, Y)
        assert loss.is_inference()
    assert torch.equal(loss, plain(X, Y))
    assert decorated(X, Y).requires_grad


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast(where: str) -> None:
    model = make_model()

    def cast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def forward(x: Any) -> Any:
        with cast() if where == "inside" else nullcontext():
            return model(x)

    with cast() if where == "around" else nullcontext():
        found = arraybridge.torch(forward)(X)
    with cast():
        expected = model(torch.tensor(X))
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model, decorated, twin, plain = both()
    x = torch.tensor(X, requires_grad=True)
    checkpoint(decorated, x, torch.tensor(Y), use_reentrant=use_reentrant).backward()
    plain(X, Y).backward()
    assert same(gradients(model), gradients(twin))
    assert x.grad is not None
