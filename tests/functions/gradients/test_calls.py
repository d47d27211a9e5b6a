"""Numbers of calls in programs of JAX, without another framework: each release of JAX keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

jax = require("jax")
jnp = jax.numpy

from arraybridge.frameworks.autodiff import LOST_CALL  # noqa: E402
from arraybridge.frameworks.jax.calls import NO_CALL, is_staged, number_in, number_of_call, told  # noqa: E402

COUNT = itertools.count(1)


def times_its_number(x: Any) -> tuple[Any, Any]:
    """``x`` times a number that is another one in each call, and that number."""
    call = number_of_call(lambda: -next(COUNT), [x])
    number = jax.pure_callback(
        lambda call: np.float32(-number_in(np.asarray(call))),
        jax.ShapeDtypeStruct((), np.float32),
        call,
        vmap_method="sequential",
    )
    return x * number, jnp.broadcast_to(number, jnp.shape(x))


def in_steps(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        y, numbers = jax.lax.scan(lambda c, _: f(c), x, None, length=3)
        return y, jnp.prod(numbers, 0)

    return run


def compiled_before(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    program = jax.jit(f)
    program(jnp.ones(3))
    return jax.checkpoint(program)


AROUND: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "checkpoint": jax.checkpoint,
    "two checkpoints": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "checkpoint of a scan": lambda f: jax.checkpoint(in_steps(f)),
    "scan of a checkpoint": lambda f: in_steps(jax.checkpoint(f, prevent_cse=False)),
    "checkpoint of a cond": lambda f: jax.checkpoint(
        lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: (x, x), x)
    ),
    "checkpoint of a vmap": lambda f: jax.checkpoint(jax.vmap(f)),
    "vmap of a checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
    "checkpoint of a program": lambda f: jax.checkpoint(jax.jit(in_steps(jax.jit(f)))),
    "a program compiled before": compiled_before,
    "a policy": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_the_second_run_of_a_call_has_the_number_of_the_first(around: str, jitted: bool) -> None:
    f = AROUND[around](times_its_number)

    def loss(x: Any) -> Any:
        y, number = f(x)
        return y.sum(), number

    step = jax.value_and_grad(loss, has_aux=True)
    step = jax.jit(step) if jitted else step
    numbers = set()
    for _ in range(3):
        (_, number), gradient = step(jnp.ones(3))
        np.testing.assert_array_equal(gradient, number)
        numbers.add(np.asarray(number).tobytes())
    assert len(numbers) == 3


def test_each_element_of_a_batch_has_a_number() -> None:
    _, numbers = jax.vmap(times_its_number)(jnp.ones(4))
    assert len(set(np.asarray(numbers).tolist())) == 4


def of_a_loop(x: Any) -> Any:
    def body(c: Any) -> Any:
        return c[0] + 1, high_part(c[1])

    return jax.lax.while_loop(lambda c: c[0] < 1, body, (0, x * 0))[1]


def high_part(x: Any) -> Any:
    return jnp.asarray(number_of_call(lambda: -next(COUNT), [x]))[0]


def of_a_rule(kind: Any) -> Callable[[Any], Any]:
    f = kind(high_part)
    if kind is jax.custom_jvp:
        f.defjvp(lambda x, t: (f(*x), jnp.zeros_like(x[0])))
    else:
        f.defvjp(lambda x: (high_part(x), None), lambda _, c: (jnp.zeros_like(c),))
    return f


@pytest.mark.parametrize("f", [of_a_loop, of_a_rule(jax.custom_vjp), of_a_rule(jax.custom_jvp)])
def test_what_a_checkpoint_takes_as_one_step_has_none(f: Callable[[Any], Any]) -> None:
    def times(x: Any) -> Any:
        return x * f(jax.lax.stop_gradient(x))

    assert float(jax.jit(lambda x: times(x))(1.0)) < told(LOST_CALL)[0]
    assert float(jax.grad(jax.checkpoint(lambda x: times(x)))(1.0)) == told(LOST_CALL)[0]


def test_it_is_told_whether_jax_traces() -> None:
    seen = []

    def look(x: Any) -> Any:
        seen.append(is_staged())
        return x

    for run in (look, jax.grad(look), jax.grad(jax.grad(look)), lambda x: jax.vjp(look, x)):
        run(1.0)
    assert seen == [False] * 4
    seen.clear()
    for run in (jax.jit(look), jax.jit(jax.grad(look)), jax.grad(jax.checkpoint(look))):
        run(1.0)
    jax.vmap(jax.grad(look))(jnp.ones(2))
    assert seen == [True] * 4


@pytest.mark.parametrize("number", [0, -1, -65535, -65536, -65537, -(2**24) - 1, -(2**31) + 1, LOST_CALL])
def test_numbers_are_exact(number: int) -> None:
    array = told(number)
    assert (array.shape, array.dtype) == (NO_CALL.shape, NO_CALL.dtype)
    assert number_in(array) == number
    assert number_in(np.array([5], np.int32)) == 5
