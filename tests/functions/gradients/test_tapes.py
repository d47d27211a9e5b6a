"""What TensorFlow's tapes ask of a function of another framework, and what its functions may give back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

in_jax = arraybridge.jax(grad="flow")
in_tf = arraybridge.tensorflow(grad="flow")
in_torch = arraybridge.torch(grad="flow")
CUBES: dict[str, Callable[[Any], Any]] = {
    "jax": in_jax(lambda x: x**3),
    "jitted": in_jax(jax.jit(lambda x: x**3)),
    "torch": in_torch(lambda x: x**3),
}
X = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize("callee", ["jax", "torch"])
def test_results_that_are_used_in_one_pass_and_not_in_another(callee: str) -> None:
    if callee == "jax":
        from arraybridge.frameworks.jax import pullback as jax_pullback

        if jax_pullback._symbolic_zero() is jnp.zeros:
            pytest.skip("this JAX computes with zeros, as its own jax.vjp does")
    f = (
        in_jax(lambda x: (jnp.sqrt(x), 2 * x))
        if callee == "jax"
        else in_torch(lambda x: (torch.sqrt(x), 2 * x))
    )
    x = tf.Variable([0.0, 4.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape(persistent=True) as tape:
            root, double = f(x)
            gathered, both = tf.gather(double, [0, 0]), root[1] + double[1]
        first = tape.gradient(double, x)
    np.testing.assert_array_equal(first, [2, 2])
    assert np.isinf(tape.gradient(root, x)[0])
    np.testing.assert_array_equal(tape.gradient(both, x)[1], 2.25)
    np.testing.assert_array_equal(tape.gradient(gathered, x), [4, 0])  # slices
    np.testing.assert_array_equal(tape.gradient([double, gathered], x), [6, 2])
    second = outer.gradient(first, x)
    assert second is None or not np.any(second)

    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda y=y: found.append(tape.gradient(y, x)[1])) for y in (root, double)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(float, found)) == [0.25, 2]


@pytest.mark.parametrize("callee", CUBES)
@pytest.mark.parametrize("of", ["argument", "cotangent"])
def test_a_forward_accumulator_around_the_backward_is_refused(callee: str, of: str) -> None:
    x, c = tf.constant(X), tf.ones(2)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = CUBES[callee](x)
    primal = x if of == "argument" else c
    with (
        tf.autodiff.ForwardAccumulator(primal, tf.ones(2)),
        pytest.raises(GradientError, match="reverse mode"),
    ):
        tape.gradient(y, x, output_gradients=c)
    np.testing.assert_allclose(tape.gradient(y, x), 3 * X**2)


@pytest.mark.parametrize("callee", CUBES)
def test_a_derivative_by_the_cotangent_alone(callee: str) -> None:
    x, c = tf.Variable(X), tf.constant([2.0, 5.0])
    with tf.GradientTape() as tape:
        y = CUBES[callee](x)
    with tf.GradientTape() as other:
        other.watch(c)
        g = tape.gradient(y, x, output_gradients=c)
    np.testing.assert_allclose(g, [6, 60])
    np.testing.assert_allclose(other.gradient(g, c), 3 * X**2)


@pytest.mark.parametrize("callee", CUBES)
def test_a_jacobian_that_maps_its_graph_is_refused(callee: str) -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = CUBES[callee](x)
    with pytest.raises(Exception, match=r"GradientError[\s\S]*experimental_use_pfor=False"):
        tape.jacobian(y, x)


def gathers(x: Any) -> Any:
    """The derivative of 2 x₀² by the table, times x₀, which TensorFlow gives as slices."""
    table = tf.identity(x)
    with tf.GradientTape() as tape:
        tape.watch(table)
        y = tf.reduce_sum(tf.gather(table, [0, 0]) ** 2)
    found = tape.gradient(y, table)
    return tf.IndexedSlices(found.values * x[0], found.indices, found.dense_shape)


def test_slices_and_variables_as_results() -> None:
    f = in_tf(gathers)
    x = torch.tensor(X, requires_grad=True)
    f(x).sum().backward()
    np.testing.assert_allclose(x.grad, [8, 0])  # of 4 x₀²
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(jnp.array(X)), [8, 0])
    state = tf.Variable(X, trainable=False)
    grad = jax.grad(lambda x: in_tf(lambda x: (x * 3, state.assign(x)))(x)[0].sum())
    for run in (grad, jax.jit(grad)):
        np.testing.assert_allclose(run(jnp.array(X)), [3, 3])
    trainable = tf.Variable(X)
    with pytest.raises(GradientError, match=r"trainable tf\.Variable"):
        in_tf(lambda x: (x * 3, trainable))(torch.tensor(X, requires_grad=True))


@pytest.mark.parametrize("callee", CUBES)
def test_a_cotangent_that_tensorflow_broadcasts(callee: str) -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = CUBES[callee](x)
    np.testing.assert_array_equal(tape.gradient(y, x, output_gradients=tf.constant(2.0)), 6 * X**2)
