"""Array API namespace for TensorFlow, from `tf.experimental.numpy`, TensorFlow and NumPy.

NumPy provides the functions that TensorFlow does not have. They run on the host and have no gradients.
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
from arraybridge.host import buffers, dlpack_capsules
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.reasons import as_cause

_np = tf.experimental.numpy

matrix_transpose = tf.linalg.matrix_transpose
permute_dims = _np.transpose

# In the standard, these functions behave differently than in TensorFlow.
_DIFFERENT_IN_TENSORFLOW = frozenset(("searchsorted", "diagonal", "svd", "trace"))


def __getattr__(name: str) -> Any:
    return _look_up(name, (_np, tf), _numpy)


def _look_up(name: str, own: Sequence[ModuleType], of_numpy: ModuleType) -> Any:
    """Return TensorFlow's attribute of this name if it conforms to the standard, and NumPy's otherwise."""
    module = next(
        (module for module in own if hasattr(module, name) and name not in _DIFFERENT_IN_TENSORFLOW), None
    )
    if module is not None:
        return getattr(module, name)
    value = getattr(of_numpy, name)
    return _through_numpy(value) if callable(value) else value


def _through_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a NumPy function so that it accepts tensors and TensorFlow's dtypes, and returns tensors."""

    @wraps(fn)
    def run(*args: Any, **options: Any) -> Any:
        floats = [x for x in args if isinstance(x, tf.Tensor) and (x.dtype.is_floating or x.dtype.is_complex)]
        args, options = tf.nest.map_structure(_to_numpy, (args, options))
        result = fn(*args, **options)
        if not all(isinstance(x, (np.ndarray, np.generic)) for x in tf.nest.flatten(result)):
            return result
        tensors = tf.nest.map_structure(tf.convert_to_tensor, result)

        def constant(*_: Any) -> Any:
            return tensors, raise_no_gradient

        return tf.custom_gradient(constant)(*floats)

    def raise_no_gradient(*_: Any) -> Any:
        raise GradientError(
            f"{fn.__name__} has no derivative: it runs in NumPy, because TensorFlow has no equivalent.",
            reason="NumPy computed it",
            advice="Compute this step with TensorFlow functions.",
        )

    return run


def _to_numpy(x: Any) -> Any:
    if isinstance(x, tf.DType):
        return np.dtype(x.as_numpy_dtype)
    return np.asarray(x) if isinstance(x, tf.Tensor) else x


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """Return ``x`` cast to ``dtype``."""
    return tf.cast(x, dtype)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """Return the arrays joined along an axis. If ``axis`` is None, the arrays are flattened first."""
    if axis is None:
        return _np.concatenate([tf.reshape(x, [-1]) for x in arrays], 0)
    return _np.concatenate(arrays, axis)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    """Return a tensor with the values of an array in host memory, which is shared if possible."""
    framework = registry.framework("tensorflow")
    view = dlpack_capsules.from_dlpack(x)
    cause = as_cause(framework.cannot_view(view))
    if cause and copy is False:
        raise BufferError(f"TensorFlow cannot share this array, because {cause.text}. Pass copy=None.")
    return framework.from_host(buffers.copy_normalized(view) if cause or copy else view, CPU)


linalg = SimpleNamespace(
    **{
        name: _look_up(name, (_np, tf.linalg), _numpy.linalg)
        for name in sorted({*dir(tf.linalg), *dir(_numpy.linalg)})
        if not name.startswith("_")
    }
)
