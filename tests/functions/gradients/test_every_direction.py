"""What is promised of gradients, in every direction, of every container, and by every door."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError
from tests.functions.gradients.test_flow import DIRECTIONS, FRAMEWORKS, WAVE, array, flowing, grad
from tests.helpers import require, run_python

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
optree = pytest.importorskip("optree")
jnp = jax.numpy

X = np.linspace(0.1, 1.3, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)[::-1].copy()

in_jax = arraybridge.jax(grad="flow")
in_tf = arraybridge.tensorflow(grad="flow")
in_torch = arraybridge.torch(grad="flow")
SCRIPTS = Path(__file__).parents[1] / "scripts"
SIN: dict[str, Callable[[Any], Any]] = {"torch": torch.sin, "jax": jnp.sin, "tensorflow": tf.sin}


def x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def tensor(x: np.ndarray[Any, Any] = X) -> Any:
    return torch.from_numpy(x.copy()).requires_grad_()


def place(x: Any) -> int:
    """The address of a plain array, by its framework's own means."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return np.asarray(memoryview(x)).__array_interface__["data"][0]


def pulled(caller: str, f: Callable[..., Any], xs: list[Any], cotangent: Any) -> tuple[Any, list[Any]]:
    """The result, and the gradients for a cotangent, as the caller's own arrays."""
    if caller == "jax":
        y, pull = jax.vjp(f, *xs)
        return y, list(pull(cotangent))
    if caller == "torch":
        xs = [x.requires_grad_() for x in xs]
        y = f(*xs)
        return y, list(torch.autograd.grad(y, xs, cotangent))
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    return y, tape.gradient(y, xs, output_gradients=cotangent)


# -- the results, containers, order ---------------------------------------------------------------------


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_results_that_are_differentiated_are_the_callers(caller: str, callee: str) -> None:
    types: list[str] = []

    def total(x: Any, y: Any) -> Any:
        z = flowing(callee, WAVE[callee])(x, y)
        types.append(arraybridge.detect_memory_type(z))
        return z

    grad(caller, total, X, Y)
    assert types == [caller]


class Pair(NamedTuple):
    x: Any
    w: Any


@optree.dataclasses.dataclass(namespace="arraybridge")
class Registered:
    x: Any
    w: Any


class Computing:
    """A class whose constructor looks at its arrays, as one that checks their shapes does."""

    def __init__(self, x: Any, w: Any) -> None:
        assert x.shape == w.shape
        self.x, self.w = x, w


optree.register_pytree_node(
    Computing, lambda c: ((c.x, c.w), None), lambda _, parts: Computing(*parts), namespace="arraybridge"
)

CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "named tuple": (Pair, lambda c: (c.x, c.w)),
    "registered dataclass": (Registered, lambda c: (c.x, c.w)),
    "class that computes": (Computing, lambda c: (c.x, c.w)),
    "ordered": (lambda x, w: collections.OrderedDict(w=w, x=x), lambda c: (c["x"], c["w"])),
    "default": (lambda x, w: collections.defaultdict(list, x=x, w=w), lambda c: (c["x"], c["w"])),
    "deque": (lambda x, w: collections.deque([x, w], maxlen=2), tuple),
    "empty ones": (lambda x, w: [(), {}, None, "s", x, [[w]]], lambda c: (c[4], c[5][0][0])),
    "twice": (lambda x, w: {"x": x, "again": [x], "w": w}, lambda c: ((c["x"] + c["again"][0]) / 2, c["w"])),
}


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_in_and_out(caller: str, callee: str, kind: str) -> None:
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


def test_a_container_that_computes_where_nobody_differentiates() -> None:
    f = in_torch(lambda c: c.x * c.w)
    np.testing.assert_array_equal(f(Computing(X, Y)), X * Y)


class Scaled(dict):  # type: ignore[type-arg]
    """A dict with a number of its own, which JAX knows of."""

    scale = 1.0


def _scaled(known: Any, values: Any) -> Scaled:
    made = Scaled(zip(known[0], values, strict=True))
    made.scale = known[1]
    return made


jax.tree_util.register_pytree_node(Scaled, lambda d: (list(d.values()), (tuple(d), d.scale)), _scaled)


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
@pytest.mark.parametrize("what", ["attribute", "default"])
def test_a_compiled_program_is_not_that_of_another_container(caller: str, what: str) -> None:
    def made(x: Any, number: float) -> Any:
        if what == "default":
            return collections.defaultdict(lambda: number, x=x)
        container = Scaled(x=x)
        container.scale = number
        return container

    jitted = jax.jit((lambda d: d["x"] * d["absent"]) if what == "default" else (lambda d: d["x"] * d.scale))
    f = in_jax(jitted)
    for number in (2.0, 3.0):
        wanted = np.asarray(jax.grad(lambda x, n=number: jitted(made(x, n)).sum())(jnp.asarray(X)))
        np.testing.assert_array_equal(wanted, np.full_like(X, number))
        np.testing.assert_array_equal(grad(caller, lambda x, n=number: f(made(x, n)), X)[0], wanted)


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_third_order_of_a_callee_under_jit(caller: str) -> None:
    jitted = jax.jit(WAVE["jax"])
    wanted = grad("jax", jitted, X, Y, order=3)
    for a, b in zip(grad(caller, in_jax(jitted), X, Y, order=3), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("callee", ["jax", "torch"])
def test_numbers_of_numpy_among_results_come_back_as_ever(callee: str, graph: bool) -> None:
    f = flowing(callee, lambda x: (x * 2, np.float32(3)))
    if callee == "jax":
        _, number = f(tensor() if graph else torch.from_numpy(X.copy()))
        assert isinstance(number, torch.Tensor)
    else:
        number = jax.vjp(f, jnp.asarray(X))[0][1] if graph else f(jnp.asarray(X))[1]
        assert isinstance(number, jax.Array)
    assert float(number) == 3


# -- complex numbers of a higher order ------------------------------------------------------------------


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_complex_numbers_of_second_order(caller: str, callee: str) -> None:
    z = np.array([1 + 2j, -0.5 + 0.25j, 3 - 1j], np.complex64)
    bodies: dict[str, Callable[[Any], Any]] = {name: lambda z: z * z * z for name in FRAMEWORKS}

    def second(f: Callable[[Any], Any]) -> np.ndarray[Any, Any]:
        if caller == "jax":

            def squared(z: Any) -> Any:
                g = jax.grad(lambda z: jnp.real(f(z) * (1 + 2j)).sum())(z)
                return jnp.real(g * jnp.conj(g)).sum()

            return np.asarray(jax.grad(squared)(jnp.asarray(z)))
        if caller == "torch":
            t = torch.from_numpy(z.copy()).requires_grad_()
            (g,) = torch.autograd.grad((f(t) * (1 + 2j)).real.sum(), t, create_graph=True)
            (h,) = torch.autograd.grad((g * g.conj()).real.sum(), t)
            return h.resolve_conj().numpy()
        v = tf.constant(z)
        with tf.GradientTape() as outer:
            outer.watch(v)
            with tf.GradientTape() as tape:
                tape.watch(v)
                y = tf.reduce_sum(tf.math.real(f(v) * (1 + 2j)))
            g = tape.gradient(y, v)
            squared_sum = tf.reduce_sum(tf.math.real(g * tf.math.conj(g)))
        return np.asarray(outer.gradient(squared_sum, v))

    wanted = second(bodies[caller])  # the caller's own
    np.testing.assert_allclose(second(flowing(callee, bodies[callee])), wanted, rtol=1e-5)


# -- random numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
@pytest.mark.parametrize("order", [1, 2])
def test_the_random_numbers_are_those_of_torch_itself(caller: str, order: int) -> None:
    def body(x: Any) -> Any:
        return torch.nn.functional.dropout(x**3, 0.5)

    torch.manual_seed(3)
    wanted = grad("torch", body, X, order=order)[0]
    after = torch.rand(2)
    torch.manual_seed(3)
    np.testing.assert_array_equal(grad(caller, in_torch(body), X, order=order)[0], wanted)
    assert torch.equal(torch.rand(2), after)


# -- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_addresses_of_arguments_and_results(caller: str, callee: str) -> None:
    memory = arraybridge.aligned((1024,), np.float32)
    memory[:] = 0.5
    places: list[int] = []

    def body(x: Any) -> Any:
        places.append(-1 if isinstance(x, jax.core.Tracer) else place(x))
        return x * 2

    x = arraybridge.convert_memory(memory, caller, copy=False)
    (ones,) = (arraybridge.convert_memory(np.ones(1024, np.float32), caller),)
    _, (g,) = pulled(caller, flowing(callee, body), [x], ones)
    if callee != "jax":  # which traces: its arguments have no address
        assert places == [memory.ctypes.data]
    np.testing.assert_array_equal(np.asarray(g), np.full(1024, 2))


#: Functions whose pullback gives the cotangent itself, or a part of it, twice.
ALIASES: dict[str, dict[str, Callable[..., Any]]] = {
    "sum": {name: lambda x, y: x + y for name in FRAMEWORKS},
    "one argument and a number": {name: lambda x, y: x + 0 * y for name in FRAMEWORKS},
    "reshaped": {
        "torch": lambda x, y: x.reshape(-1)[:512] + y.reshape(-1)[512:],
        "jax": lambda x, y: x.reshape(-1)[:512] + y.reshape(-1)[512:],
        "tensorflow": lambda x, y: tf.reshape(x, [-1])[:512] + tf.reshape(y, [-1])[512:],
    },
    "product": {name: lambda x, y: x * y for name in FRAMEWORKS},
    "transposed": {
        "torch": lambda x, y: x.T + y.T,
        "jax": lambda x, y: x.T + y.T,
        "tensorflow": lambda x, y: tf.transpose(x) + tf.transpose(y),
    },
}


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
@pytest.mark.parametrize("kind", ALIASES)
def test_no_gradient_shares_memory_in_any_direction(caller: str, callee: str, kind: str) -> None:
    def given() -> list[Any]:
        arrays = [arraybridge.aligned((32, 32), np.float32) for _ in range(2)]
        for x in arrays:
            x[:] = 0.5
        return [arraybridge.convert_memory(x, caller, copy=False) for x in arrays]

    shape = {"reshaped": (512,)}.get(kind, (32, 32))
    ones = arraybridge.aligned(shape, np.float32)
    ones[:] = 1
    cotangent = arraybridge.convert_memory(ones, caller, copy=False)
    xs = given()
    _, found = pulled(caller, flowing(callee, ALIASES[kind][callee]), xs, cotangent)
    spans = []
    for one in (*xs, cotangent, *(g for g in found if g is not None)):
        x = one.detach() if caller == "torch" else one
        if caller == "torch" and not x.is_contiguous():
            start, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        else:
            start, size = place(x), 4 * int(np.prod(x.shape))
        spans.append((start, start + size))
    for one, other in itertools.pairwise(sorted(spans)):
        assert one[1] <= other[0]


class Keeper(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    kept = torch.full((64,), 3.0)

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(_: Any, __: Any) -> Any:
        return Keeper.kept


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_a_rule_of_torch_that_hands_out_what_it_keeps(caller: str) -> None:
    f = in_torch(lambda x: Keeper.apply(x))
    x = array(caller, np.ones(64, np.float32))
    _, (g,) = pulled(caller, f, [x], x)
    Keeper.kept.fill_(77)
    np.testing.assert_array_equal(np.asarray(g), np.full(64, 3))
    Keeper.kept.fill_(3)


def test_a_checkpoint_frees_what_a_function_of_tensorflow_keeps() -> None:
    from torch.utils.checkpoint import checkpoint

    inner: list[Any] = []

    def body(x: Any) -> Any:
        y = tf.exp(x)
        inner.append(weakref.ref(y))
        return tf.sin(y)

    f = in_tf(body)
    plain = f(tensor())
    assert inner[0]() is not None  # the tape has it
    y = checkpoint(f, tensor(), use_reentrant=False)
    gc.collect()
    assert inner[1]() is None
    del plain
    gc.collect()
    assert inner[0]() is None
    y.sum().backward()


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_what_torch_keeps_is_freed_with_the_tape_or_the_pullback(caller: str) -> None:
    inner: list[Any] = []

    def body(x: Any) -> Any:
        y = torch.exp(x)
        inner.append(weakref.ref(y))
        return torch.sin(y)

    f = in_torch(body)
    x = array(caller, X)
    if caller == "jax":
        y, pull = jax.vjp(f, x)
        pull(jnp.ones_like(y))
        del pull
    else:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        tape.gradient(y, x)
        del tape
    gc.collect()
    assert inner[0]() is None


def test_training_by_a_tape_leaves_memory_flat() -> None:
    from arraybridge.frameworks import tokens

    layer = in_jax(jax.jit(lambda w, x: jnp.tanh(x @ w)))
    network = in_torch(lambda w, x: torch.tanh(x @ w))
    w, x = tf.Variable(np.ones((4, 4), np.float32) * 0.1), tf.constant(X)

    def train() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(network(w, layer(w, x)))
        w.assign_sub(1e-3 * tape.gradient(loss, w))

    def measured() -> tuple[int, int]:
        gc.collect()
        return len(jax.live_arrays()), len(tokens._tokens)

    for _ in range(20):
        train()
    before = measured()
    for _ in range(60):
        train()
    assert measured() <= before


# -- as native ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself
def test_torch_compile_has_a_break_there() -> None:
    f = in_jax(jnp.sin)
    torch._dynamo.reset()
    found = torch._dynamo.explain(lambda x: f(x * 2) + 1)(tensor())
    assert found.graph_break_count >= 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: f(x * 2) + 1, backend="eager", fullgraph=True)(tensor())


def test_a_jitted_callee_is_compiled_once_for_each_structure_under_a_tape() -> None:
    traced, pulls = [], []

    @jax.custom_vjp
    def spied(x: Any) -> Any:
        return x

    spied.defvjp(lambda x: (x, None), lambda _, g: (pulls.append(1) or g,))

    @in_jax
    @jax.jit
    def energy(params: Any, x: Any, scale: float = 1.0) -> Any:
        traced.append(1)
        return spied(params["w"] * x * scale).sum()

    for n, scale, count in ((4, 1.0, 1), (4, 2.0, 1), (5, 1.0, 2), (4, 3.0, 2)):
        w, x = tf.Variable(tf.ones(n)), tf.range(n, dtype=tf.float32)
        with tf.GradientTape() as tape:
            y = energy({"w": w}, x, scale)
        np.testing.assert_array_equal(tape.gradient(y, w), scale * np.arange(n))
        assert len(traced) == len(pulls) == count


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_a_number_beside_a_static_argument_compiles_nothing_anew(caller: str) -> None:
    compiled: list[str] = []
    f = in_jax(functools.partial(jax.jit, static_argnums=2)(lambda x, rate, n: rate * x**n))
    grad(caller, lambda x: f(x, 0.5, 3), X)
    counting = True
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if counting and "backend_compile" in event else None
    )
    for rate in (0.25, 2.0, 3.0):
        found = grad(caller, lambda x, r=rate: f(x, r, 3), X)[0]
        np.testing.assert_allclose(found, rate * 3 * X**2, rtol=1e-5)
    counting = False
    assert not compiled


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_settings_hold_in_the_backward_of_a_tape_and_of_a_pullback(caller: str) -> None:
    from arraybridge.options import missing_gpu

    seen: list[Any] = []

    class Spy(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(_: Any, g: Any) -> Any:
            seen.append((missing_gpu(), str(arraybridge.get_device())))
            return g * 2

    f = in_torch(lambda x: Spy.apply(x))
    x = array(caller, X)
    with arraybridge.settings(missing_gpu="host"), arraybridge.use_device("cpu"):
        if caller == "jax":
            y, pull = jax.vjp(f, x)
        else:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
    found: list[Any] = []
    back = (lambda: pull(jnp.ones_like(y))[0]) if caller == "jax" else (lambda: tape.gradient(y, x))
    thread = threading.Thread(target=lambda: found.append(np.asarray(back())))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], np.full_like(X, 2))
    assert seen == [("host", "cpu")]


@pytest.mark.parametrize("jitted", [False, True])
def test_x64_holds_in_the_backward_of_a_tape(jitted: bool) -> None:
    body = jax.jit(lambda x: jnp.sin(x) * x) if jitted else (lambda x: jnp.sin(x) * x)
    x = tf.constant(X.astype(np.float64) / 3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with x64():
            y = in_jax(body)(x)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tape.gradient(y, x)))
    thread.start()
    thread.join()
    wanted = np.cos(X.astype(np.float64) / 3) * np.asarray(x) + np.sin(np.asarray(x))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-14)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_large_arrays_under_jit_do_not_wait(callee: str) -> None:
    f = flowing(callee, lambda x: SIN[callee](x) * x)
    x = jnp.full((1 << 20,), 0.5, jnp.float32)
    g = jax.jit(jax.grad(lambda x: (f(x) + f(x * 2)).sum()))(x)
    wanted = np.cos(0.5) * 0.5 + np.sin(0.5) + 2 * (np.cos(1.0) + np.sin(1.0))
    np.testing.assert_allclose(np.asarray(g), np.full(1 << 20, wanted), rtol=1e-5)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_vmap_of_one_argument_and_of_the_gradient(callee: str) -> None:
    f = flowing(callee, lambda x, y: SIN[callee](x) * y * y)
    g = jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))
    mapped = jax.vmap(g, in_axes=(1, None), out_axes=(1, 0))
    for run in (mapped, jax.jit(mapped)):
        gx, gy = run(jnp.asarray(X), jnp.asarray(Y[:, 0]))
        np.testing.assert_allclose(gx, np.cos(X) * Y[:, :1] ** 2, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gy, (np.sin(X) * 2 * Y[:, :1]).T, rtol=1e-5, atol=1e-7)


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("callee", FRAMEWORKS)
def test_two_frameworks_that_differentiate_are_refused_in_all_pairs(callee: str) -> None:
    f = flowing(callee, lambda x, y: x * y)
    one, other = (name for name in FRAMEWORKS if name != callee)
    with pytest.raises(GradientError, match=f"{min(one, other)} and {max(one, other)}"):
        grad(one, lambda x: grad(other, lambda y: f(x, y), Y)[0] * 0 + x, X)


@pytest.mark.parametrize("name", ["complex128", "float64"])
def test_64_bits_are_refused_while_x64_is_off_under_a_tape_too(name: str) -> None:
    x = tf.constant(X.astype(name))
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(GradientError, match="enable_x64"):
            in_jax(lambda x: x * 2)(x)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_what_is_captured_is_refused_under_jit(callee: str) -> None:
    w: Any = tf.Variable(X) if callee == "tensorflow" else tensor()
    f = flowing(callee, lambda x: x * w)
    for run in (jax.jit(jax.grad(lambda x: f(x).sum())), jax.grad(jax.jit(lambda x: f(x).sum()))):
        with pytest.raises((GradientError, ValueError, RuntimeError), match="functional_call"):
            jax.block_until_ready(run(jnp.asarray(X)))


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_linearize_is_forward_mode_and_refused(callee: str) -> None:
    _, push = jax.linearize(flowing(callee, lambda x: x * x), jnp.asarray(X))
    with pytest.raises((GradientError, TypeError), match="forward-mode"):  # JAX's own words
        push(jnp.asarray(X))


def test_an_asynchronous_generator_is_refused_at_decoration() -> None:
    async def generator(x: Any) -> Any:
        yield x

    for name in FRAMEWORKS:
        with pytest.raises(ValueError, match="plain functions"):
            flowing(name, generator)


# -- methods, nesting, threads --------------------------------------------------------------------------


def test_kinds_of_methods() -> None:
    class Physics:
        k = 3.0

        @classmethod
        @in_jax
        def of_the_class(cls, x: Any) -> Any:
            return x * x * cls.k

        @in_tf
        @staticmethod
        def static(x: Any) -> Any:
            return x * x * 3

        @in_jax
        def law(self, x: Any, scale: float) -> Any:
            return x * x * scale

        partial = functools.partialmethod(law, scale=3.0)

    physics = Physics()
    for method in (Physics.of_the_class, physics.of_the_class, physics.static, physics.partial):
        np.testing.assert_allclose(grad("torch", method, X)[0], 6 * X, rtol=1e-6)


@pytest.mark.parametrize("callee", ["torch", "jax"])
def test_a_layer_of_keras_that_is_called(callee: str) -> None:
    class Layer(tf.keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            return law(x, self.scale.value)

    law = flowing(callee, lambda x, scale: SIN[callee](x) * scale * scale)
    layer = Layer()
    layer.build((None, 4))
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(layer(x))
    gx, gw = tape.gradient(y, [x, layer.scale.value])
    np.testing.assert_allclose(gx, np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(gw, 2 * np.sin(X).sum(0), rtol=1e-6)


@pytest.mark.parametrize("names", list(itertools.permutations(FRAMEWORKS)))
@pytest.mark.parametrize("order", [1, 2])
def test_nested_in_every_order(names: tuple[str, str, str], order: int) -> None:
    caller, middle, last = names
    inner = flowing(last, lambda x, y: SIN[last](x) * y)
    outer = flowing(middle, lambda x, y: SIN[middle](inner(x, y)) * x)
    wanted = grad("torch", lambda x, y: torch.sin(torch.sin(x) * y) * x, X, Y, order=order)
    for a, b in zip(grad(caller, outer, X, Y, order=order), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("callee", ["jax", "jitted", "tensorflow"])
def test_device_map_over_several_devices(callee: str) -> None:
    name = callee.replace("jitted", "jax")
    body = jax.jit(lambda x: jnp.sin(x) * x) if callee == "jitted" else (lambda x: SIN[name](x) * x)
    devices = [d for d in arraybridge.devices(name) if d.kind == "cpu"][:2]
    if len(devices) < 2:
        pytest.skip("one device")
    x = tensor()
    parts = list(arraybridge.device_map(flowing(name, body), [x[:1], x[1:]], devices=devices))
    torch.cat(parts).sum().backward()
    np.testing.assert_allclose(x.grad, np.cos(X) * X + np.sin(X), rtol=1e-5)


@pytest.mark.parametrize("run", ["Pipeline", "device_map"])
def test_a_tape_does_not_follow_into_a_function_around_it_neither(run: str) -> None:
    f = in_torch(lambda x: x * x)
    x = tf.constant(X)

    def around(x: Any) -> Any:
        if run == "Pipeline":
            return arraybridge.Pipeline(lambda x: f(x))(x)
        return list(arraybridge.device_map(lambda x: f(x), [x], devices=["cpu"]))

    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(GradientError, match="thread"):
            around(x)


def test_no_graph_crosses_into_other_processes() -> None:
    x = torch.ones(3, requires_grad=True)
    # As torch itself refuses to send what has a graph; a result must not look as if it had one.
    with pytest.raises(GradientError):
        list(arraybridge.device_map(squared, [x], devices=["cpu"], processes=True))


@arraybridge.torch(grad="flow")
def squared(x: Any) -> Any:
    return x * x


# -- traces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", ["nothing", "a trace"])
def test_a_trace_around_the_backward_records_it(around: str) -> None:
    f = in_jax(lambda x: jnp.sin(x))
    x = tensor()
    if around == "a trace":
        with arraybridge.trace() as first:
            y = f(x)
        known = len(first.records)
    else:
        y = f(x)
    with arraybridge.trace() as log:
        y.sum().backward()
    assert [(r.source, r.target) for r in log.records] == [("torch", "jax"), ("jax", "torch")]
    if around == "a trace":
        assert len(first.records) == known  # it is closed


def test_events_of_a_call_that_is_differentiated() -> None:
    f = in_jax(lambda x: jnp.sin(x))
    with arraybridge.trace() as log:
        try:
            raise KeyError("somebody's")
        except KeyError:
            f(tensor())
    (call,) = (e for e in log.events if e.kind == "call")
    assert call.reason == ""
    assert call.device == "cpu"


# -- threads, nesting, first use -------------------------------------------------------------------------


def test_the_first_gradient_of_a_process_inside_of_a_transform() -> None:
    done = run_python(str(SCRIPTS / "gradients_begin_in_a_transform.py"))
    assert done.stdout.split("\n")[0] == "[1.0, 1.0]", done.stderr


@pytest.mark.parametrize("middle", ["jax", "tensorflow"])
def test_a_function_of_torch_in_another_one_reads_its_own_numbers(middle: str) -> None:
    @in_torch
    def inner(z: Any) -> Any:
        if z.max().item() > 10 or z.sum().tolist() > 100:
            z = z / z.max()
        return z * z

    outer = flowing(middle, lambda x: inner(SIN[middle](x)))
    np.testing.assert_allclose(grad("torch", outer, X)[0], 2 * np.sin(X) * np.cos(X), rtol=1e-5)


def test_another_thread_does_not_end_the_watch_over_random_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    drop = tf.function(lambda x: x * tf.round(tf.random.uniform([12])), autograph=False)
    drop(tf.ones(12))
    double = in_tf(lambda x: x * 2)

    def other() -> None:
        checkpoint(double, tensor(), use_reentrant=False).sum().backward()

    @in_tf
    def f(x: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return drop(tf.reshape(x, [12]))

    with pytest.raises(GradientError, match="cannot draw again"):
        checkpoint(f, tensor(), use_reentrant=False).sum().backward()


def test_many_threads_call_functions_of_tensorflow() -> None:
    f = in_tf(lambda x: tf.sin(x) * x)
    found: list[np.ndarray[Any, Any]] = []
    start = threading.Barrier(6)

    def work() -> None:
        start.wait()
        for _ in range(20):
            x = tensor()
            (f(x).sum() + f(x).sum()).backward()
            found.append(x.grad.numpy())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    for g in found:
        np.testing.assert_allclose(g, 2 * (np.cos(X) * X + np.sin(X)), rtol=1e-5)


# -- what earlier calls of a TensorFlow function computed ---------------------------------------------------


@pytest.mark.parametrize("how", ["as it is", "by its values"])
def test_what_an_earlier_call_computed_is_refused_where_it_comes_back_as_it_is(how: str) -> None:
    kept: dict[str, Any] = {}

    def f(x: Any) -> Any:
        before = kept.get("h")
        h = tf.tanh(x)
        kept["h"] = h if how == "as it is" else tf.RaggedTensor.from_row_lengths(h[0], [1, 3])
        if before is None:
            return x * 2
        return before if how == "as it is" else before.flat_values

    x = tensor()
    y = in_tf(f)(x)
    with pytest.raises(GradientError, match="an earlier call"):
        in_tf(f)(x)
    del y


@pytest.mark.parametrize("reading", ["zeros_like", "ones_like", "greater", "argmax", "assign"])
def test_what_needs_no_gradient_of_an_earlier_call_is_no_constant_of_it(reading: str) -> None:
    kept: dict[str, Any] = {}
    total = tf.Variable(tf.zeros(X.shape), trainable=False)
    reads: dict[str, Callable[[Any], Any]] = {
        "zeros_like": lambda p: p,
        "ones_like": lambda p: p,
        "greater": lambda p: tf.cast(p > 0, tf.float32),
        "argmax": lambda p: tf.cast(tf.argmax(p), tf.float32),
        "assign": lambda p: (total.assign(p), 0.0)[1],
    }
    first: Callable[[Any], Any] = {"zeros_like": tf.zeros_like, "ones_like": tf.ones_like}.get(
        reading, tf.tanh
    )

    def f(x: Any) -> Any:
        kept.setdefault("h", first(x))
        return x * x + reads[reading](kept["h"])

    x = tensor()
    (in_tf(f)(x).sum() + in_tf(f)(x).sum()).backward()
    np.testing.assert_allclose(x.grad, 4 * X, rtol=1e-6)


class Checked(dict):  # type: ignore[type-arg]
    """A dict that looks at what it is given."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is None:
            raise TypeError("arrays only")
        super().__setitem__(key, value)


def test_a_container_that_looks_at_what_it_is_given() -> None:
    x = tensor()
    result = in_jax(lambda d: Checked(y=d["x"] * 2))(Checked(x=x))
    assert type(result) is Checked
    (g,) = torch.autograd.grad(result["y"].sum(), x)
    np.testing.assert_array_equal(g, np.full_like(X, 2))


# -- what is captured under jit, and where arrays are -------------------------------------------------------


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
def test_what_a_jitted_function_captures_of_tensorflow_is_refused_each_time() -> None:
    v = tf.Variable(X)
    f = in_jax(jax.jit(lambda x: x * jnp.asarray(v.numpy())))
    x = tf.constant(X)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with pytest.raises(GradientError, match=r"trainable tf.Variable"):
                f(x)
    frozen = tf.Variable(X, trainable=False)
    f = in_jax(jax.jit(lambda x: x * jnp.asarray(frozen.numpy())))
    np.testing.assert_array_equal(grad("tensorflow", f, X)[0], X)


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX gives a program from its cache")
def test_a_program_that_another_caller_had_compiled_is_looked_into() -> None:
    p = torch.nn.Parameter(torch.full((1,), 2.0))
    f = in_jax(jax.jit(lambda x: x * p.tolist()[0]))
    np.testing.assert_array_equal(grad("tensorflow", f, X)[0], np.full_like(X, 2))  # to it, a number
    with pytest.raises(GradientError, match="reads the numbers"):
        f(tensor())


def test_what_belongs_to_no_device_goes_where_the_rest_is() -> None:
    from torch.utils.checkpoint import checkpoint

    f = in_jax(lambda x: jnp.sin(x) * jnp.arange(1.0, 5.0))
    x = tensor()
    with jax.default_device(jax.devices()[-1]):
        checkpoint(f, x, use_reentrant=False).sum().backward()
    np.testing.assert_allclose(x.grad, np.cos(X) * np.arange(1, 5), rtol=1e-6)


def test_jacrev_of_arrays_on_another_device() -> None:
    x = jax.device_put(jnp.asarray(X[0]), jax.devices()[-1])
    np.testing.assert_allclose(jax.jacrev(in_torch(torch.sin))(x), np.diag(np.cos(X[0])), rtol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_numbers_that_jax_does_not_have_are_no_arrays_of_it(jitted: bool) -> None:
    f = in_torch(lambda x: (x * 2, np.float64(2.5), np.int64(3)))
    loss = jax.grad(lambda x: f(x)[0].sum())
    np.testing.assert_array_equal((jax.jit(loss) if jitted else loss)(jnp.asarray(X)), np.full_like(X, 2))


def test_an_earlier_call_whose_rule_calls_on() -> None:
    weight = tf.constant(Y)
    inner = in_tf(lambda v: v * weight)
    middle = in_torch(lambda v: inner(v) + v)
    block = tf.recompute_grad(lambda v: middle(v) * 1.0)
    kept: dict[str, Any] = {}

    def f(x: Any) -> Any:
        if "h" in kept:
            return x * kept["h"]
        kept["h"] = block(x)
        return x + kept["h"]

    x = tensor()
    y = in_tf(f)(x)
    with pytest.raises(GradientError, match="an earlier call"):
        in_tf(f)(x)
    del y


def test_an_earlier_result_in_a_list_of_tensors_is_seen() -> None:
    kept: dict[str, Any] = {}
    shape = tf.constant([], tf.int32)

    def f(x: Any) -> Any:
        if "h" not in kept:
            kept["h"] = x * x
            return x * 1
        many = tf.raw_ops.TensorListFromTensor(tensor=kept["h"], element_shape=shape)
        return x * tf.raw_ops.TensorListStack(
            input_handle=many, element_shape=shape, element_dtype=tf.float32, num_elements=2
        )

    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = in_tf(f)(x)
    with pytest.raises(GradientError, match="an earlier call"):
        in_tf(f)(x)
    del y


@pytest.mark.skipif(
    not hasattr(jax, "shard_map"), reason="this JAX does not follow what differs between devices"
)
def test_values_that_differ_between_devices_are_refused_where_jax_follows_them() -> None:
    devices = jax.devices()
    mesh, axis = jax.sharding.Mesh(np.array(devices), ("d",)), jax.sharding.PartitionSpec("d")
    f = in_torch(lambda w, x: w * x * x)
    step = jax.grad(lambda w, x: f(w, x).sum())
    specs = {"in_specs": (jax.sharding.PartitionSpec(), axis), "out_specs": jax.sharding.PartitionSpec()}
    w, x = jnp.ones(1), jnp.arange(1.0, 1 + 2 * len(devices))
    with pytest.raises(GradientError, match="check_vma"):
        jax.jit(jax.shard_map(step, mesh=mesh, **specs))(w, x)

    def summed(w: Any, x: Any) -> Any:
        return jax.lax.psum(step(w, x), "d")

    found = jax.jit(jax.shard_map(summed, mesh=mesh, check_vma=False, **specs))(w, x)
    np.testing.assert_allclose(found, [np.sum(np.arange(1.0, 1 + 2 * len(devices)) ** 2)], rtol=1e-6)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_a_gradient_lies_where_its_argument_does(callee: str) -> None:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one device of JAX")
    sharding = NamedSharding(Mesh(np.array(devices[:2]), ("a",)), PartitionSpec("a"))
    x = jax.device_put(jnp.arange(8.0), sharding)
    f = in_torch(lambda x: x * x) if callee == "torch" else in_tf(lambda x: x * x)
    g = jax.grad(lambda x: f(x).sum())(x)
    assert g.sharding == sharding
    np.testing.assert_array_equal(x - g, -np.arange(8.0))
