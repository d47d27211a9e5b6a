"""Functions that free caches, select a GPU in all frameworks, and let frameworks share one GPU.

They import no framework and open no accelerator, except for `gpu_context` and `share_gpu_memory`.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from arraybridge.conversion.device_resolution import check_gpu_id
from arraybridge.errors import Advice, DeviceNotFoundError, MemoryConversionError
from arraybridge.frameworks import gpu_memory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.registry import loaded
from arraybridge.reasons import Reason
from arraybridge.settings import missing_gpu
from arraybridge.types import Device, FrameworkLike, GpuId

__all__ = [
    "Coexistence",
    "SharedPoolError",
    "cleanup_all_gpu_frameworks",
    "cleanup_cupy_gpu",
    "cleanup_jax_gpu",
    "cleanup_pyclesperanto_gpu",
    "cleanup_tensorflow_gpu",
    "cleanup_torch_gpu",
    "coexist",
    "free_memory",
    "gpu_context",
    "share_gpu_memory",
]

#: Functions that empty the caches of this package. Each takes a device (None: all) and the name of a
#: framework (None: all), and returns the number of bytes freed.
own_caches: list[Callable[[Device | None, str | None], int]] = []


class SharedPoolError(MemoryConversionError, RuntimeError):
    """CuPy holds memory of its own pool, so it cannot use PyTorch's pool.

    Also a ``RuntimeError``. Call `share_gpu_memory` before the first CuPy array::

        arraybridge.share_gpu_memory("torch")
        x = cupy.zeros(3)
    """


# -- freeing caches ----------------------------------------------------------------------------------


def free_memory(
    framework: FrameworkLike | None = None, gpu_id: int | None = None, *, compiled: bool = False
) -> int:
    """Free the caches of every loaded framework, and return the number of bytes freed.

    Arrays keep their memory. Garbage is collected first. PyTorch frees its cached blocks and its pinned host
    memory, CuPy frees both of its pools, and every `BufferPool` drops its idle arrays. JAX frees only the
    memory of compiled programs, with ``compiled=True``. TensorFlow frees no memory before the process ends;
    call `coexist` to limit how much it reserves. pyclesperanto and NumPy have no cache.

    Args:
        framework: The only framework whose caches are freed. It is not imported. Defaults to None: all
            loaded frameworks.
        gpu_id: The number of the accelerator, as each framework counts. Defaults to None: all accelerators.
        compiled: Whether to drop compiled programs as well: those of JAX, and CuPy's plans of Fourier
            transforms. The next calls compile again. Defaults to False.

    Returns:
        The number of bytes freed.

    Raises:
        UnknownFrameworkError: If no framework of that name is known.
        DeviceNotFoundError: If no loaded framework has that accelerator.
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.

    Example:
        >>> free_memory() >= 0
        True
    """
    name = None if framework is None else registry.framework_name(framework)
    index = gpu_number("free_memory", gpu_id)
    frameworks = loaded(name)
    if index is not None and not _frameworks_with_gpu(index, frameworks):
        return 0
    return release_caches(frameworks, index, compiled=compiled)


def _freed(framework: str | None, gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """Call `free_memory` as in arraybridge 0.2 to 0.5: a ``device_id`` without a device frees nothing."""
    if device_id is None:
        return free_memory(framework, gpu_id)
    try:
        return free_memory(framework, device_id)
    except DeviceNotFoundError:
        return 0


cleanup_all_gpu_frameworks = partial(_freed, None)
cleanup_cupy_gpu = partial(_freed, "cupy")
cleanup_jax_gpu = partial(_freed, "jax")
cleanup_pyclesperanto_gpu = partial(_freed, "pyclesperanto")
cleanup_tensorflow_gpu = partial(_freed, "tensorflow")
cleanup_torch_gpu = partial(_freed, "torch")


def release_caches(frameworks: list[Framework], index: int | None, *, compiled: bool = False) -> int:
    """Collect garbage, free the caches of these frameworks, and return the number of bytes freed."""
    gc.collect()
    gpu_memory.block_until_ready()  # memory shared between frameworks may still be in use by a stream
    freed = 0
    for one in frameworks:
        device = None if index is None else one.devices.accelerator(index)
        for empty in own_caches:
            freed += empty(device, one.name)
        freed += one.memory.free_cache(device, compiled)
    return freed


def gpu_number(caller: str, gpu_id: GpuId) -> int | None:
    """Return the number of an accelerator, or None, for functions that act on one or on all of them.

    Args:
        caller: The name of the function, for the message.
        gpu_id: The number, or None.

    Raises:
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.
    """
    with suppress(ValueError):  # its message suggests "auto"
        index = check_gpu_id(gpu_id)
        if not isinstance(index, str):
            return index
    raise ValueError(
        f"{caller}() does not accept gpu_id={gpu_id!r}. Pass the number of a GPU, such as 0 or"
        " least_used_gpu(), or None."
    )


def _frameworks_with_gpu(index: int, frameworks: list[Framework]) -> list[Framework]:
    """Return the frameworks that have that accelerator.

    Raises:
        DeviceNotFoundError: If none has it and `settings` do not select the host instead.
    """
    devices = {one: one.devices.visible_devices() for one in frameworks}
    owners = [one for one in frameworks if one.devices.accelerator(index) in devices[one]]
    if owners or missing_gpu() == "host":
        return owners
    have = "; ".join(f"{one.name} has {', '.join(map(str, own)) or 'none'}" for one, own in devices.items())
    reason = f"no loaded framework has an accelerator with gpu_id={index}"
    raise DeviceNotFoundError(
        f"{reason}{have and f': {have}'}.",
        reason=reason,
        code=Reason.NO_DEVICE,
        advice="Pass the gpu_id of an available accelerator, or None. To use the host instead, write"
        " \"with arraybridge.settings(missing_gpu='host'):\" around the call.",
    )


# -- selecting a GPU ---------------------------------------------------------------------------------


@contextmanager
def gpu_context(gpu_id: int | None) -> Iterator[int | None]:
    """Make accelerator ``gpu_id`` the current one of every loaded framework, inside a ``with`` block.

    When the block ends, also after an exception, the previous accelerator of each framework is restored and
    the caches of this accelerator are freed. Frameworks without this accelerator, such as CPU builds, are
    left unchanged.

    Args:
        gpu_id: The number of the accelerator. None selects nothing, and frees the caches of all accelerators
            when the block ends.

    Yields:
        The number as an int, or None.

    Raises:
        DeviceNotFoundError: If no loaded framework has the accelerator.
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.

    Example:
        >>> with gpu_context(None) as gpu_id:
        ...     gpu_id is None
        True
    """
    index = gpu_number("gpu_context", gpu_id)
    frameworks = loaded()
    with ExitStack() as stack:
        stack.callback(release_caches, frameworks, index)
        if index is not None:
            for one in _frameworks_with_gpu(index, frameworks):
                stack.enter_context(one.devices.selected(one.devices.accelerator(index)))
        yield index


# -- sharing one GPU ---------------------------------------------------------------------------------


def share_gpu_memory(framework: FrameworkLike = "torch") -> None:
    """Make CuPy allocate from PyTorch's pool, so that each can use the memory that the other frees.

    It applies to the whole process, from this call on. PyTorch's allocator reuses each block only on
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
        error.advise(
            Advice("share_gpu_memory() has an effect only with a CUDA GPU. Skip it on this machine.")
        )
        raise
    try:
        cupy.use_allocator(*owner.allocator())
    except RuntimeError as error:
        raise SharedPoolError(
            f"CuPy can no longer switch to PyTorch's memory: {error}. Call share_gpu_memory() before you"
            " create the first CuPy array, or delete all CuPy arrays and call free_memory('cupy') first."
        ) from error


class Coexistence(NamedTuple):
    """The result of `coexist`; it prints one line per variable.

    Attributes:
        environment: The environment variables that were set, with their values.
        too_late: The frameworks that had already initialized their devices.

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
    """Return the environment variables that `coexist` sets."""
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, Real):
            raise TypeError(f"fraction={fraction!r} must be a number above 0 and at most 1, or None.")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r} is out of range. Pass a number above 0 and at most 1.")
        chosen["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:g}"
        chosen["CUPY_GPU_MEMORY_LIMIT"] = f"{100 * fraction:g}%"
    return chosen


def coexist(fraction: float | None = None) -> Coexistence:
    """Stop JAX and TensorFlow from reserving a whole GPU, so that several frameworks can use it.

    Sets the environment variables that frameworks read when they open their devices, for this process and
    for its child processes. Call it before you use any framework.

    Args:
        fraction: The largest fraction of a GPU's memory for each of JAX and CuPy (0 < fraction <= 1). For
            PyTorch, call ``torch.cuda.set_per_process_memory_fraction``; TensorFlow has no such limit.
            Defaults to None, which sets no limit.

    Returns:
        The variables that were set, and the frameworks for which the call came too late.

    Warns:
        RuntimeWarning: If a framework has already opened its devices.

    Raises:
        TypeError: If ``fraction`` is not a number.
        ValueError: If ``fraction`` is out of range.

    Example:
        >>> print(coexist().environment["XLA_PYTHON_CLIENT_PREALLOCATE"])
        false
    """
    chosen = coexistence(fraction)
    if fraction is not None:  # JAX raises an error at startup if both names are set
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
        warnings.warn(
            f"coexist() came too late for {' and '.join(latecomers)}: the devices are already open, and the"
            " whole GPU may be reserved. Call it at the start of the program, before you use any framework.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Coexistence(chosen, latecomers)
