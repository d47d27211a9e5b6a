"""`convert_memory` and its short forms, `detect_memory_type`, `convert_tree` and `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.conversion import plan_cache
from arraybridge.conversion.decide import Request, check_options, decide, dtype_name, is_dtype
from arraybridge.conversion.plan_cache import by_form
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
# Compared by identity: an array as `grad` has no truth value.
_ERROR = "error"
Grad = Literal["error", "detach"]
_Numpy = Literal["numpy", MemoryType.NUMPY]
_Cupy = Literal["cupy", MemoryType.CUPY]
_Torch = Literal["torch", MemoryType.TORCH]
_Jax = Literal["jax", MemoryType.JAX]
_Tensorflow = Literal["tensorflow", MemoryType.TENSORFLOW]
_Source: TypeAlias = "FrameworkLike | None"


class Options(TypedDict, total=False):
    """Keyword arguments that every form of `convert_memory` takes."""

    copy: bool | None
    dtype: Any
    grad: Grad
    device: DeviceLike | None


# A target named by a literal gives the type of the result, alone or after the source. Where it stands
# second, gpu_id stands third: mypy does not see that the implementation sorts this out by itself.
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
def convert_memory(  # type: ignore[misc]
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
    """Convert an array to another framework: bit for bit, and without a copy where memory can be shared.

    Called as ``convert_memory(data, target)``, ``convert_memory(data, target, gpu_id)`` or
    ``convert_memory(data, source, target, gpu_id)``; the names are strings or `MemoryType` members.

    Args:
        data: an array of any framework, or an object with ``__dlpack__``, ``__array_interface__`` or
            ``__cuda_array_interface__``. Any shape; values, shape and dtype arrive unchanged.
        source_type: what ``data`` is declared to be; checked. Left out, it is detected.
        target_type: the framework to convert to.
        gpu_id: number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Left out, data stays where it is, or goes to the host where the target does not reach it.
        target: the same as ``target_type``.
        copy: None shares memory where it can and copies once where not; True never shares; False shares
            or raises. What was copied is complete when the call returns.
        dtype: a dtype to cast to, as the target framework casts; without it nothing is ever cast.
        grad: what to do with a torch tensor that requires grad: ``"error"``, or ``"detach"``.
        device: any device in words instead of ``gpu_id``: ``"cpu"``, ``"cpu:1"``, ``"gpu:0"``.

    Returns:
        an array of the target framework; ``data`` itself where it is one already, on that device.

    Raises:
        UnknownArrayError: ``data`` is no array.
        SourceMismatchError: it is not of the declared source.
        FrameworkNotInstalledError: the target is not installed.
        DeviceNotFoundError: the device is not there.
        DtypeNotSupportedError, ArrayNotSupportedError: the target cannot hold it exactly.
        CopyRequiredError: ``copy=False``, and it has to be copied.
        GradientError: it requires grad, and ``grad`` is ``"error"``.
        ValueError: an unknown framework, a negative ``gpu_id``, and the like.

    >>> import numpy as np
    >>> labels = np.array([[0, 2**40]])
    >>> convert_memory(labels, "torch")
    tensor([[            0, 1099511627776]])
    """
    # Most calls name a target alone.
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
            return by_form[source_type][type(data)](data)
        except plan_cache.declined:
            pass  # not planned yet, or an array that needs care
    listeners = trace_log.listeners() if open_logs else None
    form: Any = None
    if listeners is None and gpu_id is None:
        # With types, since equal forms have to mean the same call, and 1 == True == tf.float32.
        form = (source_type, target_type, target, copy, type(copy), dtype, type(dtype), grad, device)
        try:
            return by_form[form][type(data)](data)
        except plan_cache.declined:
            pass
    request = _request(source_type, target_type, gpu_id, target, copy, dtype, grad, device)
    decision = decide(data, request)
    if listeners is None:
        result = decision()
        if form is not None:
            plan_cache.keep(form, request, data, decision)
        return result
    return convert_and_record(decision, listeners)


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
    """Sort out which of the positional arguments is the source, the target and the number of the GPU."""
    for word in (first, second, gpu_id):
        if word is not None and is_dtype(word):
            raise ValueError(
                f"{word!r} is a dtype, and no framework or GPU; pass it by name: dtype={dtype_name(word)!r}"
            )
    if second is not None and (not isinstance(second, str) or second == "auto"):
        if gpu_id is not None:
            raise ValueError(f"gpu_id is given twice, as {second!r} and as {gpu_id!r}")
        second, gpu_id = None, second
    if target is not None:
        if second is not None:
            raise ValueError(f"the target is given twice, as {second!r} and as {target!r}")
        second = target
    if second is None:
        first, second = None, first
    if second is None:
        raise TypeError('name the framework to convert to, as in convert_memory(data, "torch")')
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
def explain(  # type: ignore[misc]
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
    """The route that `convert_memory` would take with the same arguments; nothing is converted.

    Returns:
        a `Route`, which prints as one plain sentence.

    Raises:
        the errors that `convert_memory` would raise.

    >>> import numpy as np
    >>> route = explain(np.zeros(4), "torch")
    >>> route.method, route.shares_memory, route.copies
    ('view', True, 0)
    """
    request = _request(source_type, target_type, gpu_id, target, copy, dtype, grad, device)
    return decide(data, request).route


def detect_memory_type(x: Any) -> str:
    """The name of the framework whose array ``x`` is, subclasses included; imports nothing.

    An object of another library that offers ``__dlpack__`` or an array interface counts as ``"numpy"``
    where its memory is on the host, and as ``"cupy"`` on a card.

    Raises:
        UnknownArrayError: it is no array; lists and scalars are none.

    >>> import numpy as np
    >>> detect_memory_type(np.zeros(3))
    'numpy'
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner.name
    if carrier_of(x) is not None:
        return source_of(x)[0].name
    if not protocol_producers.is_foreign_array(x):
        source_of(x)  # raises the error
    return "cupy" if protocol_producers.is_on_card(x) else "numpy"


def device_of(x: Any) -> Device:
    """Where an array lives.

    Raises:
        UnknownArrayError: it is no array.

    >>> import numpy as np
    >>> print(device_of(np.zeros(3)))
    cpu
    """
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

    Containers keep their types, and dicts their order. A container that cannot be rebuilt is returned
    unchanged, with its arrays, unless its class is registered.

    Args:
        tree: Nested containers: dicts, lists, tuples and deques with their subclasses, named tuples,
            dataclasses, attrs classes, pydantic models, ``UserDict``, ``SimpleNamespace``, other mappings
            that can be rebuilt from a dict, and classes that are registered with optree (in its global
            namespace or in ``"arraybridge"``), JAX or PyTorch.
        target: the framework to convert to.
        gpu_id: as for `convert_memory`, as are the others; each is meant for every array.
        copy: share, copy, or refuse to.
        dtype: what to cast to.
        grad: what to do with tensors that require grad.
        device: the device in words.

    Raises:
        MemoryConversionError: or a subclass, whose message says where in the tree.

    >>> import numpy as np
    >>> convert_tree({"image": np.zeros(2), "name": "cell"}, "torch")
    {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'cell'}
    """
    name = registry.framework_name(target)

    def convert(leaf: Any) -> Any:
        return convert_memory(leaf, name, None, gpu_id, copy=copy, dtype=dtype, grad=grad, device=device)

    converted = map_arrays(tree, convert)
    if converted is tree:  # perhaps without an array, which would have checked the options
        check_options(Request(name, None, gpu_id, device, copy, dtype, grad))
        if dtype is not None:
            dtype_name(dtype)
    return converted


def to_numpy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> numpy.ndarray[Any, Any]:
    """``convert_memory(x, "numpy", …)``: the array as a NumPy array, which lives on the host.

    >>> import torch
    >>> to_numpy(torch.ones(2))
    array([1., 1.], dtype=float32)
    """
    result: numpy.ndarray[Any, Any] = convert_memory(x, "numpy", gpu_id, **options)
    return result


def to_cupy(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> cupy.ndarray:
    """``convert_memory(x, "cupy", gpu_id, …)``: the array as a CuPy array."""
    return convert_memory(x, "cupy", gpu_id, **options)


def to_torch(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> torch.Tensor:
    """``convert_memory(x, "torch", gpu_id, …)``: the array as a torch tensor."""
    return convert_memory(x, "torch", gpu_id, **options)


def to_jax(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> jax.Array:
    """``convert_memory(x, "jax", gpu_id, …)``: the array as a JAX array."""
    return convert_memory(x, "jax", gpu_id, **options)


def to_tensorflow(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> tensorflow.Tensor:
    """``convert_memory(x, "tensorflow", gpu_id, …)``: the array as a TensorFlow tensor."""
    return convert_memory(x, "tensorflow", gpu_id, **options)


def to_pyclesperanto(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """``convert_memory(x, "pyclesperanto", gpu_id, …)``: the array as a pyclesperanto image."""
    return convert_memory(x, "pyclesperanto", gpu_id, **options)


def to_mlx(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """``convert_memory(x, "mlx", gpu_id, …)``: the array as an MLX array."""
    return convert_memory(x, "mlx", gpu_id, **options)


def to_paddle(x: Any, gpu_id: GpuId = None, **options: Unpack[Options]) -> Any:
    """``convert_memory(x, "paddle", gpu_id, …)``: the array as a PaddlePaddle tensor."""
    return convert_memory(x, "paddle", gpu_id, **options)


def to_cpu(x: T, *, copy: bool | None = None) -> T:
    """The array in host memory, in its own framework.

    Raises:
        DeviceNotFoundError: the framework has no host arrays (cupy, pyclesperanto); use `to_numpy`.
    """
    source = detect_memory_type(x)
    if not registry.framework(source).has_host:
        raise DeviceNotFoundError(
            f"{source} has no host arrays.",
            source_type=source,
            target_type=source,
            reason=f"{source} has no host arrays",
            advice="Use to_numpy(x).",
        )
    result: T = convert_memory(x, source, device="cpu", copy=copy)
    return result


def to_gpu(x: T, gpu_id: GpuId = None, *, copy: bool | None = None) -> T:
    """The array on an accelerator, in its own framework.

    Args:
        x: the array.
        gpu_id: number of the accelerator, or ``"auto"``. Left out, the device that `set_device` or
            `use_device` chose, whatever it is, or else accelerator 0.
        copy: as for `convert_memory`.

    Raises:
        DeviceNotFoundError: there is no such accelerator; NumPy has none at all.
    """
    source = detect_memory_type(x)
    chosen = chosen_device() if gpu_id is None else None
    has_only_host = registry.framework(source).devices.has_only_host
    if chosen is not None and (chosen.kind == "cpu" or not has_only_host):
        placed: T = convert_memory(x, source, device=None if has_only_host else chosen, copy=copy)
        return placed
    if has_only_host:
        raise DeviceNotFoundError(
            "NumPy arrays live on the host.",
            source_type=source,
            target_type=source,
            reason="NumPy has no accelerator",
            advice='Name the framework that is to hold it on the GPU, as in convert_memory(x, "cupy", 0).',
        )
    result: T = convert_memory(x, source, gpu_id=0 if gpu_id is None else gpu_id, copy=copy)
    return result
