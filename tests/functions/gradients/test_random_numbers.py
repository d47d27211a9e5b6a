"""The same random numbers wherever a function runs again for its backward, or a refusal."""

from __future__ import annotations

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
keras = require("keras")
jnp = jax.numpy

in_tf = arraybridge.tensorflow(grad="flow")
in_torch = arraybridge.torch(grad="flow")

X = np.arange(1, 17, dtype=np.float32)


def again(f: Callable[..., Any], how: str) -> tuple[np.ndarray, np.ndarray]:
    """What a function gives, and the gradient of its sum, where it has to run twice for that."""
    if how in ("checkpoint of torch", "second order"):
        x = torch.from_numpy(X.copy()).requires_grad_()
        if how == "second order":
            y = f(x)
            (g,) = torch.autograd.grad((y * x).sum() / 2, x, create_graph=True)
            torch.autograd.grad(g.sum(), x)
            return y.detach().numpy(), g.detach().numpy() / X
        y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x)
        return y.detach().numpy(), g.numpy()
    run = {"jit": jax.jit, "vmap": jax.vmap, "checkpoint": jax.checkpoint}[how](lambda x: f(x))
    x = jnp.array(X).reshape((2, 8) if how == "vmap" else (16,))
    y, pull = jax.vjp(run, x)
    return np.asarray(y), np.asarray(pull(jnp.ones_like(y))[0])


# -- TensorFlow and Keras -------------------------------------------------------------------------------


def drawing_functions() -> dict[str, Callable[[Any], Any]]:
    layer, seeds = keras.layers.Dropout(0.5), keras.random.SeedGenerator(1)
    compiled = tf.function(lambda x: x * tf.random.uniform([tf.size(x)]))
    of_keras = tf.function(lambda x: layer(x, training=True))
    noise = keras.layers.GaussianNoise(0.5)
    one = tf.constant([[0]], tf.int64)
    box = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])

    def pooled(pool: Any) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            found = pool(tf.reshape(x, (1, -1, 4, 1)), [1, 1.3, 1.3, 1], pseudo_random=True)
            return x * tf.reduce_sum(found[0])

        return function

    def sampled(sampler: Any) -> Callable[[Any], Any]:
        return lambda x: x * tf.reduce_sum(tf.cast(sampler(one, 1, 4, True, 16)[0], tf.float32))

    def distorted(x: Any) -> Any:
        begin, _, _ = tf.image.sample_distorted_bounding_box([16, 16, 1], box, min_object_covered=0.1)
        return x * tf.cast(begin[0], tf.float32)

    def in_a_loop(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, compiled(x)), (0, x))[1]

    return {
        "Dropout of Keras": lambda x: layer(x, training=True),
        "GaussianNoise of Keras": lambda x: noise(x, training=True),
        "keras.random": lambda x: x * keras.random.normal(x.shape),
        "SeedGenerator": lambda x: x * keras.random.normal(x.shape, seed=seeds),
        "inside of tf.function": compiled,
        "Keras inside of tf.function": of_keras,
        "inside of a loop": in_a_loop,
        "fractional_max_pool": pooled(tf.nn.fractional_max_pool),
        "fractional_avg_pool": pooled(tf.nn.fractional_avg_pool),
        "candidate sampler": sampled(tf.random.uniform_candidate_sampler),
        "another sampler": sampled(tf.random.log_uniform_candidate_sampler),
        "distorted box": distorted,
        "shuffle": lambda x: x * tf.random.shuffle(tf.range(16.0))[: x.shape[0]],
        "poisson": lambda x: x * tf.random.poisson(x.shape, 3.0),
        "gamma": lambda x: x * tf.random.gamma(x.shape, 3.0),
        "truncated": lambda x: x * tf.random.truncated_normal(x.shape),
        "categorical": lambda x: x * tf.cast(tf.random.categorical(tf.zeros((1, 5)), 1)[0], tf.float32),
    }


DRAWING = drawing_functions()


@pytest.mark.parametrize("how", ["jit", "vmap", "checkpoint", "checkpoint of torch", "second order"])
@pytest.mark.parametrize("name", DRAWING)
def test_what_tensorflow_cannot_draw_again_is_refused(name: str, how: str) -> None:
    with pytest.raises(GradientError, match="cannot draw again"):
        again(in_tf(DRAWING[name]), how)


@pytest.mark.parametrize("name", ["Dropout of Keras", "Keras inside of tf.function", "keras.random"])
def test_what_runs_once_may_draw(name: str) -> None:
    y, pull = jax.vjp(in_tf(DRAWING[name]), jnp.array(X))
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], y / X, rtol=1e-6)


@pytest.mark.parametrize("how", ["jit", "vmap", "checkpoint", "checkpoint of torch", "second order"])
def test_seeds_that_are_numbers_draw_the_same_again(how: str) -> None:
    batches = keras.layers.BatchNormalization(center=False, scale=False)
    batches.build((None, 1))

    def body(x: Any) -> Any:
        mask = tf.random.stateless_uniform(x.shape, [1, 2]) + keras.random.normal(x.shape, seed=3)
        batches(tf.reshape(tf.stop_gradient(x), (-1, 1)), training=True)  # writes to variables, of floats
        return x * mask * tf.random.stateless_gamma(x.shape, [3, 4], alpha=2.0)

    y, g = again(in_tf(body), how)
    np.testing.assert_allclose(g, y / X.reshape(y.shape), rtol=1e-5)
