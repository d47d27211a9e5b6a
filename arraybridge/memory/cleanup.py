"""Functions that free the caches of frameworks. They import no framework and initialize no accelerator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from arraybridge.conversion.device_resolution import check_gpu_id
from arraybridge.device import Device
from arraybridge.errors import DeviceNotFoundError
from arraybridge.interface import keep_alives, registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.registry import loaded
from arraybridge.reasons import Reason
from arraybridge.settings import missing_gpu
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import add_hints, bool_option

__all__ = [
    "cleanup_all_gpu_frameworks",
    "cleanup_cupy_gpu",
    "cleanup_jax_gpu",
    "cleanup_pyclesperanto_gpu",
    "cleanup_tensorflow_gpu",
    "cleanup_torch_gpu",
    "free_memory",
]

#: Functions that empty caches of this package, such as pools. Each takes a device (None: all) and the name
#: of a framework (None: all), and returns the number of bytes freed.
own_caches: list[Callable[[Device | None, str | None], int]] = []


@add_hints
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
        gpu_id: The number of the accelerator, as each framework numbers its accelerators. PyTorch can only
            free the caches of all GPUs at once. Defaults to None: all accelerators.
        compiled: Whether to drop compiled programs as well: those of JAX, and CuPy's plans for Fourier
            transforms. The next calls compile them again. Defaults to False.

    Returns:
        The number of bytes freed.

    Raises:
        UnknownFrameworkError: If no framework of that name is known.
        DeviceNotFoundError: If no loaded framework has that accelerator.
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.
        TypeError: If ``compiled`` is not a bool.

    Example:
        >>> free_memory() >= 0
        True
    """
    name = None if framework is None else registry.framework_name(framework)
    index = gpu_number("free_memory", gpu_id)
    bool_option("compiled", compiled)
    frameworks = loaded(name)
    if index is not None and not frameworks_with_gpu(index, frameworks):
        return 0
    return release_caches(frameworks, index, compiled=compiled)


# Older names.
cleanup_all_gpu_frameworks = partial(free_memory, None)
cleanup_cupy_gpu = partial(free_memory, "cupy")
cleanup_jax_gpu = partial(free_memory, "jax")
cleanup_pyclesperanto_gpu = partial(free_memory, "pyclesperanto")
cleanup_tensorflow_gpu = partial(free_memory, "tensorflow")
cleanup_torch_gpu = partial(free_memory, "torch")


def release_caches(
    frameworks: list[Framework], index: int | None, *, compiled: bool = False, collect: bool = True
) -> int:
    """Collect garbage, free the caches of these frameworks, and return the number of bytes freed."""
    if collect:
        gc.collect()
    keep_alives.block_until_ready()  # memory shared between frameworks may still be in use by a stream
    freed = 0
    for one in frameworks:
        device = None if index is None else one.devices.accelerator(index)
        for empty in own_caches:
            freed += empty(device, one.name)
        freed += one.memory.free_cache(device, compiled)
    return freed


def gpu_number(caller: str, gpu_id: GpuId) -> int | None:
    """Check the ``gpu_id`` of a function that acts on one or on all accelerators, and return it.

    Args:
        caller: The name of the function, for the message.
        gpu_id: The number of the accelerator, or None for all.

    Returns:
        The number as an int, or None.

    Raises:
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.
    """
    with suppress(ValueError):  # replace this error, because its message suggests "auto"
        index = check_gpu_id(gpu_id)
        if not isinstance(index, str):
            return index
    raise ValueError(
        f"{caller}() does not accept gpu_id={gpu_id!r}. Pass the number of a GPU, such as 0 or"
        " least_used_gpu(), or None."
    )


def frameworks_with_gpu(index: int, frameworks: list[Framework]) -> list[Framework]:
    """Return those of ``frameworks`` that have the accelerator number ``index``.

    Raises:
        DeviceNotFoundError: If none has it and `settings` does not select the host instead.
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
