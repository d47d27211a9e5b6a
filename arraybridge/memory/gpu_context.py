"""`gpu_context`: make a GPU the current device of every loaded framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from arraybridge.compilers import run_eagerly
from arraybridge.interface.registry import loaded
from arraybridge.memory.cleanup import frameworks_with_gpu, gpu_number, release_caches

__all__ = ["gpu_context"]


@run_eagerly
def gpu_context(gpu_id: int | None) -> AbstractContextManager[int | None]:
    """Make accelerator ``gpu_id`` the current device of every loaded framework, inside a ``with`` block.

    When the block ends, even with an exception, the previous accelerator of each framework is restored and
    the caches of this accelerator are freed. Frameworks without this accelerator, such as CPU builds, are
    left unchanged.

    Args:
        gpu_id: The number of the accelerator. None selects no accelerator, and frees the caches of all
            accelerators when the block ends.

    Returns:
        A context manager, whose value is the number as an int, or None.

    Raises:
        DeviceNotFoundError: If no loaded framework has the accelerator.
        ValueError: If ``gpu_id`` is ``"auto"``, negative, a bool or a float.

    Example:
        >>> with gpu_context(None) as gpu_id:
        ...     gpu_id is None
        True
    """
    return _select_gpu(gpu_number("gpu_context", gpu_id))


@contextmanager
def _select_gpu(index: int | None) -> Iterator[int | None]:
    frameworks = loaded()
    with ExitStack() as stack:
        stack.callback(release_caches, frameworks, index)
        if index is not None:
            for one in frameworks_with_gpu(index, frameworks):
                stack.enter_context(one.devices.select(one.devices.accelerator(index)))
        yield index
