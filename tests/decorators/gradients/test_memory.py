"""Inputs, results and gradients share memory as conversions do; saved arrays are checked and freed."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.interface.autodiff import Linear
from tests.decorators.gradients.directions import (
    CALLEES,
    DIRECTIONS,
    FRAMEWORKS,
    TO_TORCH,
    X,
    array,
    flowing,
    in_torch,
    place,
    pulled,
    tensor,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

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


def test_checkpoint_frees_the_residuals() -> None:
    from torch.utils.checkpoint import checkpoint

    big = torch.rand(1 << 16, requires_grad=True)
    f = arraybridge.jax(grad="flow")(jax.jit(lambda x: jnp.sin(jnp.cos(jnp.exp(x))) * x))
    f(big)  # compiled
    plain, _y = kept_bytes(lambda: f(big))
    saved, y = kept_bytes(lambda: checkpoint(f, big, use_reentrant=False))
    assert plain >= 2 * big.nbytes
    assert saved <= big.nbytes + 1024  # only the result
    y.sum().backward()


def kept_bytes(fn: Callable[[], Any]) -> tuple[int, Any]:
    """Return the live arrays of JAX and TensorFlow that a call leaves behind in addition to its result."""
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    result = fn()
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if id(a) not in before), result


def linearized() -> int:
    """Return how many linearized functions are saved for a backward pass."""
    gc.collect()
    return sum(issubclass(type(x), Linear) for x in gc.get_objects())


@pytest.mark.parametrize("callee", TO_TORCH)
def test_saved_arrays_are_freed_with_the_graph(callee: str) -> None:
    before = linearized()
    x = tensor()
    y = CALLEES[callee](x).sum()
    assert linearized() == before + 1
    y.backward()  # without retain_graph, while y still exists
    assert linearized() == before
    z = CALLEES[callee](x)
    assert linearized() == before + 1
    del z
    assert linearized() == before


@pytest.mark.parametrize("callee", TO_TORCH)
def test_no_grad_and_inference_mode_save_nothing(callee: str) -> None:
    x, before = tensor(), linearized()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = CALLEES[callee](x)
        assert not y.requires_grad
        assert arraybridge.detect_memory_type(y) == "torch"
        np.testing.assert_allclose(y.numpy(), np.sin(X) * X, rtol=1e-5)
    assert linearized() == before


@pytest.mark.parametrize("callee", TO_TORCH)
def test_writes_to_an_argument_before_the_backward_are_detected(callee: str) -> None:
    x = tensor()
    inner = x * 1
    y = CALLEES[callee](inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("jitted", [False, True])
def test_writes_to_a_result_do_not_change_the_gradient(jitted: bool) -> None:
    # The derivative of exp is exp itself, so the pullback may save the result.
    body = jax.jit(jnp.exp) if jitted else jnp.exp
    for f in (arraybridge.jax(grad="flow")(body), arraybridge.tensorflow(grad="flow")(tf.exp)):
        x = tensor()
        y = f(x)
        total = y.sum()
        with torch.no_grad():
            y.detach().mul_(0)
        noticed = False
        try:
            total.backward()
        except RuntimeError as error:
            noticed = "modified by an inplace operation" in str(error)
        assert noticed or np.allclose(x.grad.numpy(), np.exp(X), rtol=1e-6)


def test_writes_to_numpy_arguments_do_not_change_the_gradient() -> None:
    numpy_argument = X.copy()
    for f in (
        arraybridge.jax(grad="flow")(jax.jit(lambda x, w: x * w)),
        arraybridge.jax(grad="flow")(lambda x, w: x * w),
        arraybridge.tensorflow(grad="flow")(lambda x, w: x * w),
    ):
        numpy_argument[:] = 2
        x = tensor()
        y = f(x, numpy_argument)
        numpy_argument[:] = -5
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))
    numpy_argument[:] = 2
    f = arraybridge.torch(grad="flow")(lambda x, w: x * w)

    def late(x: Any) -> Any:
        y = f(x, numpy_argument)
        numpy_argument[:] = -5
        return y.sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(late)(jnp.asarray(X))), np.full_like(X, 2))


@pytest.mark.parametrize(("caller", "callee"), DIRECTIONS)
def test_inputs_results_and_gradients_share_memory(caller: str, callee: str) -> None:
    x, ones = (arraybridge.aligned((1024,), np.float32) for _ in range(2))
    x[:], ones[:] = 0.5, 1
    source = arraybridge.convert_memory(x, caller, copy=False)
    cotangent = arraybridge.convert_memory(ones, caller, copy=False)
    f = CALLEES[callee]
    with arraybridge.trace() as log:
        if caller == "torch":
            f(source.requires_grad_()).backward(cotangent)
            found = source.grad
        elif caller == "jax":
            found = jax.vjp(f, source)[1](cotangent)[0]
        else:
            with tf.GradientTape() as tape:
                tape.watch(source)
                y = f(source)
            found = tape.gradient(y, source, output_gradients=cotangent)
    np.testing.assert_allclose(np.asarray(found), np.cos(x) * x + np.sin(x), rtol=1e-5)
    crossed = [r for r in log.records if {r.source, r.target} == {caller, callee}]
    assert len(crossed) == 4  # the argument, the result, the cotangent, the gradient
    assert all(r.shares_memory and not r.copies for r in crossed), str(log)


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


@pytest.mark.parametrize("caller", ["jax", "tensorflow"])
def test_arrays_saved_by_torch_are_freed_with_the_tape_or_pullback(caller: str) -> None:
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
