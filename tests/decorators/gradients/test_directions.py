"""All six directions: values and gradients of any order equal the callee's own, bit for bit."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from tests.decorators.gradients.directions import (
    DIRECTIONS,
    FRAMEWORKS,
    SIN,
    WAVE,
    X,
    Y,
    array,
    flowing,
    grad,
)
from tests.helpers import require
from tests.test_trees import attrs_class, pydantic_class

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
optree = pytest.importorskip("optree")
jnp = jax.numpy


@pytest.mark.parametrize("caller", FRAMEWORKS)
@pytest.mark.parametrize("callee", FRAMEWORKS)  # in its own framework, PyTorch retains the graph
@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_equal_the_callees_own_bit_for_bit(caller: str, callee: str, order: int) -> None:
    wanted = grad(callee, WAVE[callee], X, Y, order=order)
    found = grad(caller, flowing(callee, WAVE[callee]), X, Y, order=order)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_callee_under_jit(caller: str, order: int) -> None:
    jitted = jax.jit(WAVE["jax"])
    wanted = grad("jax", jitted, X, Y, order=order)
    for a, b in zip(grad(caller, flowing("jax", jitted), X, Y, order=order), wanted, strict=True):
        # XLA fuses the third case differently
        np.testing.assert_allclose(a, b, rtol=1e-6 if order == 3 else 0)


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
def test_undifferentiated_calls_are_ordinary_calls(caller: str, callee: str) -> None:
    f = flowing(callee, WAVE[callee])
    result = f(array(caller, X), array(caller, Y))
    assert arraybridge.detect_memory_type(result) == caller
    np.testing.assert_allclose(np.asarray(result), np.sin(X) * Y + np.exp(X) * X, rtol=1e-6)
    assert arraybridge.detect_memory_type(f(X, Y)) == "numpy"
    assert f.output_memory_type == "input"


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_containers_keywords_several_results_and_non_arrays(caller: str, callee: str) -> None:
    seen: list[str] = []
    side: dict[str, Any] = {}

    def body(pair: Any, *, table: Any, power: int = 2, name: str = "") -> Any:
        seen.extend(arraybridge.detect_memory_type(x) for x in (pair.left, pair.right, table["w"]))
        squares, more = pair.left**power * table["w"], (pair.left + 1, pair.right + 1)
        return {"squares": squares, "more": more, "name": name, "none": None, "number": 3}

    f = flowing(callee, body)
    index = np.arange(12, dtype=np.int32).reshape(3, 4)

    def total(x: Any, w: Any) -> Any:
        side.update(f(Pair(x, array(caller, index)), table={"w": w}, name="field"))
        return side["squares"] + 3 * side["more"][0]

    gx, gw = grad(caller, total, X, Y)
    np.testing.assert_allclose(gx, 2 * X * Y + 3, rtol=1e-6)
    np.testing.assert_allclose(gw, X**2, rtol=1e-6)
    assert list(side) == ["squares", "more", "name", "none", "number"]
    assert (side["name"], side["none"], side["number"]) == ("field", None, 3)
    assert type(side["more"]) is tuple
    if caller != "jax":  # JAX traces the function
        np.testing.assert_array_equal(np.asarray(side["more"][1]), index + 1)
    assert set(seen) == {callee}


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_python_floats_under_jax_grad(callee: str) -> None:
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
    # They also equal the callee's own bit for bit, conjugated if one of the two is JAX.
    own = grad(callee, bodies[callee], z)[0]
    np.testing.assert_array_equal(found, own.conj() if "jax" in (caller, callee) else own)


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_unused_arguments_get_zeros_or_none(caller: str, callee: str) -> None:
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
def test_unused_results_do_not_contribute(caller: str, callee: str) -> None:
    def body(x: Any) -> Any:
        return x * 2, SIN[callee](x), x * 0 + 1

    for fn in (body, jax.jit(body)) if callee == "jax" else (body,):
        f = flowing(callee, fn)
        first, second = (grad(caller, lambda x, i=i, f=f: f(x)[i], X)[0] for i in (0, 1))
        np.testing.assert_array_equal(first, np.full_like(X, 2))
        np.testing.assert_allclose(second, np.cos(X), rtol=1e-6)


@optree.dataclasses.dataclass(namespace="arraybridge")
class Registered:
    x: Any
    w: Any


class Named(NamedTuple):
    x: Any
    w: Any


class Computing:
    """A class whose constructor inspects its arrays, such as one that checks their shapes."""

    def __init__(self, x: Any, w: Any) -> None:
        assert x.shape == w.shape
        self.x, self.w = x, w


optree.register_pytree_node(
    Computing, lambda c: ((c.x, c.w), None, None), lambda _, xs: Computing(*xs), namespace="arraybridge"
)

CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "named tuple": (Named, lambda c: (c.x, c.w)),
    "registered dataclass": (Registered, lambda c: (c.x, c.w)),
    "class that computes": (Computing, lambda c: (c.x, c.w)),
    "ordered": (lambda x, w: collections.OrderedDict(w=w, x=x), lambda c: (c["x"], c["w"])),
    "default": (lambda x, w: collections.defaultdict(list, x=x, w=w), lambda c: (c["x"], c["w"])),
    "deque": (lambda x, w: collections.deque([x, w], maxlen=2), tuple),
    "attrs class": (lambda x, w: attrs_class()(x, w), lambda c: (c.left, c.right)),
    "pydantic model": (lambda x, w: pydantic_class()(left=x, right=w), lambda c: (c.left, c.right)),
    "mapping": (lambda x, w: MappingProxyType({"x": x, "w": w}), lambda c: (c["x"], c["w"])),
    "empty ones": (lambda x, w: [(), {}, None, "s", x, [[w]]], lambda c: (c[4], c[5][0][0])),
    "twice": (lambda x, w: {"x": x, "again": [x], "w": w}, lambda c: ((c["x"] + c["again"][0]) / 2, c["w"])),
}


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_all_containers_as_arguments_and_results(caller: str, callee: str, kind: str) -> None:
    make, take = CONTAINERS[kind]

    def body(container: Any) -> Any:
        x, w = take(container)
        return make(x * w * w, x + w)

    f = flowing(callee, body)

    def total(x: Any, w: Any) -> Any:
        given = make(x, w)
        result = f(given)
        assert type(result) is type(given)
        first, second = take(result)
        return first + 2 * second

    gx, gw = grad(caller, total, X, Y)
    np.testing.assert_allclose(gx, Y * Y + 2, rtol=1e-6)
    np.testing.assert_allclose(gw, 2 * X * Y + 2, rtol=1e-6)


@pytest.mark.parametrize("names", list(itertools.permutations(FRAMEWORKS)))
@pytest.mark.parametrize("order", [1, 2])
def test_nested_functions_in_every_order(names: tuple[str, str, str], order: int) -> None:
    caller, middle, last = names
    inner = flowing(last, lambda x, y: SIN[last](x) * y)
    outer = flowing(middle, lambda x, y: SIN[middle](inner(x, y)) * x)
    wanted = grad("torch", lambda x, y: torch.sin(torch.sin(x) * y) * x, X, Y, order=order)
    for a, b in zip(grad(caller, outer, X, Y, order=order), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
