"""Give caches back, select a device everywhere, and let frameworks share one card.

Nothing here imports a framework, and nothing opens an accelerator that the process has not opened yet;
`gpu_context` and `share_gpu_memory`, which are about to use one, are the exceptions.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from arraybridge.conversion.placement import check_gpu_id
from arraybridge.errors import DeviceNotFoundError, MemoryConversionError
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

#: Caches of arraybridge's own, which `release_caches` empties: functions from a device (None: all) and the
#: name of a framework (None: all) to the bytes that they gave back.
own_caches: list[Callable[[Device | None, str | None], int]] = []


class SharedPoolError(MemoryConversionError, RuntimeError):
    """CuPy holds memory of its own pool, so it cannot use PyTorch's pool.

    Also a ``RuntimeError``. Call `share_gpu_memory` before the first CuPy array::

        arraybridge.share_gpu_memory("torch")
        x = cupy.zeros(3)
    """


# -- giving back -------------------------------------------------------------------------------------


def free_memory(
    framework: FrameworkLike | None = None, gpu_id: int | None = None, *, compiled: bool = False
) -> int:
    """Give the caches of every loaded framework back to the system, and return the bytes given back.

    What arrays hold stays; what nobody refers to any more is collected first. PyTorch gives back its cached
    blocks and its pinned host memory, CuPy both of its pools, and every `BufferPool` its idle arrays.
    JAX keeps what it has taken from a card, but for the memory of compiled programs, if asked.
    TensorFlow gives back nothing before the process ends (`coexist` makes it take less), and
    pyclesperanto, like NumPy, keeps no cache.

    Args:
        framework: only that one. It is not imported: one that is not loaded holds nothing.
        gpu_id: only that accelerator, counted as each framework counts; None: all of them.
        compiled: drop compiled programs too (JAX's, and CuPy's plans of Fourier transforms); the next
            calls compile again.

    Raises:
        UnknownFrameworkError: no framework of that name is known.
        DeviceNotFoundError: no loaded framework has that accelerator.
        ValueError: ``gpu_id`` is negative, a bool or a float.

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
    """`free_memory` as arraybridge 0.2 to 0.5 calls it: ``device_id`` is ``gpu_id``, and misses no card."""
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
    """Collect garbage, then free the caches of these frameworks; returns the bytes given back."""
    gc.collect()
    gpu_memory.block_until_ready()  # what frameworks have lent one another, and is read no more
    freed = 0
    for one in frameworks:
        device = None if index is None else one.devices.accelerator(index)
        for empty in own_caches:
            freed += empty(device, one.name)
        freed += one.memory.free_cache(device, compiled)
    return freed


def gpu_number(who: str, gpu_id: GpuId) -> int | None:
    """The number of an accelerator, for functions that mean one or all of them.

    Raises:
        ValueError: it is ``"auto"``, negative, a bool or a float.
    """
    index = check_gpu_id(gpu_id)
    if isinstance(index, str):
        raise ValueError(f"{who}(gpu_id='auto') has no meaning; pass least_used_gpu(), a number or None")
    return index


def _frameworks_with_gpu(index: int, frameworks: list[Framework]) -> list[Framework]:
    """The frameworks that have that accelerator.

    Raises:
        DeviceNotFoundError: none has, and the settings do not send the work to the host.
    """
    devices = {one: one.devices.visible_devices() for one in frameworks}
    owners = [one for one in frameworks if one.devices.accelerator(index) in devices[one]]
    if owners or missing_gpu() == "host":
        return owners
    have = "; ".join(f"{one.name} has {', '.join(map(str, own)) or 'none'}" for one, own in devices.items())
    reason = f"no loaded framework has an accelerator {index}"
    raise DeviceNotFoundError(
        f"{reason}{have and f': {have}'}.",
        reason=reason,
        code=Reason.NO_DEVICE,
        advice="Pass gpu_id of one that is there, or None; or opt in to the host with"
        ' settings(missing_gpu="host").',
    )


# -- one device everywhere ---------------------------------------------------------------------------


@contextmanager
def gpu_context(gpu_id: int | None) -> Iterator[int | None]:
    """Make accelerator ``gpu_id`` the current one of every loaded framework, inside a ``with`` block.

    On leaving, also by an exception, each framework gets its own choice back, and the caches of that
    accelerator are freed. A framework that has no such accelerator (a build for the CPU) stays as it is.

    Args:
        gpu_id: its number; None changes nothing and frees the caches of all.

    Yields:
        the number, as an int; None for None.

    Raises:
        DeviceNotFoundError: no loaded framework has it.
        ValueError: ``gpu_id`` is negative, a bool or a float.

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


# -- sharing one card --------------------------------------------------------------------------------


def share_gpu_memory(framework: FrameworkLike = "torch") -> None:
    """Let CuPy draw from PyTorch's pool, so that what one of them frees the other can use.

    For the whole process, from now on. PyTorch's allocator learns the stream on which CuPy asks, and keeps
    each block on that stream, as CuPy's own pool does.

    Raises:
        FrameworkNotInstalledError: CuPy or PyTorch is missing.
        DeviceNotFoundError: PyTorch has no CUDA card here.
        SharedPoolError: CuPy holds memory of its own already: its arrays would have two owners.
        ValueError: another framework than PyTorch is named.
    """
    name = registry.framework_name(framework)
    if not registry.metadata_of(name).has_allocator:
        raise ValueError(f"CuPy can share the memory of 'torch' alone, not of {name!r}")
    owner: Any = registry.framework(name)
    cupy: Any = registry.framework("cupy")
    owner.devices.find_device(Device("gpu", 0))
    try:
        cupy.use_allocator(*owner.allocator())
    except RuntimeError as error:
        raise SharedPoolError(
            f"CuPy cannot share PyTorch's memory any more: {error}. Call share_gpu_memory() before the first"
            " CuPy array is made, or free those arrays and call free_memory('cupy') first."
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
    """The environment variables that `coexist` sets."""
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, Real):
            raise TypeError(f"fraction={fraction!r} must be a number over 0, at most 1, or None")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r} is no share of a card; pass a number over 0, at most 1")
        chosen["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:g}"
        chosen["CUPY_GPU_MEMORY_LIMIT"] = f"{100 * fraction:g}%"
    return chosen


def coexist(fraction: float | None = None) -> Coexistence:
    """Stop JAX and TensorFlow from taking a whole card, so that several frameworks fit on it.

    Sets the environment variables that frameworks read when they open their devices, for this process and
    those that it starts. Call it before any is used; when one has opened its devices, a warning says so.

    Args:
        fraction: at most this share of a card for each of JAX and CuPy (0 < fraction <= 1); None: as much as
            they need. PyTorch takes it by ``torch.cuda.set_per_process_memory_fraction``, TensorFlow not.

    Returns:
        What was set, and for which frameworks it came too late.

    Raises:
        TypeError: ``fraction`` is no number.
        ValueError: it is no share.

    >>> print(coexist().environment["XLA_PYTHON_CLIENT_PREALLOCATE"])
    false
    """
    chosen = coexistence(fraction)
    if fraction is not None:  # JAX refuses to start when it finds both names
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
            f"coexist() came too late for {' and '.join(latecomers)}, which had opened their devices"
            " already and may have taken the whole card; call it first in the program, before they are used",
            RuntimeWarning,
            stacklevel=2,
        )
    return Coexistence(chosen, latecomers)
