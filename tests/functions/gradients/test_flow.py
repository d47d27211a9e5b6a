"""All six directions: values and gradients of any order, bit for bit those of the callee's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

FRAMEWORKS = ("torch", "jax", "tensorflow")
DIRECTIONS = [(caller, callee) for callee in FRAMEWORKS for caller in FRAMEWORKS if caller != callee]

X = np.linspace(0.1, 1.3, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)[::-1].copy()

#: The same function, written in each framework.
WAVE: dict[str, Callable[..., Any]] = {
    "torch": lambda x, y: torch.sin(x) * y + torch.exp(x) * x,
    "jax": lambda x, y: jnp.sin(x) * y + jnp.exp(x) * x,
    "tensorflow": lambda x, y: tf.sin(x) * y + tf.exp(x) * x,
}


def array(name: str, x: Any) -> Any:
    """An array of the framework, of its own memory."""
    x = np.array(x)
    make: Any = {"torch": torch.from_numpy, "jax": jnp.array, "tensorflow": tf.constant}[name]
    return make(x)


def summed(total: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: jax.grad(total)(*xs).sum()


def grad(name: str, fn: Callable[..., Any], *arrays: Any, order: int = 1) -> list[np.ndarray]:
    """The derivatives of the sum of ``fn(*arrays)``, by the framework's own means.

    A higher order is that of the sum of the first derivatives, in the first argument alone.
    """
    if name == "jax":

        def total(*xs: Any) -> Any:
            return fn(*xs).sum()

        for _ in range(order - 1):
            total = summed(total)
        found = jax.grad(total, argnums=tuple(range(len(arrays))))(*(array("jax", x) for x in arrays))
        return [np.asarray(g) for g in found]
    if name == "torch":
        xs = [array("torch", x).requires_grad_() for x in arrays]
        value = fn(*xs).sum()
        for _ in range(order - 1):
            (first,) = torch.autograd.grad(value, xs[:1], create_graph=True, materialize_grads=True)
            value = first.sum()
            if not value.requires_grad:  # it is the same everywhere
                return [np.zeros_like(x) for x in arrays]
        return [
            g.detach().resolve_conj().numpy() for g in torch.autograd.grad(value, xs, materialize_grads=True)
        ]
    xs = [array("tensorflow", x) for x in arrays]
    return [np.asarray(g) for g in _nested(fn, xs, order)]


def _nested(fn: Callable[..., Any], xs: list[Any], order: int) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(xs)
        inner = fn(*xs) if order == 1 else _nested(fn, xs, order - 1)[0]
        value = tf.reduce_sum(inner)
    return tape.gradient(value, xs, unconnected_gradients="zero")


def flowing(callee: str, fn: Callable[..., Any]) -> Any:
    return getattr(arraybridge, callee)(grad="flow")(fn)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_are_bit_for_bit_the_callees_own(caller: str, callee: str, order: int) -> None:
    wanted = grad(callee, WAVE[callee], X, Y, order=order)
    found = grad(caller, flowing(callee, WAVE[callee]), X, Y, order=order)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_callee_under_jit(caller: str, order: int) -> None:
    jitted = jax.jit(WAVE["jax"])
    wanted = grad("jax", jitted, X, Y, order=order)
    for a, b in zip(grad(caller, flowing("jax", jitted), X, Y, order=order), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_caller_under_jit(callee: str, order: int) -> None:
    wanted = grad(callee, WAVE[callee], X, Y, order=order)
    f = flowing(callee, WAVE[callee])
    found = grad("jax", jax.jit(f), X, Y, order=order)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    total = jax.jit(jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1)))
    if order == 1:
        for a, b in zip(total(X, Y), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_without_a_graph_tape_or_tracer_it_is_an_ordinary_function(caller: str, callee: str) -> None:
    f = flowing(callee, WAVE[callee])
    result = f(array(caller, X), array(caller, Y))
    assert arraybridge.detect_memory_type(result) == caller
    np.testing.assert_allclose(np.asarray(result), np.sin(X) * Y + np.exp(X) * X, rtol=1e-6)
    assert arraybridge.detect_memory_type(f(X, Y)) == "numpy"
    assert f.output_memory_type == "input"


@pytest.mark.parametrize("callee", FRAMEWORKS)
def test_in_its_own_framework_the_graph_is_kept(callee: str) -> None:
    found = grad(callee, flowing(callee, WAVE[callee]), X, Y)
    for a, b in zip(found, grad(callee, WAVE[callee], X, Y), strict=True):
        np.testing.assert_array_equal(a, b)


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_containers_keywords_several_results_integers_and_no_arrays(caller: str, callee: str) -> None:
    seen = []

    def body(pair: Any, *, table: Any, power: int = 2, name: str = "") -> Any:
        seen.append([type(x).__module__.partition(".")[0] for x in (pair.left, pair.right, table["w"])])
        index = pair.right
        picked = {
            "torch": lambda: pair.left[index],
            "jax": lambda: pair.left[index],
            "tensorflow": lambda: tf.gather(pair.left, index),
        }
        rows = picked[callee]()
        count = {
            "torch": lambda: (rows > 0).sum(),
            "jax": lambda: (rows > 0).sum(),
            "tensorflow": lambda: tf.reduce_sum(tf.cast(rows > 0, tf.int32)),
        }[callee]()
        return {
            "rows": rows**power * table["w"],
            "more": (rows + 1, count),
            "name": name,
            "none": None,
            "number": 3,
        }

    f = flowing(callee, body)
    index = np.array([2, 0], np.int32)
    side: dict[str, Any] = {}

    def total(x: Any, w: Any) -> Any:
        result = f(Pair(x, array(caller, index)), table={"w": w}, name="field")
        assert list(result) == ["rows", "more", "name", "none", "number"]
        side.update(result)
        rows, (more, _) = result["rows"], result["more"]
        return rows + 3 * more

    w = np.full((2, 4), 0.5, np.float32)
    gx, gw = grad(caller, total, X, w)
    wanted = np.zeros_like(X)
    wanted[index] = 2 * X[index] * w + 3
    np.testing.assert_allclose(gx, wanted, rtol=1e-6)
    np.testing.assert_allclose(gw, X[index] ** 2, rtol=1e-6)
    assert (side["name"], side["none"], side["number"]) == ("field", None, 3)
    assert type(side["more"]) is tuple
    package = {"torch": "torch", "jax": "jax", "tensorflow": "tensorflow"}[callee]
    assert all(root in (package, f"{package}lib") for root in seen[0])


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_numpy_beside_and_a_third_framework_are_inputs_like_others(caller: str, callee: str) -> None:
    (third,) = set(FRAMEWORKS) - {caller, callee}
    f = flowing(callee, WAVE[callee])
    wanted = grad(callee, lambda x: WAVE[callee](x, array(callee, Y)), X)[0]
    for beside in (Y, array(third, Y), array(callee, Y)):
        np.testing.assert_array_equal(grad(caller, lambda x, y=beside: f(x, y), X)[0], wanted)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_a_python_float_of_jax_grad(callee: str) -> None:
    f = flowing(callee, lambda x: x * x * x)
    assert float(jax.grad(f)(0.5)) == 0.75


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("holomorphic", [True, False])
def test_complex_numbers_follow_the_callers_convention(caller: str, callee: str, holomorphic: bool) -> None:
    z = np.array([1 + 2j, -0.5 + 0.25j, 3 - 1j], np.complex64)
    if holomorphic:
        bodies = {
            "torch": lambda z: (z * z * z).abs(),
            "jax": lambda z: jnp.abs(z * z * z),
            "tensorflow": lambda z: tf.abs(z * z * z),
        }
    else:
        bodies = {
            "torch": lambda z: (z.conj() * (1 + 2j) * z.real).imag,
            "jax": lambda z: (z.conj() * (1 + 2j) * z.real).imag,
            "tensorflow": lambda z: tf.math.imag(
                tf.math.conj(z) * (1 + 2j) * tf.cast(tf.math.real(z), tf.complex64)
            ),
        }
    wanted = grad(caller, bodies[caller], z)[0]
    found = grad(caller, flowing(callee, bodies[callee]), z)[0]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    # And bit for bit the callee's own, conjugated where one of the two is JAX.
    own = grad(callee, bodies[callee], z)[0]
    np.testing.assert_array_equal(found, own.conj() if "jax" in (caller, callee) else own)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_complex_results_and_second_order(caller: str, callee: str) -> None:
    z = np.array([1 + 2j, -0.5 + 0.25j], np.complex64)
    absolute = {
        "torch": lambda z: (z * z.conj()).real,
        "jax": lambda z: (z * z.conj()).real,
        "tensorflow": lambda z: tf.math.real(z * tf.math.conj(z)),
    }

    def total(fn: Callable[..., Any], z: Any) -> Any:
        return absolute[caller](fn(z))

    cube = flowing(callee, lambda z: z * z * z)
    found = grad(caller, lambda z: total(cube, z), z)[0]
    wanted = grad(caller, lambda z: total(lambda z: z * z * z, z), z)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if caller == "torch":

        def second(fn: Callable[..., Any]) -> np.ndarray:
            t = torch.from_numpy(z.copy()).requires_grad_()
            (g,) = torch.autograd.grad(total(fn, t).sum(), t, create_graph=True)
            (h,) = torch.autograd.grad((g * g.conj()).real.sum(), t)
            return h.resolve_conj().numpy()

        np.testing.assert_allclose(second(cube), second(lambda z: z * z * z), rtol=1e-4)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_an_argument_that_is_not_used_gets_zeros_or_none(caller: str, callee: str) -> None:
    f = flowing(callee, lambda x, unused: x * 2)
    if caller == "torch":
        x, unused = (array("torch", a).requires_grad_() for a in (X, Y))
        f(x, unused).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))
        assert unused.grad is None or not unused.grad.any()
    elif caller == "jax":
        _, g = jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(X, Y)
        np.testing.assert_array_equal(np.asarray(g), np.zeros_like(Y))
    else:
        x, unused = tf.constant(X), tf.constant(Y)
        with tf.GradientTape() as tape:
            tape.watch([x, unused])
            y = f(x, unused)
        _, g = tape.gradient(y, [x, unused])
        assert g is None or not np.any(g)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_a_result_that_is_not_used_adds_nothing(caller: str, callee: str) -> None:
    if callee == "jax":
        from arraybridge.frameworks.jax import pullback as jax_pullback

        if jax_pullback._symbolic_zero() is jnp.zeros:
            pytest.skip("this JAX computes with zeros, as its own jax.vjp does")
    # The derivative of the second one is infinite at zero: zero times it would be no number.
    bodies = {
        "torch": lambda x: (x * 2, torch.log(x)),
        "jax": lambda x: (x * 2, jnp.log(x)),
        "tensorflow": lambda x: (x * 2, tf.math.log(x)),
    }
    f = flowing(callee, bodies[callee])
    x = np.array([0.0, 1.0], np.float32)
    np.testing.assert_array_equal(grad(caller, lambda x: f(x)[0], x)[0], [2, 2])
    if callee == "jax":
        g = flowing(callee, jax.jit(bodies[callee]))
        np.testing.assert_array_equal(grad(caller, lambda x: g(x)[0], x)[0], [2, 2])


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_of_a_scan(jitted: bool, order: int, used: int) -> None:
    def body(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry * x, carry), x, None, length=3)

    f = flowing("jax", jax.jit(body) if jitted else body)
    (found,) = grad("torch", lambda x: f(x)[used], X, order=order)
    (wanted,) = grad("jax", lambda x: body(x)[used], X, order=order)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_results_of_no_array_or_no_float(caller: str, callee: str) -> None:
    f = flowing(callee, lambda x, flag: (x > 0.5, "word") if flag else 7)
    x = array(caller, X)
    if caller == "torch":
        x.requires_grad_()
        above, word = f(x, True)
        assert not above.requires_grad
        assert f(x, False) == 7
    elif caller == "jax":
        words = []

        def total(x: Any) -> Any:
            above, word = f(x, True)
            words.append(word)
            return x.sum(), above

        _, above = jax.grad(total, has_aux=True)(x)
        word = words[0]
    else:
        with tf.GradientTape() as tape:
            tape.watch(x)
            above, word = f(x, True)
        assert tape.gradient(tf.cast(above, tf.float32), x) is None
    np.testing.assert_array_equal(np.asarray(above), X > 0.5)
    assert word == "word"


def test_three_frameworks_nested() -> None:
    inner = flowing("tensorflow", lambda x: tf.sin(x) * x)
    middle = flowing("jax", lambda x: jnp.exp(inner(x)) * x)
    compiled = flowing("jax", jax.jit(lambda x: jnp.exp(inner(x)) * x))
    wanted = grad("torch", lambda x: torch.exp(torch.sin(x) * x) * x, X)[0]
    for f in (middle, compiled):
        np.testing.assert_allclose(grad("torch", f, X)[0], wanted, rtol=2e-6)
    second = grad("torch", lambda x: torch.exp(torch.sin(x) * x) * x, X, order=2)[0]
    np.testing.assert_allclose(grad("torch", middle, X, order=2)[0], second, rtol=1e-5)
    # And out of JAX, through torch, to JAX again.
    outer = flowing("torch", lambda x: torch.sin(flowing("jax", lambda x: x**3)(x)))
    wanted = np.asarray(jax.grad(lambda x: jnp.sin(x**3).sum())(X))
    np.testing.assert_allclose(grad("jax", outer, X)[0], wanted, rtol=1e-5)


def test_methods() -> None:
    class Physics(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([2.0]))
            self.factor = 3.0

        @arraybridge.jax(grad="flow")
        def law(self, x: Any, scale: Any) -> Any:
            return jnp.sin(x) * scale * self.factor

        def forward(self, x: Any) -> Any:
            return self.law(x, self.scale)

    model = Physics()
    x = torch.from_numpy(X.copy()).requires_grad_()
    model(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.cos(X) * 6, rtol=1e-6)
    np.testing.assert_allclose(model.scale.grad.numpy(), [(np.sin(X) * 3).sum()], rtol=1e-6)


def test_a_method_of_a_keras_layer() -> None:
    keras = tf.keras

    class Layer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable([2.0], trainable=True)

        @arraybridge.torch(grad="flow")
        def law(self, x: Any, scale: Any) -> Any:
            return torch.sin(x) * scale

        def call(self, x: Any) -> Any:
            return self.law(x, self.scale)

    layer = Layer()
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(layer.call(x))
    gx, gs = tape.gradient(total, [x, layer.scale])
    np.testing.assert_allclose(gx, np.cos(X) * 2, rtol=1e-6)
    np.testing.assert_allclose(gs, [np.sin(X).sum()], rtol=1e-6)


# -- arguments that are differentiated at one level and not at another --------------------------------------


def of_three(a: Any, b: Any, c: Any, sin: Callable[..., Any]) -> Any:
    return a**2 * b**3 * sin(c)


THREE = {
    "torch": arraybridge.torch(grad="flow")(lambda a, b, c: of_three(a, b, c, torch.sin)),
    "tensorflow": arraybridge.tensorflow(grad="flow")(lambda a, b, c: of_three(a, b, c, tf.sin)),
}
AROUND: dict[str, Callable[..., Any]] = {
    "eager": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "vmap": lambda f: lambda *xs: jax.vmap(f)(*(x[None] for x in xs))[0],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1), (0, 2, 0)])
def test_jax_differentiates_with_regard_to_one_argument_after_another(
    around: str, callee: str, order: tuple[int, ...]
) -> None:
    values = tuple(map(jnp.float32, (1.5, 0.5, 0.3)))
    found, wanted = THREE[callee], lambda a, b, c: of_three(a, b, c, jnp.sin)
    for i in order:
        found, wanted = jax.grad(found, i), jax.grad(wanted, i)
    np.testing.assert_allclose(AROUND[around](found)(*values), wanted(*values), rtol=1e-5)


def test_a_jacobian_of_a_gradient_in_jax() -> None:
    a, b = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    product = arraybridge.torch(grad="flow")(lambda a, b: (a**2 * b**3).sum())
    np.testing.assert_allclose(jax.jacrev(jax.grad(product))(a, b), np.diag(2 * np.asarray(b) ** 3))
    across = jax.jacrev(jax.grad(product), 1)(a, b)
    np.testing.assert_allclose(across, np.diag(6 * np.asarray(a * b**2)))


def test_a_program_of_jax_that_is_differentiated_by_parts() -> None:
    a, b = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    product = arraybridge.torch(grad="flow")(lambda a, b: (a**2 * b**3).sum())
    by_a, by_b = 2 * np.asarray(a * b**3), 3 * np.asarray(a**2 * b**2)
    traced = jax.make_jaxpr(product)(a, b)
    programs: list[Callable[..., Any]] = [jax.jit(product)]
    if jax.__version_info__ >= (0, 10):  # others assert that a rule always gives the same gradients
        programs.append(lambda *xs: jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *xs)[0])
    for program in programs:
        for i in (0, 1, 0):
            np.testing.assert_allclose(jax.grad(program, i)(a, b), (by_a, by_b)[i])
        # Both forwards are traced before either pullback.
        both = jax.grad(lambda x, y, f=program: f(x, b) + f(a, y), (0, 1))
        for found, wanted in zip(both(a, b), (by_a, by_b), strict=True):
            np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize("around", ["jit", "checkpoint"])
@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_a_result_used_by_jax_that_depends_on_one_argument_alone(around: str, callee: str) -> None:
    sin = {"torch": torch, "tensorflow": tf}[callee].sin
    apart = getattr(arraybridge, callee)(grad="flow")(lambda a, b: (sin(a), b**2))
    found = jax.grad(lambda a, b: jax.grad(lambda a, b: apart(a, b)[0] * b, 1)(a, b))
    given = jnp.float32(0.3), jnp.float32(2)
    np.testing.assert_allclose(AROUND[around](found)(*given), np.cos(0.3), rtol=1e-6)
