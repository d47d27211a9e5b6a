"""The array API over TensorFlow: `tf.experimental.numpy`, and by their names of today what that lacks.

This module is the namespace; what it does not define is looked up there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU

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


_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


def isdtype(dtype: Any, kind: Any) -> Any:
    """Whether the dtype is of a kind (in words), is another dtype, or any of a tuple of these."""
    dtype, kinds = tf.as_dtype(dtype), kind if isinstance(kind, tuple) else (kind,)
    code = "f" if dtype.is_floating else np.dtype(dtype.as_numpy_dtype).kind
    return any(code in _KINDS[one] if isinstance(one, str) else dtype == tf.as_dtype(one) for one in kinds)


def can_cast(from_: Any, to: Any, /) -> Any:
    """Whether every value of the one dtype (or array) has its place in the other."""
    of_array = from_.dtype if isinstance(from_, tf.Tensor) else from_
    return np.can_cast(tf.as_dtype(of_array).as_numpy_dtype, tf.as_dtype(to).as_numpy_dtype)


class UniqueAll(NamedTuple):
    """What `unique_all` gives: the elements, where each comes first, which each was, and how often."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """What `unique_counts` gives."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """What `unique_inverse` gives."""

    values: Any
    inverse_indices: Any


def unique_all(x: Any, /) -> UniqueAll:
    """The elements, each once and in order, with where each comes first, which each was, and how often."""
    flat = tf.reshape(x, [-1])
    if flat.dtype == tf.bool:  # which TensorFlow sorts as numbers alone
        unique = unique_all(tf.reshape(tf.cast(flat, tf.uint8), x.shape))
        return unique._replace(values=tf.cast(unique.values, tf.bool))
    order = tf.cast(tf.argsort(flat, stable=True), tf.int64)
    values, places, counts = tf.unique_with_counts(tf.gather(flat, order), tf.int64)
    inverse = tf.reshape(tf.gather(places, tf.argsort(order)), x.shape)
    return UniqueAll(values, tf.gather(order, tf.cumsum(counts, exclusive=True)), inverse, counts)


def unique_counts(x: Any, /) -> Any:
    """The elements, each once and in order, and how often."""
    unique = unique_all(x)
    return UniqueCounts(unique.values, unique.counts)


def unique_inverse(x: Any, /) -> Any:
    """The elements, each once and in order, and which of them each was."""
    unique = unique_all(x)
    return UniqueInverse(unique.values, unique.inverse_indices)


def unique_values(x: Any, /) -> Any:
    """The elements, each once, in order."""
    return unique_all(x).values


def searchsorted(x1: Any, x2: Any, /, *, side: Any = "left", sorter: Any = None) -> Any:
    """Where in the sorted ``x1`` each element of ``x2`` would be put in."""
    ordered = x1 if sorter is None else tf.gather(x1, sorter)
    places = tf.searchsorted(ordered, tf.reshape(x2, [-1]), side, tf.int64)
    return tf.reshape(places, x2.shape)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    """A tensor of an array in the host's memory, shared where TensorFlow can."""
    framework, view = registry.framework("tensorflow"), hostmemory.from_dlpack(x)
    objection = framework.cannot_view(view)
    if objection and copy is False:
        raise BufferError(f"TensorFlow cannot share it: {objection}")
    return framework.from_host(hostmemory.fresh(view) if objection or copy else view, CPU)


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


def _matrix_power(x: Any, n: int, /) -> Any:
    """The product of ``n`` times the square matrices in the last two axes; of their inverses below 0."""
    power, x, n = (
        tf.eye(x.shape[-1], batch_shape=x.shape[:-2], dtype=x.dtype),
        tf.linalg.inv(x) if n < 0 else x,
        abs(n),
    )
    while n:
        power, x, n = power @ x if n % 2 else power, x @ x, n // 2
    return power


def __array_namespace_info__() -> Any:  # noqa: N807  # the standard's name
    """What the standard asks of a namespace: devices, dtypes and what it can do."""
    names = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("float32", "float64", "complex64", "complex128")
    every: dict[str, Any] = {name: getattr(tf, name) for name in (*names, *floats)}
    real = _np.zeros(()).dtype
    defaults = {
        "real floating": real,
        "complex floating": tf.complex64 if real == tf.float32 else tf.complex128,
        "integral": tf.int64,
        "indexing": tf.int64,
    }

    def default_dtypes(*, device: Any = None) -> dict[str, Any]:
        return defaults

    def dtypes(*, device: Any = None, kind: Any = None) -> dict[str, Any]:
        return {name: dtype for name, dtype in every.items() if kind is None or isdtype(dtype, kind)}

    return SimpleNamespace(
        capabilities=lambda: {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 254},
        default_device=lambda: "CPU:0",
        devices=lambda: [native.name for native in tf.config.list_logical_devices()],
        default_dtypes=default_dtypes,
        dtypes=dtypes,
    )


linalg = SimpleNamespace(
    cholesky=tf.linalg.cholesky,
    cross=_np.cross,
    det=tf.linalg.det,
    diagonal=_np.diagonal,
    eigh=tf.linalg.eigh,
    eigvalsh=tf.linalg.eigvalsh,
    inv=tf.linalg.inv,
    matmul=_np.matmul,
    matrix_norm=_matrix_norm,
    matrix_power=_matrix_power,
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
