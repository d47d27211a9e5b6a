"""`convert_tree`: convert every array in nested containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.request import Request, check_options, dtype_name
from arraybridge.frameworks import registry
from arraybridge.trees import map_arrays
from arraybridge.types import DeviceLike, FrameworkLike, GpuId

if TYPE_CHECKING:
    from arraybridge.conversion.convert import Grad

__all__ = ["convert_tree"]


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
    Containers keep their types, and dicts their order. A container that cannot be rebuilt stays unchanged,
    with its arrays. For a named tuple, or a class registered with optree, this raises an error instead.

    Args:
        tree: Nested containers: dicts, lists, tuples and deques, their subclasses, named tuples,
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
        MemoryConversionError: One of the subclasses that `convert_memory` raises. The message contains the
            path of the array in ``tree``.
        ArrayNotSupportedError: If a named tuple, or an object of a class that is registered with optree,
            cannot be rebuilt with the converted arrays.
        UnknownFrameworkError: If no framework has the name of the target.
        ValueError: If a container contains itself, or an option is invalid.

    Example:
        >>> import numpy as np
        >>> convert_tree({"image": np.zeros(2), "name": "cell"}, "torch")
        {'image': tensor([0., 0.], dtype=torch.float64), 'name': 'cell'}
    """
    name = registry.framework_name(target)

    def convert(leaf: Any) -> Any:
        return convert_memory(leaf, name, None, gpu_id, copy=copy, dtype=dtype, grad=grad, device=device)

    converted = map_arrays(tree, convert)
    if converted is tree:  # without arrays, no conversion has checked the options
        check_options(Request(name, None, gpu_id, device, copy, dtype, grad))
        if dtype is not None:
            dtype_name(dtype)
    return converted
