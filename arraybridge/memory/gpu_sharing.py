"""Functions that let several frameworks of a process use the memory of one GPU."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any, NamedTuple

from arraybridge import hardware
from arraybridge.advice import Advice
from arraybridge.device import Device
from arraybridge.errors import DeviceNotFoundError, MemoryConversionError, warn
from arraybridge.interface import registry
from arraybridge.interface.registry import loaded
from arraybridge.reasons import Reason
from arraybridge.types import FrameworkLike
from arraybridge.validation import add_hints

__all__ = ["Coexistence", "SharedPoolError", "coexist", "coexistence", "share_gpu_memory"]


class SharedPoolError(MemoryConversionError, RuntimeError):
    """CuPy still holds memory from its own pool, so it cannot switch to PyTorch's pool.

    Also a ``RuntimeError``. Call `share_gpu_memory` before the first CuPy array::

        arraybridge.share_gpu_memory("torch")
        x = cupy.zeros(3)
    """


@add_hints
def share_gpu_memory(framework: FrameworkLike = "torch") -> None:
    """Make CuPy allocate from PyTorch's pool, so that each can use the memory that the other frees.

    The change applies to the whole process, from this call on. PyTorch's allocator reuses each block only on
    the stream on which CuPy requested it, as CuPy's own pool does.

    Args:
        framework: The framework whose pool CuPy uses. Only ``"torch"`` is supported. Defaults to ``"torch"``.

    Raises:
        FrameworkNotInstalledError: If CuPy or PyTorch is missing.
        DeviceNotFoundError: If PyTorch has no CUDA device.
        SharedPoolError: If CuPy has already allocated memory from its own pool.
        ValueError: If ``framework`` is not PyTorch.

    Example:
        >>> share_gpu_memory("torch")  # doctest: +SKIP
    """
    name = registry.framework_name(framework)
    if not registry.metadata_of(name).has_allocator:
        raise ValueError(f"CuPy cannot use the memory pool of {name!r}. Pass 'torch'.")
    owner: Any = registry.framework(name)
    cupy: Any = registry.framework("cupy")
    try:
        owner.devices.find_device(Device("gpu", 0))
    except DeviceNotFoundError as error:
        if hardware.gpus():
            error.advise(Advice(""))  # the reason already states what to install
            raise
        raise DeviceNotFoundError(
            f"{name} has no device gpu:0 here: this machine has no CUDA GPU.",
            target_type=name,
            reason="this machine has no CUDA GPU",
            code=Reason.NO_DEVICE,
            advice="Skip share_gpu_memory() on this machine.",
        ) from None
    try:
        cupy.use_allocator(*owner.allocator())
    except RuntimeError as error:
        raise SharedPoolError(
            f"CuPy can no longer switch to PyTorch's memory: {error}. Call share_gpu_memory() before you"
            " create the first CuPy array, or delete all CuPy arrays and call free_memory('cupy') first."
        ) from error


class Coexistence(NamedTuple):
    """The result of `coexist`. It prints as one line per variable.

    Attributes:
        environment: The environment variables that were set, with their values.
        too_late: The frameworks that had already initialized their devices without these variables.

    Example:
        >>> print(Coexistence({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, ("jax",)))
        XLA_PYTHON_CLIENT_PREALLOCATE=false
        too late for jax
    """

    environment: dict[str, str]
    too_late: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{name}={value}" for name, value in self.environment.items()]
        return "\n".join([*lines, *(f"too late for {name}" for name in self.too_late)])


def coexistence(fraction: float | None = None) -> dict[str, str]:
    """Return the environment variables that `coexist` sets, with their values."""
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, Real):
            raise TypeError(f"fraction={fraction!r} must be a number above 0 and at most 1, or None.")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r} is out of range. Pass a number above 0 and at most 1.")
        chosen["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:g}"
        chosen["CUPY_GPU_MEMORY_LIMIT"] = f"{100 * fraction:g}%"
    return chosen


@add_hints
def coexist(fraction: float | None = None) -> Coexistence:
    """Stop JAX and TensorFlow from reserving a whole GPU, so that several frameworks can use it.

    Sets the environment variables that frameworks read when they initialize devices, for this process and
    for its child processes. Call it before you use any framework.

    Args:
        fraction: The largest fraction of a GPU's memory for each of JAX and CuPy (0 < fraction <= 1). For
            PyTorch, call ``torch.cuda.set_per_process_memory_fraction``; TensorFlow has no such limit.
            Defaults to None, which sets no limit.

    Returns:
        The variables that were set, and the frameworks for which the call came too late.

    Warns:
        RuntimeWarning: If a framework has already initialized its devices without these variables.

    Raises:
        TypeError: If ``fraction`` is not a number.
        ValueError: If ``fraction`` is out of range.

    Example:
        >>> print(coexist().environment["XLA_PYTHON_CLIENT_PREALLOCATE"])
        false
    """
    chosen = coexistence(fraction)
    if fraction is not None:  # JAX raises an error at startup if both names are set, openxla/xla#16457
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    readers = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "jax",
        "TF_FORCE_GPU_ALLOW_GROWTH": "tensorflow",
        "CUPY_GPU_MEMORY_LIMIT": "cupy",
    }
    latecomers = tuple(
        name
        for variable, name in readers.items()
        if variable in chosen and os.environ.get(variable) != chosen[variable]
        if any(one.devices.is_started() for one in loaded(name))
    )
    os.environ.update(chosen)
    if latecomers:
        warn(
            f"coexist() came too late for {' and '.join(latecomers)}: the devices are already initialized,"
            " and the whole GPU may be reserved. Call it at the start of the program, before you use any"
            " framework.",
            RuntimeWarning,
        )
    return Coexistence(chosen, latecomers)
