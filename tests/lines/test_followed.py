"""What follows an array in one thread, or one process, on its way to another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, Pipeline, device_map
from tests.helpers import require

torch = require("torch")


class Kept(np.ndarray):
    """An array that a weak reference can be made of."""


def by_map(f: Callable[[Any], Any], x: Any) -> Any:
    return next(iter(list(device_map(f, [x], devices=["cpu"]))))


def by_pipeline(f: Callable[[Any], Any], x: Any) -> Any:
    return next(iter(list(Pipeline(f).map([x]))))


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_a_transform_of_torch_does_not_follow_into_another_thread(run: Any) -> None:
    with pytest.raises(GradientError, match="thread"):
        torch.func.grad(lambda x: run(lambda t: t * t, x).sum())(torch.ones(2))


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_a_graph_of_torch_does(run: Any) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run(lambda t: t * t, x * 1).sum().backward()
    assert x.grad.tolist() == [2, 4]


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_variables_that_no_tape_follows_go_through(run: Any) -> None:
    tf = require("tensorflow")
    v, steps = tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)
    with tf.GradientTape(watch_accessed_variables=False):
        np.testing.assert_array_equal(run(lambda x: x.numpy(), v), [1, 2])
    with tf.GradientTape():
        assert run(lambda x: x.numpy(), steps) == 3
        np.testing.assert_array_equal(run(lambda x: x.numpy(), tf.stop_gradient(v)), [1, 2])
        with pytest.raises(GradientError, match="tensorflow"):
            run(lambda x: x.numpy(), v)


@pytest.mark.parametrize("run", ["device_map", "Pipeline"])
def test_an_item_is_not_kept_while_the_next_one_is_awaited(run: str) -> None:
    kept: list[bool] = []

    def items() -> Iterator[Any]:
        x = np.zeros(4).view(Kept)
        reference = weakref.ref(x)
        yield x
        del x
        while reference() is not None and len(kept) < 100:  # until the other thread is done with it
            kept.append(True)
            yield 0
        kept.append(reference() is not None)

    results = (
        device_map(len_of, items(), devices=["cpu"]) if run == "device_map" else Pipeline(len_of).map(items())
    )
    list(results)
    assert kept[-1] is False


def len_of(x: Any) -> int:
    return np.size(x)


LINEAR = torch.nn.Linear(2, 2)


def parameters(_: Any) -> Any:
    return list(LINEAR.parameters())


def applied(x: Any) -> Any:
    return LINEAR(x)


def applied_alone(x: Any) -> Any:
    with torch.no_grad():
        return LINEAR(x)


def test_leaves_come_out_of_a_process_and_graphs_do_not() -> None:
    def run(f: Any) -> Any:
        return list(device_map(f, [torch.ones(2)], devices=["cpu"], processes=True))

    (weights,) = run(parameters)
    assert [w.shape for w in weights] == [(2, 2), (2,)]
    assert run(applied_alone)[0].shape == (2,)
    with pytest.raises(GradientError, match="its graph stays in the process"):
        run(applied)


def test_the_device_that_a_call_names_is_that_of_its_event() -> None:
    require("jax")

    @arraybridge.jax(grad="flow", device="cpu:2")
    def double(x: Any) -> Any:
        return x * 2

    with arraybridge.trace() as log:
        double(torch.ones(2, requires_grad=True))
        double(torch.ones(2))
    assert [e.device for e in log.events if e.kind == "call"] == ["cpu:2", "cpu:2"]
