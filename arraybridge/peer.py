"""What the library of this name on the package index (0.2 to 0.5) calls otherwise."""

from __future__ import annotations

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


def _freed(framework: str | None, gpu_id: int | None, device_id: int | None) -> int:
    """`free_memory`, also by ``device_id``, the older name of ``gpu_id``, which misses no card."""
    if device_id is None:
        return free_memory(framework, gpu_id)
    try:
        return free_memory(framework, device_id)
    except DeviceNotFoundError:
        return 0


def cleanup_all_gpu_frameworks(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for all frameworks."""
    return _freed(None, gpu_id, device_id)


def cleanup_torch_gpu(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for PyTorch alone; 0 where it is not loaded."""
    return _freed("torch", gpu_id, device_id)


def cleanup_cupy_gpu(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for CuPy alone; 0 where it is not loaded."""
    return _freed("cupy", gpu_id, device_id)


def cleanup_jax_gpu(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for JAX alone; 0 where it is not loaded."""
    return _freed("jax", gpu_id, device_id)


def cleanup_tensorflow_gpu(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for TensorFlow alone, which keeps its memory until the process ends."""
    return _freed("tensorflow", gpu_id, device_id)


def cleanup_pyclesperanto_gpu(gpu_id: int | None = None, *, device_id: int | None = None) -> int:
    """`free_memory` for pyclesperanto alone; 0 where it is not loaded."""
    return _freed("pyclesperanto", gpu_id, device_id)
