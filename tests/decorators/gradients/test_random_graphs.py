"""Random small expression graphs of one framework, called from two others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.decorators.gradients.directions import DIRECTIONS, flowing, grad  # noqa: E402
from tests.helpers import require  # noqa: E402

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

NAMESPACES: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {"sin": torch.sin, "tanh": torch.tanh, "exp": lambda x: torch.exp(-x * x)},
    "jax": {"sin": jnp.sin, "tanh": jnp.tanh, "exp": lambda x: jnp.exp(-x * x)},
    "tensorflow": {"sin": tf.sin, "tanh": tf.tanh, "exp": lambda x: tf.exp(-x * x)},
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}

#: A step is an operation and the indices of two earlier values. Unary operations use only the first one.
STEPS = st.lists(
    st.tuples(st.sampled_from([*BINARY, "sin", "tanh", "exp"]), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=6,
)
VALUES = st.lists(st.floats(-2, 2, width=32), min_size=6, max_size=6)


def expression(steps: list[tuple[str, int, int]], name: str) -> Callable[..., Any]:
    def body(x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(BINARY[kind](a, b) if kind in BINARY else NAMESPACES[name][kind](a))
        return values[-1] + x * y  # both contribute to the result

    return body


def check(
    steps: list[tuple[str, int, int]], values: list[float], direction: tuple[str, str], order: int
) -> None:
    caller, callee = direction
    x, y = np.array(values[:3], np.float32), np.array(values[3:], np.float32)
    body = expression(steps, callee)
    wanted = grad(callee, body, x, y, order=order)
    found = grad(caller, flowing(callee, body), x, y, order=order)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


ANY = list(HealthCheck)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=ANY)
@given(STEPS, VALUES, st.sampled_from(DIRECTIONS), st.sampled_from([1, 1, 2]))
def test_random_graphs(steps: Any, values: Any, direction: Any, order: int) -> None:
    check(steps, values, direction, order)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=ANY)
@given(STEPS, VALUES, st.sampled_from(DIRECTIONS), st.sampled_from([1, 2, 3]))
def test_many_random_graphs(steps: Any, values: Any, direction: Any, order: int) -> None:
    check(steps, values, direction, order)
