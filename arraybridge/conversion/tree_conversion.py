"""`convert_tree`: convert every array in nested containers."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.conversion.convert import Grad, convert_memory, explain
from arraybridge.conversion.detection import detect_memory_type
from arraybridge.conversion.output import memory_range
from arraybridge.conversion.request import Request, check_options
from arraybridge.device import DeviceLike
from arraybridge.errors import MemoryConversionError, note_on
from arraybridge.interface import registry
from arraybridge.trees import map_arrays, pair_arrays
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import add_hints

__all__ = ["convert_tree"]


@add_hints
def convert_tree(
    tree: Any,
    target: FrameworkLike | None = None,
    gpu_id: GpuId = None,
    *,
    copy: bool | None = None,
    dtype: Any = None,
    grad: Grad = "error",
    device: DeviceLike | None = None,
    out: Any = None,
) -> Any:
    """Convert every array in nested containers, and leave everything else unchanged.

    NumPy scalars, ``bytes``, ``bytearray`` and ``mmap``, which `convert_memory` accepts, stay unchanged, too.
    Containers keep their types, and dicts their order. A container that cannot be rebuilt stays unchanged,
    with its arrays. For a named tuple, or a class registered with optree, this raises an error instead.

    Args:
        tree: Nested containers: dicts, lists, tuples and deques, their subclasses, named tuples,
            dataclasses, attrs classes, pydantic models, ``UserDict``, ``SimpleNamespace``, other mappings
            that can be rebuilt from a dict, and classes that are registered with optree (in its global
            namespace or in ``"arraybridge"``), JAX or PyTorch.
        target: The framework to convert to. It is optional if ``out`` is passed.
        gpu_id: As for `convert_memory`. Every option applies to every array.
        copy: As for `convert_memory`.
        dtype: As for `convert_memory`.
        grad: As for `convert_memory`.
        device: As for `convert_memory`.
        out: Containers with the same keys as ``tree``, of any types. Each array of ``tree`` is written to the
            array at the same place of ``out``, as by `convert_memory`. All arrays are compared before any is
            written. Defaults to None, which returns other arrays.

    Returns:
        ``out`` if it was passed. Otherwise, a container of the same structure; ``tree`` itself if nothing was
        converted.

    Raises:
        MemoryConversionError: One of the subclasses that `convert_memory` raises. The message contains the
            path of the array in ``tree``.
        ArrayNotSupportedError: If a named tuple, or an object of a class that is registered with optree,
            cannot be rebuilt with the converted arrays.
        UnknownFrameworkError: If no framework has the name of the target.
        TypeError: If there is neither a target nor ``out``, or an array of ``out`` cannot be modified.
        ValueError: If a container contains itself, the keys of ``out`` differ, or an option is invalid.

    Example:
        >>> import numpy as np
        >>> convert_tree({"image": np.zeros(2), "name": "cell"}, "torch")
        {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'cell'}
    """
    if target is None and out is None:
        raise TypeError('the target framework is missing. Pass its name, as in convert_tree(tree, "torch").')
    name = "" if target is None else registry.framework_name(target)
    has_options = gpu_id is not None or device is not None or copy is not None or dtype is not None
    if out is None and not has_options and isinstance(grad, str) and grad == "error":
        return map_arrays(tree, lambda leaf: convert_memory(leaf, name))  # the fastest way to call it
    check_options(Request(name, None, gpu_id, device, copy, dtype, grad))
    if out is not None:
        return _write_tree(tree, out, target, gpu_id, copy=copy, dtype=dtype, grad=grad, device=device)

    def convert(leaf: Any) -> Any:
        return convert_memory(leaf, name, None, gpu_id, copy=copy, dtype=dtype, grad=grad, device=device)

    return map_arrays(tree, convert)


def _write_tree(tree: Any, out: Any, target: FrameworkLike | None, gpu_id: GpuId, **options: Any) -> Any:
    """Write each array of a tree to the array at the same place of ``out``, and return ``out``."""
    pairs = list(pair_arrays(tree, out))
    for x, buffer, place in pairs:  # all are compared before any is written
        try:
            explain(x, None, target, gpu_id, out=buffer, **options)
        except MemoryConversionError as error:
            if place:
                error.add_path(place)
            raise
        except (TypeError, ValueError) as error:
            note_on(error, f"arraybridge: at {place or 'the top level'} of out")
            raise
    ranges = np.array([memory_range(buffer) for _, buffer, _ in pairs]).reshape(-1, 2)
    sources = [x for x, _, _ in pairs]
    for i, (x, buffer, _) in enumerate(pairs):
        first, last = memory_range(x)
        earlier = ranges[:i]
        if x is not buffer and np.any((earlier[:, 0] < last) & (first < earlier[:, 1])):
            # An earlier array of `out` is this array, or overlaps it.
            sources[i] = convert_memory(x, detect_memory_type(x), copy=True, grad="detach")
    for x, (_, buffer, _) in zip(sources, pairs, strict=True):
        convert_memory(x, None, target, gpu_id, out=buffer, **options)
    return out
