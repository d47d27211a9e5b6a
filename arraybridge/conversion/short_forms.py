"""The short forms of `convert_memory`: `to_numpy`, `to_torch`, `to_cpu`, `to_gpu` and similar functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy

from arraybridge.compilers import exempt
from arraybridge.conversion.convert import Options, T, convert_memory
from arraybridge.conversion.detection import detect_memory_type
from arraybridge.conversion.request import Request, check_options
from arraybridge.errors import DeviceNotFoundError
from arraybridge.interface import registry
from arraybridge.settings import device_setting
from arraybridge.types import GpuId
from arraybridge.validation import add_hints

if TYPE_CHECKING:
    import cupy
    import jax
    import tensorflow
    import torch
else:

    class _NotImported:
        """A framework in annotations: `typing.get_type_hints` must not import it."""

        Array = Tensor = ndarray = Any

    cupy = jax = tensorflow = torch = _NotImported

__all__ = [
    "to_cpu",
    "to_cupy",
    "to_gpu",
    "to_jax",
    "to_mlx",
    "to_numpy",
    "to_paddle",
    "to_pyclesperanto",
    "to_tensorflow",
    "to_torch",
]


F = TypeVar("F", bound=Callable[..., Any])

_COMMON_TEXT = """\
Args:
    x: An array of any framework and shape, or a carrier.
    gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
        Defaults to None: the array stays on its device if possible. It has no effect for NumPy.
    **options: ``copy``, ``dtype``, ``grad``, ``device`` and ``out``, as for `convert_memory`.

Returns:
    An array of the same shape and values, and of the same dtype unless ``dtype`` is given. It is ``x`` itself
    if no conversion or copy is needed.

Raises:
    MemoryConversionError: One of the subclasses that `convert_memory` raises.
"""


def _short_form(fn: F) -> F:
    """Exempt ``fn`` from compilers, and insert the common text before the example in its docstring."""
    if fn.__doc__ is not None:  # None if Python runs with -OO
        description, example = inspect.cleandoc(fn.__doc__).split("\n\nExample:")
        fn.__doc__ = f"{description}\n\n{_COMMON_TEXT}\nExample:{example}\n"
    return exempt(fn)


@_short_form
def to_numpy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> numpy.ndarray[Any, Any]:
    """Convert an array to a NumPy array; the same as ``convert_memory(x, "numpy", gpu_id, ...)``.

    The result is in host memory. Views of immutable arrays (JAX, TensorFlow) are read-only.

    Example:
        >>> import torch
        >>> to_numpy(torch.ones(2))
        array([1., 1.], dtype=float32)
    """
    try:
        result: numpy.ndarray[Any, Any] = convert_memory(x, "numpy", gpu_id, **options)
        return result
    finally:
        pass  # it costs nothing, and keeps torch.compile from inspecting the array; see `run_eagerly`


@_short_form
def to_cupy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> cupy.ndarray:
    """Convert an array to a CuPy array; the same as ``convert_memory(x, "cupy", gpu_id, ...)``.

    An array on the host is copied to CuPy's current GPU, because CuPy has no host arrays.

    Example:
        >>> import numpy as np
        >>> to_cupy(np.ones(2), 0)
        array([1., 1.])
    """
    try:
        return convert_memory(x, "cupy", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_torch(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> torch.Tensor:
    """Convert an array to a PyTorch tensor; the same as ``convert_memory(x, "torch", gpu_id, ...)``.

    Example:
        >>> import numpy as np
        >>> image = np.ones(2)
        >>> tensor = to_torch(image)
        >>> image[0] = 5  # NumPy and PyTorch share the memory
        >>> tensor
        tensor([5., 1.], dtype=torch.float64)
    """
    try:
        return convert_memory(x, "torch", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_jax(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> jax.Array:
    """Convert an array to a JAX array; the same as ``convert_memory(x, "jax", gpu_id, ...)``.

    The array is committed to its device, as with ``jnp.from_dlpack``. 64-bit dtypes are preserved, even if
    x64 is off.

    Example:
        >>> import numpy as np
        >>> to_jax(np.array([2**40]))
        Array([1099511627776], dtype=int64)
    """
    try:
        return convert_memory(x, "jax", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_tensorflow(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> tensorflow.Tensor:
    """Convert an array to a TensorFlow tensor; the same as ``convert_memory(x, "tensorflow", gpu_id, ...)``.

    Example:
        >>> import numpy as np
        >>> to_tensorflow(np.ones(2)).shape
        TensorShape([2])
    """
    try:
        return convert_memory(x, "tensorflow", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_pyclesperanto(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to a pyclesperanto image, as ``convert_memory(x, "pyclesperanto", gpu_id, ...)``.

    Images have one to three axes. float64, bool and complex arrays need ``dtype``, as in the example.

    Example:
        >>> import numpy as np
        >>> to_pyclesperanto(np.ones((2, 3)), dtype="float32").shape
        (2, 3)
    """
    try:
        return convert_memory(x, "pyclesperanto", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_mlx(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to an MLX array; the same as ``convert_memory(x, "mlx", gpu_id, ...)``.

    Example:
        >>> import numpy as np
        >>> to_mlx(np.ones(2, "float32")).tolist()
        [1.0, 1.0]
    """
    try:
        return convert_memory(x, "mlx", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@_short_form
def to_paddle(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to a PaddlePaddle tensor; the same as ``convert_memory(x, "paddle", gpu_id, ...)``.

    Example:
        >>> import numpy as np
        >>> to_paddle(np.ones(2)).tolist()
        [1.0, 1.0]
    """
    try:
        return convert_memory(x, "paddle", gpu_id, **options)
    finally:
        pass  # see `to_numpy`


@add_hints
def to_cpu(x: T, *, copy: bool | None = None, out: Any = None) -> T:
    """Return the array in host memory, in the same framework.

    Args:
        x: An array of any framework and shape, or a carrier.
        copy: As for `convert_memory`. Defaults to None.
        out: As for `convert_memory`. Defaults to None.

    Returns:
        An array of the same framework on the device ``cpu``; for a carrier, an array without the carrier. It
        is ``x`` itself if no conversion or copy is needed.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        DeviceNotFoundError: If the framework has no host arrays (CuPy, pyclesperanto). Use `to_numpy`
            instead.

    Example:
        >>> import torch
        >>> to_cpu(torch.ones(2))  # also for a tensor on a GPU
        tensor([1., 1.])
    """
    source = registry.find_owner(x)
    if source is None or not source.has_host:
        check_options(Request("numpy", copy=copy))  # `convert_memory` does so otherwise
    if source is None:  # a carrier, or an array of another library
        source = registry.framework(detect_memory_type(x))
    if not source.has_host:
        raise DeviceNotFoundError(
            f"{source.name} has no host arrays.",
            source_type=source.name,
            target_type=source.name,
            reason=f"{source.name} has no host arrays",
            advice="Use to_numpy(x).",
        )
    result: T = convert_memory(x, source.name, device="cpu", copy=copy, out=out)
    return result


@add_hints
def to_gpu(x: T, gpu_id: GpuId = None, *, copy: bool | None = None, out: Any = None) -> T:
    """Return the array on an accelerator, in the same framework.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the accelerator, or ``"auto"`` for the one with the most free memory. Defaults
            to None: the device of `set_device` or `use_device`, even if it is a CPU, or accelerator 0 if
            neither was called.
        copy: As for `convert_memory`. Defaults to None.
        out: As for `convert_memory`. Defaults to None.

    Returns:
        An array of the same framework on that device; for a carrier, an array without the carrier. It is
        ``x`` itself if no conversion or copy is needed.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        DeviceNotFoundError: If the framework does not have the accelerator. NumPy has none.

    Example:
        >>> import torch, arraybridge
        >>> with arraybridge.use_device("cpu"):  # without this line: GPU 0
        ...     to_gpu(torch.ones(2))
        tensor([1., 1.])
    """
    check_options(Request("numpy", copy=copy, gpu_id=gpu_id))
    source = detect_memory_type(x)
    chosen = device_setting() if gpu_id is None else None
    has_only_host = registry.framework(source).devices.has_only_host
    if chosen is not None and (chosen.kind == "cpu" or not has_only_host):
        placed: T = convert_memory(x, source, device=None if has_only_host else chosen, copy=copy, out=out)
        return placed
    if has_only_host:
        raise DeviceNotFoundError(
            "NumPy arrays are always in host memory.",
            source_type=source,
            target_type=source,
            reason="NumPy has no accelerator",
            advice='Convert the array to a framework with GPU arrays, as in convert_memory(x, "cupy", 0).',
        )
    result: T = convert_memory(x, source, gpu_id=0 if gpu_id is None else gpu_id, copy=copy, out=out)
    return result
