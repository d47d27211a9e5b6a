"""Parts whose results lie in memory that the function writes to again: they are joined as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, batches, process_slices, split_and_retry
from arraybridge.frameworks import registry
from arraybridge.testing import inject_oom
from tests.helpers import require

ROWS = np.arange(16.0).reshape(8, 2)
Run = Callable[[Callable[[Any], Any], Any], Any]


def in_parts(fn: Callable[[Any], Any], batch: Any) -> Any:
    with inject_oom("numpy", above_rows=3):
        return split_and_retry(fn, batch)


def in_single_rows(fn: Callable[[Any], Any], batch: Any) -> Any:
    with inject_oom("numpy", above_rows=1):
        return split_and_retry(fn, batch)


def in_stages(fn: Callable[[Any], Any], batch: Any) -> Any:
    return Pipeline(fn)(batch)


RUNS = [in_parts, in_single_rows, in_stages]


class Doubling:
    """Doubles into buffers of its own, one after the other."""

    def __init__(self, count: int = 1, shape: tuple[int, ...] = (8, 2)) -> None:
        self.buffers = [np.empty(shape) for _ in range(count)]
        self.calls = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        out = self.buffers[self.calls % len(self.buffers)]
        self.calls += 1
        return np.multiply(x, 2, out=out[: len(x)])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_ring_of_buffers(run: Run, count: int) -> None:
    np.testing.assert_array_equal(run(Doubling(count), ROWS), ROWS * 2)


def test_strided_and_transposed_views() -> None:
    memory = np.empty((2, 16))

    def fn(x: np.ndarray) -> np.ndarray:
        found = memory.T[::2][: len(x)]
        found[...] = x * 2
        return found

    for run in RUNS:
        np.testing.assert_array_equal(run(fn, ROWS), ROWS * 2)


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    "wrap", [lambda y: (y, [y + 1]), lambda y: {"b": [y], "a": y + 1}, lambda y: Pair(y, y + 1)]
)
def test_in_containers(wrap: Callable[[Any], Any]) -> None:
    import optree

    for run in RUNS:
        doubling = Doubling()
        found = run(lambda x, double=doubling: wrap(double(x)), ROWS)
        assert type(found) is type(wrap(ROWS))
        for one, expected in zip(optree.tree_leaves(found), optree.tree_leaves(wrap(ROWS * 2)), strict=True):
            np.testing.assert_array_equal(one, expected)


def test_a_container_that_the_function_keeps() -> None:
    kept: dict[str, np.ndarray] = {}

    def fn(x: np.ndarray) -> dict[str, np.ndarray]:
        if len(kept.get("y", ())) == len(x):
            kept["y"][...] = x * 2
        else:
            kept["y"] = x * 2
        return kept

    for run in RUNS:
        np.testing.assert_array_equal(run(fn, ROWS)["y"], ROWS * 2)


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
    if output == "torch":  # the others are lent the buffer itself
        np.testing.assert_array_equal(arraybridge.to_numpy(Pipeline(fn)(x)), x * 2)


def test_a_variable_of_tensorflow() -> None:
    tf = require("tensorflow")
    kept = tf.Variable(np.zeros((2, 2)))

    def fn(x: Any) -> Any:
        kept.assign(x * 2)
        return kept

    with inject_oom("numpy", above_rows=2):
        result = split_and_retry(fn, tf.constant(ROWS))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), ROWS * 2)


def test_pyclesperanto() -> None:
    cle = require("pyclesperanto")
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    buffer = cle.push(x[:2])

    def fn(part: Any) -> Any:
        return cle.add_image_and_scalar(part, buffer, scalar=2)

    with inject_oom("numpy", above_rows=2):
        result = split_and_retry(fn, cle.push(x))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x + 2)


def test_planes() -> None:
    stack = np.arange(24.0).reshape(4, 2, 3)
    buffer = np.empty((2, 3))

    def fn(plane: np.ndarray) -> np.ndarray:
        return np.multiply(plane, 2, out=buffer)

    np.testing.assert_array_equal(process_slices(stack, fn), stack * 2)
    np.testing.assert_array_equal(process_slices(stack, lambda p: [fn(p)])[0], stack * 2)
    np.testing.assert_array_equal(arraybridge.numpy(slice_by_slice=True)(fn)(stack), stack * 2)


def test_between_stages() -> None:
    rows = np.arange(400.0).reshape(200, 2)
    pipeline = Pipeline(Doubling(shape=rows.shape), lambda y: y + 1, Doubling(2, rows.shape), microbatches=50)
    for _ in range(5):
        np.testing.assert_array_equal(pipeline(rows), (rows * 2 + 1) * 2)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the frameworks of which an array was copied."""
    found: list[str] = []
    for name in ("numpy", "torch", "jax"):
        require(name)
        cls = type(registry.framework(name))

        def copy(self: Any, x: Any, was: Any = cls.copy, name: str = name) -> Any:
            found.append(name)
            return was(self, x)

        monkeypatch.setattr(cls, "copy", copy)
    return found


def test_what_is_fresh_is_not_copied(copied: list[str]) -> None:
    torch, jnp = require("torch"), require("jax").numpy
    weights = torch.nn.Linear(2, 3)
    tensor, array = torch.from_numpy(ROWS).float(), jnp.asarray(ROWS)
    for fn, batch in (
        (lambda x: x * 2, ROWS),
        (lambda x: (x * 2)[:, ::-1], ROWS),
        (lambda x: np.stack([x, x]).transpose(1, 0, 2), ROWS),
        (lambda x: {"a": x + 1, "b": [(x * 2)[:, :1]]}, ROWS),
        (lambda x: x * 2, tensor),
        (lambda x: torch.relu(x)[:, :1], tensor),
        (lambda x: (x + 1, weights(x)), tensor),
        (lambda x: x, array),
    ):
        for run in RUNS:
            run(fn, batch)
    assert copied == []
    in_parts(Doubling(), ROWS)
    assert copied == ["numpy"] * 4


def test_what_others_hold(copied: list[str]) -> None:
    """Whatever way they hold it."""
    torch = require("torch")
    memory, tensor, followed = np.zeros(8), torch.zeros(8), torch.ones(8, requires_grad=True)
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    for make in (
        lambda: memory,
        lambda: memory[2:],
        lambda: memory.reshape(2, 4).T[1:],
        lambda: keep(memory * 2),
        lambda: keep(memory * 2)[:3],
        lambda: keep([memory * 2]),
        lambda: np.ma.array(memory, copy=False),
        lambda: tensor,
        lambda: tensor[1:],
        lambda: tensor.detach(),
        lambda: keep(tensor * 2).data,
        lambda: keep((tensor * 2)[2:]).detach(),
        lambda: keep(torch.relu(tensor * followed)),
    ):
        for unsure in (True, False):
            copied.clear()
            batches.owned([make()], unsure=unsure)
            assert len(copied) == 1
    for unknown in (
        lambda: tensor.numpy(),
        lambda: torch.from_numpy(memory),
        lambda: torch.relu(tensor * followed),
        lambda: torch.eye(2).to_sparse(),
    ):
        copied.clear()
        batches.owned([unknown()], unsure=False)
        assert copied == []
        batches.owned([unknown()])
        assert len(copied) == 1


def lends_from_torch(places: list[int]) -> Callable[[Any], Any]:
    @arraybridge.torch(output_type="numpy")
    def fn(x: Any) -> Any:
        y = x * 2
        places.append(y.data_ptr())
        return y

    return fn


def lends_from_jax(output: str | None) -> Callable[[list[int]], Callable[[Any], Any]]:
    def lends(places: list[int]) -> Callable[[Any], Any]:
        @arraybridge.jax(output_type=output)
        def fn(x: Any) -> Any:
            y = x * 2
            places.append(y.unsafe_buffer_pointer())
            return y

        return fn

    return lends


@pytest.mark.parametrize("lends", [lends_from_torch, lends_from_jax(None), lends_from_jax("torch")])
def test_what_one_stage_lends_to_the_next_is_shared(lends: Any, copied: list[str]) -> None:
    torch = require("torch")
    given: list[int] = []
    taken: list[int] = []

    @arraybridge.torch
    def then(x: Any) -> Any:
        taken.append(x.data_ptr())
        return x + 1

    rows = np.arange(2000, dtype=np.float32).reshape(1000, 2)
    result = Pipeline(lends(given), then, microbatches=2)(torch.from_numpy(rows))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), rows * 2 + 1)
    assert given == taken
    assert len(given) == 2
    assert copied == []


def test_what_autograd_keeps_is_shared(copied: list[str]) -> None:
    torch = require("torch")
    weight = torch.tensor(3.0, requires_grad=True)
    given: list[int] = []
    taken: list[int] = []

    def first(x: Any) -> Any:
        y = torch.relu(x * weight)
        given.append(y.data_ptr())
        return y

    def then(x: Any) -> Any:
        taken.append(x.data_ptr())
        return x * x

    result = Pipeline(first, then, microbatches=2)(torch.tensor([-1.0, 2.0, 3.0, -4.0]))
    result.sum().backward()
    assert result.tolist() == [0.0, 36.0, 81.0, 0.0]
    assert weight.grad is not None
    assert weight.grad.item() == 2 * 3 * (4 + 9)
    assert given == taken
    assert len(given) == 2
    assert copied == []


# -- memory that an array does not name by its base --------------------------------------------------------

BATCH = np.arange(8.0)


class Buffers:
    """Doubles into memory of its own, which the result does not name, or not at once."""

    def __init__(self) -> None:
        self.array, self.mask, self.bytes = np.zeros(8), np.zeros(8, bool), bytearray(64)

    def windows(self, x: Any) -> Any:
        np.multiply(x, 2, out=self.array[: len(x)])
        return np.lib.stride_tricks.sliding_window_view(self.array[: len(x)], 1)

    def raw(self, x: Any) -> Any:
        found = np.frombuffer(self.bytes, float)[: len(x)]
        found[:] = x * 2
        return found

    def masked(self, x: Any) -> Any:
        np.greater(x, 3, out=self.mask[: len(x)])
        return np.ma.masked_array(x * 2, mask=self.mask[: len(x)])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("how", ["windows", "raw", "masked"])
def test_memory_behind_other_objects(run: Run, how: str) -> None:
    found = run(getattr(Buffers(), how), BATCH)
    np.testing.assert_array_equal(np.asarray(found).ravel(), BATCH * 2)
    if how == "masked":
        np.testing.assert_array_equal(found.mask, [False] * 4 + [True] * 4)


def test_fresh_arrays_of_all_these_kinds_are_not_copied() -> None:
    running = registry.framework("numpy").running
    assert running is not None
    for make in (
        lambda: np.ma.masked_array(np.zeros(3), mask=[1, 0, 0]),
        lambda: np.ma.array(np.zeros(3)),
        lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(3), 1),
    ):
        held = running.may_change(make())  # an assert would hold it, too
        assert held is False


def test_the_tape_follows_a_variable_that_comes_for_each_part() -> None:
    tf = require("tensorflow")
    v = tf.Variable(np.ones((2, 2)))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(process_slices(tf.constant(np.zeros((3, 2, 2))), lambda plane: v))
    np.testing.assert_array_equal(tape.gradient(y, v), np.full((2, 2), 3.0))


def test_a_view_of_what_a_stage_is_given_is_shared(copied: list[str]) -> None:
    def flipped(x: Any) -> Any:
        return x[:, ::-1]

    np.testing.assert_array_equal(Pipeline(flipped, lambda x: x + 1)(ROWS), ROWS[:, ::-1] + 1)
    torch = require("torch")
    found = Pipeline(lambda x: x.T.T, lambda x: x + 1)(torch.from_numpy(ROWS))
    np.testing.assert_array_equal(found.numpy(), ROWS + 1)
    assert copied == []


def test_planes_keep_their_masks() -> None:
    stack = np.ma.masked_array(np.arange(8.0).reshape(2, 2, 2), mask=np.arange(8).reshape(2, 2, 2) > 3)
    for found in (process_slices(stack, lambda p: p * 1), arraybridge.stack_slices([*stack], "numpy")):
        np.testing.assert_array_equal(found.mask, stack.mask)
        np.testing.assert_array_equal(found.data, stack.data)
