"""Convert arrays and containers, predict conversions, and detect the framework and device of an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.conversion import plan_cache
from arraybridge.conversion.decide import check_options, decide, dtype_name, is_dtype
from arraybridge.conversion.decision import Request
from arraybridge.conversion.plan_cache import plans_by_signature
from arraybridge.conversion.recorded import convert_and_record
from arraybridge.errors import DeviceNotFoundError
from arraybridge.frameworks import protocol_producers, registry
from arraybridge.settings import chosen_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.route import Route
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import map_arrays
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, MemoryType

if TYPE_CHECKING:
    import cupy
    import jax
    import numpy
    import tensorflow
    import torch

__all__ = [
    "convert",
    "convert_memory",
    "convert_tree",
    "detect_memory_type",
    "device_of",
    "explain",
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

T = TypeVar("T")
# `grad` is compared with this string by identity, because `==` with an array may not return a single bool.
_ERROR = "error"
Grad = Literal["error", "detach"]
_Numpy = Literal["numpy", MemoryType.NUMPY]
_Cupy = Literal["cupy", MemoryType.CUPY]
_Torch = Literal["torch", MemoryType.TORCH]
_Jax = Literal["jax", MemoryType.JAX]
_Tensorflow = Literal["tensorflow", MemoryType.TENSORFLOW]
_Source: TypeAlias = "FrameworkLike | None"


class Options(TypedDict, total=False):
    """Keyword arguments of every call signature of `convert_memory`."""

    copy: bool | None
    dtype: Any
    grad: Grad
    device: DeviceLike | None


# A literal target determines the type of the result, whether it follows the array or the source. If it
# follows the array, the next argument is gpu_id. mypy cannot check that the implementation distinguishes the
# two cases.
@overload
def convert_memory(
    data: Any, target: _Numpy, gpu_id: GpuId = None, **options: Unpack[Options]
) -> numpy.ndarray[Any, Any]: ...
@overload
def convert_memory(
    data: Any, target: _Cupy, gpu_id: GpuId = None, **options: Unpack[Options]
) -> cupy.ndarray: ...
@overload
def convert_memory(
    data: Any, target: _Torch, gpu_id: GpuId = None, **options: Unpack[Options]
) -> torch.Tensor: ...
@overload
def convert_memory(
    data: Any, target: _Jax, gpu_id: GpuId = None, **options: Unpack[Options]
) -> jax.Array: ...
@overload
def convert_memory(
    data: Any, target: _Tensorflow, gpu_id: GpuId = None, **options: Unpack[Options]
) -> tensorflow.Tensor: ...
@overload
def convert_memory(
    data: Any, target: FrameworkLike, gpu_id: GpuId = None, **options: Unpack[Options]
) -> Any: ...
@overload
def convert_memory(
    data: Any, source_type: _Source, target_type: _Numpy, gpu_id: GpuId = None, **options: Unpack[Options]
) -> numpy.ndarray[Any, Any]: ...
@overload
def convert_memory(
    data: Any, source_type: _Source, target_type: _Cupy, gpu_id: GpuId = None, **options: Unpack[Options]
) -> cupy.ndarray: ...
@overload
def convert_memory(
    data: Any, source_type: _Source, target_type: _Torch, gpu_id: GpuId = None, **options: Unpack[Options]
) -> torch.Tensor: ...
@overload
def convert_memory(
    data: Any, source_type: _Source, target_type: _Jax, gpu_id: GpuId = None, **options: Unpack[Options]
) -> jax.Array: ...
@overload
def convert_memory(
    data: Any,
    source_type: _Source,
    target_type: _Tensorflow,
    gpu_id: GpuId = None,
    **options: Unpack[Options],
) -> tensorflow.Tensor: ...
@overload
def convert_memory(
    data: Any,
    source_type: FrameworkLike | None = None,
    target_type: FrameworkLike | None = None,
    gpu_id: GpuId = None,
    **options: Unpack[Options],
) -> Any: ...
def convert_memory(  # type: ignore[misc]  # noqa: D417  # the text describes the other call signatures
    data: Any,
    source_type: Any = None,
    target_type: Any = None,
    gpu_id: Any = None,
    *,
    target: Any = None,
    copy: bool | None = None,
    dtype: Any = None,
    grad: str = "error",
    device: DeviceLike | None = None,
) -> Any:
    """Convert an array to another framework, exactly, and without a copy if memory can be shared.

    Values, shape and dtype are preserved bit for bit. If that is impossible, a typed error states the reason
    and what to pass instead.

    ``gpu_id`` may be passed as the third positional argument. A source may precede the target, as in
    ``convert_memory(data, source, target, gpu_id)``; then the array must be from that source. Source and
    target may also be passed by keyword, as ``source_type`` and ``target_type``. A framework is a string such
    as ``"torch"`` or a `MemoryType` member. `convert` is the same function.

    A sparse array of SciPy, PyTorch, JAX, TensorFlow or CuPy becomes the target's sparse array of the same
    layout. SciPy removes duplicates in place, even in ``max``, ``min``, ``argmax`` and ``power``, and damages
    an array that shares the memory: call ``data.sum_duplicates()`` first, or pass ``copy=True``.

    Args:
        data: An array of any framework and shape, a carrier such as ``xarray.DataArray``, or an object with
            ``__dlpack__``, ``__array_interface__`` or ``__cuda_array_interface__``.
        target: The framework to convert to.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if the target has that device, and otherwise moves
            to the host. CuPy and pyclesperanto have no host arrays and use their current device.
        copy: None shares memory if possible and copies once otherwise. True never shares. False shares or
            raises; it also shares read-only memory and 0-d JAX and TensorFlow arrays with mutable frameworks:
            do not write to the result. Defaults to None. Copies are complete when the call returns.
        dtype: The dtype to cast to, by the rules of the target framework. Defaults to None, which never
            casts.
        grad: ``"error"`` raises for a PyTorch tensor that requires grad, ``"detach"`` detaches it. Defaults
            to ``"error"``.
        device: A device string such as ``"cpu"``, ``"cpu:1"`` or ``"gpu:0"``, a `Device`, or a native
            device of any framework. Use it instead of ``gpu_id``. Defaults to None.

    Returns:
        An array of the target framework. It is ``data`` itself if ``data`` is such an array on that device,
        and neither ``copy`` nor ``dtype`` requires a new one.

    Raises:
        UnknownArrayError: If ``data`` is not an array.
        SourceMismatchError: If the array is not of the declared source.
        UnknownFrameworkError: If no framework has that name.
        FrameworkNotInstalledError: If the target is not installed, or its import fails.
        DeviceNotFoundError: If the target does not have the device.
        DtypeNotSupportedError: If the target does not have the dtype.
        ArrayNotSupportedError: If the target cannot represent the array, such as a masked array.
        CopyRequiredError: If ``copy`` is False and memory cannot be shared.
        GradientError: If the tensor requires grad and ``grad`` is ``"error"``.
        ValueError: For an invalid option, such as a negative ``gpu_id``.

    Example:
        >>> import numpy as np
        >>> labels = np.array([[0, 2**40]])
        >>> convert_memory(labels, "torch")
        tensor([[            0, 1099511627776]])
    """
    # Most calls pass only a target.
    if (
        target_type is None
        and gpu_id is None
        and target is None
        and copy is None
        and dtype is None
        and grad is _ERROR
        and device is None
        and not open_logs
    ):
        try:
            return plans_by_signature[source_type][type(data)](data)
        except plan_cache.declined:
            pass  # no plan yet, or an array that needs the slow path
    active_logs = trace_log.active_logs() if open_logs else None
    signature: Any = None
    if active_logs is None and gpu_id is None:
        # The signature includes types, because equal signatures must mean the same call, and
        # 1 == True == tf.float32.
        signature = (source_type, target_type, target, copy, type(copy), dtype, type(dtype), grad, device)
        try:
            return plans_by_signature[signature][type(data)](data)
        except plan_cache.declined:
            pass
    request = _request(source_type, target_type, gpu_id, target, copy, dtype, grad, device)
    decision = decide(data, request)
    if active_logs is None:
        result = decision()
        if signature is not None:
            plan_cache.store_plan(signature, request, data, decision)
        return result
    return convert_and_record(decision, active_logs)


convert = convert_memory


def _request(
    first: Any,
    second: Any,
    gpu_id: Any,
    target: Any,
    copy: bool | None,
    dtype: Any,
    grad: str,
    device: DeviceLike | None,
) -> Request:
    """Return the request of a call. This determines which positional arguments are source, target and GPU."""
    for argument in (first, second, gpu_id):
        if argument is not None and is_dtype(argument):
            raise ValueError(
                f"{argument!r} is a dtype, not a framework or a GPU number."
                f" Pass dtype={dtype_name(argument)!r}."
            )
    if second is not None and (not isinstance(second, str) or second == "auto"):
        if gpu_id is not None:
            raise ValueError(f"gpu_id is given twice, as {second!r} and as {gpu_id!r}. Pass it once.")
        second, gpu_id = None, second
    if target is not None:
        if second is not None:
            raise ValueError(f"the target is given twice, as {second!r} and as {target!r}. Pass it once.")
        second = target
    if second is None:
        first, second = None, first
    if second is None:
        raise TypeError(
            'the target framework is missing. Pass its name, as in convert_memory(data, "torch").'
        )
    return Request(second, first, gpu_id, device, copy, dtype, grad)


@overload
def explain(data: Any, target: FrameworkLike, gpu_id: GpuId = None, **options: Unpack[Options]) -> Route: ...
@overload
def explain(
    data: Any,
    source_type: FrameworkLike | None = None,
    target_type: FrameworkLike | None = None,
    gpu_id: GpuId = None,
    **options: Unpack[Options],
) -> Route: ...
def explain(  # type: ignore[misc]  # noqa: D417  # as for convert_memory
    data: Any,
    source_type: Any = None,
    target_type: Any = None,
    gpu_id: Any = None,
    *,
    target: Any = None,
    copy: bool | None = None,
    dtype: Any = None,
    grad: str = "error",
    device: DeviceLike | None = None,
) -> Route:
    """Return the route of a conversion without converting anything.

    `convert_memory` with the same arguments takes this route.

    Args:
        data: The array, as for `convert_memory`.
        target: The framework to convert to.
        gpu_id: The number of the target's accelerator, or ``"auto"``. Defaults to None.
        copy: As for `convert_memory`.
        dtype: As for `convert_memory`.
        grad: As for `convert_memory`.
        device: As for `convert_memory`.

    Returns:
        A `Route` with source, target, method, device, bytes, copies and the reason. It prints as one
        sentence.

    Raises:
        MemoryConversionError: The error that `convert_memory` would raise.

    Example:
        >>> import numpy as np
        >>> route = explain(np.zeros(4), "torch")
        >>> route.method, route.shares_memory, route.copies
        ('view', True, 0)
        >>> print(explain(np.zeros(4)[::-1], "torch"))  # doctest: +ELLIPSIS
        numpy → torch on cpu: copied ...
    """
    request = _request(source_type, target_type, gpu_id, target, copy, dtype, grad, device)
    return decide(data, request).route


def detect_memory_type(x: Any) -> str:
    """Return the name of the framework of an array, without importing any framework.

    Instances of classes such as ``torch.nn.Parameter``, ``tf.Variable`` and ``np.memmap`` are arrays, too.
    For objects of other libraries with ``__dlpack__`` or an array interface, the result is ``"numpy"`` for
    host memory and ``"cupy"`` for GPU memory.

    Args:
        x: An array of any framework and shape, or a carrier.

    Returns:
        The name, such as ``"torch"``.

    Raises:
        UnknownArrayError: If ``x`` is not an array. Lists and Python numbers are not arrays, but NumPy
            scalars are.

    Example:
        >>> import numpy as np
        >>> detect_memory_type(np.zeros(3))
        'numpy'
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner.name
    if carrier_of(x) is not None:
        return source_of(x)[0].name
    if not protocol_producers.is_protocol_producer(x):
        source_of(x)  # raises the error
    return "cupy" if protocol_producers.is_on_gpu(x) else "numpy"


def device_of(x: Any) -> Device:
    """Return the device of an array.

    Args:
        x: An array of any framework and shape, or a carrier.

    Returns:
        A `Device`, such as ``cpu`` or ``gpu:1``.

    Raises:
        UnknownArrayError: If ``x`` is not an array.

    Example:
        >>> import numpy as np
        >>> print(device_of(np.zeros(3)))
        cpu
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner.devices.device_of(x)
    source, data = source_of(x)
    return source.devices.device_of(data)


def convert_tree(
    tree: Any,
    target: FrameworkLike,
    gpu_id: GpuId = None,
    *,
    copy: bool | None = None,
    dtype: Any = None,
    grad: Grad = "error",
    device: DeviceLike | None = None,
) -> Any:
    """Convert every array in nested containers, and leave everything else unchanged.

    NumPy scalars and buffers such as ``bytes``, which `convert_memory` accepts, stay unchanged, too.
    Containers keep their types, and dicts their order. A container that cannot be rebuilt is returned
    unchanged, with its arrays, unless its class is registered.

    Args:
        tree: Nested containers: dicts, lists, tuples and deques with their subclasses, named tuples,
            dataclasses, attrs classes, pydantic models, ``UserDict``, ``SimpleNamespace``, other mappings
            that can be rebuilt from a dict, and classes that are registered with optree (in its global
            namespace or in ``"arraybridge"``), JAX or PyTorch.
        target: The framework to convert to.
        gpu_id: As for `convert_memory`. Every option applies to every array.
        copy: As for `convert_memory`.
        dtype: As for `convert_memory`.
        grad: As for `convert_memory`.
        device: As for `convert_memory`.

    Returns:
        A container of the same structure; ``tree`` itself if nothing was converted.

    Raises:
        MemoryConversionError: One of its subclasses. The message states the place of the array in ``tree``.

    Example:
        >>> import numpy as np
        >>> convert_tree({"image": np.zeros(2), "name": "cell"}, "torch")
        {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'cell'}
    """
    name = registry.framework_name(target)

    def convert(leaf: Any) -> Any:
        return convert_memory(leaf, name, None, gpu_id, copy=copy, dtype=dtype, grad=grad, device=device)

    converted = map_arrays(tree, convert)
    if converted is tree:  # without an array, no conversion has checked the options
        check_options(Request(name, None, gpu_id, device, copy, dtype, grad))
        if dtype is not None:
            dtype_name(dtype)
    return converted


def to_numpy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> numpy.ndarray[Any, Any]:
    """Convert an array to a NumPy array; the same as ``convert_memory(x, "numpy", gpu_id, ...)``.

    The result is in host memory. Views of immutable arrays (JAX, TensorFlow) are read-only.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: Accepted and ignored, because NumPy arrays are in host memory.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A NumPy array of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import torch
        >>> to_numpy(torch.ones(2))
        array([1., 1.], dtype=float32)
    """
    result: numpy.ndarray[Any, Any] = convert_memory(x, "numpy", gpu_id, **options)
    return result


def to_cupy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> cupy.ndarray:
    """Convert an array to a CuPy array; the same as ``convert_memory(x, "cupy", gpu_id, ...)``.

    An array on the host is copied to CuPy's current GPU, because CuPy has no host arrays.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A CuPy array of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_cupy(np.ones(2), 0)
        array([1., 1.])
    """
    return convert_memory(x, "cupy", gpu_id, **options)


def to_torch(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> torch.Tensor:
    """Convert an array to a PyTorch tensor; the same as ``convert_memory(x, "torch", gpu_id, ...)``.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A PyTorch tensor of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> image = np.ones(2)
        >>> tensor = to_torch(image)
        >>> image[0] = 5  # NumPy and PyTorch share the memory
        >>> tensor
        tensor([5., 1.], dtype=torch.float64)
    """
    return convert_memory(x, "torch", gpu_id, **options)


def to_jax(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> jax.Array:
    """Convert an array to a JAX array; the same as ``convert_memory(x, "jax", gpu_id, ...)``.

    The array is committed to its device, as with ``jnp.from_dlpack``. 64-bit dtypes are preserved, even if
    x64 is off.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A JAX array of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_jax(np.array([2**40]))
        Array([1099511627776], dtype=int64)
    """
    return convert_memory(x, "jax", gpu_id, **options)


def to_tensorflow(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> tensorflow.Tensor:
    """Convert an array to a TensorFlow tensor; the same as ``convert_memory(x, "tensorflow", gpu_id, ...)``.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A TensorFlow tensor of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_tensorflow(np.ones(2)).shape
        TensorShape([2])
    """
    return convert_memory(x, "tensorflow", gpu_id, **options)


def to_pyclesperanto(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to a pyclesperanto image, as ``convert_memory(x, "pyclesperanto", gpu_id, ...)``.

    Images have one to three axes. float64, bool and complex arrays need ``dtype``, as in the example.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A pyclesperanto image of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_pyclesperanto(np.ones((2, 3)), dtype="float32").shape
        (2, 3)
    """
    return convert_memory(x, "pyclesperanto", gpu_id, **options)


def to_mlx(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to an MLX array; the same as ``convert_memory(x, "mlx", gpu_id, ...)``.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        An MLX array of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_mlx(np.ones(2, "float32")).tolist()
        [1.0, 1.0]
    """
    return convert_memory(x, "mlx", gpu_id, **options)


def to_paddle(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """Convert an array to a PaddlePaddle tensor; the same as ``convert_memory(x, "paddle", gpu_id, ...)``.

    Args:
        x: An array of any framework and shape, or a carrier.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if possible.
        **options: ``copy``, ``dtype``, ``grad`` and ``device``, as for `convert_memory`.

    Returns:
        A PaddlePaddle tensor of the same shape, values and dtype; ``x`` itself if it is one already.

    Raises:
        MemoryConversionError: One of its subclasses, as `convert_memory` raises them.

    Example:
        >>> import numpy as np
        >>> to_paddle(np.ones(2)).tolist()
        [1.0, 1.0]
    """
    return convert_memory(x, "paddle", gpu_id, **options)


def to_cpu(x: T, *, copy: bool | None = None) -> T:
    """Return the array in host memory, in the same framework.

    Args:
        x: An array of any framework and shape.
        copy: As for `convert_memory`. Defaults to None.

    Returns:
        An array of the same framework on the device ``cpu``; ``x`` itself if it is there already.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        DeviceNotFoundError: If the framework has no host arrays (CuPy, pyclesperanto). Use `to_numpy`
            instead.

    Example:
        >>> import torch
        >>> to_cpu(torch.ones(2))  # on a GPU or not
        tensor([1., 1.])
    """
    source = registry.find_owner(x)
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
    result: T = convert_memory(x, source.name, device="cpu", copy=copy)
    return result


def to_gpu(x: T, gpu_id: GpuId = None, *, copy: bool | None = None) -> T:
    """Return the array on an accelerator, in the same framework.

    Args:
        x: An array of any framework and shape.
        gpu_id: The number of the accelerator, or ``"auto"`` for the one with the most free memory. Defaults
            to None: the device of `set_device` or `use_device`, even if it is a CPU, or accelerator 0 if
            neither was called.
        copy: As for `convert_memory`. Defaults to None.

    Returns:
        An array of the same framework on that device; ``x`` itself if it is there already.

    Raises:
        UnknownArrayError: If ``x`` is not an array.
        DeviceNotFoundError: If the framework does not have the accelerator. NumPy has none.

    Example:
        >>> import torch, arraybridge
        >>> with arraybridge.use_device("cpu"):  # without this line: GPU 0
        ...     to_gpu(torch.ones(2))
        tensor([1., 1.])
    """
    source = detect_memory_type(x)
    chosen = chosen_device() if gpu_id is None else None
    has_only_host = registry.framework(source).devices.has_only_host
    if chosen is not None and (chosen.kind == "cpu" or not has_only_host):
        placed: T = convert_memory(x, source, device=None if has_only_host else chosen, copy=copy)
        return placed
    if has_only_host:
        raise DeviceNotFoundError(
            "NumPy arrays are always in host memory.",
            source_type=source,
            target_type=source,
            reason="NumPy has no accelerator",
            advice='Convert the array to a framework with GPU arrays, as in convert_memory(x, "cupy", 0).',
        )
    result: T = convert_memory(x, source, gpu_id=0 if gpu_id is None else gpu_id, copy=copy)
    return result
