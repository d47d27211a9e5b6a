"""Stacking and unstacking of 2-D slices (planes), and functions that are called for each plane of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from arraybridge.batches import snapshot
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.decorators.wrapping import SelfArgument
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework, native_errors
from arraybridge.interface.unsupported import sparse_array_error
from arraybridge.trees import ARRAY, kind_of, map_arrays, together
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import add_hints

__all__ = ["process_slices", "stack_slices", "unstack_slices"]


@add_hints
def stack_slices(slices: Iterable[Any], memory_type: FrameworkLike, gpu_id: GpuId = None) -> Any:
    """Return an array of shape ``(n, height, width)`` with the slices along its first axis.

    Args:
        slices: n arrays of shape ``(height, width)`` and of the same dtype, from any frameworks.
        memory_type: The framework of the result.
        gpu_id: The accelerator of the result. Defaults to the device of the first slice.

    Returns:
        An array of ``memory_type``.

    Raises:
        ValueError: If there are no slices, their shapes differ, or they do not have two axes.
        TypeError: If their dtypes differ, or ``slices`` is not iterable.
        MemoryConversionError: If ``memory_type`` cannot represent the slices exactly.

    >>> import numpy as np
    >>> stack_slices([np.zeros((2, 3)), np.ones((2, 3))], "torch").shape
    torch.Size([2, 2, 3])
    """
    target = registry.framework(memory_type)
    try:
        planes = list(slices)
    except TypeError as error:
        raise TypeError(
            f"slices must be an iterable of arrays, got {type(slices).__name__}. Pass a list of arrays."
        ) from error
    stack = _along_new_axis(planes, target, gpu_id)
    _check_stack(target.shape(stack))
    return stack


def _check_stack(shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(
            f"A stack must have three axes, (slices, height, width), but its shape is {shape}. Reshape the"
            " arrays first."
        )


def _planes_of(stack: Any, framework: Framework) -> list[Any]:
    """Return the planes of a stack; raise `ArrayNotSupportedError` for sparse stacks that cannot be split."""
    try:
        return framework.batching.unstack(stack)
    except native_errors(framework) as error:
        if framework.sparse.layout(stack):
            raise sparse_array_error(framework, stack) from error
        raise


def _along_new_axis(slices: Sequence[Any], target: Framework, gpu_id: GpuId = None) -> Any:
    """Stack arrays of the same shape, with any number of axes, along a new first axis."""
    if not slices:
        raise ValueError("There are no slices to stack. Pass at least one array.")
    first = convert_memory(slices[0], target.name, gpu_id=gpu_id)
    device = target.devices.device_of(first)
    if target.devices.is_scattered(first):  # the other slices are on one device
        first = convert_memory(first, target.name, device=device)
    planes = [first]
    shape = target.shape(first)
    dtype = target.dtype_name(first)
    for i, plane in enumerate(slices[1:], 1):
        planes.append(convert_memory(plane, target.name, device=device))
        other = target.shape(planes[i])
        name = target.dtype_name(planes[i])
        if other != shape:
            raise ValueError(
                f"Slices must have the same shape, but slice 0 has {shape} and slice {i} has {other}. Pad or"
                " crop them first."
            )
        if name != dtype:
            raise TypeError(
                f"Slices must have the same dtype, but slice 0 has {dtype} and slice {i} has {name}. Cast"
                f" them first, for example with convert_memory(x, {target.name!r}, dtype={dtype!r})."
            )
    target.supports(dtype, (len(planes), *shape))
    try:
        return target.batching.stack(planes)
    except native_errors(target) as error:
        if target.sparse.layout(first):
            raise sparse_array_error(target, first) from error
        raise


@add_hints
def unstack_slices(array: Any, memory_type: FrameworkLike, gpu_id: GpuId = None) -> list[Any]:
    """Return the n planes of an array of shape ``(n, height, width)``, as arrays of ``memory_type``.

    Args:
        array: An array of any framework.
        memory_type: The framework of the planes. NumPy, CuPy and PyTorch planes are views.
        gpu_id: The accelerator of the planes. Defaults to the device of the array.

    Returns:
        A list of arrays of shape ``(height, width)``.

    Raises:
        ValueError: If the array does not have three axes.
        MemoryConversionError: If ``memory_type`` cannot represent the array exactly.

    >>> import numpy as np
    >>> [plane.tolist() for plane in unstack_slices(np.arange(4).reshape(2, 1, 2), "torch")]
    [[[0, 1]], [[2, 3]]]
    """
    source, data = source_of(array)
    _check_stack(source.shape(data))
    target = registry.framework(memory_type)
    return _planes_of(convert_memory(array, target.name, gpu_id=gpu_id), target)


@add_hints
def process_slices(array: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn(plane, *args, **kwargs)`` for each plane of a 3-D array and stack the results.

    Args:
        array: An array of shape ``(n, height, width)``, of any framework. The planes belong to the
            same framework.
        fn: A function of one plane. Its results may have another framework and another shape, which must be
            the same for all planes. It may write them to a buffer that it reuses, unless it exports the
            buffer to JAX or TensorFlow.
        *args: Further positional arguments of every call.
        **kwargs: Further keyword arguments of every call.

    Returns:
        The stacked arrays, in the framework of the results. For containers, one container with a stack in
        each place. For other objects, including NumPy scalars, the list of results; None if all are None.

    Raises:
        ValueError: If the array does not have three axes, has no planes, or the results differ in shape or
            structure.
        TypeError: If ``fn`` is not callable, or the results differ in dtype.

    >>> import numpy as np
    >>> stack = np.arange(12.0).reshape(2, 2, 3)
    >>> flipped, mean = process_slices(stack, lambda plane: (plane[::-1], plane.mean()))
    >>> flipped.shape, [float(m) for m in mean]
    ((2, 2, 3), [2.5, 8.5])
    """
    if not callable(fn):
        raise TypeError(
            f"process_slices expected a function, got {type(fn).__name__}."
            " Pass it as the second argument: process_slices(array, fn)."
        )
    source, data = source_of(array)
    _check_stack(source.shape(data))
    return call_by_planes(lambda plane: fn(plane, *args, **kwargs), None, data)


def call_by_planes(
    fn: Callable[..., Any], self_argument: SelfArgument | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``fn`` once for each plane of its 3-D arrays, and stack the results.

    If there is no array argument, or the first one has two axes or fewer, ``fn`` is called once, with
    all arguments unchanged. Otherwise, all array arguments with three axes are split into planes. Other
    arguments, including containers of arrays, are passed to every call.

    Args:
        fn: The function.
        self_argument: Recognizes ``self`` and ``cls``, which are never split; None if there is none.
        *args: The arguments of the function.
        **kwargs: The keyword arguments of the function.

    Raises:
        ValueError: If the first array has more than three axes, the numbers of planes differ or are 0, or the
            results cannot be joined.
    """
    values = [*args, *kwargs.values()]
    skip = 0 if self_argument is None else self_argument.count(args)
    arrays = {i: source_of(x) for i, x in enumerate(values) if i >= skip and kind_of(x) is ARRAY}
    axes = {i: len(owner.shape(data)) for i, (owner, data) in arrays.items()}
    first = next(iter(axes.values()), 0)
    if first < 3:
        return fn(*args, **kwargs)
    if first > 3:
        raise ValueError(
            f"slice_by_slice=True expects arrays with at most three axes, got {first}. Call the function for"
            " each 3-D stack."
        )
    stacks = {i: _planes_of(data, owner) for i, (owner, data) in arrays.items() if axes[i] == 3}
    results = []
    for number in range(_number_of_planes([len(planes) for planes in stacks.values()])):
        for i, planes in stacks.items():
            values[i] = planes[number]
        result = fn(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        # The function may return a buffer to which it writes again for the next plane.
        results.append(map_arrays(result, snapshot))
    return together(results, _join_results, "plane")


def _number_of_planes(counts: Sequence[int]) -> int:
    """Return the number of planes, which must be the same for all stacks.

    Raises:
        ValueError: If the numbers differ or are 0.
    """
    if len(set(counts)) > 1:
        raise ValueError(
            f"The arrays have different numbers of planes: {counts}. With slice_by_slice=True, all 3-D arrays"
            " need the same number."
        )
    if not counts[0]:
        raise ValueError("Cannot process a stack without planes. Pass at least one plane.")
    return counts[0]


def _join_results(results: Sequence[Any], _: str) -> Any:
    """Stack the results of all planes at one place of a result; return a list if they are not arrays."""
    if any(kind_of(result) is ARRAY for result in results):
        return _along_new_axis(results, source_of(results[0])[0])
    return None if all(result is None for result in results) else list(results)
