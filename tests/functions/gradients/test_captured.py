"""What a function captures, in place of taking it as an argument, gets its gradient or is refused."""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
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

W = torch.tensor([2.0, 3.0], requires_grad=True)
NETWORK = torch.nn.Linear(2, 2)
times = in_torch(lambda x, w: x * w)


class Scale:
    """A function with a parameter of its own."""

    weight = W

    @arraybridge.tensorflow(grad="flow")
    def __call__(self, x: Any) -> Any:
        return x * self.weight


#: Functions of JAX and TensorFlow that read a tensor of torch which requires grad.
READERS: dict[str, Callable[[Any], Any]] = {
    "jnp.asarray": in_jax(lambda x: x * jnp.asarray(W)),
    "jitted": in_jax(jax.jit(lambda x: x * jnp.asarray(W))),
    "np.asarray": in_jax(lambda x: x * np.asarray(W)),
    "from_dlpack": in_jax(lambda x: x * jax.dlpack.from_dlpack(W)),
    "torch's operation": in_jax(lambda x: x * jnp.asarray(torch.exp(W))),
    "converted": in_jax(lambda x: x * arraybridge.to_jax(W * 1)),
    "module": in_jax(lambda x: x * arraybridge.to_jax(NETWORK(torch.ones(2)))),
    "inner function": in_jax(lambda x: x * jnp.asarray(times(torch.ones(2), W))),
    "inner function under jit": in_jax(jax.jit(lambda x: times(x, W))),
    "inner function of TensorFlow": in_jax(
        lambda x: x * jnp.asarray(in_tf(lambda x, w: x * w)(jnp.ones(2), W))
    ),
    "result": in_jax(lambda x: (x, W)),
    "tensorflow": in_tf(lambda x: x * W),
    "tf.constant": in_tf(lambda x: x * tf.constant(W)),
    "method": Scale(),
    "result of TensorFlow": in_tf(lambda x: (x, W * 2)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_torch_tensor_that_another_framework_reads_is_refused(reader: str) -> None:
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    for _ in range(2):
        with pytest.raises(GradientError, match=r"functional_call|detach|jax and torch"):
            READERS[reader](x)


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
def test_a_program_of_before_does_not_hide_what_is_read() -> None:
    f = in_jax(jax.jit(lambda x: x * jnp.asarray(W)))
    inside = jax.jit(lambda x: x * jnp.asarray(W))
    for function in (f, in_jax(lambda x: inside(x))):
        x = torch.tensor([1.0, 5.0], requires_grad=True)
        with torch.no_grad():
            assert function(x).tolist() == [2, 15]
        with pytest.raises(GradientError, match="functional_call"):
            function(x)


V = tf.Variable([2.0, 3.0])
times_v = jax.jit(lambda x: x * V.numpy())
inner = in_jax(jax.jit(lambda x: x * V.numpy()))


def step(carry: Any, _: Any) -> Any:
    return carry * V.numpy(), None


def failing_first(x: Any, failed: list[bool] = []) -> Any:  # noqa: B006  # state, as a retry has it
    y = times_v(x)
    if not failed:
        failed.append(True)
        raise MemoryError
    return y


#: Functions whose second call finds a program of the first one, in which the variable is a constant.
WITH_A_HELPER: dict[str, Callable[[Any], Any]] = {
    "the same function": in_torch(lambda x: inner(x)),
    "decorated anew": lambda x: in_jax(lambda x: times_v(x))(x),
    "scan": lambda x: in_jax(lambda x: jax.lax.scan(step, x, None, length=2)[0])(x),
    "after an error": arraybridge.jax(grad="flow", oom_recovery=True)(failing_first),
    "a plain function of JAX in one of torch": in_torch(
        lambda x: torch.from_dlpack(times_v(jnp.from_dlpack(x.detach()))) * x
    ),
}


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
@pytest.mark.parametrize("way", WITH_A_HELPER)
def test_a_program_of_a_helper_does_not_hide_a_variable(way: str) -> None:
    inner(torch.ones(2, requires_grad=True))  # torch differentiates, and the variable is a number
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(x := tf.constant([1.0, 1.0]))
            with pytest.raises(GradientError, match=r"trainable tf\.Variable"):
                WITH_A_HELPER[way](x)
    for _ in range(2):  # nobody follows it here
        np.testing.assert_array_equal(inner(torch.ones(2, requires_grad=True)).detach(), [2, 3])


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
def test_a_program_of_a_helper_does_not_hide_a_parameter_of_torch() -> None:
    w = torch.tensor(3.0, requires_grad=True)
    helper = in_jax(jax.jit(lambda x: x * jnp.asarray(w.tolist())))
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant([1.0, 1.0]))
        helper(x)  # to TensorFlow it is a number
    for _ in range(2):
        with pytest.raises(GradientError, match="reads the numbers"):
            in_tf(lambda t: helper(t) + 0)(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("callee", ["jax", "torch"])
def test_a_variable_is_seen_where_the_data_is_constant(callee: str) -> None:
    f = (
        in_jax(lambda x: x * V.numpy())
        if callee == "jax"
        else in_torch(lambda x: x * torch.tensor(V.numpy()))
    )
    data = tf.constant([1.0, 1.0])
    with tf.GradientTape(), pytest.raises(GradientError, match=r"trainable tf\.Variable"):
        f(data)
    np.testing.assert_array_equal(f(data), [2, 3])


@pytest.mark.parametrize("callee", ["jax", "torch", "tensorflow"])
def test_a_counter_is_no_parameter(callee: str) -> None:
    count = tf.Variable(3)  # trainable, as all are by default
    if callee == "tensorflow":
        x = torch.ones(2, requires_grad=True)
        in_tf(lambda x: (count.assign_add(1), x * x)[1])(x).sum().backward()
        g = x.grad
    else:
        body = in_jax if callee == "jax" else in_torch
        with tf.GradientTape() as tape:
            tape.watch(x := tf.ones(2))
            y = body(lambda x: x * x + 0 * int(count))(x)
        g = tape.gradient(y, x)
    np.testing.assert_array_equal(g, [2, 2])


@pytest.mark.parametrize("read", [float, torch.Tensor.tolist, torch.Tensor.numpy])
def test_a_backward_rule_that_reads_a_parameter_of_torch(read: Any) -> None:
    w = torch.tensor(3.0, requires_grad=True)

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 3

    scaled.defvjp(lambda x: (x * 3, None), lambda _, ct: (ct * jnp.asarray(read(w)),))
    x = torch.ones(2, requires_grad=True)
    y = in_jax(scaled)(x).sum()
    with pytest.raises((GradientError, RuntimeError), match=r"reads the numbers|requires grad"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_backward_rule_that_reads_a_variable() -> None:
    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * x

    scaled.defvjp(lambda x: (x * x, x), lambda x, ct: (ct * x * V.numpy(),))
    f = in_jax(scaled)
    with tf.GradientTape() as tape:
        tape.watch(x := tf.ones(2))
        y = f(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [2, 3])
    with tf.GradientTape() as outer, tf.GradientTape() as tape:
        outer.watch(x)
        tape.watch(x)
        y = f(x)
        with pytest.raises(GradientError, match=r"trainable tf\.Variable"):
            tape.gradient(y, x)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_an_array_in_a_class_that_jax_knows_alone_is_refused(caller: str, jitted: bool) -> None:
    def body(x: Any) -> Any:
        return jnp.sum(x), jax.tree_util.Partial(lambda y: y, x**2)

    f = in_jax(jax.jit(body) if jitted else body)
    with tf.GradientTape() as tape:
        x = torch.ones(2, requires_grad=True) if caller == "torch" else tf.ones(2)
        if caller == "tensorflow":
            tape.watch(x)
        with pytest.raises(GradientError, match="no container"):
            f(x)


def test_frozen_tensors_are_numbers() -> None:
    frozen = torch.tensor([2.0, 3.0])
    for f in (in_jax(lambda x: x * jnp.asarray(frozen)), in_tf(lambda x: x * frozen)):
        x = torch.tensor([1.0, 5.0], requires_grad=True)
        f(x).sum().backward()
        assert x.grad.tolist() == [2, 3]
    detached = in_jax(lambda x: x * jnp.asarray(W.detach()))
    with torch.no_grad():
        assert READERS["jnp.asarray"](x.detach()).tolist() == [2, 15]
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    detached(x).sum().backward()
    assert x.grad.tolist() == [2, 3]


@pytest.mark.parametrize("order", [1, 2])
def test_a_variable_that_is_watched_and_not_trainable_is_differentiated(order: int) -> None:
    c = tf.Variable([1.0, 2.0], trainable=False)
    cube = in_jax(lambda x: x**3)
    with tf.GradientTape() as outer:
        outer.watch(c)
        with tf.GradientTape() as tape:
            tape.watch(c)
            y = tf.reduce_sum(cube(c)) + tf.reduce_sum(c)
        g = tape.gradient(y, c)
    np.testing.assert_allclose(g, [4, 13])
    np.testing.assert_allclose(outer.gradient(g, c), [6, 12])
    # A tape that does not watch it leaves it alone.
    w = tf.Variable([3.0, 4.0])
    with tf.GradientTape() as tape:
        y = in_jax(lambda x, y: x * y)(w, c)
    first, second = tape.gradient(y, [w, c])
    np.testing.assert_allclose(first, [1, 2])
    assert second is None


def test_a_trainable_variable_that_another_framework_reads_is_refused() -> None:
    w, x = tf.Variable([2.0, 3.0]), tf.Variable([1.0, 5.0])
    readers = (
        in_jax(lambda x: x * jnp.asarray(w)),
        in_torch(lambda x: x * torch.as_tensor(w.numpy())),
        in_torch(lambda x: (x, w)),
    )
    for f in readers:
        with tf.GradientTape(), pytest.raises(GradientError, match="functional_call"):
            f(x)


class Normal:
    """An object of which nobody knows what is in it."""

    def __init__(self, mean: Any) -> None:
        self.mean = mean


def read_in_torch(mean: Any, x: Any) -> Any:
    return x * torch.from_numpy(np.array(mean))


def map_first(mean: Callable[[], Any], x: Any) -> Any:
    return read_in_torch(mean(), x)


#: Ways to a tensor of TensorFlow that is no argument: a function of the tensor and of a variable.
AROUND_THE_ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "object": lambda t, v: in_torch(lambda d, x: read_in_torch(d.mean, x))(Normal(t), v),
    "object in an object": lambda t, v: in_torch(lambda d, x: read_in_torch(d.a.mean, x))(
        types.SimpleNamespace(a=Normal([t])), v
    ),
    "generator": lambda t, v: in_torch(lambda g, x: read_in_torch(next(g), x))((y for y in [t]), v),
    "closure": lambda t, v: in_torch(lambda x: read_in_torch(t, x))(v),
    "default": lambda t, v: in_torch(lambda x, mean=t: read_in_torch(mean, x))(v),
    "partial": lambda t, v: in_torch(functools.partial(read_in_torch, t))(v),
    "container": lambda t, v: in_torch(
        lambda x, known=collections.deque([{"t": t}]): read_in_torch(known[0]["t"], x)
    )(v),
    "helper": lambda t, v: in_torch(lambda x: functools.partial(lambda y: read_in_torch(t, y))(x))(v),
    "cached helper": lambda t, v: in_torch(functools.partial(map_first, functools.lru_cache(lambda: t)))(v),
    "jax": lambda t, v: in_jax(lambda x: x * jnp.asarray(t.numpy()))(v),
}


@pytest.mark.parametrize("way", AROUND_THE_ARGUMENTS)
def test_a_tensor_that_comes_around_the_arguments_is_refused(way: str) -> None:
    v = tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape, pytest.raises(GradientError, match="stop_gradient"):
        AROUND_THE_ARGUMENTS[way](tf.exp(v), v)
    with tf.GradientTape() as tape:
        y = AROUND_THE_ARGUMENTS[way](tf.stop_gradient(tf.exp(v)), v)
    np.testing.assert_allclose(tape.gradient(y, v), np.e, rtol=1e-6)


GLOBAL: list[Any] = []
by_global = in_torch(lambda x: read_in_torch(GLOBAL[0], x))


class Reading(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return read_in_torch(GLOBAL[0], x)


class LazyList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise AssertionError("nobody asked for it")


def test_a_tensor_in_a_global_is_refused() -> None:
    v = tf.Variable(1.0)
    with tf.GradientTape():
        GLOBAL[:] = [tf.exp(v)]
        for f in (by_global, in_torch(Reading())):
            with pytest.raises(GradientError, match="captures a tensor"):
                f(v)
        GLOBAL[:] = [tf.exp(2.0)]
        by_global(v)


class Recurrent:
    """An ordinary class: it keeps tensors that a tape follows, and its method of torch reads none of them."""

    def __init__(self) -> None:
        self.hidden, self.history = tf.zeros(3), []

    @arraybridge.torch(grad="flow")
    def step(self, x: Any, hidden: Any) -> Any:
        return torch.tanh(x + hidden)

    def __call__(self, x: Any) -> Any:
        self.features = tf.tanh(x)
        self.hidden = self.step(self.features, self.hidden)
        self.history.append(self.hidden)
        return self.hidden


def test_what_an_object_keeps_is_no_sign_that_its_method_reads_it() -> None:
    cell, native, v = Recurrent(), tf.zeros(3), tf.Variable(tf.ones(3))
    with tf.GradientTape(persistent=True) as tape:
        for _ in range(3):
            y = cell(v)
            native = tf.tanh(tf.tanh(v) + native)
    np.testing.assert_allclose(tape.gradient(y, v), tape.gradient(native, v), rtol=1e-6)


def test_what_cannot_be_looked_into() -> None:
    parent = Normal(0)
    child = Normal(weakref.proxy(parent))
    del parent
    gc.collect()
    many = list(range(100_000))
    v = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        lazy = LazyList([1, 2])
        y = in_torch(lambda x, other, child=child, many=many: x * len(many) * bool(len(lazy)))(v, child)
    np.testing.assert_array_equal(tape.gradient(y, v), [100_000])
    x = torch.ones(2, requires_grad=True)
    in_tf(lambda x: (x * 2, child))(x)[0].sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2])


HIDING: dict[str, Callable[[Any], Any]] = {
    "object": Normal,
    "generator": lambda y: (z for z in [y]),
    "closure": lambda y: lambda: y,
    "method": lambda y: Normal(y).__str__,
    "the argument": Normal,
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
@pytest.mark.parametrize("how", ["object", "generator", "closure", "method", "the argument"])
def test_a_tensor_of_torch_that_is_returned_inside_of_no_container_is_refused(
    how: str, caller: str, jitted: bool
) -> None:
    hide = HIDING[how]
    f = in_torch(lambda x: (x * 2, hide(x if how == "the argument" else x.sum())))
    if caller == "jax":
        run = jax.jit(lambda x: f(x)[0]) if jitted else lambda x: f(x)[0]
        with pytest.raises(GradientError, match="no container"):
            jax.vjp(run, jnp.ones(2))
        return
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape(), pytest.raises(GradientError, match="no container"):
        f(v)
    kept = in_torch(lambda x: (x * 2, hide(torch.ones(2))))
    with tf.GradientTape() as tape:
        y, _ = kept(v)
    np.testing.assert_array_equal(tape.gradient(y, v), [2, 2])


@pytest.mark.parametrize("callee", ["jax", "jitted", "tensorflow"])
def test_a_parameter_that_a_rule_reads_by_a_function_of_torch_is_refused_for_a_higher_order(
    callee: str,
) -> None:
    w = torch.full((3,), 3.0, requires_grad=True)
    inner = in_torch(lambda c: w * c)
    square = jax.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, g: (x * inner(g),))
    of_tensorflow = tf.custom_gradient(lambda x: (x * x, lambda g: x * inner(g)))
    f = {
        "jax": in_jax(lambda x: square(x)),
        "jitted": in_jax(jax.jit(lambda x: square(x))),
        "tensorflow": in_tf(lambda x: of_tensorflow(x)),
    }[callee]
    x = torch.full((3,), 2.0, requires_grad=True)
    with pytest.raises(Exception, match="trainable tensor"):
        torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].sum().backward()


INNER: dict[str, Callable[[Any, Any], Any]] = {
    "a constant": lambda f, x: x * f(jnp.ones(3)),
    "a program": lambda f, x: jax.jit(lambda x: x * f(jnp.ones(3)))(x),
    "what is stopped": lambda f, x: x * f(jax.lax.stop_gradient(x)),
    "what is stopped in a program": lambda f, x: jax.jit(lambda x: x * f(jax.lax.stop_gradient(x)))(x),
    "integers": lambda f, x: x * f(jnp.ones(3, int)),
    "NumPy": lambda f, x: x * jnp.asarray(f(np.ones(3, np.float32))),
}


@pytest.mark.parametrize("how", [*INNER, "tensorflow"])
def test_a_parameter_that_an_inner_function_of_torch_captures_is_refused(how: str) -> None:
    w = torch.full((3,), 3.0, requires_grad=True)
    inner = in_torch(lambda c: w * c)
    outer = in_tf(lambda x: x * inner(tf.ones(3)))
    if how != "tensorflow":
        outer = in_jax(lambda x: INNER[how](inner, x))
    x = torch.full((3,), 2.0, requires_grad=True)
    with pytest.raises(Exception, match="trainable tensor"):
        outer(x).sum().backward()
    with torch.no_grad():  # nobody differentiates
        np.testing.assert_array_equal(outer(x), outer_value := [12.0] * 3 if "stopped" in how else [6.0] * 3)
    w.requires_grad_(False)
    outer(x).sum().backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad, np.divide(outer_value, 2))


@pytest.mark.parametrize("caller", ["torch", "jax"])
@pytest.mark.parametrize("how", ["object", "generator", "closure"])
def test_a_tensor_that_is_returned_inside_of_no_container_is_refused(caller: str, how: str) -> None:
    hide = {"object": Normal, "generator": lambda y: (z for z in [y]), "closure": lambda y: lambda: y}[how]
    f = in_tf(lambda x: (x * 2, hide(tf.exp(x))))
    call = f if caller == "torch" else lambda x: jax.vjp(lambda x: f(x)[0], x)
    with pytest.raises(GradientError, match="no container"):
        call(torch.ones(2, requires_grad=True) if caller == "torch" else jnp.ones(2))
    kept = in_tf(lambda x: (x * 2, hide(tf.exp(1.0))))
    y, _ = kept(torch.ones(2, requires_grad=True))
    y.sum().backward()


@pytest.mark.parametrize("writer", ["the function", "somebody"])
def test_a_variable_beside_is_not_read_again_after_a_write(writer: str) -> None:
    v = tf.Variable([2.0, 3.0], trainable=False)

    @in_tf
    def scale(x: Any, v: Any) -> Any:
        y = x**3 * v
        if writer == "the function":
            v.assign_add([1.0, 1.0])
        return y

    x = torch.tensor([1.0, 5.0], requires_grad=True)
    (g,) = torch.autograd.grad(scale(x, v).sum(), x, create_graph=True)
    np.testing.assert_allclose(g.detach(), [6, 225])
    if writer == "somebody":
        v.assign([100.0, 100.0])
    with pytest.raises(GradientError, match="written to meanwhile"):
        torch.autograd.grad(g.sum(), x)


def test_a_variable_beside_that_nobody_writes_to_is_an_input_like_others() -> None:
    v = tf.Variable([2.0, 3.0], trainable=False)
    f = in_tf(lambda x, v: x**3 * v)
    second = jax.grad(lambda x: jax.grad(lambda x: f(x, v).sum())(x).sum())
    for run in (second, jax.jit(second)):
        np.testing.assert_allclose(run(jnp.array([1.0, 5.0])), [12, 90])


#: Functions of JAX and TensorFlow that read a tensor which torch may write to.
BUFFER = torch.zeros(64)
OF_A_BUFFER: dict[str, Callable[[Any], Any]] = {
    "to_jax": in_jax(lambda x: x * arraybridge.to_jax(BUFFER)),
    "from_dlpack": in_jax(lambda x: x * jax.dlpack.from_dlpack(BUFFER)),
    "jnp.asarray": in_jax(lambda x: x * jnp.asarray(BUFFER.numpy())),
    "tensorflow": in_tf(lambda x: x * BUFFER),
    "to_tensorflow": in_tf(lambda x: x * arraybridge.to_tensorflow(BUFFER)),
    "numpy": in_tf(lambda x: x * np.asarray(BUFFER)),
}


@pytest.mark.parametrize("reader", OF_A_BUFFER)
def test_writing_to_a_captured_buffer_before_the_backward_changes_nothing(reader: str) -> None:
    x = torch.ones(64, requires_grad=True)
    with torch.no_grad():
        BUFFER.fill_(3)
    y = OF_A_BUFFER[reader](x)
    BUFFER.mul_(10)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert g.tolist() == [3] * 64


def _gradient_at_ones(total: Callable[[Any], Any], caller: str) -> Any:
    """The gradient of the sum of ``total``, by JAX or by a tape."""
    if caller == "jax":
        return np.asarray(jax.grad(lambda x: total(x).sum())(jnp.ones(64)))
    x = tf.ones(64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = total(x)
    return np.asarray(tape.gradient(y, x))


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_a_state_that_a_function_returns_and_writes_to_later_is_that_of_its_call(caller: str) -> None:
    state = torch.zeros(64)

    @in_torch
    def step(x: Any) -> Any:
        state.mul_(0.5).add_(x.detach())
        return x * 2, state, state.view(8, 8)

    def total(x: Any) -> Any:
        (_, first, _), (_, second, square) = step(x), step(x + 1)
        return (x * first + x * second)[0] + 0 * square[0, 0]

    np.testing.assert_array_equal(_gradient_at_ones(total, caller), [3.5] + [0] * 63)


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
@pytest.mark.parametrize("view", [False, True])
def test_a_state_with_a_graph_that_a_function_writes_to_later(caller: str, view: bool) -> None:
    state = torch.zeros(64)

    @in_torch
    def step(x: Any) -> Any:
        state.detach_().mul_(0.5).add_(x)
        return state.view(64) if view else state

    def total(x: Any) -> Any:
        return step(x) * x + step(x + 1) * x

    # y = a x + b x with a = x and b = c / 2 + x + 1, where c is the value of a, and a number.
    np.testing.assert_array_equal(_gradient_at_ones(total, caller), np.full(64, (1 + 1) + (2.5 + 1)))


class Cell:
    """A recurrent cell of TensorFlow with a state of its own."""

    def __init__(self, stop: bool) -> None:
        self.h, self.stop = tf.zeros(64), stop

    def step(self, x: Any) -> Any:
        h = tf.stop_gradient(self.h) if self.stop else self.h
        self.h = h * x + x
        return self.h


@pytest.mark.parametrize("caller", ["jax", "torch"])
def test_a_state_that_tensorflow_computed_in_an_earlier_call(caller: str) -> None:
    def gradient(stop: bool) -> Any:
        step = in_tf(Cell(stop).step)
        if caller == "jax":
            return jax.grad(lambda x: (step(x) + step(x)).sum())(jnp.full(64, 3.0))
        x = torch.full((64,), 3.0, requires_grad=True)
        (step(x) + step(x)).sum().backward()
        return x.grad

    with pytest.raises(GradientError, match="an earlier call"):
        gradient(stop=False)
    # x + (h x + x) with h = 3, a number.
    np.testing.assert_array_equal(gradient(stop=True), np.full(64, 1 + 4))


def test_a_state_of_tensorflow_whose_backward_is_done_is_a_number() -> None:
    cell = Cell(stop=False)
    step = in_tf(cell.step)
    for state in (0, 3, 12):  # 3 h + 3
        x = torch.full((64,), 3.0, requires_grad=True)
        step(x).sum().backward()
        np.testing.assert_array_equal(x.grad, np.full(64, state + 1))


def test_a_function_of_tensorflow_that_differentiates_one_inside() -> None:
    inner = in_tf(lambda a: a * a * a)

    @in_tf
    def outer(x: Any) -> Any:
        g = tf.constant(np.asarray(jax.grad(lambda a: inner(a).sum())(jnp.full(64, 2.0))))
        return x * g

    x = torch.ones(64, requires_grad=True)
    outer(x).sum().backward()
    np.testing.assert_array_equal(x.grad, np.full(64, 12))


def _and_a_part(y: Any) -> Any:
    return y, y[:8]


#: What a function may keep of a result, to write to it later.
KEPT: dict[str, Any] = {
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "NumPy": lambda y: torch.from_numpy(y.detach().numpy()),
    "view": lambda y: y.view(8, 8)[1:],
    "view of detach": lambda y: y.detach()[8:],
}
#: Results: the memory of some is also held by their graph, by their base or by one another.
MADE: dict[str, Any] = {
    "x * 2": lambda x: x * 2,
    "exp": torch.exp,
    "a view of softmax": lambda x: x.softmax(0)[:],
    "in place": lambda x: (x * 2).tanh_(),
    "one and a part of it": lambda x: _and_a_part(x * 2),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kept", KEPT)
def test_a_result_is_not_changed_by_what_its_function_keeps_of_it(made: str, kept: str) -> None:
    held: list[Any] = []

    @in_torch
    def f(x: Any) -> Any:
        y = MADE[made](x)
        held.append(KEPT[kept](y[0] if isinstance(y, tuple) else y))
        return y

    # The backward is torch's own: an error where its graph saved what is written to.
    y, _ = jax.vjp(lambda x: jax.tree_util.tree_leaves(f(x))[0], jnp.arange(64, dtype=jnp.float32) / 64)
    before = np.array(y)
    with torch.no_grad():
        held[0].fill_(77)
    np.testing.assert_array_equal(y, before)


@pytest.mark.parametrize("made", [name for name in MADE if "part" not in name])
def test_a_result_that_its_function_lets_go_is_shared(made: str) -> None:
    places: list[int] = []

    @in_torch
    def f(x: Any) -> Any:
        y = MADE[made](x)
        places.append(y.data_ptr())
        return y

    y, _ = jax.vjp(f, jnp.ones(64))
    assert y.unsafe_buffer_pointer() == places[0]


def test_foretelling_shapes_leaves_the_state_of_a_torch_function_alone() -> None:
    norm, state = torch.nn.BatchNorm1d(2, affine=False), torch.ones(2)

    @in_torch
    def step(x: Any) -> Any:
        view = state[:1]
        state.mul_(0.5)
        view.add_(1)
        return norm(x)

    x = jnp.asarray(np.random.default_rng(0).random((8, 2)), jnp.float32)
    program = jax.jit(step).lower(x)
    assert state.tolist() == [1, 1]
    assert norm.num_batches_tracked.item() == 0
    jax.block_until_ready(program.compile()(x))
    assert state.tolist() == [1.5, 0.5]
    assert norm.num_batches_tracked.item() == 1
    np.testing.assert_allclose(norm.running_mean, 0.1 * np.asarray(x).mean(0), rtol=1e-5)
