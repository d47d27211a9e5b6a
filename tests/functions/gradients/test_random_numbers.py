"""The same random numbers wherever a function runs again for its backward, or a refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


WAYS = ["jit", "vmap", "checkpoint", "checkpoint of torch", "reentrant checkpoint of torch", "second order"]


def again(f: Callable[..., Any], how: str) -> tuple[np.ndarray, np.ndarray]:
    """What a function gives, and the gradient of its sum, where it has to run twice for that."""
    if how in ("checkpoint of torch", "reentrant checkpoint of torch", "second order"):
        x = torch.from_numpy(X.copy()).requires_grad_()
        if how == "second order":
            y = f(x)
            (g,) = torch.autograd.grad((y * x).sum() / 2, x, create_graph=True)
            torch.autograd.grad(g.sum(), x)
            return y.detach().numpy(), g.detach().numpy() / X
        y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=how.startswith("reentrant"))
        y.sum().backward()
        return y.detach().numpy(), x.grad.numpy()
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
    generator = tf.random.Generator.from_seed(1)
    shuffled = tf.data.Dataset.range(16).shuffle(16).batch(16)

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
        "binomial": lambda x: x * tf.cast(generator.binomial(x.shape, 9.0, 0.5), tf.float32),
        "shuffled data": lambda x: x * tf.cast(shuffled.get_single_element()[: x.shape[0]], tf.float32),
        "reduced data": lambda x: (
            x * tf.cast(shuffled.reduce(0, lambda _, row: tf.cast(row[0], tf.int32)), tf.float32)
        ),
        "categorical": lambda x: x * tf.cast(tf.random.categorical(tf.zeros((1, 5)), 1)[0], tf.float32),
    }


DRAWING = drawing_functions()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", DRAWING)
def test_what_tensorflow_cannot_draw_again_is_refused(name: str, how: str) -> None:
    with pytest.raises(GradientError, match="cannot draw again"):
        again(in_tf(DRAWING[name]), how)


@pytest.mark.parametrize("name", ["Dropout of Keras", "Keras inside of tf.function", "keras.random"])
def test_what_runs_once_may_draw(name: str) -> None:
    y, pull = jax.vjp(in_tf(DRAWING[name]), jnp.array(X))
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], y / X, rtol=1e-6)


@pytest.mark.parametrize("how", WAYS)
def test_seeds_that_are_numbers_draw_the_same_again(how: str) -> None:
    batches = keras.layers.BatchNormalization(center=False, scale=False)
    batches.build((None, 1))

    def body(x: Any) -> Any:
        mask = tf.random.stateless_uniform(x.shape, [1, 2]) + keras.random.normal(x.shape, seed=3)
        batches(tf.reshape(tf.stop_gradient(x), (-1, 1)), training=True)  # writes to variables, of floats
        return x * mask * tf.random.stateless_gamma(x.shape, [3, 4], alpha=2.0)

    y, g = again(in_tf(body), how)
    np.testing.assert_allclose(g, y / X.reshape(y.shape), rtol=1e-5)


# -- torch ------------------------------------------------------------------------------------------------

ONES = jnp.ones(64)


@in_torch
def dropped(x: Any) -> Any:
    return torch.nn.functional.dropout(x, 0.5)


PULLED_ELSEWHERE: dict[str, Callable[[], Any]] = {
    "traced, then pulled": lambda: jax.jit(lambda x: jax.vjp(dropped, x))(ONES),
    "mapped, then pulled": lambda: jax.jit(lambda x: jax.vjp(jax.vmap(dropped), x))(ONES.reshape(4, 16)),
    "a jaxpr": lambda: jax.vjp(jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(dropped)(ONES)), ONES),
    "converted closure": lambda: jax.vjp(lambda x: jax.closure_convert(dropped, x)[0](x), ONES),
    "pulled in another program": lambda: jax.vjp(dropped, ONES),
}


@pytest.mark.parametrize("way", PULLED_ELSEWHERE)
def test_a_pullback_draws_what_its_forward_drew(way: str) -> None:
    import jax.extend

    found = [PULLED_ELSEWHERE[way]() for _ in range(2)]
    for results, pull in found:
        pulled = jax.jit(pull) if way == "pulled in another program" else pull
        (g,) = pulled(jax.tree.map(jnp.ones_like, results))
        (y,) = jax.tree.leaves(results)
        np.testing.assert_array_equal(g, y)
        assert 0 < np.count_nonzero(y) < y.size


def forked(x: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        return x * x * torch.rand_like(x)


def put_back(x: Any) -> Any:
    state = torch.get_rng_state()
    mask = torch.rand_like(x)
    torch.set_rng_state(state)
    return x * x * mask


def seeded_afterwards(x: Any) -> Any:
    mask = torch.rand_like(x)
    torch.manual_seed(0)
    return x * x * mask


@pytest.mark.parametrize("how", ["jit", "checkpoint", "second order", "second order of a tape"])
@pytest.mark.parametrize("body", [forked, put_back, seeded_afterwards])
def test_a_function_that_puts_the_state_back_draws_the_same(body: Callable[[Any], Any], how: str) -> None:
    f, x = in_torch(body), jnp.ones(16)
    torch.manual_seed(0)
    if how == "jit":

        def loss(x: Any) -> Any:
            y = f(x)
            return jnp.sum(y) + 0 * jnp.sum(dropped(x)), y

        (_, y), g = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    elif how == "checkpoint":
        y, pull = jax.vjp(jax.checkpoint(f), x)
        torch.rand(3)
        (g,) = pull(x)
    elif how == "second order":
        y, pull = jax.vjp(lambda x: jax.grad(lambda x: f(x).sum())(x), x)
        torch.rand(3)
        (g,) = pull(x)
        y = y / 2
    else:
        with tf.GradientTape() as outer:
            outer.watch(t := tf.ones(16))
            with tf.GradientTape() as tape:
                tape.watch(t)
                y = f(t)
            torch.rand(3)
            first = tape.gradient(y, t)
        y, g = first / 2, outer.gradient(first, t)
    np.testing.assert_array_equal(g, 2 * np.asarray(y))


@pytest.mark.parametrize("callee", ["tensorflow", "torch"])
def test_the_forward_is_left_out_where_nothing_needs_it(callee: str) -> None:
    runs: list[str] = []

    def of_tensorflow(x: Any) -> Any:
        tf.py_function(lambda: runs.append("run"), [], [])
        return tf.sin(x) * x

    def of_torch(x: Any) -> Any:
        runs.append("run")
        return torch.sin(x) * x

    f, x = in_tf(of_tensorflow) if callee == "tensorflow" else in_torch(of_torch), jnp.arange(3.0)
    pull = jax.jit(jax.grad(lambda x: f(x).sum()))
    with_value = jax.jit(jax.value_and_grad(lambda x: f(x).sum()))
    for program, times in ((pull, 1), (with_value, 2)):
        jax.block_until_ready(program(x))
        runs.clear()
        jax.block_until_ready(program(x))
        assert len(runs) == times
    np.testing.assert_allclose(pull(x), np.cos(x) * x + np.sin(x), rtol=1e-6)


@pytest.mark.parametrize("around", ["jit", "cached program", "checkpoint"])
@pytest.mark.parametrize("callee", ["tensorflow", "generator of torch"])
def test_what_draws_only_later_is_noticed_then(callee: str, around: str) -> None:
    training, generator = [False], torch.Generator()

    def body(x: Any) -> Any:
        if not training[0]:
            return x * 2
        return x * (
            tf.random.uniform([16]) if callee == "tensorflow" else torch.rand(16, generator=generator)
        )

    f = in_tf(body) if callee == "tensorflow" else in_torch(body)
    program = jax.checkpoint(lambda x: f(x)) if around == "checkpoint" else jax.jit(lambda x: f(x))
    run = program if around == "cached program" else lambda x: program(x)
    jax.block_until_ready(jax.vjp(run, jnp.ones(16))[1](jnp.ones(16)))
    training[0] = True
    with pytest.raises(Exception, match="cannot draw again"):
        jax.block_until_ready(jax.vjp(run, jnp.ones(16))[1](jnp.ones(16)))


@pytest.mark.parametrize("how", ["jit", "checkpoint"])
def test_a_function_that_draws_in_a_thread_of_its_own(how: str) -> None:
    def body(x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return x * pool.submit(lambda: torch.rand(16)).result()

    f = in_torch(body)
    y, pull = (
        jax.jit(lambda x: jax.vjp(f, x))(ONES[:16]) if how == "jit" else jax.vjp(jax.checkpoint(f), ONES[:16])
    )
    np.testing.assert_array_equal(pull(ONES[:16])[0], y)


def test_what_puts_the_state_back_where_it_drew_nothing_before() -> None:
    training = [False]

    def body(x: Any) -> Any:
        if not training[0]:
            return x * 1
        with torch.random.fork_rng(devices=[]):
            return torch.nn.functional.dropout(x, 0.5)

    f = in_torch(body)

    def loss(x: Any) -> Any:
        y = f(x)
        return dropped(y).sum() * 0 + y.sum(), y

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for now in (False, True, True):
        training[0] = now
        (_, y), g = step(ONES)
        np.testing.assert_array_equal(g, y)


def test_what_draws_where_it_drew_nothing_before() -> None:
    training = [True]
    f = in_torch(lambda x: torch.nn.functional.dropout(x, 0.5, training=training[0]))
    program = jax.jit(lambda x: f(x))
    for now in (True, False, True):
        training[0] = now
        y, pull = jax.vjp(program, ONES)
        torch.rand(1)
        np.testing.assert_array_equal(pull(ONES)[0], y)


def test_tensorflow_may_draw_where_nobody_differentiates() -> None:
    f = in_tf(lambda x: x * 0 + tf.random.uniform([16]))
    for way in (jax.jit, jax.vmap):
        x = ONES[:16] if way is jax.jit else jnp.ones((2, 16))
        assert 0 < float(way(lambda x: f(x))(x).mean()) < 1


def test_a_second_order_of_what_was_traced() -> None:
    f = in_torch(lambda x: torch.nn.functional.dropout(x, 0.5) ** 2)
    g, pull = jax.jit(lambda x: jax.vjp(jax.grad(lambda x: f(x).sum()), x))(ONES)
    (second,) = pull(ONES)
    np.testing.assert_array_equal(second, g)
    assert 0 < np.count_nonzero(g) < g.size


def of_equal_calls(f: Callable[[Any], Any], around: str) -> Callable[[Any], Any]:
    """A quadratic function: its gradient times x is twice its value, whatever was drawn."""

    def loss(x: Any) -> Any:
        if around == "scan":
            step = jax.checkpoint(lambda c, x: (c + jnp.sum(f(x) ** 2), None))
            return jax.lax.scan(step, 0.0, jnp.stack([x] * 4))[0]
        if around == "the same in each step":
            step = jax.checkpoint(lambda c, _: (c + jnp.sum(f(x) ** 2), None))
            return jax.lax.scan(step, 0.0, jnp.zeros(4))[0]
        if around == "map":
            return jnp.sum(jax.lax.map(jax.checkpoint(f), jnp.stack([x] * 5)) ** 2)
        called = jax.checkpoint(jax.jit(f))
        if around == "calls":
            return jnp.sum(called(x) ** 2) + jnp.sum(called(x)) ** 2
        return sum((i + 1) * jnp.sum(called(x) ** 2) for i in range(5))

    return loss


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("around", ["scan", "the same in each step", "map", "calls", "a loop of calls"])
def test_equal_calls_within_checkpoints_draw_what_their_pullbacks_draw(around: str, jitted: bool) -> None:
    loss = of_equal_calls(in_torch(lambda x: x * torch.rand(3)), around)
    run = jax.jit(jax.value_and_grad(loss)) if jitted else jax.value_and_grad(loss)
    x, found = jnp.array([1.0, 2.0, 3.0]), []
    for seed in range(3):
        torch.manual_seed(seed)
        value, g = run(x)
        np.testing.assert_allclose(jnp.vdot(g, x), 2 * value, rtol=1e-5)
        found.append(float(value))
    assert len(set(found)) == 3


@pytest.mark.parametrize("when", ["before the backward", "inside of another function"])
def test_a_seed_that_is_set_meanwhile(when: str) -> None:
    other = in_torch(lambda x: (torch.manual_seed(42), x)[1])
    if when == "before the backward":
        for _ in range(3):
            y, pull = jax.vjp(jax.checkpoint(dropped), ONES)
            torch.manual_seed(5)
            np.testing.assert_array_equal(pull(ONES)[0], y)
        called = []
        for seed in range(3):
            torch.manual_seed(seed)
            called.append(jax.vjp(jax.checkpoint(dropped), ONES))
        for y, pull in called:
            np.testing.assert_array_equal(pull(ONES)[0], y)
        return

    def loss(x: Any) -> Any:
        y = jax.checkpoint(lambda x: dropped(x))(x)
        return jnp.sum(other(y)), y

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for seed in range(3):
        torch.manual_seed(seed)
        (_, y), g = run(ONES)
        np.testing.assert_array_equal(g, y)


def test_a_pullback_does_not_take_the_numbers_of_another_call() -> None:
    program = jax.jit(lambda x: dropped(x))
    y, first = jax.vjp(program, ONES)
    np.testing.assert_array_equal(first(ONES)[0], y)
    z, pull = jax.vjp(jax.checkpoint(program), ONES)
    first(ONES)
    np.testing.assert_array_equal(pull(ONES)[0], z)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_checkpoint_is_pulled_back_several_times(around: Callable[[Any], Any]) -> None:
    for f in (around(jax.checkpoint(dropped)), jax.checkpoint(around(dropped))):
        y, pull = jax.vjp(f, ONES)
        for _ in range(3):
            np.testing.assert_array_equal(pull(ONES)[0], y)


@pytest.mark.parametrize("around", [lambda pull: pull, jax.jit])
@pytest.mark.parametrize("checkpoint", [lambda f: f, jax.checkpoint])
def test_a_pullback_alone_draws_the_same_whenever_it_is_called(checkpoint: Any, around: Any) -> None:
    pull = around(jax.jit(lambda x: jax.vjp(checkpoint(dropped), x)[1])(ONES))
    masks = [np.asarray(pull(ONES)[0]) for _ in range(3)]
    assert 0 < np.count_nonzero(masks[0]) < masks[0].size
    assert all(np.array_equal(masks[0], mask) for mask in masks)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("order", ["checkpoint first", "gradient first"])
def test_a_second_order_under_a_checkpoint(order: str, nested: bool) -> None:
    f = in_torch(lambda x: torch.nn.functional.dropout(x, 0.5) * x * x)
    again = (lambda f: jax.checkpoint(jax.checkpoint(f))) if nested else jax.checkpoint
    total = lambda f: lambda x: f(x).sum()  # noqa: E731
    gradient = jax.grad(total(again(f))) if order == "checkpoint first" else again(jax.grad(total(f)))
    g, pull = jax.vjp(gradient, ONES)
    np.testing.assert_array_equal(pull(ONES)[0], 2 * g)
    assert 0 < np.count_nonzero(g) < g.size


def test_random_numbers_that_are_forgotten_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from arraybridge.functions.draws import Draws

    monkeypatch.setattr(Draws, "_MOST", 8)
    step = jax.checkpoint(lambda c, x: (c + jnp.sum(dropped(x)), None))
    xs = jnp.arange(60.0).reshape(20, 3)
    with pytest.raises(Exception, match="forgotten"):
        jax.block_until_ready(jax.grad(lambda xs: jax.lax.scan(step, 0.0, xs)[0])(xs))
    few = xs[:5] + 100
    for _ in range(3):  # as often as one likes
        jax.block_until_ready(jax.grad(lambda xs: jax.lax.scan(step, 0.0, xs)[0])(few))


class Meddler:
    """Another thread, which draws whenever it is told to."""

    def __init__(self) -> None:
        self._now, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._now.acquire()
            torch.rand(3)
            self._done.release()

    def draw(self) -> None:
        self._now.release()
        assert self._done.acquire(timeout=60)


MEDDLER = Meddler()
AROUND: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: lambda x: jax.jit(jax.value_and_grad(lambda x: f(x).sum()))(x),
    "checkpoint": lambda f: lambda x: jax.value_and_grad(jax.checkpoint(lambda x: f(x).sum()))(x),
    "second order": lambda f: (
        lambda x: jax.value_and_grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x)
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("when", ["first", "again"])
def test_another_thread_that_draws_meanwhile_is_noticed(around: str, when: str) -> None:
    runs: list[int] = []
    meddled = 0 if when == "first" else 1

    def body(x: Any) -> Any:
        first = torch.rand(x.shape)
        if not isinstance(first, torch._subclasses.FakeTensor):
            if len(runs) == meddled:
                MEDDLER.draw()
            runs.append(1)
        return x * x * first * torch.rand(x.shape)

    if when == "again":  # once more, and it is right
        value, g = AROUND[around](in_torch(body))(ONES)
        np.testing.assert_allclose(g.sum(), value * (1 if around == "second order" else 2), rtol=1e-5)
        return
    # From a callback JAX gives it as an error of its own, with ours in the text.
    with pytest.raises((GradientError, ValueError, RuntimeError), match="did not come again"):
        jax.block_until_ready(AROUND[around](in_torch(body))(ONES))
    assert len(runs) == 3


@pytest.mark.parametrize("around", AROUND)
def test_a_function_that_draws_nothing_does_not_mind_who_draws(around: str) -> None:
    def body(x: Any) -> Any:
        if not isinstance(x, torch._subclasses.FakeTensor):
            MEDDLER.draw()
        return x**3

    value, g = AROUND[around](in_torch(body))(ONES * 2)
    np.testing.assert_allclose(g, 12 * ONES, rtol=1e-6)
    np.testing.assert_allclose(value, 64 * (12 if around == "second order" else 8), rtol=1e-6)


def test_a_run_while_another_thread_runs_again_is_not_trusted() -> None:
    drawn, other = threading.Event(), threading.Event()
    slow_runs: list[int] = []

    def slow(x: Any) -> Any:
        y = x * x * torch.rand(x.shape)
        slow_runs.append(1)
        if len(slow_runs) == 2:  # for the second order
            drawn.set()
            assert other.wait(60)
        return y

    found: list[Any] = []

    def work() -> None:
        g, pull = jax.vjp(jax.grad(lambda x: in_torch(slow)(x).sum()), ONES)
        found.extend([g, *pull(ONES)])

    # What this thread draws it draws from the state of the other one, which puts its own back.
    thread = threading.Thread(target=work)
    thread.start()
    assert drawn.wait(60)
    _, pull = jax.vjp(jax.grad(lambda x: in_torch(lambda x: x * x * torch.rand(x.shape))(x).sum()), ONES)
    other.set()
    thread.join(60)
    assert len(slow_runs) == 3
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    with pytest.raises(GradientError, match="did not come again"):
        pull(ONES)


def test_programs_that_run_in_several_threads_draw_the_same_numbers_again() -> None:
    def body(x: Any) -> Any:
        first = torch.rand(x.shape)
        threading.Event().wait(0.003)  # for others to come in between, if they may
        return x * first * torch.rand(x.shape)

    step = jax.jit(lambda x: jax.vjp(in_torch(body), x))
    wrong: list[int] = []

    def work(k: int) -> None:
        for i in range(5):
            x = jnp.arange(1.0, 65.0) + 100 * k + 10000 * i
            y, pull = step(x)
            (g,) = pull(jnp.ones_like(y)) if k % 2 else jax.jit(lambda p, x: p(x))(pull, jnp.ones_like(y))
            wrong.append(not np.allclose(y, g * x, rtol=1e-5))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(0, 8, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(wrong) == 20
    assert not any(wrong)


@pytest.mark.parametrize(
    ("middle", "inner"),
    [("jax", "torch"), ("jitted", "torch"), ("tensorflow", "torch"), ("jax", "Keras"), ("jitted", "Keras")],
)
def test_what_an_inner_function_drew_is_not_drawn_anew_for_a_higher_order(middle: str, inner: str) -> None:
    if (middle, inner) == ("jitted", "torch") and not hasattr(jax, "make_user_context"):
        pytest.skip("this JAX cannot trace it apart: docs/gradients.md, What is not noticed")
    draw = dropped if inner == "torch" else in_tf(DRAWING["Dropout of Keras"])
    fixed = (in_torch if inner == "torch" else in_tf)(lambda x: x * 3)

    def outer(function: Any) -> Any:
        def body(x: Any) -> Any:
            return function(x) * x

        return {
            "jax": arraybridge.jax(grad="flow")(body),
            "jitted": arraybridge.jax(grad="flow")(jax.jit(body)),
            "tensorflow": in_tf(body),
        }[middle]

    if (middle, inner) != ("jitted", "Keras"):  # refused at once there
        x = torch.from_numpy(X.copy()).requires_grad_()
        y = outer(draw)(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        np.testing.assert_allclose(g.detach(), 2 * y.detach() / x.detach(), rtol=1e-5)
        with pytest.raises((GradientError, ValueError, RuntimeError), match="cannot draw again"):
            torch.autograd.grad(g.sum(), x)
    x = torch.from_numpy(X.copy()).requires_grad_()
    (g,) = torch.autograd.grad(outer(fixed)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(second, np.full_like(X, 6), rtol=1e-6)


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
@pytest.mark.parametrize("middle", ["jax", "jitted", "tensorflow"])
def test_what_an_inner_function_drew_is_not_drawn_anew_where_what_is_saved_is_copied(middle: str) -> None:
    def outer(function: Any) -> Any:
        def body(x: Any) -> Any:
            return function(x) * x

        in_jax = arraybridge.jax(grad="flow")
        return {"jax": in_jax(body), "jitted": in_jax(jax.jit(body)), "tensorflow": in_tf(body)}[middle]

    def saved(function: Any) -> tuple[Any, Any]:
        x = torch.from_numpy(X.copy()).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return x, outer(function)(x).sum()

    x, y = saved(dropped)
    for _ in range(2):
        with pytest.raises((GradientError, ValueError, RuntimeError), match="cannot draw again"):
            torch.autograd.grad(y, x, retain_graph=True)
    x, y = saved(in_torch(lambda x: x * 3))
    for _ in range(2):
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        np.testing.assert_allclose(g, 6 * X, rtol=1e-6)


@pytest.mark.parametrize("how", ["checkpoint of torch", "reentrant checkpoint of torch", "second order"])
@pytest.mark.parametrize("inner", ["Dropout of Keras", "generator"])
def test_what_an_inner_function_cannot_draw_again_is_refused(inner: str, how: str) -> None:
    generator = torch.Generator()
    draw = (
        in_torch(lambda x: x * torch.rand(16, generator=generator))
        if inner == "generator"
        else in_tf(DRAWING[inner])
    )
    with pytest.raises(GradientError, match="cannot draw again"):
        again(arraybridge.jax(grad="flow")(lambda x: draw(x) * x), how)


def test_what_is_inside_of_a_function_of_torch_is_not_drawn_anew_for_a_higher_order() -> None:
    draw = in_tf(DRAWING["Dropout of Keras"])
    f = in_torch(lambda x: draw(x) * x)

    def total(x: Any) -> Any:
        return f(x).sum()

    with pytest.raises((GradientError, ValueError, RuntimeError), match="cannot draw again"):
        jax.grad(lambda x: jax.grad(total)(x).sum())(jnp.array(X))


# -- where nobody differentiates what draws ---------------------------------------------------------------


def drawn_by_torch(k: Any) -> Any:
    return torch.rand(()) + 0 * k


def drawn_by_tensorflow(k: Any) -> Any:
    return tf.random.uniform([], 0.1, 1.0) + 0 * k


@pytest.mark.parametrize("jitted", [False, True])
def test_a_mask_under_a_checkpoint_of_what_nobody_differentiates(jitted: bool) -> None:
    mask = arraybridge.torch(grad="flow")(drawn_by_torch)

    @jax.checkpoint
    def scaled(x: Any) -> Any:
        return x * mask(jax.lax.stop_gradient(x))

    both = jax.value_and_grad(scaled)
    both = jax.jit(both) if jitted else both
    torch.manual_seed(4)
    found = [both(jnp.float32(1.0))]
    torch.manual_seed(5)
    found += [both(jnp.float32(1.0)), both(jnp.float32(1.0))]
    for value, gradient in found:
        assert value == gradient  # of x · r at 1
    assert len({float(value) for value, _ in found}) == 3  # each call draws anew


def test_a_mask_of_tensorflow_under_a_checkpoint_is_refused() -> None:
    mask = arraybridge.tensorflow(grad="flow")(drawn_by_tensorflow)
    scaled = jax.checkpoint(lambda x: x * mask(jax.lax.stop_gradient(x)))
    with pytest.raises((GradientError, jax.errors.JaxRuntimeError), match="cannot draw again"):
        jax.block_until_ready(jax.value_and_grad(scaled)(jnp.float32(1.0)))


def second_order(f: Callable[[Any], Any]) -> Any:
    x = torch.tensor(1.0, requires_grad=True)
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first, x)


def test_an_inner_function_that_draws_of_what_nobody_differentiates_is_refused() -> None:
    mask = arraybridge.torch(grad="flow")(drawn_by_torch)
    of_tensorflow = arraybridge.tensorflow(grad="flow")(lambda x: x * x * mask(tf.ones([])))
    of_jax = arraybridge.jax(grad="flow")(lambda x: x * x * mask(jax.lax.stop_gradient(x)))
    for f in (of_tensorflow, of_jax):
        with pytest.raises(GradientError, match="inside of another function"):
            second_order(f)


def test_an_inner_function_of_tensorflow_that_draws_is_refused_under_a_checkpoint() -> None:
    mask = arraybridge.tensorflow(grad="flow")(drawn_by_tensorflow)
    f = arraybridge.jax(grad="flow")(lambda x: x * mask(jax.lax.stop_gradient(x)))
    x = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(GradientError, match="cannot draw again"):
        torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).backward()


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_an_inner_function_that_draws_by_py_function_is_refused_in_a_program(around: Any) -> None:
    inner = arraybridge.torch(grad="flow")(lambda t: t * torch.rand(()))

    @arraybridge.tensorflow(grad="flow")
    def f(x: Any) -> Any:
        y = tf.py_function(inner, [x], tf.float32)
        y.set_shape([])
        return y

    with pytest.raises((GradientError, jax.errors.JaxRuntimeError), match="inside of another function"):
        jax.block_until_ready(jax.grad(around(f))(jnp.float32(1.0)))


WRITES: dict[str, Callable[[Any], object]] = {
    "slice": lambda v: v[1].assign(v[1] + 1),
    "scatter_nd": lambda v: v.scatter_nd_add([[1]], [1]),
    "scatter": lambda v: v.scatter_add(tf.IndexedSlices([1], [1])),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_who_writes_to_a_part_of_a_counter_draws(write: str, graph: bool) -> None:
    counter = tf.Variable([1, 2], trainable=False)

    def f(x: Any) -> Any:
        WRITES[write](counter)
        return x * tf.random.stateless_uniform([], counter)

    scaled = arraybridge.tensorflow(grad="flow")(tf.function(f, autograph=False) if graph else f)
    x = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(GradientError, match="of integers"):
        torch.utils.checkpoint.checkpoint(scaled, x, use_reentrant=False).backward()
    with pytest.raises((GradientError, jax.errors.JaxRuntimeError), match="of integers"):
        jax.block_until_ready(jax.jit(jax.value_and_grad(scaled))(jnp.float32(1.0)))


def test_the_first_call_under_a_checkpoint_may_trace_the_function() -> None:
    cube = arraybridge.torch(grad="flow")(lambda t: t**3)
    f = arraybridge.jax(grad="flow")(jax.jit(lambda x: cube(x)))
    x = torch.tensor(1.0, requires_grad=True)
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).backward()
    assert x.grad is not None
    assert x.grad.item() == 3.0


def normalised(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


#: What comes before a function: under jit, XLA compiles it anew for the second run, with other last bits.
BEFORE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "tanh": jnp.tanh,
    "a normalisation": normalised,
    "what multiplies roundings": lambda x: jnp.sin(2.0**14 * np.pi * normalised(x)),
    "a difference of roundings": lambda x: (
        normalised(x) - (x - x.mean(-1, keepdims=True)) / jnp.std(x, -1)[:, None]
    ),
    "minus infinity": lambda x: jnp.where(jnp.tril(jnp.ones(x.shape, bool)), normalised(x), -jnp.inf),
    "a while_loop": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, x)
    )[1],
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("before", BEFORE)
def test_a_checkpoint_may_round_otherwise(before: str, jitted: bool) -> None:
    mask = in_torch(lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 256)), jnp.float32)

    def loss(b: Any) -> Any:
        def block(x: Any, b: Any) -> Any:
            m = mask(jax.lax.stop_gradient(BEFORE[before](x)) + b * 0)
            return b * m, m

        y, m = jax.checkpoint(block)(x, b)
        return y.sum(), m

    step = jax.value_and_grad(loss, has_aux=True)
    step = jax.jit(step) if jitted else step
    masks = set()
    for _ in range(3):
        (_, m), found = step(jnp.ones(x.shape))
        np.testing.assert_array_equal(found, m)
        masks.add(np.asarray(m).tobytes())
    assert len(masks) == 3


def test_a_dropout_behind_a_normalisation_in_a_checkpoint() -> None:
    dropout = in_torch(torch.nn.Dropout(0.5))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 256)), jnp.float32)
    pull = jax.vjp(normalised, x)[1]

    def loss(x: Any) -> Any:
        y = jax.checkpoint(lambda x: dropout(normalised(x)))(x)
        return (y**2).sum(), y

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for _ in range(3):
        (_, y), found = step(x)
        expected = pull(2 * y * 2.0 * (np.asarray(y) != 0))[0]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def masked(x: Any) -> tuple[Any, Any]:
    """``x · m`` and ``m``, of which nobody differentiates the argument."""
    m = MASK(jax.lax.stop_gradient(normalised(x)))
    return x * m, m


def dropped_with(x: Any) -> tuple[Any, Any]:
    return tuple(BOTH(x))


def mask_and_product(x: Any, m: Any) -> tuple[Any, Any]:
    return x * m, m


MASK = in_torch(lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.5))
BOTH = in_torch(lambda x: mask_and_product(x, torch.nn.functional.dropout(torch.ones_like(x), 0.5)))


def with_a_rule(kind: str) -> Callable[[Any], Any]:
    """A mask from within a function that has a derivative of its own."""
    if kind == "sequential_vmap":
        f = jax.custom_batching.sequential_vmap(lambda x: MASK(x))
    elif kind == "custom_linear_solve":
        f = lambda x: jax.lax.custom_linear_solve(lambda y: y, x, lambda _, b: MASK(b))  # noqa: E731
    elif kind == "custom_vjp":
        f = jax.custom_vjp(lambda x: MASK(x))
        f.defvjp(lambda x: (MASK(x), None), lambda _, c: (jnp.zeros_like(c),))
    else:
        f = jax.custom_jvp(lambda x: MASK(x))
        f.defjvp(lambda x, t: (f(*x), jnp.zeros_like(x[0])))

    def run(x: Any) -> Any:
        m = f(jax.lax.stop_gradient(x))
        return x * m, m

    return run


def twice(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        y, m = f(x)
        z, n = f(y)
        return z, m * n

    return run


def in_steps(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        y, ms = jax.lax.scan(lambda c, _: f(c), x, None, length=3)
        return y, jnp.prod(ms, 0)

    return run


def compiled_before(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    program = jax.jit(f)
    program(ROWS)
    jax.vjp(lambda x: program(x)[0], ROWS)
    return jax.checkpoint(program)


ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32)
POLICIES = jax.checkpoint_policies
CHECKPOINTS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "one": jax.checkpoint,
    "nested": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "of two calls": lambda f: jax.checkpoint(twice(f)),
    "two": lambda f: twice(jax.checkpoint(f)),
    "of a scan": lambda f: jax.checkpoint(in_steps(f)),
    "in a scan": lambda f: in_steps(jax.checkpoint(f, prevent_cse=False)),
    "in a scan of a checkpoint": lambda f: jax.checkpoint(in_steps(jax.checkpoint(f))),
    "of a cond": lambda f: jax.checkpoint(lambda x: jax.lax.cond(x.sum() > -1e9, f, lambda x: (x, x), x)),
    "of a vmap": lambda f: jax.checkpoint(jax.vmap(f)),
    "in a vmap": lambda f: jax.vmap(jax.checkpoint(f)),
    "of a program": lambda f: jax.checkpoint(jax.jit(in_steps(jax.jit(f)))),
    "of a program compiled before": compiled_before,
    "everything saveable": lambda f: jax.checkpoint(f, policy=POLICIES.everything_saveable),
    "dots saveable": lambda f: jax.checkpoint(f, policy=POLICIES.dots_saveable),
    "names saveable": lambda f: jax.checkpoint(f, policy=POLICIES.save_only_these_names("a")),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("f", [dropped_with, masked])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_checkpoint_draws_the_same_again_and_anew_in_each_call(
    checkpoint: str, f: Callable[[Any], Any], jitted: bool
) -> None:
    around = CHECKPOINTS[checkpoint](f)

    def loss(x: Any) -> Any:
        y, m = around(x)
        return y.sum(), m

    step = jax.value_and_grad(loss, has_aux=True)
    step = jax.jit(step) if jitted else step
    masks = set()
    for _ in range(3):
        (_, m), found = step(ROWS)
        np.testing.assert_allclose(found, m, rtol=1e-5)
        masks.add(np.asarray(m).tobytes())
    assert len(masks) == 3


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp", "sequential_vmap", "custom_linear_solve"])
def test_a_function_with_a_rule_that_draws_in_a_checkpoint(kind: str) -> None:
    f = with_a_rule(kind)
    with pytest.raises(Exception, match="with a rule of its own"):
        jax.block_until_ready(jax.grad(lambda x: jax.checkpoint(f)(x)[0].sum())(ROWS))
    rows = jax.vmap(with_a_rule(kind))(jnp.ones((4, 64)))[1]
    assert len({row.tobytes() for row in np.asarray(rows)}) == 4


def test_a_rule_around_what_jax_compiles_by_itself() -> None:
    program = jax.jit(in_torch(lambda x: 2 * x))
    f = jax.custom_vjp(lambda x: program(x))
    f.defvjp(lambda x: jax.vjp(program, x), lambda pull, c: pull(c))
    for run in (jax.jit(lambda x: f(x)), jax.jit(lambda x: f(x) + 0), program, jax.checkpoint(f)):
        np.testing.assert_array_equal(run(ROWS), 2 * ROWS)
    np.testing.assert_array_equal(jax.grad(lambda x: jax.checkpoint(f)(x).sum())(ROWS), ROWS * 0 + 2)
    draws = jax.jit(dropped)
    ruled = jax.custom_vjp(lambda x: draws(x))
    ruled.defvjp(lambda x: jax.vjp(draws, x), lambda pull, c: pull(c))
    y, pull = jax.vjp(jax.jit(jax.checkpoint(lambda x: ruled(jnp.tanh(x) * 0 + 1))), ROWS)
    assert not np.asarray(pull(y)[0]).any()


@pytest.mark.parametrize("loop", ["scan", "map", "vmap", "calls"])
def test_zeros_around_an_image_make_no_two_calls_one(loop: str) -> None:
    program = jax.jit(lambda x: (dropped(jnp.pad(x, 1)) != 0) * 1.0)
    x = jnp.arange(1.0, 65).reshape(4, 16)
    rows = {
        "scan": lambda: jax.lax.scan(lambda c, x: (c, program(x)), 0, x)[1],
        "map": lambda: jax.lax.map(program, x),
        "vmap": lambda: jax.jit(jax.vmap(program))(x),
        "calls": lambda: jnp.stack(jax.jit(lambda x: [program(row) for row in x])(x)),
    }[loop]()
    assert len({row.tobytes() for row in np.asarray(rows)}) == 4


def test_what_draws_nothing_is_never_forgotten() -> None:
    f = in_torch(lambda x: x * 0.5)
    steps = jax.jit(
        jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c) * 2, None), x, None, length=5000)[0].sum())
    )
    np.testing.assert_array_equal(steps(jnp.ones(2)), [1, 1])


@pytest.mark.parametrize("draws", [False, True])
def test_a_while_loop_in_a_checkpoint(draws: bool) -> None:
    f = MASK if draws else in_torch(lambda x: x * 0.5)

    def looped(x: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] + 1, f(c[1])

        return x * jax.lax.while_loop(lambda c: c[0] < 2, body, (0, jax.lax.stop_gradient(x)))[1]

    gradient = jax.grad(lambda x: jax.checkpoint(looped)(x).sum())
    if draws:
        with pytest.raises(Exception, match="in a while_loop, or"):
            jax.block_until_ready(gradient(ROWS))
    else:
        np.testing.assert_allclose(gradient(ROWS), ROWS / 4, rtol=1e-6)


def test_a_while_loop_draws_in_each_step() -> None:
    def step(c: Any) -> Any:
        i, x = c
        return i + 1, x.at[i].set(jax.grad(lambda y: dropped(y).sum())(ONES)[:8].sum())

    found = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 8, step, (0, x))[1])(jnp.zeros(8))
    assert len(set(np.asarray(found).tolist())) > 1


def test_a_seed_between_the_forward_and_the_backward_of_a_mask() -> None:
    y, pull, m = jax.vjp(jax.checkpoint(masked), ROWS, has_aux=True)
    torch.manual_seed(5)
    np.testing.assert_array_equal(pull(y * 0 + 1)[0], m)


@pytest.mark.parametrize("before", [None, "forward", "backward"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torch_around_a_program_that_calls_torch(reentrant: bool, before: str | None) -> None:
    noise = in_torch(lambda x: torch.nn.functional.dropout(x, 0.5))
    program = arraybridge.jax(grad="flow")(jax.jit(lambda x: noise(x)))
    if before is not None:
        result = program(torch.ones(16, requires_grad=True))
        if before == "backward":
            result.sum().backward()
    for _ in range(3):
        x = torch.ones(16, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(program, x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_mask_of_tensorflow_under_a_checkpoint_of_torch_is_refused(reentrant: bool) -> None:
    mask = arraybridge.tensorflow(grad="flow")(lambda x: tf.nn.dropout(x, 0.5))
    x = torch.ones(8, requires_grad=True)

    def scaled(x: Any) -> Any:
        return x * mask(torch.ones(8))

    with pytest.raises(GradientError, match="cannot draw again"):
        torch.utils.checkpoint.checkpoint(scaled, x, use_reentrant=reentrant).sum().backward()
