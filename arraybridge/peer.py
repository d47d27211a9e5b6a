"""What the library of this name on the package index (0.2 to 0.5) calls otherwise."""

from __future__ import annotations

from functools import partial

from arraybridge.errors import DeviceNotFoundError
from arraybridge.memory.cleanup import free_memory

__all__ = [
    "cleanup_all_gpu_frameworks",
    "cleanup_cupy_gpu",
    "cleanup_jax_gpu",
    "cleanup_pyclesperanto_gpu",
    "cleanup_tensorflow_gpu",
    "cleanup_torch_gpu",
]


def _freed(framework: str | None, gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory`, also by ``device_id``, the older name of ``gpu_id``, which misses no card."""
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
