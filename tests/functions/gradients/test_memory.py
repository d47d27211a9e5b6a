"""Memory of results, cotangents and saved tensors: what is kept, written to, or moved."""

from __future__ import annotations

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
jnp = jax.numpy
JAX = arraybridge.framework("jax").autodiff

in_jax = arraybridge.jax(grad="flow")
in_tf = arraybridge.tensorflow(grad="flow")
in_torch = arraybridge.torch(grad="flow")


def held_by_tensorflow(kind: str) -> Callable[[Any], Any]:
    table, variable, cell = (
        tf.fill([64], 3.0),
        tf.Variable(tf.fill([64], 3.0), trainable=False),
        [tf.fill([64], 3.0)],
    )

    def recurrent(x: Any) -> Any:
        cell[0] = tf.stop_gradient(cell[0]) + 0 * tf.stop_gradient(x)
        return x * cell[0], cell[0]

    return {
        "constant": lambda x: (x * table, table),
        "integers": lambda x: (x * tf.cast(counts, tf.float32), counts),
        "variable": lambda x: (x * variable, variable),
        "value of a variable": lambda x: (x * variable, variable.read_value()),
        "state": recurrent,
        "compiled": tf.function(lambda x: (x * table, table)),
    }[kind]


counts = tf.fill([64], 3)


@pytest.mark.parametrize("differentiated", [True, False])
@pytest.mark.parametrize("kind", ["constant", "integers", "variable", "state"])
def test_torch_may_write_to_what_a_function_of_tensorflow_returns_and_keeps(
    kind: str, differentiated: bool
) -> None:
    f = in_tf(held_by_tensorflow(kind))
    w = torch.ones(64, requires_grad=True)
    y, kept = f(w)
    kept.detach().mul_(2)
    y, _ = f(w if differentiated else w * 1)
    (g,) = torch.autograd.grad(y.sum(), w)
    assert y.tolist() == g.tolist() == [3] * 64


def test_torch_may_write_to_what_a_function_of_jax_keeps() -> None:
    table, count = jnp.full(64, 3.0), jnp.full(64, 3)
    f = in_jax(lambda x: (x * table * count, table, count))
    for _ in range(2):
        w = torch.ones(64, requires_grad=True)
        y, one, other = f(w)
        (g,) = torch.autograd.grad(y.sum(), w)
        assert y.tolist() == g.tolist() == [9] * 64
        one.mul_(2)
        other.mul_(2)


V, K = tf.Variable(tf.fill([64], 3.0), trainable=False), tf.fill([64], 3.0)
ALIASES: dict[str, Callable[[], Any]] = {
    "read_value": lambda: V.read_value(),
    "reshaped variable": lambda: tf.reshape(V, [8, 8]),
    "expanded variable": lambda: tf.expand_dims(V, 0),
    "identity": lambda: tf.identity(K),
    "reshaped constant": lambda: tf.reshape(K, [8, 8]),
    "stop_gradient": lambda: tf.stop_gradient(K),
    "concatenated": lambda: tf.concat([K], 0),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_torch_may_write_to_another_handle_on_what_a_function_of_tensorflow_keeps(alias: str) -> None:
    f = in_tf(lambda x: (x * 2, ALIASES[alias]()))
    _, found = f(torch.ones(64, requires_grad=True))
    found.zero_()
    np.testing.assert_array_equal(V, np.full(64, 3))
    np.testing.assert_array_equal(K, np.full(64, 3))


def test_torch_may_write_to_another_handle_on_what_a_function_of_jax_keeps() -> None:
    table = jnp.full(64, 3.0)
    for alias in (
        lambda: jax.device_put(table, jax.devices()[0]),
        lambda: jax.dlpack.from_dlpack(table),
        lambda: jax.device_put(np.asarray(table)),
    ):
        f = in_jax(lambda x, alias=alias: (x * 2, alias()))
        _, found = f(torch.ones(64, requires_grad=True))
        found.zero_()
        np.testing.assert_array_equal(table, np.full(64, 3))


def test_a_function_of_torch_that_writes_to_its_argument_under_jit_is_refused() -> None:
    @in_torch
    def f(x: Any) -> Any:
        x += 1
        return x * 1

    with pytest.raises((GradientError, RuntimeError, ValueError), match="writes to an argument"):
        jax.block_until_ready(jax.jit(lambda x: f(x) * 2)(jnp.zeros(64)))


#: Functions of TensorFlow of two arguments, whose gradients are in memory that TensorFlow holds.
GRADIENTS_HELD: dict[str, Callable[[Any, Any], Any]] = {
    "zeros for what is not used": tf.function(lambda a, b: (tf.tanh(a), b + 1.0)),
    "zeros, reshaped": lambda a, b: tf.identity_n([a * 2, tf.reshape(b, (3, 4))]),
    "constant of a program": tf.function(lambda a, b: a * 2 + tf.sign(b)),
}


@pytest.mark.parametrize("name", GRADIENTS_HELD)
def test_torch_may_write_to_gradients_that_tensorflow_holds(name: str) -> None:
    f = in_tf(GRADIENTS_HELD[name])
    for _ in range(3):
        a, b = torch.ones(12, requires_grad=True), torch.ones(12, requires_grad=True)
        first = f(a, b)
        (first[0] if isinstance(first, (list, tuple)) else first).sum().backward()
        (3 * b).sum().backward()  # adds to what is there, in place
        np.testing.assert_array_equal(b.grad, np.full(12, 3))
    w = tf.Variable(tf.ones(12))  # and TensorFlow's own zeros are zeros
    with tf.GradientTape() as tape:
        u, _ = tf.identity_n([w * 2, w * 3])
    np.testing.assert_array_equal(tape.gradient(u, w), np.full(12, 2))


@pytest.mark.parametrize("make", [lambda: tf.linspace(0.0, 1.0, 5), lambda: tf.zeros(3), lambda: tf.eye(2)])
def test_torch_may_write_to_a_constant_of_a_program(make: Callable[[], Any]) -> None:
    f = in_tf(tf.function(lambda x: (tf.sin(x), make()), autograph=False))
    for _ in range(3):
        _, found = f(torch.ones(3, requires_grad=True))
        np.testing.assert_array_equal(found.detach(), make())
        with torch.no_grad():
            found += 1000


@pytest.mark.parametrize("part", ["split", "slice", "unstack"])
def test_torch_may_write_to_the_beginning_of_a_larger_buffer(part: str) -> None:
    parts: dict[str, Callable[[Any], list[Any]]] = {
        "split": lambda y: tf.split(y, 2),
        "slice": lambda y: [y[:2], y[2:]],
        "unstack": lambda y: tf.unstack(tf.reshape(y, (2, 2, 16))),
    }
    kept: list[Any] = []

    def body(x: Any) -> Any:
        found = parts[part](x * 2)
        kept[:] = [tf.identity(y) for y in found]
        return found

    for y in in_tf(body)(torch.ones(4, 16, requires_grad=True)):
        y.detach().zero_()
    for y in kept:
        np.testing.assert_array_equal(y, np.full((2, 16), 2))


@pytest.mark.parametrize("how", ["variable", "attribute", "identity"])
def test_torch_may_write_to_what_comes_through_a_function_of_jax(how: str) -> None:
    state = {"variable": tf.Variable(tf.ones(4), trainable=False), "kept": tf.ones(4)}

    @in_tf
    def cell(x: Any) -> Any:
        before = state["variable"] if how == "variable" else tf.stop_gradient(state["kept"])
        new = x * before
        if how == "variable":
            state["variable"].assign(new)
        else:
            state["kept"] = tf.stop_gradient(new) if how == "identity" else new + 0
            return state["kept"] if how == "attribute" else new
        return new

    outer, found = in_jax(lambda x: cell(x)), []
    x = torch.full((4,), 2.0, requires_grad=True)
    for _ in range(3):
        y = outer(x)
        found.append(float(y[0].detach()))
        y.detach().clamp_(max=1.0)
    assert found == [2, 4, 8]


def test_of_an_unknown_tensorflow_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from arraybridge.frameworks.tensorflow import buffers as tensorflow_buffers

    y = tf.ones(3) * 2
    assert not tensorflow_buffers.is_shared(y)
    assert tensorflow_buffers.is_shared(tf.strings.as_string(y))
    monkeypatch.setattr(tensorflow_buffers, "_KNOWN", ("1.0",))
    tensorflow_buffers._holders_of_one_and_two.cache_clear()
    try:
        assert tensorflow_buffers.is_shared(y)
    finally:
        monkeypatch.undo()
        tensorflow_buffers._holders_of_one_and_two.cache_clear()


def test_what_a_rule_of_jax_keeps_is_copied_where_jit_is_switched_off() -> None:
    kept = jnp.arange(3.0)

    @jax.custom_vjp
    def total(x: Any) -> Any:
        return x.sum()

    total.defvjp(lambda x: (x.sum(), None), lambda _, ct: (kept,))
    x = torch.ones(3, requires_grad=True)
    with jax.disable_jit():
        in_jax(jax.jit(lambda x: total(x)))(x).backward()
    x.grad.fill_(-9)
    np.testing.assert_array_equal(kept, [0, 1, 2])


@pytest.mark.parametrize("f", [jnp.exp, jnp.tanh, lambda x: x * 2, lambda x: jnp.sort(x)[::2]])
def test_a_result_of_jax_that_nobody_keeps_is_not_copied(f: Any) -> None:
    linear = JAX.linearise(lambda xs: ([f(xs[0])], None), [jnp.ones(64)], (True,), "f")
    assert not linear.kept


def test_a_result_of_tensorflow_that_nobody_keeps_is_not_copied() -> None:
    places: list[int] = []

    def f(x: Any) -> Any:
        y = x * 2
        places.append(torch.from_dlpack(tf.experimental.dlpack.to_dlpack(y)).data_ptr())
        return y

    assert in_tf(f)(torch.ones(1 << 16, requires_grad=True)).data_ptr() == places[0]


RESULTS: list[Any] = []
LAST = tf.Variable(tf.zeros(3), trainable=False)
CONSTANT = tf.constant([5.0, 6.0, 7.0])


def kept_by(keep: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def body(x: Any) -> Any:
        y = x * 2
        RESULTS[:] = [keep(y)]
        return y

    return body


def in_another_thread(f: Callable[[Any], Any], y: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f, y).result()


def assigning(x: Any) -> Any:
    y = tf.exp(x)
    LAST.assign(y)
    return y


#: Functions of TensorFlow, and what reads what they keep in the memory of their result.
KEPT_BY_TENSORFLOW: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "identity": (kept_by(tf.identity), lambda: RESULTS[0]),
    "stop_gradient": (kept_by(tf.stop_gradient), lambda: RESULTS[0]),
    "a view of a view": (kept_by(lambda y: tf.identity(tf.reshape(y, (3, 1)))), lambda: RESULTS[0]),
    "variable": (kept_by(lambda y: tf.Variable(y, trainable=False)), lambda: RESULTS[0].read_value()),
    "assign": (assigning, LAST.read_value),
    "assign in a program": (tf.function(assigning), LAST.read_value),
    "NumPy": (kept_by(np.asarray), lambda: RESULTS[0]),
    "DLPack": (kept_by(lambda y: torch.from_dlpack(y.__dlpack__())), lambda: RESULTS[0].numpy()),
    "another thread": (kept_by(lambda y: in_another_thread(tf.identity, y)), lambda: RESULTS[0]),
    "list of TensorFlow's": (
        kept_by(lambda y: tf.TensorArray(tf.float32, 1, clear_after_read=False).write(0, y)),
        lambda: RESULTS[0].read(0),
    ),
    "constant of a program": (tf.function(lambda x: (x * 2, CONSTANT)), lambda: CONSTANT),
    "constant of a rule": (tf.custom_gradient(lambda x: (CONSTANT, lambda d: d)), lambda: CONSTANT),
}


@pytest.mark.parametrize("how", KEPT_BY_TENSORFLOW)
def test_torch_may_write_to_a_result_that_tensorflow_holds_otherwise(how: str) -> None:
    f, read = KEPT_BY_TENSORFLOW[how]
    results = in_tf(f)(torch.tensor([1.0, 2.0, 3.0], requires_grad=True))
    before = np.array(read())
    with torch.no_grad():
        for y in results if isinstance(results, tuple) else (results,):
            y.zero_()
    np.testing.assert_array_equal(read(), before)
    assert before.all()


def test_numbers_of_numpy_that_a_function_returns_and_writes_to_later() -> None:
    state = np.zeros(64, np.float32)

    @in_torch
    def f(x: Any) -> Any:
        state[:] += 1
        return x * 2, state, torch.from_numpy(state), torch.from_numpy(state) * x.new_ones(())

    _, *first = jax.vjp(f, jnp.ones(64))[0]
    jax.vjp(f, jnp.ones(64))
    for found in first:
        np.testing.assert_array_equal(np.asarray(found), np.ones(64))


KEPT_BY: dict[str, Callable[[Any], Any]] = {
    "its storage": lambda y: y.untyped_storage(),
    "a weak reference": __import__("weakref").ref,
}


def _written(held: Any) -> None:
    if isinstance(held, torch.UntypedStorage):
        held.fill_(77)
    elif held() is not None:
        held().data.fill_(77)


@pytest.mark.parametrize("how", KEPT_BY)
def test_a_result_of_torch_is_not_changed_by_what_keeps(how: str) -> None:
    held: list[Any] = []

    @in_torch
    def f(x: Any) -> Any:
        y = torch.exp(x)
        held.append(KEPT_BY[how](y))
        return y

    y, _ = jax.vjp(f, jnp.zeros(64))
    _written(held[0])
    np.testing.assert_array_equal(y, np.ones(64))


def test_a_result_in_memory_of_numpy() -> None:
    buffer = arraybridge.aligned((64,), np.float32)
    f = in_torch(lambda x: torch.from_numpy(buffer).copy_(x * 2))
    y, pull = jax.vjp(f, jnp.ones(64))
    buffer[:] = 77
    np.testing.assert_array_equal(y, np.full(64, 2))
    np.testing.assert_array_equal(pull(jnp.ones(64))[0], np.full(64, 2))


class Doubling(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(_: Any, g: Any) -> Any:
        return g.mul_(2)


def hooked(x: Any) -> Any:
    y = x * 1
    y.register_hook(lambda g: g.mul_(2))
    return y + 0


@pytest.mark.parametrize("f", [Doubling.apply, hooked])
@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_a_backward_of_torch_that_writes_to_its_cotangent_is_refused(caller: str, f: Any) -> None:
    def by_tape() -> None:
        x = tf.ones(64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = in_torch(lambda x: f(x))(x)
        tape.gradient(y, x, output_gradients=tf.fill([64], 3.0))

    def by_jax() -> None:
        _, pull = jax.vjp(in_torch(lambda x: f(x)), jnp.ones(64))
        pull(jnp.full(64, 3.0))

    with pytest.raises(GradientError, match="written to the gradient"):
        by_jax() if caller == "jax" else by_tape()


CALLEES = {
    "jax": in_jax(lambda x: x * x * x),
    "jitted": in_jax(jax.jit(lambda x: x * x * x)),
    "tensorflow": in_tf(lambda x: x * x * x),
}
PACKS: dict[str, Callable[[Any], Any]] = {
    "what is large": lambda t: t.clone() if t.numel() > 2 else t,
    "what floats": lambda t: t.clone() if t.is_floating_point() else t,
    "nothing": lambda t: t,
}


def gradient_of_cube(callee: str, meanwhile: Callable[[Any, Any], None]) -> Any:
    """With something done to argument and result between forward and backward."""
    x0 = torch.arange(64.0).requires_grad_()
    x = x0.clone()
    y = CALLEES[callee](x)
    with torch.no_grad():
        meanwhile(x, y)
    y.sum().backward()
    return x0.grad


def write_to_both(x: Any, y: Any) -> None:
    x.mul_(10)
    y.zero_()


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("callee", CALLEES)
def test_a_hook_that_saves_copies_sees_the_values_of_the_forward(callee: str, pack: str) -> None:
    # With "nothing" it is the user's own hook that would give what was written to.
    with torch.autograd.graph.saved_tensors_hooks(PACKS[pack], lambda t: t):
        found = gradient_of_cube(callee, (lambda x, y: None) if pack == "nothing" else write_to_both)
    np.testing.assert_array_equal(found, 3 * np.arange(64.0) ** 2)


@pytest.mark.parametrize("callee", CALLEES)
def test_what_torch_allows_to_be_written_to_after_it_was_saved(callee: str) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        found = gradient_of_cube(callee, write_to_both)
    np.testing.assert_array_equal(found, 3 * np.arange(64.0) ** 2)


@pytest.mark.parametrize("callee", CALLEES)
def test_an_argument_that_moves_to_shared_memory_before_the_backward(callee: str) -> None:
    junk: list[Any] = []

    def move(x: Any, y: Any) -> None:
        x.detach().share_memory_()
        junk.extend(torch.full((64,), 7.0) for _ in range(200))

    found = gradient_of_cube(callee, move)
    np.testing.assert_array_equal(found, 3 * np.arange(64.0) ** 2)


@pytest.mark.parametrize("under", ["eager", "jit"])
def test_a_leaf_that_a_torch_function_makes_of_another_argument(under: str) -> None:
    @in_torch
    def force(x: Any, y: Any) -> Any:
        x.requires_grad_()
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return (g * y).sum()

    grad = jax.grad(force, argnums=1)
    found = (jax.jit(grad) if under == "jit" else grad)(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(found, [3, 12])


@pytest.mark.parametrize("read", [float, complex, torch.Tensor.item, torch.Tensor.tolist])
def test_a_captured_parameter_that_is_read_as_a_number_is_refused(read: Any) -> None:
    p = torch.tensor(2.0, requires_grad=True)
    f = in_jax(lambda x: x * abs(read(p)))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradientError, match="reads the numbers"):
        f(x)
    p.requires_grad_(False)
    assert f(x).tolist() == [2, 2, 2]


def test_a_number_as_cotangent() -> None:
    for callee in (in_torch(lambda x: (x * x).sum()), in_tf(lambda x: tf.reduce_sum(x * x))):
        _, pull = jax.vjp(callee, jnp.array([1.0, 2.0]))
        for cotangent in (1.0, np.float32(1), jnp.float32(1)):
            np.testing.assert_array_equal(pull(cotangent)[0], [2, 4])


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_arrays_of_a_third_framework_beside_traced_results(callee: str) -> None:
    table = np.arange(3, dtype=np.int32)
    f = {"torch": in_torch, "tensorflow": in_tf}[callee](lambda x: (x * 2, table, jnp.ones(2)))
    for run in (f, jax.jit(f)):
        assert [np.asarray(x).tolist() for x in run(jnp.ones(2))] == [[2, 2], [0, 1, 2], [1, 1]]
    (g,) = jax.jit(jax.vjp(f, jnp.ones(2))[1])((jnp.ones(2), np.zeros(3, jax.dtypes.float0), jnp.ones(2)))
    np.testing.assert_array_equal(g, [2, 2])


def test_a_wide_integer_among_traced_results_is_refused_in_words() -> None:
    f = in_torch(lambda x: (x * 2, x.argmax()))
    assert np.asarray(f(jnp.arange(3.0))[1]) == 2
    with pytest.raises(GradientError, match="int32"):
        jax.jit(f)(jnp.arange(3.0))


def test_dtypes_that_a_callee_lacks_are_refused_alike_where_jax_traces() -> None:
    f = in_torch(lambda x, k: x * 2)
    for strange in (jnp.zeros(2, jnp.float8_e4m3b11fnuz), jnp.zeros(2, jnp.int4), jax.random.key(0)):
        for run in (f, jax.jit(f), jax.grad(lambda x, k: jax.jit(f)(x, k).sum())):
            with pytest.raises(arraybridge.MemoryConversionError, match=r"dtype|key"):
                run(jnp.ones(2), strange)


def test_a_tensor_without_values_does_not_give_its_memory_away() -> None:
    @in_torch
    def f(x: Any) -> Any:
        return x * float(jnp.from_dlpack(x.detach()).sum())

    assert jax.grad(lambda x: f(x).sum())(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(GradientError, match="gives the memory"):
        jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.ones(2))


def test_what_tensorflow_has_of_several_arrays_is_refused_in_words() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(arraybridge.MemoryConversionError, match="RaggedTensor"):
            in_torch(lambda x, r: x * 2)(x, ragged)
