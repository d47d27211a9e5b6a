"""The array API over TensorFlow: `tf.experimental.numpy`, and by their names of today what that lacks.

This module is the namespace; what it does not define is looked up there, and else in TensorFlow. What has a
derivative is made of TensorFlow's own functions; the rest is NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy as _numpy
import numpy as np
import tensorflow as tf

from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU

_np = tf.experimental.numpy

nan = math.nan
bitwise_invert, matrix_transpose = tf.bitwise.invert, tf.linalg.matrix_transpose
bitwise_left_shift, bitwise_right_shift = tf.bitwise.left_shift, tf.bitwise.right_shift


def __getattr__(name: str) -> Any:
    return getattr(_np, name) if hasattr(_np, name) else getattr(tf, name)


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """``x`` in another dtype."""
    return tf.cast(x, dtype)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """The arrays one after the other along an axis; flattened where it is None."""
    if axis is None:
        arrays, axis = [tf.reshape(x, [-1]) for x in arrays], 0
    return _np.concatenate(arrays, axis)


def permute_dims(x: Any, /, axes: Sequence[int]) -> Any:
    """``x`` with its axes in another order."""
    return tf.transpose(x, axes)


def trunc(x: Any, /) -> Any:
    """The whole part of each element."""
    return x if x.dtype.is_integer else tf.where(x < 0, tf.math.ceil(x), tf.math.floor(x))


def copysign(x1: Any, x2: Any, /) -> Any:
    """The size of ``x1`` with the sign of ``x2``."""
    return tf.where(_np.signbit(x1) == _np.signbit(x2), x1, -x1)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The inner products along an axis, of the conjugate of ``x1``."""
    return _np.sum(tf.math.conj(x1) * x2, axis=axis)


def _cumulative(
    op: Any,
    start: int,
    x: Any,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
) -> Any:
    """What the elements up to each give; of integers in 64 bits where no dtype is named."""
    if axis is None and len(x.shape) != 1:
        raise ValueError(f"axis is left out, which {len(x.shape)} axes do not allow")
    axis = (axis or 0) % len(x.shape)
    if dtype is None:
        exact = tf.uint64 if x.dtype.is_unsigned else tf.int64
        dtype = x.dtype if x.dtype.is_floating or x.dtype.is_complex else exact
    result = op(tf.cast(x, dtype), axis=axis)
    if include_initial:
        before = [[int(i == axis), 0] for i in range(len(x.shape))]
        result = tf.pad(result, before, constant_values=tf.cast(start, dtype))
    return result


cumulative_sum = partial(_cumulative, tf.cumsum, 0)
cumulative_prod = partial(_cumulative, tf.math.cumprod, 1)

# -- what has no derivative --------------------------------------------------------------------------


def _dtype(x: Any) -> Any:
    """NumPy's dtype of an array, or of a dtype of TensorFlow's namespace; words are words."""
    if isinstance(x, str):
        return x
    return np.dtype(tf.as_dtype(x.dtype if isinstance(x, tf.Tensor) else x).as_numpy_dtype)


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether the dtype is of a kind (in words), is another dtype, or any of a tuple of these."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return _numpy.isdtype(_dtype(dtype), tuple(map(_dtype, kinds)))


def can_cast(from_: Any, to: Any, /) -> bool:
    """Whether every value of the one dtype (or array) has its place in the other."""
    return np.can_cast(_dtype(from_), _dtype(to))


def _by_way_of_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's function, of tensors."""

    @wraps(fn)
    def run(*args: Any, **options: Any) -> Any:
        result = fn(*map(np.asarray, args), **options)
        if isinstance(result, tuple):
            return type(result)(*map(tf.convert_to_tensor, result))
        return tf.convert_to_tensor(result)

    return run


unique_all, unique_counts = _by_way_of_numpy(_numpy.unique_all), _by_way_of_numpy(_numpy.unique_counts)
unique_inverse = _by_way_of_numpy(_numpy.unique_inverse)
unique_values, searchsorted = _by_way_of_numpy(_numpy.unique_values), _by_way_of_numpy(np.searchsorted)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    """A tensor of an array in the host's memory, shared where TensorFlow can."""
    framework, view = registry.framework("tensorflow"), hostmemory.from_dlpack(x)
    objection = framework.cannot_view(view)
    if objection and copy is False:
        raise BufferError(f"TensorFlow cannot share it: {objection}")
    return framework.from_host(hostmemory.fresh(view) if objection or copy else view, CPU)


def __array_namespace_info__() -> Any:  # noqa: N807  # the standard's name
    """What the standard asks of a namespace: devices, dtypes and what it can do."""
    info = _numpy.__array_namespace_info__()

    def tensorflow_dtypes(of_numpy: Callable[..., Any], **options: Any) -> dict[str, Any]:
        return {name: tf.as_dtype(dtype) for name, dtype in of_numpy(**options).items()}

    return SimpleNamespace(
        capabilities=info.capabilities,
        default_device=lambda: "CPU:0",
        devices=lambda: [native.name for native in tf.config.list_logical_devices()],
        default_dtypes=partial(tensorflow_dtypes, info.default_dtypes),
        dtypes=partial(tensorflow_dtypes, info.dtypes),
    )


# -- linear algebra ----------------------------------------------------------------------------------


def _vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:  # noqa: A002
    """The norm of the vectors along one or more axes; of all elements where it is None."""
    size = tf.abs(x if x.dtype.is_floating or x.dtype.is_complex else tf.cast(x, tf.float64))
    if ord in (math.inf, -math.inf):
        return (tf.reduce_max if ord > 0 else tf.reduce_min)(size, axis, keepdims)
    if ord == 0:
        return tf.reduce_sum(tf.cast(size != 0, size.dtype), axis, keepdims)
    return tf.reduce_sum(size**ord, axis, keepdims) ** (1 / ord)


def _svd(x: Any, /, *, full_matrices: bool = True) -> tuple[Any, Any, Any]:
    """``(u, s, vh)``."""
    s, u, v = tf.linalg.svd(x, full_matrices=full_matrices)
    return u, s, tf.linalg.adjoint(v)


def _matrix_power(x: Any, n: int, /) -> Any:
    """The product of ``n`` times the square matrices in the last two axes; of their inverses below 0."""
    factors = [tf.linalg.inv(x) if n < 0 else x] * abs(n)
    return reduce(tf.matmul, factors, tf.eye(x.shape[-1], batch_shape=x.shape[:-2], dtype=x.dtype))


_last_two = {"axis1": -2, "axis2": -1}
# TensorFlow's own, and beside it what that lacks, or what the standard means by the name.
linalg = SimpleNamespace(**vars(tf.linalg))
linalg.cross, linalg.matmul, linalg.outer, linalg.tensordot = _np.cross, _np.matmul, _np.outer, _np.tensordot
linalg.diagonal, linalg.trace = partial(_np.diagonal, **_last_two), partial(_np.trace, **_last_two)
linalg.matrix_norm, linalg.vector_norm = partial(tf.norm, ord="fro", axis=(-2, -1)), _vector_norm
linalg.matrix_power, linalg.vecdot = _matrix_power, vecdot
linalg.svd, linalg.svdvals = _svd, partial(tf.linalg.svd, compute_uv=False)
