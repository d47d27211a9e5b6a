"""What a framework does around an operation of its own it does around one of another framework."""

from __future__ import annotations

import contextvars
import gc
import itertools
import threading
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

DIRECTIONS = list(itertools.permutations(("torch", "jax", "tensorflow"), 2))
X = np.linspace(0.1, 1.3, 12, dtype=np.float32).reshape(3, 4)

CALLEES: dict[str, Callable[..., Any]] = {
    "jax": arraybridge.jax(grad="flow")(lambda x: jnp.sin(x) * x),
    "jitted": arraybridge.jax(grad="flow")(jax.jit(lambda x: jnp.sin(x) * x)),
    "tensorflow": arraybridge.tensorflow(grad="flow")(lambda x: tf.sin(x) * x),
    "torch": arraybridge.torch(grad="flow")(lambda x: torch.sin(x) * x),
}
TO_TORCH = ("jax", "jitted", "tensorflow")
TO_JAX = ("torch", "tensorflow")


def tensor(requires_grad: bool = True) -> Any:
    return torch.from_numpy(X.copy()).requires_grad_(requires_grad)


def wanted() -> np.ndarray:
    """The derivative of sin(x) x, computed by hand."""
    return np.cos(X) * X + np.sin(X)


# -- torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callee", TO_TORCH)
def test_retain_graph(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * wanted(), rtol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("callee", TO_TORCH)
def test_create_graph_and_hooks(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x)
    seen: list[Any] = []
    y.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    np.testing.assert_allclose(g.detach().numpy(), 2 * wanted(), rtol=1e-5)
    np.testing.assert_array_equal(seen[0].numpy(), np.ones_like(X))
    (second,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(second.numpy(), 2 * (2 * np.cos(X) - np.sin(X) * X), rtol=1e-4)


@pytest.mark.parametrize("callee", TO_TORCH)
@pytest.mark.parametrize("times", [1, 2])
def test_checkpoint(callee: str, times: int) -> None:
    from torch.utils.checkpoint import checkpoint

    x = tensor()
    calls = []

    def block(x: Any) -> Any:
        calls.append(1)
        return CALLEES[callee](torch.exp(x)) * 2

    plain = block(x).sum()
    (expected,) = torch.autograd.grad(plain, x)
    y = checkpoint(block, x, use_reentrant=False).sum()
    for _ in range(times):
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(g, expected)
    reentrant = checkpoint(block, x, use_reentrant=True).sum()
    reentrant.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_checkpoint_with_create_graph(callee: str) -> None:
    from torch.utils.checkpoint import checkpoint

    x = tensor()
    y = checkpoint(CALLEES[callee], x, use_reentrant=False).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_allclose(second.numpy(), 2 * np.cos(X) - np.sin(X) * X, rtol=1e-4)


def kept_bytes(fn: Callable[[], Any]) -> tuple[int, Any]:
    """Live arrays of JAX and TensorFlow that a call leaves behind, beside its result."""
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    result = fn()
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if id(a) not in before), result


def test_checkpoint_frees_the_residuals() -> None:
    from torch.utils.checkpoint import checkpoint

    big = torch.rand(1 << 16, requires_grad=True)
    f = arraybridge.jax(grad="flow")(jax.jit(lambda x: jnp.sin(jnp.cos(jnp.exp(x))) * x))
    f(big)  # compiled
    plain, _y = kept_bytes(lambda: f(big))
    saved, y = kept_bytes(lambda: checkpoint(f, big, use_reentrant=False))
    assert plain >= 2 * big.nbytes
    assert saved <= big.nbytes + 1024  # the result alone
    y.sum().backward()


@pytest.mark.parametrize("callee", TO_TORCH)
def test_what_is_kept_is_freed_with_the_graph(callee: str) -> None:
    from arraybridge.frameworks import tokens

    gc.collect()
    before = len(tokens._tokens)
    x = tensor()
    y = CALLEES[callee](x).sum()
    assert len(tokens._tokens) == before + 1
    y.backward()  # without retain_graph, and y is still there
    assert len(tokens._tokens) == before
    z = CALLEES[callee](x)
    del z
    gc.collect()
    assert len(tokens._tokens) == before


@pytest.mark.parametrize("callee", TO_TORCH)
def test_a_checkpoint_keeps_no_pullback(callee: str) -> None:
    from torch.utils.checkpoint import checkpoint

    from arraybridge.frameworks import tokens

    gc.collect()
    before = len(tokens._tokens)
    x = tensor()
    y = checkpoint(CALLEES[callee], x, use_reentrant=False).sum()
    gc.collect()
    assert len(tokens._tokens) == before
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted(), rtol=1e-5)
    gc.collect()
    assert len(tokens._tokens) == before


@pytest.mark.parametrize("callee", TO_TORCH)
def test_residuals_on_the_cpu(callee: str) -> None:
    x = tensor()
    with torch.autograd.graph.save_on_cpu():
        y = CALLEES[callee](x).sum()
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted(), rtol=1e-5)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_writing_to_an_argument_before_the_backward_is_noticed(callee: str) -> None:
    x = tensor()
    inner = x * 1
    y = CALLEES[callee](inner)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("callee", TO_TORCH)
def test_writing_to_a_view_of_an_argument_is_noticed(callee: str) -> None:
    x = tensor()
    base = x * 1
    y = CALLEES[callee](base[1:])
    base[2].mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("jitted", [False, True])
def test_writing_to_a_result_never_spoils_the_gradient(jitted: bool) -> None:
    # The derivative of exp is exp itself, so that the result may be what the pullback keeps.
    body = jax.jit(jnp.exp) if jitted else jnp.exp
    for f in (arraybridge.jax(grad="flow")(body), arraybridge.tensorflow(grad="flow")(tf.exp)):
        x = tensor()
        y = f(x)
        noticed = False
        try:
            y.mul_(0)
            y.sum().backward()
        except RuntimeError as error:
            noticed = "modified by an inplace operation" in str(error)
        assert noticed or not x.grad.any()
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


def test_writing_to_a_result_that_nobody_reads_again_is_fine() -> None:
    x = tensor()
    y = arraybridge.jax(grad="flow")(jax.jit(lambda x: x * 3))(x)
    y.add_(1).relu_()
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 3))


@pytest.mark.parametrize("callee", TO_TORCH)
def test_sparse_cotangents_of_torch(callee: str) -> None:
    x = tensor()
    y = CALLEES[callee](x)
    torch.nn.functional.embedding(torch.tensor([0, 0, 2]), y, sparse=True).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted() * np.array([[2], [0], [1]]), rtol=1e-5)


@pytest.mark.parametrize("callee", TO_TORCH)
def test_what_is_saved_is_compressed_and_no_other_pullback_is_taken(callee: str) -> None:
    others = [CALLEES[callee](tensor() + 1) for _ in range(600)]  # whose numbers are near
    x = tensor()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.to(torch.bfloat16)), lambda kept: kept[1].to(kept[0])
    ):
        y = CALLEES[callee](x)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted(), rtol=0.05)
    del others


def test_writing_to_numpy_beside_changes_nothing() -> None:
    beside = X.copy()
    for f in (
        arraybridge.jax(grad="flow")(jax.jit(lambda x, w: x * w)),
        arraybridge.jax(grad="flow")(lambda x, w: x * w),
        arraybridge.tensorflow(grad="flow")(lambda x, w: x * w),
    ):
        beside[:] = 2
        x = tensor()
        y = f(x, beside)
        beside[:] = -5
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))
    beside[:] = 2
    f = arraybridge.torch(grad="flow")(lambda x, w: x * w)

    def late(x: Any) -> Any:
        y = f(x, beside)
        beside[:] = -5
        return y.sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(late)(jnp.asarray(X))), np.full_like(X, 2))


@pytest.mark.parametrize("callee", TO_TORCH)
def test_no_grad_and_inference_mode_keep_nothing(callee: str) -> None:
    from arraybridge.frameworks import tokens

    x = tensor()
    gc.collect()
    before = len(tokens._tokens)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = CALLEES[callee](x)
        assert not y.requires_grad
        assert arraybridge.detect_memory_type(y) == "torch"
        np.testing.assert_allclose(y.numpy(), np.sin(X) * X, rtol=1e-5)
    assert len(tokens._tokens) == before


@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_func_grad(callee: str) -> None:
    f = CALLEES[callee]
    x = tensor(False)
    g = torch.func.grad(lambda x: f(x).sum())(x)
    np.testing.assert_allclose(g.numpy(), wanted(), rtol=1e-5)
    value, pull = torch.func.vjp(f, x)
    np.testing.assert_allclose(pull(torch.ones_like(value))[0].numpy(), wanted(), rtol=1e-5)
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x)
    np.testing.assert_allclose(second.numpy(), 2 * np.cos(X) - np.sin(X) * X, rtol=1e-4)


# torch compiles decompositions for forward mode by means that it has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_vmap_and_forward_mode_are_refused(callee: str) -> None:
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


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself
@pytest.mark.parametrize("callee", TO_TORCH)
def test_torch_compile_breaks_its_graph(callee: str) -> None:
    f = CALLEES[callee]

    @torch.compile(backend="eager")
    def model(x: Any) -> Any:
        return f(x * 2).sum() + 1

    x = tensor()
    for _ in range(3):
        x.grad = None
        model(x).backward()
        np.testing.assert_allclose(
            x.grad.numpy(), 2 * (np.cos(2 * X) * 2 * X + np.sin(2 * X)), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("callee", TO_TORCH)
def test_gradcheck(callee: str) -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with _x64():
        assert torch.autograd.gradcheck(CALLEES[callee], (x,))
        assert torch.autograd.gradgradcheck(CALLEES[callee], (x,))


def _x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


@pytest.mark.parametrize("callee", ["jax", "jitted"])
def test_x64_holds_in_the_backward_in_whichever_thread(callee: str) -> None:
    x = torch.rand(5, dtype=torch.float64, requires_grad=True)
    with _x64():
        y = CALLEES[callee](x).sum()
    failed: list[BaseException] = []

    def backward() -> None:
        try:
            y.backward()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failed
    x0 = x.detach().numpy()
    np.testing.assert_allclose(x.grad.numpy(), np.cos(x0) * x0 + np.sin(x0), rtol=1e-14)


@pytest.mark.parametrize("callee", ["jax", "jitted"])
def test_64_bits_into_jax_are_refused_while_x64_is_off(callee: str) -> None:
    x = torch.rand(5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradientError, match="enable_x64"):
        CALLEES[callee](x)
    with pytest.raises(GradientError, match="enable_x64"):
        arraybridge.jax(grad="flow")(lambda x, w: x * w)(tensor(), X.astype(np.float64))
    t = tf.constant([1.0, 2.0], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(GradientError, match="enable_x64"):
            CALLEES[callee](t)
    # And where a callee makes them for JAX.
    wide = arraybridge.torch(grad="flow")(lambda x: x.double())
    for run in (jax.grad(lambda x: wide(x).sum()), jax.jit(jax.grad(lambda x: wide(x).sum()))):
        with pytest.raises(GradientError, match="enable_x64"):
            run(jnp.ones(2))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # of JAX itself
def test_integers_of_64_bits_are_indices_as_ever() -> None:
    index = torch.tensor([2, 0, 2])
    for body in (lambda x, i: x[i] * 2, jax.jit(lambda x, i: x[i] * 2)):
        x = tensor()
        arraybridge.jax(grad="flow")(body)(x, index).sum().backward()
        expected = np.zeros_like(X)
        np.add.at(expected, index.numpy(), 2)
        np.testing.assert_array_equal(x.grad.numpy(), expected)


@pytest.mark.parametrize("callee", ["jax", "torch", "tensorflow"])
def test_integer_and_boolean_arguments_get_none(callee: str) -> None:
    def body(x: Any, mask: Any, count: Any) -> Any:
        if callee == "tensorflow":
            return x * tf.cast(mask, tf.float32) * tf.cast(count, tf.float32)
        return (
            x * mask.astype(x.dtype) * count.astype(x.dtype)
            if callee == "jax"
            else x * mask.to(x.dtype) * count.to(x.dtype)
        )

    f = getattr(arraybridge, callee)(grad="flow")(body)
    mask, count = X > 0.5, np.arange(12, dtype=np.int32).reshape(3, 4)
    expected = mask * count.astype(np.float32)
    if callee != "torch":
        x, m, c = tensor(), torch.from_numpy(mask.copy()), torch.from_numpy(count.copy())
        y = f(x, m, c)
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), expected)
        assert m.grad is None
        assert c.grad is None
    if callee != "jax":
        for run in (jax.grad, lambda *a, **k: jax.jit(jax.grad(*a, **k))):
            gx, gm, gc_ = run(lambda x, m, c: f(x, m, c).sum(), argnums=(0, 1, 2), allow_int=True)(
                jnp.asarray(X), jnp.asarray(mask), jnp.asarray(count)
            )
            np.testing.assert_array_equal(np.asarray(gx), expected)
            assert gm.dtype == gc_.dtype == jax.dtypes.float0
    if callee != "tensorflow":
        x, m, c = tf.constant(X), tf.constant(mask), tf.constant(count)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x, m, c)
        gx, gm, gc_ = tape.gradient(y, [x, m, c])
        np.testing.assert_array_equal(gx, expected)
        assert gm is None
        assert gc_ is None


def test_context_variables_and_settings_hold_in_the_backward() -> None:
    from arraybridge.options import missing_gpu

    held: list[str] = []
    depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
    seen: list[Any] = []

    @jax.custom_vjp
    def spy(x: Any) -> Any:
        return x * 2

    def backward(_: Any, g: Any) -> Any:
        seen.append((depth.get(), arraybridge.get_device(), jax.config.jax_enable_x64, threading.get_ident()))
        held.append(missing_gpu())
        return (g * 2,)

    spy.defvjp(lambda x: (x * 2, None), backward)
    f = arraybridge.jax(grad="flow")(lambda x: spy(x))
    x = tensor()
    depth.set(3)
    device_words = "cpu:1" if len(jax.devices("cpu")) > 1 else "cpu"
    with (
        arraybridge.use_device(device_words) as device,
        arraybridge.settings(missing_gpu="host"),
        _x64(),
    ):
        y = f(x)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert seen[0][0] == 3
    assert held == ["host"]
    assert seen[0][1] == device
    assert seen[0][2]
    assert seen[0][3] != threading.get_ident()


# -- JAX --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callee", TO_JAX)
def test_jit_vmap_scan_checkpoint(callee: str) -> None:
    f = CALLEES[callee]
    x = jnp.asarray(X)

    def total(x: Any) -> Any:
        return f(x).sum()

    for run in (
        jax.grad(total),
        jax.jit(jax.grad(total)),
        jax.grad(jax.jit(total)),
        jax.grad(jax.checkpoint(total)),
        jax.jit(jax.grad(jax.checkpoint(total))),
        jax.vmap(jax.grad(total)),
        jax.jit(jax.vmap(jax.grad(total))),
        jax.grad(lambda x: jax.vmap(f)(x).sum()),
        jax.grad(lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x)[1].sum()),
        jax.jit(
            jax.grad(lambda x: jax.lax.scan(jax.checkpoint(lambda c, row: (c, f(row))), 0.0, x)[1].sum())
        ),
        jax.grad(lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x).sum()),
        jax.grad(lambda x: jax.lax.map(f, x).sum()),
    ):
        np.testing.assert_allclose(np.asarray(run(x)), wanted(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(jax.vmap(f)(x)), np.sin(X) * X, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(jax.jit(f)(x)), np.sin(X) * X, rtol=1e-5)
    jacobian = jax.jacrev(f)(x[0])
    np.testing.assert_allclose(np.asarray(jacobian), np.diag(wanted()[0]), rtol=1e-5)
    hessian = jax.jacrev(jax.jacrev(lambda x: f(x).sum()))(x[0])
    np.testing.assert_allclose(
        np.asarray(hessian), np.diag(2 * np.cos(X[0]) - np.sin(X[0]) * X[0]), rtol=1e-4
    )


@pytest.mark.parametrize("callee", TO_JAX)
@pytest.mark.parametrize("loop", ["map", "scan"])
def test_a_loop_that_is_pulled_back_twice_and_then_differentiated(loop: str, callee: str) -> None:
    """JAX adds up the cotangents of what the pullback keeps, of integers too, of which there are none."""

    def gradient(f: Callable[[Any], Any]) -> Any:
        def total(x: Any) -> Any:
            if loop == "map":
                return jax.lax.map(f, jnp.stack([x, x])).sum()
            return jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0].sum()

        def twice(x: Any) -> Any:
            pull = jax.vjp(total, x)[1]
            return (pull(1.0)[0] * pull(2.0)[0]).sum()

        return jax.grad(twice)(jnp.asarray(X[0]))

    np.testing.assert_allclose(gradient(CALLEES[callee]), gradient(lambda x: jnp.sin(x) * x), rtol=1e-4)


@pytest.mark.parametrize("callee", TO_JAX)
def test_forward_mode_of_jax_is_refused(callee: str) -> None:
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
def test_shapes_that_cannot_be_foretold_under_jit_are_refused(callee: str) -> None:
    bodies = {"torch": lambda x: x[x > 0.5], "tensorflow": lambda x: tf.boolean_mask(x, x > 0.5)}
    f = getattr(arraybridge, callee)(grad="flow")(bodies[callee])
    x = jnp.asarray(X)
    np.testing.assert_array_equal(np.asarray(jax.grad(lambda x: f(x).sum())(x)), (X > 0.5).astype(np.float32))
    with pytest.raises(GradientError, match=r"outside of jax\.jit"):
        jax.jit(f)(x)
    branch = {
        "torch": lambda x: x * 2 if x.sum() > 0 else x,
        "tensorflow": lambda x: x * 2 if tf.reduce_sum(x) > 0 else x,
    }
    g = getattr(arraybridge, callee)(grad="flow")(branch[callee])
    np.testing.assert_array_equal(np.asarray(jax.grad(lambda x: g(x).sum())(x)), np.full_like(X, 2))
    with pytest.raises(GradientError, match=r"outside of jax\.jit"):
        jax.jit(jax.grad(lambda x: g(x).sum()))(x)


def test_large_arrays_under_jit_do_not_wait_for_each_other() -> None:
    f = CALLEES["torch"]
    x = jnp.ones((1 << 22,), jnp.float32)
    g = jax.jit(jax.grad(lambda x: (f(x) + f(x * 2)).sum()))
    assert bool(jnp.all(jnp.isfinite(g(x))))


def test_a_jitted_callee_is_compiled_once_for_each_structure() -> None:
    traced, pulled = [], []

    @jax.custom_vjp
    def spied(x: Any) -> Any:
        return x

    spied.defvjp(lambda x: (x, None), lambda _, g: (pulled.append(1) or g,))

    @arraybridge.jax(grad="flow")
    @jax.jit
    def energy(params: Any, x: Any, scale: float = 1.0) -> Any:
        traced.append(1)
        return spied(params["w"] * x * scale + params["b"]).sum()

    def step(n: int, scale: float) -> None:
        params = {"w": torch.rand(n, requires_grad=True), "b": torch.rand(n, requires_grad=True)}
        x = torch.rand(n)
        energy(params, x, scale).backward()
        np.testing.assert_allclose(params["w"].grad.numpy(), scale * x.numpy(), rtol=1e-6)

    for k in range(5):
        step(4, 0.5 + k)
    assert len(traced) == 1
    assert len(pulled) == 1
    step(5, 1.0)
    assert len(traced) == len(pulled) == 2
    step(4, 7.0)
    assert len(traced) == 2


def test_a_static_number_of_any_size() -> None:
    from functools import partial

    f = arraybridge.jax(grad="flow")(partial(jax.jit, static_argnums=1)(lambda x, n: x * (n % 7)))
    x = tensor()
    f(x, 2**40).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))


@pytest.mark.parametrize("setting", ["threefry_partitionable", "default_prng_impl"])
def test_settings_of_jax_that_change_numbers_hold_where_it_runs_again(setting: str) -> None:
    def noisy(x: Any) -> Any:
        return (x**3 * jax.random.uniform(jax.random.PRNGKey(0), x.shape)).sum()

    f, x = arraybridge.jax(grad="flow")(noisy), tensor()
    with getattr(jax, setting)(False if setting == "threefry_partitionable" else "rbg"):
        y, wanted = f(x), 6 * X * np.asarray(jax.random.uniform(jax.random.PRNGKey(0), X.shape))
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    np.testing.assert_allclose(second.numpy(), wanted, rtol=1e-5)


def test_what_torch_casts_by_itself_is_as_it_was_in_the_forward() -> None:
    f = arraybridge.torch(grad="flow")(lambda x, y: (x @ y.T).float().sum())
    x, y = jnp.asarray(X), jnp.asarray(X + 1)
    wanted = np.asarray(y).sum(0)
    _, pull = jax.vjp(f, x, y)
    program = jax.jit(jax.grad(f))
    program(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_allclose(pull(jnp.float32(1))[0][0], wanted, rtol=1e-6)
        np.testing.assert_allclose(program(x, y)[0], wanted, rtol=1e-6)


def test_gradients_of_jax_are_where_its_arrays_are() -> None:
    f = arraybridge.torch(grad="flow")(lambda x: x**2)
    device = jax.devices()[-1]
    x = jax.device_put(jnp.array(X), device)
    y, pull = jax.vjp(f, x)
    assert y.devices() == pull(y)[0].devices() == {device}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("where", ["another device", "all devices"])
def test_a_function_of_jax_that_computes_on_other_devices(where: str, jitted: bool) -> None:
    devices = jax.devices()
    axis = jax.sharding.PartitionSpec("i")
    place = devices[-1]
    if where == "all devices":
        place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("i",)), axis)
    cube: Any = jax.jit(lambda x: x**3) if jitted else lambda x: x**3
    f = arraybridge.jax(grad="flow")(lambda x: cube(jax.device_put(x, place)))
    values = np.arange(8, dtype=np.float32)

    x = torch.from_numpy(values).requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    np.testing.assert_array_equal(g.detach(), 3 * values**2)
    np.testing.assert_array_equal(h, 6 * values)
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    np.testing.assert_array_equal(x.grad, 3 * values**2)

    v = tf.constant(values)
    with tf.GradientTape() as tape:
        tape.watch(v)
        y = f(v)
    np.testing.assert_array_equal(tape.gradient(y, v), 3 * values**2)


def test_a_cotangent_of_torch_goes_where_its_result_is() -> None:
    # "meta" stands for another card: torch refuses a cotangent of another device there, too.
    there = arraybridge.framework("torch").autodiff
    x = torch.ones(3, device="meta")
    linear = there.linearise(lambda xs: ([xs[0] * 2], None), [x], (True,), "f")
    with pytest.raises(RuntimeError, match="device"):
        torch.autograd.grad(linear.leaves[0], linear.inputs, torch.ones(3), retain_graph=True)
    assert linear.pull([torch.ones(3)])[0].device.type == "meta"


def test_what_is_kept_of_the_run_without_values_is_never_computed_with() -> None:
    kept: list[Any] = []

    def body(x: Any) -> Any:
        if not kept:
            kept.append(torch.arange(4.0))
        weights = torch.zeros_like(x)
        weights.add_(kept[0])
        return (x**2 * weights).sum()

    gradient = jax.grad(arraybridge.torch(grad="flow")(body))
    with pytest.raises(Exception, match="FakeTensor"):
        jax.block_until_ready(jax.jit(gradient)(jnp.array(X)))
    kept.clear()
    wanted = 2 * X * np.arange(4)
    np.testing.assert_allclose(gradient(jnp.array(X)), wanted)
    np.testing.assert_allclose(jax.jit(gradient)(jnp.array(X)), wanted)


def test_static_arguments_of_jit() -> None:
    from functools import partial

    @arraybridge.jax(grad="flow")
    @partial(jax.jit, static_argnames=("count", "mode"))
    def power(x: Any, count: int, *, mode: str = "a") -> Any:
        for _ in range(count):
            x = x * x
        return x if mode == "a" else -x

    for count in (1, 2):
        x = tensor()
        power(x, count, mode="b").sum().backward()
        n = 2**count
        np.testing.assert_allclose(x.grad.numpy(), -n * X ** (n - 1), rtol=1e-5)


# -- TensorFlow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_persistent_tapes_and_variables(callee: str) -> None:
    f = CALLEES[callee]
    v = tf.Variable(X)
    with tf.GradientTape(persistent=True) as tape:
        y = f(v)
        z = tf.reduce_sum(y * y)
    np.testing.assert_allclose(tape.gradient(y, v), wanted(), rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(z, v), 2 * np.sin(X) * X * wanted(), rtol=1e-5)
    v.assign_add(tf.ones_like(v))  # after the forward
    np.testing.assert_allclose(tape.gradient(y, v), wanted(), rtol=1e-5)
    frozen = tf.Variable(X, trainable=False)
    with tf.GradientTape() as tape:
        y = f(frozen)
    assert tape.gradient(y, frozen) is None
    np.testing.assert_allclose(f(v), np.sin(X + 1) * (X + 1), rtol=1e-5)  # no tape


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_sparse_cotangents_of_tensorflow(callee: str) -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(tf.gather(CALLEES[callee](x), [0, 0, 2]))
    np.testing.assert_allclose(tape.gradient(total, x), wanted() * np.array([[2], [0], [1]]), rtol=1e-5)


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_a_jacobian_by_a_tape(callee: str) -> None:
    x = tf.constant(X[0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = CALLEES[callee](x)
    jacobian = tape.jacobian(y, x, experimental_use_pfor=False)
    np.testing.assert_allclose(jacobian, np.diag(wanted()[0]), rtol=1e-5)


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_tf_function_is_refused_and_py_function_works(callee: str) -> None:
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
    np.testing.assert_allclose(tape.gradient(y, x), wanted(), rtol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
def test_second_derivatives_of_a_py_function_are_refused(graph: bool) -> None:
    """TensorFlow gives None for them, or an error; of a result that is squared, a part of the number."""

    def cubed(x: Any) -> Any:
        y = tf.py_function(lambda a: a**3, [x], tf.float32)
        y.set_shape(x.shape)
        return y

    cube = arraybridge.tensorflow(grad="flow")(tf.function(cubed) if graph else cubed)
    x = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
    assert first.item() == 12.0
    with pytest.raises(GradientError, match="py_function"):
        torch.autograd.grad(first.sum(), x, allow_unused=True)

    def loss(x: Any) -> Any:
        return (cube(x) ** 2).sum()

    x = jax.numpy.array([2.0])
    np.testing.assert_allclose(jax.grad(loss)(x), [192.0])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), [192.0])
    for second in (
        jax.grad(lambda x: jax.grad(loss)(x).sum()),
        jax.jit(jax.grad(lambda x: jax.grad(loss)(x).sum())),
    ):
        with pytest.raises((GradientError, jax.errors.JaxRuntimeError), match="py_function"):
            jax.block_until_ready(second(x))


def test_a_reentrant_checkpoint_inside_is_refused_in_words() -> None:
    def twice(x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)

    f = arraybridge.torch(grad="flow")(twice)
    with pytest.raises(GradientError, match="use_reentrant=False"):
        jax.grad(lambda x: f(x).sum())(jax.numpy.ones(3))


@pytest.mark.parametrize("callee", ["jax", "jitted", "torch"])
def test_a_forward_accumulator_is_refused(callee: str) -> None:
    x = tf.constant(X)
    with (
        tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)),
        pytest.raises(GradientError, match="reverse mode"),
    ):
        CALLEES[callee](x)


# -- what is captured -----------------------------------------------------------------------------------


def test_captured_trainable_parameters_are_refused() -> None:
    linear = torch.nn.Linear(4, 2)
    model = arraybridge.torch(grad="flow")(linear.forward)
    x = jnp.asarray(X)
    for run in (jax.grad(lambda x: model(x).sum()),):
        with pytest.raises(GradientError, match=r"torch\.func\.functional_call"):
            run(x)
    t = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(GradientError, match=r"torch\.func\.functional_call"):
            model(t)
    with pytest.raises(Exception, match=r"functional_call"):
        jax.block_until_ready(jax.jit(jax.grad(lambda x: model(x).sum()))(x))
    # Without gradients it is an ordinary function, and frozen parameters are numbers.
    assert model(x).shape == (3, 2)
    assert model(X).shape == (3, 2)
    linear.requires_grad_(False)
    g = np.asarray(jax.grad(lambda x: model(x).sum())(x))
    np.testing.assert_allclose(g, np.broadcast_to(linear.weight.numpy().sum(0), X.shape), rtol=1e-6)
    # The same structure as before, and trainable again.
    linear.requires_grad_(True)
    with pytest.raises(GradientError, match=r"functional_call"):
        jax.grad(lambda x: model(x).sum())(x)


def test_what_a_function_of_ones_own_keeps_is_no_parameter() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.variable = "anything"  # as torch calls the tensor of a leaf
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            return 2 * ctx.saved_tensors[0] * cotangent

    square = arraybridge.torch(grad="flow")(lambda x: Square.apply(x).sum())
    assert jax.grad(square)(np.float32([1, 2, 3])).tolist() == [2, 4, 6]


def test_captured_trainable_variables_are_refused() -> None:
    w = tf.Variable(X)
    f = arraybridge.tensorflow(grad="flow")(lambda x: x * w)
    with pytest.raises(GradientError, match="functional_call"):
        f(tensor())
    with pytest.raises(GradientError, match="functional_call"):
        jax.grad(lambda x: f(x).sum())(jnp.asarray(X))
    watched = tf.constant(X)
    g = arraybridge.tensorflow(grad="flow")(lambda x: x * watched)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        with pytest.raises(GradientError, match="tape"):
            g(tensor())
    x = tensor()
    g(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), X)


def test_a_captured_tracer_is_refused() -> None:
    x = tensor()

    def loss(w: Any) -> Any:
        f = arraybridge.jax(grad="flow")(lambda x: x * w)
        return f(x)

    with pytest.raises(GradientError, match="traced"):
        jax.grad(loss)(2.0)


def test_a_parameter_that_is_passed_gets_no_gradient_in_silence_neither() -> None:
    w = torch.nn.Parameter(torch.from_numpy(X.copy()))
    f = arraybridge.torch(grad="flow")(lambda x, w: x * w)
    with pytest.raises(GradientError, match="detach"):
        jax.grad(lambda x: f(x, w).sum())(jnp.asarray(X))


def test_two_frameworks_that_differentiate_are_refused() -> None:
    f = arraybridge.tensorflow(grad="flow")(lambda x, y: x * y)
    x = tensor()
    with pytest.raises(GradientError, match="jax and torch"):
        jax.grad(lambda y: f(x, y).sum())(jnp.asarray(X))
    with torch.no_grad():
        g = jax.grad(lambda y: f(x, y).sum())(jnp.asarray(X))
    np.testing.assert_array_equal(np.asarray(g), X)


def test_functional_call_trains_a_torch_network_from_jax() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    parameters = {name: jnp.asarray(p.detach().numpy().copy()) for name, p in network.named_parameters()}

    @arraybridge.torch(grad="flow")
    def predict(parameters: Any, x: Any) -> Any:
        return torch.func.functional_call(network, parameters, (x,))

    def loss(parameters: Any) -> Any:
        return (predict(parameters, X) ** 2).mean()

    gradients = jax.grad(loss)(parameters)
    native = (network(torch.from_numpy(X)) ** 2).mean()
    native.backward()
    for name, p in network.named_parameters():
        np.testing.assert_allclose(np.asarray(gradients[name]), p.grad.numpy(), rtol=1e-5, atol=1e-7)
    compiled = jax.jit(jax.grad(loss))(parameters)
    for name in parameters:
        np.testing.assert_array_equal(np.asarray(compiled[name]), np.asarray(gradients[name]))


# -- random numbers -------------------------------------------------------------------------------------


def test_random_numbers_are_the_same_wherever_the_forward_runs_again() -> None:
    masks: list[np.ndarray] = []

    def noisy(x: Any) -> Any:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        if not isinstance(mask, torch._subclasses.FakeTensor):
            masks.append(mask.detach().numpy().copy())
        return x * x * mask

    f = arraybridge.torch(grad="flow")(noisy)
    x = jnp.arange(1, 65, dtype=jnp.float32)

    def total(x: Any) -> Any:
        y = f(x)
        return y.sum(), y

    plain, checkpointed = (
        [value_and_grad, jax.jit(value_and_grad)]
        for value_and_grad in (
            jax.value_and_grad(total, has_aux=True),
            jax.value_and_grad(jax.checkpoint(total), has_aux=True),
        )
    )
    for run in (*plain, *checkpointed):
        found = set()
        for seed in range(3):
            if run in checkpointed:  # else equal arguments draw the same there
                torch.manual_seed(seed)
            masks.clear()
            (_, y), g = run(x)
            mask = np.asarray(y) / np.asarray(x) ** 2
            np.testing.assert_allclose(np.asarray(g), 2 * np.asarray(x) * mask, rtol=1e-6)
            assert all(np.array_equal(m, masks[0]) for m in masks)
            found.add(mask.tobytes())
        assert len(found) == 3  # other ones in each call
    # Second order.
    masks.clear()
    g, h = jax.vjp(jax.grad(lambda x: f(x).sum()), x)
    (second,) = h(jnp.ones_like(x))
    np.testing.assert_allclose(np.asarray(second), 2 * np.asarray(g) / (2 * np.asarray(x)), rtol=1e-6)


def test_the_random_state_is_left_as_after_one_run() -> None:
    f = arraybridge.torch(grad="flow")(lambda x: x * torch.rand_like(x))
    x = jnp.ones(5)
    torch.manual_seed(3)
    jax.grad(lambda x: f(x).sum())(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.rand(5)
    assert torch.equal(after, torch.rand(1))


def test_what_cannot_be_drawn_again_is_refused() -> None:
    f = arraybridge.tensorflow(grad="flow")(lambda x: x * tf.random.uniform(x.shape))
    with pytest.raises(GradientError, match="stateless"):
        jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.ones(4))
    x = tensor()
    y = f(x)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy() * X, y.detach().numpy(), rtol=1e-6)
    from torch.utils.checkpoint import checkpoint

    with pytest.raises(GradientError, match="stateless"):
        checkpoint(f, x, use_reentrant=False)
    fixed = arraybridge.tensorflow(grad="flow")(lambda x: x * tf.random.stateless_uniform(x.shape, [1, 2]))
    x = tensor()
    y = checkpoint(fixed, x, use_reentrant=False)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy() * X, y.detach().numpy(), rtol=1e-6)


# -- memory ---------------------------------------------------------------------------------------------


def span(x: Any) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def apart(*tensors: Any) -> bool:
    spans = sorted(span(t) for t in tensors)
    return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


KEPT = np.arange(12, dtype=np.float32).reshape(3, 4)


@jax.custom_vjp
def keeper(x: Any) -> Any:
    return x * 1


_kept = jnp.asarray(KEPT.copy())
keeper.defvjp(lambda x: (x * 1, None), lambda _, g: (_kept,))


@pytest.mark.parametrize("jitted", [False, True])
def test_no_gradient_shares_memory_with_another_or_with_what_is_known(jitted: bool) -> None:
    bodies: dict[str, Callable[..., Any]] = {
        "the cotangent twice": lambda x, y: x + y,
        "the cotangent": lambda x, y: (x, y * 1),
        "an argument": lambda x, y: (x * jax.lax.stop_gradient(y)) + 0 * y,
        "a residual": lambda x, y: jnp.exp(x) + y,
        "reshaped": lambda x, y: x.reshape(-1)[:6] + y.reshape(-1)[6:],
    }
    for name, body in bodies.items():
        f = arraybridge.jax(grad="flow")(jax.jit(body) if jitted else body)
        x, y = tensor(), tensor()
        result = f(x, y)
        results = result if isinstance(result, tuple) else (result,)
        cotangents = [torch.ones_like(r) for r in results]
        gradients = torch.autograd.grad(results, (x, y), cotangents, retain_graph=True)
        assert apart(x, y, *results, *cotangents, *gradients), name
        before = [g.clone() for g in gradients]
        again = torch.autograd.grad(results, (x, y), cotangents, retain_graph=True)
        for g in gradients:
            g.mul_(0)  # torch may write to what it gets
        assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True)), name
        again = torch.autograd.grad(results, (x, y), cotangents)
        assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True)), name


def test_a_custom_rule_that_hands_out_what_it_keeps() -> None:
    f = arraybridge.jax(grad="flow")(lambda x: keeper(x))
    for _ in range(2):
        x = tensor()
        f(x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), KEPT)
        x.grad.zero_()
    np.testing.assert_array_equal(np.asarray(_kept), KEPT)


def test_gradients_of_tf_and_jax_callers_are_apart_too() -> None:
    f = arraybridge.torch(grad="flow")(lambda x, y: x + y)
    gx, gy = jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(jnp.asarray(X), jnp.asarray(X))
    assert gx.unsafe_buffer_pointer() != gy.unsafe_buffer_pointer()
    x, y = tf.constant(X), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = f(x, y)
    gx, gy = tape.gradient(z, [x, y])
    assert np.asarray(memoryview(gx)).ctypes.data != np.asarray(memoryview(gy)).ctypes.data


def test_clipping_one_gradient_leaves_the_other() -> None:
    f = arraybridge.jax(grad="flow")(jax.jit(lambda x, y: x + y))
    x, y = tensor(), tensor()
    f(x, y).backward(torch.full((3, 4), 5.0))
    torch.nn.utils.clip_grad_value_([x], 1.0)
    assert x.grad.max() == 1
    assert y.grad.min() == 5


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


def test_300_steps_of_training_leave_memory_flat() -> None:
    import psutil

    from arraybridge.frameworks import tokens

    layer = arraybridge.jax(grad="flow")(jax.jit(lambda p, x: jnp.tanh(x @ p["w"]) + p["b"]))
    eager = arraybridge.jax(grad="flow")(lambda x: jnp.sin(x))
    flow = arraybridge.tensorflow(grad="flow")(lambda x: tf.tanh(x))
    p = {"w": torch.rand(64, 64, requires_grad=True), "b": torch.rand(64, requires_grad=True)}
    optimiser = torch.optim.SGD(p.values(), lr=1e-3)
    x = torch.rand(256, 64)
    network = arraybridge.torch(grad="flow")(lambda w, x: torch.tanh(x @ w))
    w = jnp.ones((64, 64)) * 0.01
    step = jax.grad(lambda w: network(w, batch).sum())
    batch = np.ones((16, 64), np.float32)

    def train() -> None:
        nonlocal w
        optimiser.zero_grad()
        (flow(eager(layer(p, x))) ** 2).mean().backward()
        optimiser.step()
        w = w - 1e-3 * step(w)

    def measured() -> tuple[int, int, int]:
        gc.collect()
        return psutil.Process().memory_info().rss, len(jax.live_arrays()), len(tokens._tokens)

    for _ in range(50):
        train()
    rss, arrays, kept = measured()
    for _ in range(300):
        train()
    after = measured()
    assert after[1] <= arrays + 2
    assert after[2] <= kept
    assert after[0] - rss < 30 << 20


# -- at decoration, and elsewhere ------------------------------------------------------------------------


def test_refusals_at_decoration() -> None:
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
    arraybridge.torch(grad="flow", output_type="input", oom_recovery=True)(lambda x: x)
    with pytest.raises(ValueError, match="flow"):
        arraybridge.torch(grad="flaw")


def test_a_conversion_has_no_gradient() -> None:
    with pytest.raises(ValueError, match="decorators"):
        arraybridge.convert_memory(tensor(), "jax", grad="flow")


def test_it_pickles_and_keeps_its_options() -> None:
    import pickle

    f = pickle.loads(pickle.dumps(pickled))
    x = tensor()
    f(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))


@arraybridge.jax(grad="flow")
def pickled(x: Any) -> Any:
    return x * 2


def test_strict_contract_and_recovery() -> None:
    f = arraybridge.jax(
        grad="flow", input_type="torch", strict=True, oom_recovery=True, contract=lambda y: y.ndim == 2
    )(lambda x: x * 2)
    x = tensor()
    f(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))
    t = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(TypeError, match="strict"):
            f(t)
    with pytest.raises(ValueError, match="contract"):
        f(torch.ones(3, requires_grad=True))


# -- threads --------------------------------------------------------------------------------------------


def test_pipelines_and_device_map_where_forward_and_backward_meet() -> None:
    double = CALLEES["jitted"]
    pipeline = arraybridge.Pipeline(double, CALLEES["tensorflow"], microbatches=3)
    x = tensor()
    pipeline(x).sum().backward()
    other = tensor()
    y = torch.sin(other) * other
    (torch.sin(y) * y).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), other.grad.numpy(), rtol=1e-5)
    x = tensor()
    parts = list(arraybridge.device_map(double, [x[:1], x[1:]], devices=["cpu"]))
    torch.cat(parts).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), wanted(), rtol=1e-5)


def test_pipelines_and_device_map_where_they_do_not_are_refused() -> None:
    f = CALLEES["torch"]
    t = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(t)
        with pytest.raises(GradientError, match="thread"):
            arraybridge.Pipeline(f)(t)
        with pytest.raises(GradientError, match="thread"):
            list(arraybridge.device_map(f, [t], devices=["cpu"]))
    with pytest.raises(arraybridge.MemoryConversionError, match="traced"):
        jax.grad(lambda x: arraybridge.Pipeline(f)(x).sum())(jnp.asarray(X))
    with pytest.raises(GradientError, match="thread"):
        jax.grad(lambda x: next(arraybridge.Pipeline(f).map([x])).sum())(jnp.asarray(X))
    np.testing.assert_allclose(np.asarray(arraybridge.Pipeline(f)(t)), np.sin(X) * X, rtol=1e-5)
    # Each in its own thread.
    steps = [lambda x: jax.grad(lambda x: f(x).sum())(x)]
    (g,) = arraybridge.device_map(steps[0], [jnp.asarray(X)], devices=["cpu"])
    np.testing.assert_allclose(np.asarray(g), wanted(), rtol=1e-5)


def test_a_torch_function_that_writes_to_its_argument_is_refused() -> None:
    f = arraybridge.torch(grad="flow")(lambda x: x.detach().mul_(2) * x)
    with pytest.raises(GradientError, match="clone"):
        jax.grad(lambda x: f(x).sum())(jnp.array(X))


@pytest.mark.parametrize("again", ["second order", "checkpoint", "jit"])
@pytest.mark.parametrize("writer", ["the function", "somebody"])
def test_what_stands_beside_is_not_read_again_after_a_write(again: str, writer: str) -> None:
    def body(x: Any, n: Any) -> Any:
        if writer == "the function":
            n += 1
        return (x**3 * n).sum()

    f = arraybridge.torch(grad="flow")(body)
    n: Any = torch.ones(3, 4) if writer == "somebody" else np.ones((3, 4), np.float32)

    def once(x: Any) -> Any:
        return f(x, n)

    around: dict[str, Any] = {
        "second order": lambda x: jax.grad(once)(x).sum(),
        "checkpoint": jax.checkpoint(once),
        "jit": jax.jit(once),
    }

    def forward_and_backward() -> None:
        _, pull = jax.vjp(around[again], jnp.array(X))
        if writer == "somebody":
            n.mul_(100)
        jax.block_until_ready(pull(jnp.float32(1)))

    # From a callback JAX gives it as an error of its own, with ours in the text.
    with pytest.raises((GradientError, ValueError, RuntimeError), match="written to meanwhile"):
        forward_and_backward()


@pytest.mark.parametrize("jitted", [False, True])
def test_writing_to_a_result_that_was_an_argument_beside_changes_nothing(jitted: bool) -> None:
    def body(x: Any, n: Any) -> Any:
        return x**3 * jnp.sin(n), n

    f = arraybridge.jax(grad="flow")(jax.jit(body) if jitted else body)
    for n in (np.ones((3, 4), np.float32), jnp.ones((3, 4))):
        x = tensor()
        y, same = f(x, n)
        same.zero_()
        assert np.all(np.asarray(n) == 1)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        np.testing.assert_allclose(second, 6 * X * np.sin(np.float32(1)), rtol=1e-5)


def test_a_generator_of_ones_own_is_refused_where_the_function_runs_again() -> None:
    generator = torch.Generator().manual_seed(0)
    f = arraybridge.torch(grad="flow")(lambda x: (torch.rand(x.shape, generator=generator) * x * x).sum())
    x = jnp.ones((3, 4))
    value, g = jax.value_and_grad(f)(x)  # runs once
    np.testing.assert_allclose(g.sum(), 2 * value, rtol=1e-5)
    for again in (
        jax.grad(jax.checkpoint(f)),
        jax.jit(jax.grad(f)),
        jax.grad(lambda x: jax.grad(f)(x).sum()),
    ):
        with pytest.raises(GradientError, match=r"torch\.Generator"):
            again(x)
    jax.jit(f)(x)  # no backward, nothing to draw again
    same = arraybridge.torch(grad="flow")(
        lambda x: (torch.rand(x.shape, generator=torch.default_generator) * x * x).sum()
    )
    value, g = jax.jit(jax.value_and_grad(same))(x)
    np.testing.assert_allclose(g.sum(), 2 * value, rtol=1e-5)
