"""Taking a stack of images apart, putting one together, and both around a function of one image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from arraybridge.batches import snapshot
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.trees import ARRAY, kind_of, map_arrays, together
from arraybridge.types import FrameworkLike, GpuId

__all__ = ["process_slices", "stack_slices", "unstack_slices"]


def stack_slices(slices: Iterable[Any], memory_type: FrameworkLike, gpu_id: GpuId = None) -> Any:
    """One array ``(n, height, width)`` of ``memory_type`` with the slices along its first axis.

    Args:
        slices: n arrays of one shape, ``(height, width)``, and one dtype, of any frameworks.
        memory_type: the framework of the result.
        gpu_id: its accelerator; left out, the result lives where the first slice does.

    Raises:
        ValueError: there are no slices, or their shapes differ, or they have not two axes.
        TypeError: their dtypes differ, or ``slices`` cannot be iterated over.
        MemoryConversionError: or a subclass, where ``memory_type`` cannot hold them exactly.

    >>> import numpy as np
    >>> stack_slices([np.zeros((2, 3)), np.ones((2, 3))], "torch").shape
    torch.Size([2, 2, 3])
    """
    target = registry.framework(memory_type)
    try:
        planes = list(slices)
    except TypeError as error:
        raise TypeError(
            f"slices must be several arrays, not {type(slices).__name__}. Pass a list of arrays."
        ) from error
    stack = _along_new_axis(planes, target, gpu_id)
    _check_stack(target.shape(stack))
    return stack


def _check_stack(shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(f"a stack has three axes, (slices, height, width); this is one of shape {shape}")


def _along_new_axis(slices: Sequence[Any], target: Framework, gpu_id: GpuId = None) -> Any:
    """Arrays of one shape, whatever it is, along a new first axis."""
    if not slices:
        raise ValueError("there are no slices to stack")
    planes = [convert_memory(slices[0], target.name, gpu_id=gpu_id)]
    first = planes[0]
    shape = target.shape(first)
    dtype = target.dtype_name(first)
    device = target.devices.device_of(first)
    for i, plane in enumerate(slices[1:], 1):
        planes.append(convert_memory(plane, target.name, device=device))
        other = target.shape(planes[i])
        name = target.dtype_name(planes[i])
        if other != shape:
            raise ValueError(f"slices of one shape stack: slice 0 has {shape}, slice {i} has {other}")
        if name != dtype:
            raise TypeError(
                f"slice 0 has {dtype}, slice {i} has {name}; cast by convert_memory(..., dtype=...)"
            )
    target.supports(dtype, (len(planes), *shape))
    return target.batching.stack(planes)


def unstack_slices(array: Any, memory_type: FrameworkLike, gpu_id: GpuId = None) -> list[Any]:
    """The planes of a 3-D array ``(n, height, width)``, each an array of ``memory_type``.

    Args:
        array: of any framework.
        memory_type: the framework of the planes; in numpy, cupy and torch they are views.
        gpu_id: its accelerator; left out, the planes live where the array does.

    Raises:
        ValueError: the array has not three axes.
        MemoryConversionError: or a subclass, where ``memory_type`` cannot hold the array exactly.

    >>> import numpy as np
    >>> [plane.tolist() for plane in unstack_slices(np.arange(4).reshape(2, 1, 2), "torch")]
    [[[0, 1]], [[2, 3]]]
    """
    source, data = source_of(array)
    _check_stack(source.shape(data))
    target = registry.framework(memory_type)
    return target.batching.unstack(convert_memory(array, target.name, gpu_id=gpu_id))


def process_slices(array: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn(plane, *args, **kwargs)`` for each plane of a 3-D array and stack what comes back.

    Args:
        array: ``(n, height, width)``, of any framework; the planes belong to the same.
        fn: takes one plane. Its results may be of another framework and another shape, all alike. It may
            write them into a buffer of its own, unless it lends that to JAX or TensorFlow.
        *args: passed on to every call as they are.
        **kwargs: likewise.

    Returns:
        the stacked results, in their framework; of tuples and other containers one with a stack in each
        place; of what is no array the list of the results; None where ``fn`` returned None.

    Raises:
        ValueError: the array has not three axes or no plane, or the results differ in shape or structure.
        TypeError: the results differ in dtype.

    >>> import numpy as np
    >>> stack = np.arange(12.0).reshape(2, 2, 3)
    >>> flipped, mean = process_slices(stack, lambda plane: (plane[::-1], plane.mean()))
    >>> flipped.shape, [float(m) for m in mean]
    ((2, 2, 3), [2.5, 8.5])
    """
    source, data = source_of(array)
    _check_stack(source.shape(data))
    return call_by_planes(lambda plane: fn(plane, *args, **kwargs), 0, data)


def call_by_planes(fn: Callable[..., Any], skip: int, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` once for each plane of its 3-D arrays, and stack what comes back.

    The first array among the arguments decides: with two axes or fewer ``fn`` is called once, as it is.
    Other arrays with three axes go plane by plane beside it; all else goes to every call as it is.
    ``skip`` positional arguments, self, are never looked at.

    Raises:
        ValueError: the first array has more than three axes, or another has a different number of planes.
    """
    values = [*args, *kwargs.values()]
    arrays = {i: source_of(x) for i, x in enumerate(values) if i >= skip and kind_of(x) is ARRAY}
    axes = {i: len(owner.shape(data)) for i, (owner, data) in arrays.items()}
    first = next(iter(axes.values()), 0)
    if first < 3:
        return fn(*args, **kwargs)
    if first > 3:
        raise ValueError(f"slice_by_slice=True takes apart arrays with three axes, not {first}")
    stacks = {i: owner.batching.unstack(data) for i, (owner, data) in arrays.items() if axes[i] == 3}
    counts = [len(planes) for planes in stacks.values()]
    if len(set(counts)) > 1:
        raise ValueError(f"slice_by_slice=True: the arrays have different numbers of planes: {counts}")
    if not counts[0]:
        raise ValueError("a stack without planes leaves nothing to stack")
    results = []
    for number in range(counts[0]):
        for i, planes in stacks.items():
            values[i] = planes[number]
        result = fn(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        # The function may write to a buffer of its own again at the next plane.
        results.append(map_arrays(result, snapshot))
    return together(results, _column, "plane")


def _column(results: Sequence[Any], _: str) -> Any:
    """What the calls for the planes gave in one place: arrays stacked, and of anything else the list."""
    if any(kind_of(result) is ARRAY for result in results):
        return _along_new_axis(results, source_of(results[0])[0])
    return None if all(result is None for result in results) else list(results)
