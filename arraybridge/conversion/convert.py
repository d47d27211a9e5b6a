"""Convert arrays with `convert_memory`, and predict conversions with `explain`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np

from arraybridge.compilers import exempt, find_untraced_call, hook_getter, run_eagerly
from arraybridge.conversion import plan_cache
from arraybridge.conversion.decision import decide
from arraybridge.conversion.output import decide_output, framework_of_output, store_output_plan
from arraybridge.conversion.plan_cache import plans_by_signature
from arraybridge.conversion.recorded import convert_and_record
from arraybridge.conversion.request import Request, dtype_name, is_dtype
from arraybridge.device import DeviceLike
from arraybridge.interface.framework import NoPlanError
from arraybridge.route import Route
from arraybridge.tracing import trace_log
from arraybridge.tracing.trace_log import open_logs
from arraybridge.types import FrameworkLike, GpuId, MemoryType
from arraybridge.validation import add_hints, raise_unknown_option

if TYPE_CHECKING:
    import cupy
    import jax
    import numpy
    import tensorflow
    import torch

__all__ = [
    "convert",
    "convert_memory",
    "explain",
]

T = TypeVar("T")
Grad = Literal["error", "detach"]
_Numpy = Literal["numpy", MemoryType.NUMPY]
_Cupy = Literal["cupy", MemoryType.CUPY]
_Torch = Literal["torch", MemoryType.TORCH]
_Jax = Literal["jax", MemoryType.JAX]
_Tensorflow = Literal["tensorflow", MemoryType.TENSORFLOW]
_Source: TypeAlias = FrameworkLike | None


class Options(TypedDict, total=False):
    """Keyword arguments of every overload of `convert_memory`."""

    copy: bool | None
    dtype: Any
    grad: Grad
    device: DeviceLike | None
    out: Any


# A literal target determines the type of the result, whether it follows the array or the source. If it
# follows the array, the next argument is gpu_id. mypy cannot check that the implementation distinguishes the
# two cases.
@overload
def convert_memory(
    data: Any,
    *,
    out: T,
    copy: bool | None = None,
    dtype: Any = None,
    grad: Grad = "error",
    device: DeviceLike | None = None,
) -> T: ...
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
def convert_memory(  # type: ignore[misc]  # noqa: D417  # the docstring describes the overloads
    data: Any,
    source_type: Any = None,
    target_type: Any = None,
    gpu_id: Any = None,
    *,
    target: Any = None,
    copy: bool | None = None,
    dtype: Any = None,
    **others: Any,
) -> Any:
    """Convert an array to another framework, exactly, and without a copy if memory can be shared.

    Shape and dtype are preserved, and values bit for bit, unless ``dtype`` requests a cast. If that is
    impossible, an exception states the reason and what to pass instead.

    ``gpu_id`` may be passed as the third positional argument. A source may precede the target, as in
    ``convert_memory(data, source, target, gpu_id)``; then the array must be from that source. Source and
    target may also be passed by keyword, as ``source_type`` and ``target_type``. A framework is a string such
    as ``"torch"`` or a `MemoryType` member. `convert` is the same function.

    A sparse array of SciPy, PyTorch, JAX, TensorFlow or CuPy becomes the target's sparse array of the same
    layout. SciPy sums duplicate entries in place (scipy/scipy#5807), even in ``max``, ``min``, ``argmax`` and
    ``power``, which corrupts every other array that shares the memory. If there are duplicates, call
    ``data.sum_duplicates()`` before the conversion, or pass ``copy=True``.

    Args:
        data: An array of any framework and shape, a carrier such as ``xarray.DataArray``, or an object with
            ``__dlpack__``, ``__array_interface__`` or ``__cuda_array_interface__``.
        target: The framework to convert to.
        gpu_id: The number of the target's accelerator, or ``"auto"`` for the one with the most free memory.
            Defaults to None: the array stays on its device if the target has that device, and otherwise moves
            to the host. CuPy and pyclesperanto have no host arrays and use their current device.
        copy: None shares memory if possible and copies once otherwise. True never shares. False shares or
            raises; it also shares read-only memory and 0-d JAX and TensorFlow arrays with frameworks whose
            arrays are mutable: do not write to the result. Defaults to None. Copies are complete when the
            call returns.
        dtype: The dtype to cast to, by the rules of the target framework. Defaults to None, which never
            casts.
        grad: ``"error"`` raises if the conversion would drop the graph of a PyTorch tensor that requires
            grad, ``"detach"`` drops it. Defaults to ``"error"``.
        device: A device string such as ``"cpu"``, ``"cpu:1"`` or ``"gpu:0"``, a `Device`, or a native
            device of any framework. Use it instead of ``gpu_id``. Defaults to None.
        out: A NumPy, PyTorch, CuPy or pyclesperanto array that the values are written to. It determines the
            target and the device, and must have the shape and the dtype of ``data``. To cast, pass
            ``dtype=`` with the dtype of ``out``. Defaults to None, which returns another array.

    Returns:
        ``out`` if it was passed. Otherwise, an array of the target framework. It is ``data`` itself if
        ``data`` is such an array on that device, and neither ``copy`` nor ``dtype`` requires a new one.

    Raises:
        UnknownArrayError: If ``data`` is not an array.
        SourceMismatchError: If the array is not from the declared source.
        UnknownFrameworkError: If no framework has that name.
        FrameworkNotInstalledError: If the target is not installed, or its import fails.
        DeviceNotFoundError: If the target does not have the device, unless ``settings(missing_gpu="host")``
            replaces a missing GPU with the CPU.
        DtypeNotSupportedError: If the target does not have the dtype.
        ArrayNotSupportedError: If the target cannot represent the array, such as a masked array, or its shape
            or dtype differs from that of ``out``.
        CopyRequiredError: If ``copy`` is False and memory cannot be shared.
        GradientError: If the conversion would drop the graph of a tensor and ``grad`` is ``"error"``, or if
            ``out`` requires grad while gradients are recorded.
        TypeError: If there is no target, a framework is not a string, or ``out`` is of a framework with
            immutable arrays.
        ValueError: For an invalid option, such as a negative ``gpu_id``, and if ``out`` is read-only, has
            repeated elements, or contradicts the target or the device.

    Example:
        >>> import numpy as np
        >>> labels = np.array([[0, 2**40]])
        >>> convert_memory(labels, "torch")
        tensor([[            0, 1099511627776]])
    """
    if hook_getter:  # torch.compile is imported; see `run_eagerly`
        try:
            call = find_untraced_call()
        finally:
            pass
        if call is not None:
            options = dict(target=target, copy=copy, dtype=dtype, **others)
            return call(convert_memory, data, source_type, target_type, gpu_id, **options)
    # Most calls pass only a target, by position; the parameter is named source_type here.
    if (
        target_type is None
        and gpu_id is None
        and target is None
        and copy is None
        and dtype is None
        and not others
        and not open_logs
    ):
        try:
            plan = plans_by_signature[source_type][type(data)]
        except (KeyError, TypeError):
            pass  # no plan yet, or an unhashable argument or class
        else:
            try:
                return plan(data)
            except NoPlanError:
                pass  # an array that needs another plan or the slow path
    # `others` catches misspelled options. It also holds the options that few calls pass, because
    # each parameter takes 5 ns.
    grad = "error"
    device = None
    out = None
    if others:
        device = others.pop("device", None)
        if others:
            grad = others.pop("grad", grad)
            out = others.pop("out", None)
            for option in others:  # to_torch() and similar functions pass on their options
                problem = "The conversion got an unexpected keyword argument"
                positional = ("target", "source_type", "target_type")
                raise_unknown_option(problem, option, ("gpu_id", *Options.__annotations__), positional)
    active_logs = trace_log.active_logs() if open_logs else None
    signature: Any = None
    if gpu_id is None:
        # The signature includes types, because equal signatures must mean the same call, and
        # 1 == True == tf.float32.
        signature = (source_type, target_type, target, copy, type(copy), dtype, type(dtype), grad, device)
        if out is not None:
            signature = (type(out), *signature)
        if active_logs is None:
            try:
                plan = plans_by_signature[signature][type(data)]
            except (KeyError, TypeError):
                pass
            else:
                try:
                    return plan(data) if out is None else plan(data, out)
                except NoPlanError:
                    pass
        else:
            decision = plan_cache.recall_decision(signature, data)
            if decision is not None:
                return convert_and_record(decision, active_logs)
    source, target, gpu_id = _resolve_arguments(
        "convert_memory", data, source_type, target_type, gpu_id, target, out
    )
    request = Request(target, source, gpu_id, device, copy, dtype, grad, out)
    return _decide_and_convert(data, request, signature, active_logs)


convert = exempt(convert_memory)


@run_eagerly
def _decide_and_convert(data: Any, request: Request, signature: Any, active_logs: Any) -> Any:
    """Convert an array by a new decision, which is cached if there is a signature and calls can reuse it."""
    decision = decide(data, request) if request.out is None else decide_output(data, request)
    result = decision() if active_logs is None else convert_and_record(decision, active_logs)
    if signature is None or (active_logs is not None and not plan_cache.can_recall(data, decision)):
        return result
    if request.out is None:
        plan_cache.store_plan(signature, request, data, decision)
    else:
        store_output_plan(signature, data, request, decision)
    return result


def _resolve_arguments(
    name: str, data: Any, first: Any, second: Any, gpu_id: Any, target: Any, out: Any
) -> tuple[Any, Any, Any]:
    """Return the source, the target and the GPU number of a call.

    Args:
        name: The function that the user called, for messages.
        data: The first argument.
        first: The second argument: the source, or the target if it is the only framework.
        second: The third argument: the target, or the GPU number.
        gpu_id: The fourth argument.
        target: The keyword argument of that name.
        out: The keyword argument of that name. Its framework is the target if the call names none.
    """
    _check_no_dtype(first, second, gpu_id)
    _check_order(name, data, first, second, gpu_id)
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
        if out is None:
            raise TypeError(f'the target framework is missing. Pass its name, as in {name}(data, "torch").')
        second = framework_of_output(out).name
    return first, second, gpu_id


def _check_no_dtype(*arguments: Any) -> None:
    """Raise `ValueError` if a dtype was passed in place of a framework or a GPU number."""
    for argument in arguments:
        if argument is not None and is_dtype(argument):
            raise ValueError(
                f"{argument!r} is a dtype, not a framework or a GPU number."
                f" Pass dtype={dtype_name(argument)!r}."
            )


def _check_order(name: str, data: Any, first: Any, second: Any, gpu_id: Any) -> None:
    """Raise `TypeError` if the array, the framework and the GPU number are in the wrong order."""
    order = ""
    wrong = first
    if first is not None and not isinstance(first, str):
        if issubclass(type(data), str):
            order = f"{name}(data, {data!r})"
        elif isinstance(second, str) and second != "auto":
            order = f"{name}(data, {second!r}, {first!r})"
    elif issubclass(type(data), int):
        wrong = second if gpu_id is None else gpu_id
        is_number = wrong is None or isinstance(wrong, (int, float, str, np.generic))
        order = "" if is_number else "the array as the first argument"
    if order:
        expected = "a framework name" if wrong is first else "a GPU number"
        raise TypeError(
            f"Expected {expected}, got {type(wrong).__name__}. Did you swap the arguments? Use {order}."
        )


@add_hints
def explain(  # noqa: D417  # as for convert_memory
    data: Any,
    source_type: FrameworkLike | None = None,
    target_type: FrameworkLike | GpuId = None,
    gpu_id: GpuId = None,
    *,
    target: FrameworkLike | None = None,
    copy: bool | None = None,
    dtype: Any = None,
    grad: Grad = "error",
    device: DeviceLike | None = None,
    out: Any = None,
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
        out: As for `convert_memory`. Nothing is written.

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
    source, named, number = _resolve_arguments("explain", data, source_type, target_type, gpu_id, target, out)
    request = Request(named, source, number, device, copy, dtype, grad, out)
    return (decide(data, request) if out is None else decide_output(data, request)).route


# The parameters that editors and `help` show.
convert_memory.__signature__ = inspect.signature(explain).replace(  # type: ignore[attr-defined]
    return_annotation="Any"
)
