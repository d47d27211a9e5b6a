"""Unsupported differentiation raises errors with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeNotSupportedError, GradientError
from tests.decorators.gradients.directions import (
    CALLEES,
    FRAMEWORKS,
    TO_JAX,
    TO_TORCH,
    X,
    Y,
    flowing,
    grad,
    in_jax,
    in_torch,
    slope,
    tensor,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

CUBES: dict[str, Callable[[Any], Any]] = {
    "jax": in_jax(lambda x: x**3),
    "jitted": in_jax(jax.jit(lambda x: x**3)),
    "torch": in_torch(lambda x: x**3),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # inside PyTorch 2.14's own forward mode
@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_vmap_and_forward_mode_raise(callee: str) -> None:
    f = CALLEES[callee]
    x = tensor(False)
    with pytest.raises(GradientError, match="vmap"):
        torch.func.vmap(f)(x)
    with pytest.raises(GradientError, match="vmap"):
        torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x)
    for run in (
        lambda: torch.func.jvp(f, (x,), (x,)),
        lambda: torch.func.jacfwd(f)(x),
        lambda: torch.func.hessian(lambda x: f(x).sum())(x),
    ):
        with pytest.raises(GradientError, match=r"jacrev|vmap"):
            run()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(GradientError, match="reverse mode"):
            f(dual)


@pytest.mark.parametrize("callee", ["jax", "jitted"])
def test_64_bit_arrays_for_jax_raise_while_x64_is_off(callee: str) -> None:
    x = torch.rand(5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradientError, match=r"enable_x64\(True\):`, or pass float32\.$"):
        CALLEES[callee](x)
    with pytest.raises(GradientError, match=r"gradients of complex128 .*, or pass complex64\.$"):
        CALLEES[callee](x.detach().to(torch.complex128).requires_grad_())
    with pytest.raises(GradientError, match="enable_x64"):
        arraybridge.jax(grad="flow")(lambda x, w: x * w)(tensor(), X.astype(np.float64))
    t = tf.constant([1.0, 2.0], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(GradientError, match="enable_x64"):
            CALLEES[callee](t)
    # A callee that creates 64-bit arrays for JAX raises the same error.
    wide = arraybridge.torch(grad="flow")(lambda x: x.double())
    for run in (jax.grad(lambda x: wide(x).sum()), jax.jit(jax.grad(lambda x: wide(x).sum()))):
        with pytest.raises(GradientError, match="enable_x64"):
            run(jnp.ones(2))


@pytest.mark.parametrize("callee", TO_JAX)
def test_forward_mode_of_jax_raises(callee: str) -> None:
    f = CALLEES[callee]
    x = jnp.asarray(X[0])
    for run in (
        lambda: jax.jvp(f, (x,), (x,)),
        lambda: jax.jacfwd(f)(x),
        lambda: jax.hessian(lambda x: f(x).sum())(x),
    ):
        with pytest.raises(GradientError, match="jacrev"):
            run()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(f), (x,), (x,))


@pytest.mark.parametrize("callee", TO_JAX)
def test_unpredictable_shapes_under_jit_raise(callee: str) -> None:
    bodies = {"torch": lambda x: x[x > 0.5], "tensorflow": lambda x: tf.boolean_mask(x, x > 0.5)}
    f = getattr(arraybridge, callee)(grad="flow")(bodies[callee])
    x = jnp.asarray(X)
    np.testing.assert_array_equal(np.asarray(jax.grad(lambda x: f(x).sum())(x)), (X > 0.5).astype(np.float32))
    with pytest.raises(GradientError, match=r"outside of jax\.jit"):
        jax.jit(f)(x)


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_tf_function_raises_and_py_function_works(callee: str) -> None:
    f = CALLEES[callee]

    @tf.function(autograph=False)
    def inside(x: Any) -> Any:
        return f(x)

    with pytest.raises(GradientError, match="py_function"):
        inside(tf.constant(X))

    @tf.function
    def called(x: Any) -> Any:
        y = tf.py_function(f, [x], tf.float32)
        y.set_shape(x.shape)
        return y

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = called(x)
    np.testing.assert_allclose(tape.gradient(y, x), slope(), rtol=1e-5)


def test_the_error_names_the_argument_that_cannot_be_converted() -> None:
    f = arraybridge.jax(grad="flow")(lambda x, pair, *, z=None, scale=None: x)
    text = np.array(["a"])
    for pair, options, name in (
        ((1, text), {}, "pair"),
        ((1, 2), {"scale": text, "z": 3}, "scale"),
        ((1, 2), {"z": {"a": text}, "scale": 3}, "z"),
    ):
        with pytest.raises(
            DtypeNotSupportedError,
            match=rf"<lambda>\(\), argument '{name}': Cannot convert a NumPy array of dt",
        ):
            f(tensor(), pair, **options)


def words_by_tensorflow(x: Any) -> Any:
    return tf.constant(["b", "a"])


def words_by_numpy(x: Any) -> Any:
    return np.array(["b", "a"])


def test_the_error_names_the_result_that_cannot_be_converted() -> None:
    words = arraybridge.tensorflow(grad="flow")(words_by_tensorflow)
    names = arraybridge.torch(grad="flow")(words_by_numpy)
    tf_advice = "Pass integers that identify the strings, tf.unique(tf.reshape(result, [-1])).idx"
    np_advice = "Pass integers that identify the strings, np.unique(result, return_inverse=True)[1]"
    cases: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: words(torch.ones(2, requires_grad=True)), "words_by_tensorflow", tf_advice),
        (lambda: jax.grad(lambda x: words(x).sum())(jnp.ones(2)), "words_by_tensorflow", tf_advice),
        (lambda: jax.grad(lambda x: names(x).sum())(jnp.ones(2)), "words_by_numpy", np_advice),
    ]
    for call, name, advice in cases:
        with pytest.raises(DtypeNotSupportedError) as caught:
            call()
        error = caught.value
        assert error.place == f"{name}(), result"
        assert error.advice.endswith(f"{advice}. Return that from the function instead.")
    with pytest.raises(DtypeNotSupportedError, match=r"result: .*string.*Return an array of another dtype"):
        jax.jit(words)(jnp.ones(2))


def test_captured_trainable_parameters_raise() -> None:
    linear = torch.nn.Linear(4, 2)
    model = arraybridge.torch(grad="flow")(linear.forward)
    x = jnp.asarray(X)
    with pytest.raises(GradientError, match=r"torch\.func\.functional_call"):
        jax.grad(lambda x: model(x).sum())(x)
    t = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(GradientError, match=r"torch\.func\.functional_call"):
            model(t)
    # Without gradients, it is an ordinary function that treats frozen parameters as constants.
    assert model(x).shape == (3, 2)
    assert model(X).shape == (3, 2)
    linear.requires_grad_(False)
    g = np.asarray(jax.grad(lambda x: model(x).sum())(x))
    np.testing.assert_allclose(g, np.broadcast_to(linear.weight.numpy().sum(0), X.shape), rtol=1e-6)
    # The same structure as before, trainable again.
    linear.requires_grad_(True)
    with pytest.raises(GradientError, match=r"functional_call"):
        jax.grad(lambda x: model(x).sum())(x)


def test_the_error_for_a_captured_tensor_names_fixes_that_work() -> None:
    w = torch.tensor([2.0, 3.0], requires_grad=True)
    x = jnp.array([5.0, 7.0])
    with pytest.raises(GradientError) as caught:
        jax.grad(arraybridge.torch(grad="flow")(lambda x: (x * w).sum()))(x)
    assert str(caught.value) == (
        "test_the_error_for_a_captured_tensor_names_fixes_that_work.<locals>.<lambda>():"
        " The result depends on a trainable tensor, called w here, which is not an argument and would get no"
        " gradient. If w is a constant, use w.detach() in the function (for a module, call"
        ' module.requires_grad_(False)). Otherwise, pass it as an argument: to_jax(w, grad="detach"), and'
        " list its position in argnums= of jax.grad. For the parameters of a module, use"
        " torch.func.functional_call."
    )
    constant = arraybridge.torch(grad="flow")(lambda x: (x * w.detach()).sum())
    assert jax.grad(constant)(x).tolist() == [2.0, 3.0]
    loss = arraybridge.torch(grad="flow")(lambda x, w: (x * w).sum())
    converted = arraybridge.to_jax(w, grad="detach")
    assert [g.tolist() for g in jax.grad(loss, argnums=(0, 1))(x, converted)] == [[2.0, 3.0], [5.0, 7.0]]


def test_captured_trainable_variables_raise() -> None:
    w = tf.Variable(X)
    f = arraybridge.tensorflow(grad="flow")(lambda x: x * w)
    with pytest.raises(GradientError, match=r"outside of the function.* to_torch\(w, grad=\"detach\"\)"):
        f(tensor())
    with pytest.raises(GradientError, match=r"compute w\.numpy\(\) outside of the function"):
        jax.grad(lambda x: f(x).sum())(jnp.asarray(X))
    values = w.numpy()
    constant = arraybridge.tensorflow(grad="flow")(lambda x: x * values)
    np.testing.assert_array_equal(jax.grad(lambda x: constant(x).sum())(jnp.asarray(X)), X)
    watched = tf.constant(X)
    g = arraybridge.tensorflow(grad="flow")(lambda x: x * watched)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        with pytest.raises(GradientError, match="tape"):
            g(tensor())
    x = tensor()
    g(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), X)


@pytest.mark.parametrize("caller", ["torch", "jax"])
def test_keras_variables_next_to_arrays_are_read_as_values(caller: str) -> None:
    variable = tf.keras.Variable(np.array([2, 3], np.float32))
    fn = arraybridge.tensorflow(grad="flow")(lambda x, w: x * w)
    if caller == "torch":
        x = torch.ones(2, requires_grad=True)
        fn(x, w=variable).sum().backward()
        gradient = x.grad
    else:
        gradient = jax.grad(lambda x: fn(x, variable).sum())(jnp.ones(2))
    assert gradient.tolist() == [2, 3]


def test_captured_tracers_raise() -> None:
    x = tensor()

    def loss(w: Any) -> Any:
        f = arraybridge.jax(grad="flow")(lambda x: x * w)
        return f(x)

    with pytest.raises(GradientError, match="traced"):
        jax.grad(loss)(2.0)


def test_parameters_passed_as_arguments_get_a_gradient_or_raise() -> None:
    w = torch.nn.Parameter(torch.from_numpy(X.copy()))
    f = arraybridge.torch(grad="flow")(lambda x, w: x * w)
    with pytest.raises(GradientError, match="detach"):
        jax.grad(lambda x: f(x, w).sum())(jnp.asarray(X))


def test_unsupported_functions_and_options_raise_at_decoration() -> None:
    for name in ("numpy", "cupy", "pyclesperanto"):
        with pytest.raises(ValueError, match=r"torch, jax or tensorflow"):
            getattr(arraybridge, name)(grad="flow")(lambda x: x)

    def generator(x: Any) -> Any:
        yield x

    async def coroutine(x: Any) -> Any:
        return x

    for fn in (generator, coroutine):
        with pytest.raises(ValueError, match="plain functions"):
            arraybridge.torch(grad="flow")(fn)
    for options in (
        {"slice_by_slice": True},
        {"oom_recovery": "split"},
        {"dtype_conversion": arraybridge.DtypeConversion.UINT8},
        {"output_type": "numpy"},
        {"output_type": "torch"},
        {"dtype": "float32"},
    ):
        with pytest.raises(ValueError, match="flow"):
            arraybridge.torch(grad="flow", **options)(lambda x: x)
    with pytest.raises(
        ValueError, match=r"cannot be combined with dtype_conversion='uint8'\. Convert inside"
    ):
        arraybridge.torch(grad="flow", dtype_conversion="uint8")(lambda x: x)
    arraybridge.torch(grad="flow", output_type="input", oom_recovery=True)(lambda x: x)
    with pytest.raises(ValueError, match="flow"):
        arraybridge.torch(grad="flaw")


def test_conversions_have_no_gradient() -> None:
    with pytest.raises(ValueError, match="decorators"):
        arraybridge.convert_memory(tensor(), "jax", grad="flow")


def test_torch_functions_that_write_to_an_argument_raise() -> None:
    f = arraybridge.torch(grad="flow")(lambda x: x.detach().mul_(2) * x)
    with pytest.raises(GradientError, match="clone"):
        jax.grad(lambda x: f(x).sum())(jnp.array(X))
    with pytest.raises((GradientError, RuntimeError, ValueError), match="writes to an argument"):
        jax.block_until_ready(jax.jit(lambda x: f(x) * 2)(jnp.zeros(64)))


@pytest.mark.parametrize("callee", FRAMEWORKS)
def test_arguments_differentiated_by_two_frameworks_raise(callee: str) -> None:
    f = flowing(callee, lambda x, y: x * y)
    one, other = (name for name in FRAMEWORKS if name != callee)
    with pytest.raises(GradientError, match=f"{min(one, other)} and {max(one, other)}"):
        grad(one, lambda x: grad(other, lambda y: f(x, y), Y)[0] * 0 + x, X)


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_captured_arrays_under_jit_raise(callee: str) -> None:
    w: Any = tf.Variable(X) if callee == "tensorflow" else tensor()
    f = flowing(callee, lambda x: x * w)
    for run in (jax.jit(jax.grad(lambda x: f(x).sum())), jax.grad(jax.jit(lambda x: f(x).sum()))):
        with pytest.raises((GradientError, ValueError, RuntimeError), match="which is not an argument"):
            jax.block_until_ready(run(jnp.asarray(X)))


@pytest.mark.parametrize("callee", CUBES)
def test_vectorized_jacobians_raise(callee: str) -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = CUBES[callee](x)
    # AutoGraph quotes the error, with its class if it can read the source.
    with pytest.raises(Exception, match="experimental_use_pfor=False"):
        tape.jacobian(y, x)


def test_wide_integers_among_traced_results_raise() -> None:
    f = in_torch(lambda x: (x * 2, x.argmax()))
    assert np.asarray(f(jnp.arange(3.0))[1]) == 2
    with pytest.raises(GradientError, match="int32"):
        jax.jit(f)(jnp.arange(3.0))


def test_interrupted_graphs_raise_with_both_alternatives() -> None:
    with pytest.raises(GradientError, match=r"grad='detach'.*only its values.*@jax\(grad='flow'\)"):
        arraybridge.jax(lambda x: x)(tensor())
    with pytest.raises(GradientError) as refused:
        arraybridge.to_numpy(tensor())
    assert "flow" not in str(refused.value)


def test_writes_to_other_arguments_before_the_rerun_are_detected() -> None:
    x, w = jnp.asarray(X), torch.from_numpy(X.copy())
    g, pull = jax.vjp(jax.grad(lambda x: in_torch(lambda x, w: x**3 * w)(x, w).sum()), x)
    w.add_(1)
    with pytest.raises(GradientError, match="writes to an argument"):
        pull(g)
