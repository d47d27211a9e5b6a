"""Results that lie in memory which the function writes to again: parts are joined as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, process_slices, split_and_retry
from arraybridge.testing import inject_oom
from tests.helpers import require

ROWS = np.arange(16.0).reshape(8, 2)
Run = Callable[[Callable[[Any], Any], Any], Any]


def in_parts(fn: Callable[[Any], Any], batch: Any) -> Any:
    with inject_oom("numpy", above_rows=3):
        return split_and_retry(fn, batch)


def in_a_last_stage(fn: Callable[[Any], Any], batch: Any) -> Any:
    return Pipeline(fn)(batch)


class Doubling:
    """Doubles into buffers of its own, one after the other."""

    def __init__(self, count: int = 1) -> None:
        self.buffers = [np.empty((8, 2)) for _ in range(count)]
        self.calls = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out = self.buffers[self.calls % len(self.buffers)]
        self.calls += 1
        return np.multiply(x, 2, out=out[: len(x)])


@pytest.mark.parametrize("run", [in_parts, in_a_last_stage])
@pytest.mark.parametrize("count", [1, 2])
def test_a_ring_of_buffers(run: Run, count: int) -> None:
    np.testing.assert_array_equal(run(Doubling(count), ROWS), ROWS * 2)


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    "wrap", [lambda y: (y, [y + 1]), lambda y: {"b": [y], "a": y + 1}, lambda y: Pair(y, y + 1)]
)
def test_in_containers(wrap: Callable[[Any], Any]) -> None:
    import optree

    doubling = Doubling()
    result = in_parts(lambda x: wrap(doubling(x)), ROWS)
    assert type(result) is type(wrap(ROWS))
    for one, expected in zip(optree.tree_leaves(result), optree.tree_leaves(wrap(ROWS * 2)), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("output", ["torch", "numpy", "jax"])
def test_torch(output: Any) -> None:
    torch = require("torch")
    require(output)
    buffer = torch.empty(8, 2, dtype=torch.float32)

    @arraybridge.torch(oom_recovery="split", output_type=output)
    def fn(x: Any) -> Any:
        return torch.mul(x, 2, out=buffer[: len(x)])

    x = ROWS.astype(np.float32)
    with inject_oom("numpy", above_rows=3):
        result = fn(x)
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x * 2)


def test_a_variable_of_tensorflow() -> None:
    tf = require("tensorflow")
    variable = tf.Variable(np.zeros((2, 2)))

    def fn(x: Any) -> Any:
        variable.assign(x * 2)
        return variable

    with inject_oom("numpy", above_rows=2):
        result = split_and_retry(fn, tf.constant(ROWS))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), ROWS * 2)


def test_pyclesperanto() -> None:
    cle = require("pyclesperanto")
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    buffer = cle.push(x[:2])
    with inject_oom("numpy", above_rows=2):
        result = split_and_retry(lambda part: cle.add_image_and_scalar(part, buffer, scalar=2), cle.push(x))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x + 2)


def test_planes() -> None:
    stack = np.arange(24.0).reshape(4, 2, 3)
    buffer = np.empty((2, 3))

    def fn(plane: np.ndarray) -> np.ndarray:
        return np.multiply(plane, 2, out=buffer)

    np.testing.assert_array_equal(process_slices(stack, fn), stack * 2)
    np.testing.assert_array_equal(arraybridge.numpy(slice_by_slice=True)(fn)(stack), stack * 2)


def test_masks() -> None:
    mask = np.zeros(8, bool)

    def fn(x: Any) -> Any:
        np.greater(x, 3, out=mask[: len(x)])
        return np.ma.masked_array(x * 2, mask=mask[: len(x)])

    result = in_parts(fn, np.arange(8.0))
    np.testing.assert_array_equal(result.data, np.arange(8.0) * 2)
    np.testing.assert_array_equal(result.mask, [False] * 4 + [True] * 4)


def test_one_result_is_made_for_all_parts() -> None:
    """At the peak there is the whole result and that of one part, and not every part twice."""
    import tracemalloc

    x = np.zeros((8, 1 << 17))  # 8 MiB
    with inject_oom("numpy", above_rows=1):
        split_and_retry(np.negative, x)
        tracemalloc.start()
        split_and_retry(np.negative, x)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1.4 * x.nbytes
