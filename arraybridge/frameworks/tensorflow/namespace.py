"""The array API over TensorFlow: `tf.experimental.numpy`, TensorFlow itself, and NumPy for what both lack.

This module is the namespace. What is NumPy's runs on the host, and refuses to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import array_api_compat.numpy as _numpy
import numpy as np
import tensorflow as tf

from arraybridge.errors import GradientError
from arraybridge.frameworks import dlpack_capsules, host_memory, registry
from arraybridge.frameworks.base import CPU
from arraybridge.reasons import as_cause

_np = tf.experimental.numpy

matrix_transpose = tf.linalg.matrix_transpose
permute_dims = _np.transpose

# By these names the standard means something else than TensorFlow does.
_OTHERWISE = frozenset(("searchsorted", "diagonal", "svd", "trace"))


def __getattr__(name: str) -> Any:
    return _look_up(name, (_np, tf), _numpy)


def _look_up(name: str, own: Sequence[ModuleType], of_numpy: ModuleType) -> Any:
    """What has this name in TensorFlow, if it is what the standard means by it, or else in NumPy."""
    module = next((one for one in own if hasattr(one, name) and name not in _OTHERWISE), None)
    if module is not None:
        return getattr(module, name)
    value = getattr(of_numpy, name)
    return _through_numpy(value) if callable(value) else value


def _through_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's function, of tensors and of TensorFlow's dtypes."""

    @wraps(fn)
    def run(*args: Any, **options: Any) -> Any:
        floats = [x for x in args if isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)]
        args, options = tf.nest.map_structure(_to_numpy, (args, options))
        result = fn(*args, **options)
        if not all(isinstance(one, (np.ndarray, np.generic)) for one in tf.nest.flatten(result)):
            return result
        tensors = tf.nest.map_structure(tf.convert_to_tensor, result)

        def constant(*_: Any) -> Any:
            return tensors, unsupported_array_error

        return tf.custom_gradient(constant)(*floats)

    def unsupported_array_error(*_: Any) -> Any:
        raise GradientError(
            f"{fn.__name__} runs by way of NumPy here, and has no derivative.",
            reason="NumPy computed it",
            advice="Write it with TensorFlow's own functions where gradients flow.",
        )

    return run


def _to_numpy(x: Any) -> Any:
    if isinstance(x, tf.DType):
        return np.dtype(x.as_numpy_dtype)
    return np.asarray(x) if isinstance(x, tf.Tensor) else x


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """``x`` in another dtype."""
    return tf.cast(x, dtype)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """The arrays one after the other along an axis; flattened where it is None."""
    if axis is None:
        return _np.concatenate([tf.reshape(x, [-1]) for x in arrays], 0)
    return _np.concatenate(arrays, axis)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    """A tensor of an array in the host's memory, shared where TensorFlow can."""
    framework = registry.framework("tensorflow")
    view = dlpack_capsules.from_dlpack(x)
    objection = as_cause(framework.cannot_view(view))
    if objection and copy is False:
        raise BufferError(f"TensorFlow cannot share it: {objection.text}")
    return framework.from_host(host_memory.aligned_copy(view) if objection or copy else view, CPU)


linalg = SimpleNamespace(
    **{
        name: _look_up(name, (_np, tf.linalg), _numpy.linalg)
        for name in sorted({*dir(tf.linalg), *dir(_numpy.linalg)})
        if not name.startswith("_")
    }
)
