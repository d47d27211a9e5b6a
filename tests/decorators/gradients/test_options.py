"""Gradients and the rest of the library: options, devices, pipelines, traces."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError
from arraybridge.conversion import device_resolution
from arraybridge.memory import oom_recovery
from tests.decorators import cases
from tests.decorators.gradients.directions import (
    CALLEES,
    SIN,
    X,
    flowing,
    grad,
    in_jax,
    slope,
    tensor,
)
from tests.helpers import require

torch = require("torch")
jax = require("jax")
tf = require("tensorflow")
jnp = jax.numpy

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_decorated_functions_pickle_with_their_options() -> None:

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


def test_pipelines_and_device_map_within_one_thread_differentiate() -> None:
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
    np.testing.assert_allclose(x.grad.numpy(), slope(), rtol=1e-5)


def test_pipelines_and_device_map_across_threads_raise() -> None:
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
    # Each in a separate thread.
    steps = [lambda x: jax.grad(lambda x: f(x).sum())(x)]
    (g,) = arraybridge.device_map(steps[0], [jnp.asarray(X)], devices=["cpu"])
    np.testing.assert_allclose(np.asarray(g), slope(), rtol=1e-5)


@pytest.mark.parametrize("callee", ["jax", "jitted", "tensorflow"])
def test_device_map_on_several_devices_differentiates(callee: str) -> None:
    name = callee.replace("jitted", "jax")
    body = jax.jit(lambda x: jnp.sin(x) * x) if callee == "jitted" else (lambda x: SIN[name](x) * x)
    devices = [d for d in arraybridge.devices(name) if d.kind == "cpu"][:2]
    if len(devices) < 2:
        pytest.skip(f"{name} has only one CPU device here, and the test needs two")
    x = tensor()
    parts = list(arraybridge.device_map(flowing(name, body), [x[:1], x[1:]], devices=devices))
    torch.cat(parts).sum().backward()
    np.testing.assert_allclose(x.grad, np.cos(X) * X + np.sin(X), rtol=1e-5)


def test_graphs_do_not_cross_processes() -> None:
    x = torch.ones(3, requires_grad=True)
    # A graph cannot be sent to another process, so a result that has one raises an error.
    with pytest.raises(GradientError):
        list(arraybridge.device_map(cases.squared, [x], devices=["cpu"], processes=True))


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
        assert len(first.records) == known  # the trace is closed


@pytest.mark.filterwarnings("ignore::arraybridge.MissingGpuWarning")
def test_out_of_memory_calls_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the freed caches are those of the worker's GPU in a Dask cluster."""
    runs: list[Any] = []
    freed: list[int | None] = []
    monkeypatch.setattr(device_resolution, "only_gpu", 0)
    monkeypatch.setattr(
        oom_recovery, "release_caches", lambda _, gpu_id, **options: freed.append(gpu_id) or 0
    )

    @arraybridge.jax(gpu_id=7, grad="flow", oom_recovery=True)
    def f(x: Any) -> Any:
        runs.append(x)
        if len(runs) == 1:
            raise MemoryError
        return x * 2

    x = tensor()
    with arraybridge.settings(missing_gpu="host"):
        f(x).sum().backward()
    np.testing.assert_array_equal(x.grad, np.full_like(X, 2))
    assert len(runs) == 2
    assert freed == [0]


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_results_and_gradients_are_on_the_callers_devices(caller: str) -> None:
    def times(x: Any, w: Any) -> Any:
        if not isinstance(w, jax.core.Tracer):
            places.append(w.devices())
        return x * w

    places: list[Any] = []
    f = arraybridge.jax(grad="flow", device="cpu:1")(times)
    np.testing.assert_array_equal(grad(caller, lambda x: f(x, X), X)[0], X)
    assert places == [{jax.devices()[1]}]


@pytest.mark.parametrize("callee", ["torch", "tensorflow"])
def test_gradients_reach_a_second_jax_device(callee: str) -> None:
    device = jax.devices()[-1]
    x = jax.device_put(jnp.asarray(X), device)
    y, pull = jax.vjp(flowing(callee, lambda x: x * x), x)
    (g,) = pull(y)
    assert y.devices() == g.devices() == {device}
    np.testing.assert_allclose(g, 2 * X**3, rtol=1e-6)
