"""The array API namespace over TensorFlow, compared with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import GradientError, array_namespace
from tests.helpers import require

MATRIX = np.array([[3.0, -1.0, 2.0], [0.5, 4.0, -2.0]])
WHOLE = np.array([[3, 1, 2], [3, 3, 0]], np.int32)
SQUARE = np.array([[4.0, 1.0], [1.0, 3.0]])


@pytest.fixture
def xp() -> Any:
    tf = require("tensorflow")
    return array_namespace(tf.constant(1.0))


def check(got: Any, want: Any) -> None:
    want = np.asarray(want)
    assert got.dtype.name == want.dtype.name
    assert tuple(got.shape) == want.shape
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


CASES: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "concat": (lambda xp, x: xp.concat([x, x], axis=1), np.concatenate([MATRIX, MATRIX], 1)),
    "concat flat": (lambda xp, x: xp.concat([x, x], axis=None), np.concatenate([MATRIX, MATRIX], None)),
    "permute_dims": (lambda xp, x: xp.permute_dims(x, axes=(1, 0)), MATRIX.T),
    "astype": (lambda xp, x: xp.astype(x, xp.int8), MATRIX.astype("int8")),
    "matrix_transpose": (lambda xp, x: xp.matrix_transpose(x), MATRIX.T),
    "unstack": (lambda xp, x: xp.unstack(x, axis=1)[2], MATRIX[:, 2]),
    "cumulative_sum": (lambda xp, x: xp.cumulative_sum(x, axis=-1), np.cumsum(MATRIX, 1)),
    "cumulative_sum of all": (lambda xp, x: xp.cumulative_sum(x[0]), np.cumsum(MATRIX[0])),
    "cumulative_prod": (lambda xp, x: xp.cumulative_prod(x, axis=0), np.cumprod(MATRIX, 0)),
    "cumulative_sum from 0": (
        lambda xp, x: xp.cumulative_sum(x, axis=1, include_initial=True),
        np.hstack([np.zeros((2, 1)), np.cumsum(MATRIX, 1)]),
    ),
    "vecdot": (lambda xp, x: xp.vecdot(x, x), (MATRIX * MATRIX).sum(-1)),
    "trunc": (lambda xp, x: xp.trunc(x), np.trunc(MATRIX)),
    "copysign": (lambda xp, x: xp.copysign(x, -x), np.copysign(MATRIX, -MATRIX)),
    "acosh": (lambda xp, x: xp.acosh(x * x + 1), np.arccosh(MATRIX * MATRIX + 1)),
    "atan2": (lambda xp, x: xp.atan2(x, x), np.arctan2(MATRIX, MATRIX)),
    "pow": (lambda xp, x: xp.pow(x, 2.0), MATRIX**2),
    "searchsorted": (
        lambda xp, x: xp.searchsorted(xp.asarray([0.0, 1.0, 3.0]), x),
        np.searchsorted([0.0, 1.0, 3.0], MATRIX),
    ),
    "searchsorted right": (
        lambda xp, x: xp.searchsorted(xp.asarray([3.0, 0.0]), x, side="right", sorter=xp.asarray([1, 0])),
        np.searchsorted([0.0, 3.0], MATRIX, side="right"),
    ),
    "from_dlpack": (lambda xp, x: xp.from_dlpack(MATRIX[:, ::2]), MATRIX[:, ::2]),
    "what was there": (lambda xp, x: xp.sum(x, axis=0), MATRIX.sum(0)),
    "cross": (lambda xp, x: xp.linalg.cross(x, x[::-1]), np.cross(MATRIX, MATRIX[::-1])),
    "trace of each": (lambda xp, x: xp.linalg.trace(xp.stack([x, x])), np.full(2, np.trace(MATRIX))),
    "diagonal of each": (
        lambda xp, x: xp.linalg.diagonal(xp.stack([x, x]), offset=1),
        np.stack([np.diagonal(MATRIX, 1)] * 2),
    ),
    "inv": (lambda xp, x: xp.linalg.inv(xp.asarray(SQUARE)), np.linalg.inv(SQUARE)),
    "matrix_norm": (lambda xp, x: xp.linalg.matrix_norm(x), np.linalg.norm(MATRIX)),
    "svdvals": (lambda xp, x: xp.linalg.svdvals(x), np.linalg.svd(MATRIX, compute_uv=False)),
}
for order in (1, 2, 3, 0, np.inf, -np.inf):  # of rows
    CASES[f"vector_norm {order}"] = (
        lambda xp, x, order=order: xp.linalg.vector_norm(x, ord=order, axis=1, keepdims=True),
        np.linalg.norm(MATRIX, order, axis=1, keepdims=True),
    )


@pytest.mark.parametrize("name", CASES)
def test_functions_agree_with_numpy(xp: Any, name: str) -> None:
    run, want = CASES[name]
    check(run(xp, xp.asarray(MATRIX)), want)


def test_integer_reductions(xp: Any) -> None:
    """Integers are summed in 64 bits, and have norms."""
    check(xp.cumulative_sum(xp.asarray(WHOLE), axis=0), np.cumsum(WHOLE, 0))
    check(xp.cumulative_sum(xp.asarray(WHOLE[0]), dtype=xp.int32), np.cumsum(WHOLE[0], dtype=np.int32))
    check(xp.linalg.vector_norm(xp.asarray(WHOLE[1])), np.linalg.norm(WHOLE[1]))
    check(xp.trunc(xp.asarray(WHOLE)), WHOLE)


@pytest.mark.parametrize("values", [WHOLE, WHOLE > 2, np.zeros(0), MATRIX])
def test_unique_functions(xp: Any, values: np.ndarray) -> None:
    x = xp.asarray(values)
    want, first, inverse, counts = np.unique(
        values, return_index=True, return_inverse=True, return_counts=True
    )
    unique = xp.unique_all(x)
    for got, expected in zip(unique, (want, first, inverse.reshape(values.shape), counts), strict=True):
        check(got, expected)
    check(xp.unique_values(x), want)
    check(xp.unique_counts(x).counts, counts)
    check(xp.unique_inverse(x).inverse_indices, inverse.reshape(values.shape))


def test_dtypes(xp: Any) -> None:
    assert xp.isdtype(xp.int8, "signed integer")
    assert xp.isdtype(xp.float32, ("bool", "real floating"))
    assert xp.isdtype(xp.float32, xp.float32)
    assert not xp.isdtype(xp.bool, "numeric")
    assert xp.can_cast(xp.int8, xp.int16)
    assert not xp.can_cast(xp.asarray(MATRIX), xp.float32)
    info = xp.__array_namespace_info__()
    assert info.dtypes(kind="complex floating") == {"complex64": xp.complex64, "complex128": xp.complex128}
    assert info.default_dtypes()["real floating"] == xp.asarray([1.0]).dtype
    assert info.capabilities()["boolean indexing"]


def test_from_dlpack_shares_or_raises(xp: Any) -> None:
    memory = arraybridge.aligned((4,), "float32")
    memory[:] = 1
    shared, copied = xp.from_dlpack(memory, copy=False), xp.from_dlpack(memory, copy=True)
    memory[0] = 7
    assert (shared.numpy()[0], copied.numpy()[0]) == (7, 1)
    with pytest.raises(BufferError, match="C-contiguous"):
        xp.from_dlpack(memory[::2], copy=False)


def test_matrices(xp: Any) -> None:
    x = xp.asarray(SQUARE)
    for n in (0, 1, 5, -2):
        check(xp.linalg.matrix_power(x, n), np.linalg.matrix_power(SQUARE, n))
    u, s, vh = xp.linalg.svd(x)
    check((u * s) @ vh, SQUARE)


@pytest.mark.parametrize("name", ["cumulative_sum", "linalg.svd"])
def test_functions_computed_by_numpy_are_not_differentiable(name: str, xp: Any) -> None:
    tf = require("tensorflow")
    x = tf.constant(SQUARE[0] if name == "cumulative_sum" else SQUARE)
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = attrgetter(name)(xp)(x)
        loss = tf.reduce_sum(result if name == "cumulative_sum" else result[1])
    with pytest.raises(GradientError, match="no derivative"):
        tape.gradient(loss, x)
