"""Autodiff state that follows an array to another thread or process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arraybridge import GradientError, Pipeline, device_map
from tests.helpers import require

torch = require("torch")


def by_map(f: Callable[[Any], Any], x: Any) -> Any:
    return next(iter(list(device_map(f, [x], devices=["cpu"]))))


def by_pipeline(f: Callable[[Any], Any], x: Any) -> Any:
    return next(iter(list(Pipeline(f).map([x]))))


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_torch_transforms_do_not_cross_threads(run: Any) -> None:
    with pytest.raises(GradientError, match="thread"):
        torch.func.grad(lambda x: run(lambda t: t * t, x).sum())(torch.ones(2))


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_torch_graphs_cross_threads(run: Any) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run(lambda t: t * t, x * 1).sum().backward()
    assert x.grad.tolist() == [2, 4]


@pytest.mark.parametrize("run", [by_map, by_pipeline])
def test_unwatched_variables_cross_threads(run: Any) -> None:
    tf = require("tensorflow")
    v, steps = tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)
    with tf.GradientTape(watch_accessed_variables=False):
        np.testing.assert_array_equal(run(lambda x: x.numpy(), v), [1, 2])
    with tf.GradientTape():
        assert run(lambda x: x.numpy(), steps) == 3
        np.testing.assert_array_equal(run(lambda x: x.numpy(), tf.stop_gradient(v)), [1, 2])
        with pytest.raises(GradientError, match="tensorflow"):
            run(lambda x: x.numpy(), v)
