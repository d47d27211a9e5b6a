"""The array API over TensorFlow: `tf.experimental.numpy`, and by their names of today what that lacks.

This module is the namespace; what it does not define is looked up there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

_np = tf.experimental.numpy

# fmt: off
acos, acosh, asin, asinh, atan = _np.arccos, _np.arccosh, _np.arcsin, _np.arcsinh, _np.arctan
atan2, atanh, pow = _np.arctan2, _np.arctanh, _np.power  # noqa: A001
bitwise_invert, bitwise_left_shift = tf.bitwise.invert, tf.bitwise.left_shift
bitwise_right_shift = tf.bitwise.right_shift
nan = math.nan
bool = tf.bool  # noqa: A001
# fmt: on


def __getattr__(name: str) -> Any:
    return getattr(_np, name)


def astype(x: Any, dtype: Any, /, *, copy: Any = True, device: Any = None) -> Any:
    """``x`` in another dtype."""
    return tf.cast(x, dtype)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """The arrays one after the other along an axis; flattened where it is None."""
    if axis is None:
        arrays, axis = [tf.reshape(x, [-1]) for x in arrays], 0
    return _np.concatenate(arrays, axis)


def permute_dims(x: Any, /, axes: Sequence[int]) -> Any:
    """``x`` with its axes in another order."""
    return _np.transpose(x, tuple(axes))


def matrix_transpose(x: Any, /) -> Any:
    """``x`` with its last two axes exchanged."""
    if len(x.shape) < 2:
        raise ValueError(f"matrix_transpose takes matrices, not an array of shape {tuple(x.shape)}")
    return _np.swapaxes(x, -1, -2)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """The arrays along an axis."""
    return tuple(tf.unstack(x, axis=axis))


def trunc(x: Any, /) -> Any:
    """The whole part of each element."""
    return x if x.dtype.is_integer else tf.where(x < 0, tf.math.ceil(x), tf.math.floor(x))


def copysign(x1: Any, x2: Any, /) -> Any:
    """The size of ``x1`` with the sign of ``x2``."""
    return tf.where(_np.signbit(x1) == _np.signbit(x2), x1, -x1)


def unique_values(x: Any, /) -> Any:
    """The elements, each once, in order."""
    flat = tf.reshape(x, [-1])
    if flat.dtype == tf.bool:
        return tf.cast(tf.unique(tf.sort(tf.cast(flat, tf.uint8)))[0], tf.bool)
    return tf.unique(tf.sort(flat))[0]


def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Any:
    """The sums of the elements up to each; of integers in 64 bits where no dtype is named."""
    return _cumulative(tf.cumsum, 0, x, axis, dtype, include_initial)


def cumulative_prod(
    x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Any:
    """The products of the elements up to each; of integers in 64 bits where no dtype is named."""
    return _cumulative(tf.math.cumprod, 1, x, axis, dtype, include_initial)


def _cumulative(op: Any, start: int, x: Any, axis: int | None, dtype: Any, include_initial: Any) -> Any:
    if axis is None:
        if len(x.shape) != 1:
            raise ValueError(f"axis is left out, which {len(x.shape)} axes do not allow")
        axis = 0
    if dtype is None:
        dtype = x.dtype
        if dtype == tf.bool or dtype.is_integer:
            dtype = tf.uint64 if dtype.is_unsigned else tf.int64
    result = op(tf.cast(x, dtype), axis=axis)
    if include_initial:
        axis %= len(x.shape)
        shape = [1 if i == axis else n for i, n in enumerate(result.shape)]
        result = tf.concat([tf.fill(shape, tf.cast(start, dtype)), result], axis)
    return result


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The inner products along an axis, of the conjugate of ``x1``."""
    return _np.sum(tf.math.conj(x1) * x2, axis=axis)


def _vector_norm(x: Any, /, *, axis: Any = None, keepdims: Any = False, ord: float = 2) -> Any:  # noqa: A002
    """The norm of the vectors along one or more axes; of all elements where it is None."""
    size = tf.abs(x) if x.dtype.is_floating or x.dtype.is_complex else tf.abs(tf.cast(x, tf.float64))
    if ord == math.inf:
        return tf.reduce_max(size, axis, keepdims)
    if ord == -math.inf:
        return tf.reduce_min(size, axis, keepdims)
    if ord == 0:
        return tf.reduce_sum(tf.cast(size != 0, size.dtype), axis, keepdims)
    if ord == 1:
        return tf.reduce_sum(size, axis, keepdims)
    if ord == 2:
        return tf.sqrt(tf.reduce_sum(size * size, axis, keepdims))
    return tf.reduce_sum(size**ord, axis, keepdims) ** (1 / ord)


def _matrix_norm(x: Any, /, *, keepdims: Any = False, ord: Any = "fro") -> Any:  # noqa: A002
    """The norm of the matrices in the last two axes: ``"fro"``, 1 or inf."""
    return tf.norm(x, ord="fro" if ord == "fro" else ord, axis=(-2, -1), keepdims=keepdims)


def _svd(x: Any, /, *, full_matrices: Any = True) -> tuple[Any, Any, Any]:
    """``(u, s, vh)``."""
    s, u, v = tf.linalg.svd(x, full_matrices=full_matrices)
    return u, s, tf.linalg.adjoint(v)


linalg = SimpleNamespace(
    cholesky=tf.linalg.cholesky,
    det=tf.linalg.det,
    diagonal=_np.diagonal,
    eigh=tf.linalg.eigh,
    eigvalsh=tf.linalg.eigvalsh,
    inv=tf.linalg.inv,
    matmul=_np.matmul,
    matrix_norm=_matrix_norm,
    matrix_rank=tf.linalg.matrix_rank,
    matrix_transpose=matrix_transpose,
    outer=_np.outer,
    pinv=tf.linalg.pinv,
    qr=tf.linalg.qr,
    slogdet=tf.linalg.slogdet,
    solve=tf.linalg.solve,
    svd=_svd,
    svdvals=lambda x: tf.linalg.svd(x, compute_uv=False),
    tensordot=_np.tensordot,
    trace=_np.trace,
    vecdot=vecdot,
    vector_norm=_vector_norm,
)
