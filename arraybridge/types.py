"""Framework names, and the types of arguments that name a framework or a GPU number."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias


class MemoryType(StrEnum):
    """Names of built-in frameworks. A member is accepted wherever a framework name is accepted.

    MLX and Paddle have no member; use the strings ``"mlx"`` and ``"paddle"``.

    >>> MemoryType.TORCH == "torch"
    True
    """

    NUMPY = "numpy"
    CUPY = "cupy"
    TORCH = "torch"
    JAX = "jax"
    TENSORFLOW = "tensorflow"
    PYCLESPERANTO = "pyclesperanto"

    # Enum hashes a member by its name. With the hash of the string, looking up a member finds the cache
    # entries that were stored under the plain string.
    __hash__ = str.__hash__


FrameworkLike: TypeAlias = str | MemoryType
GpuId: TypeAlias = int | Literal["auto"] | None
