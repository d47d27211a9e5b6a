"""The utilization, memory and temperature of NVIDIA GPUs."""

from __future__ import annotations

from typing import NamedTuple

from arraybridge import hardware
from arraybridge.compilers import run_eagerly

__all__ = ["gpu_utilization"]


class GpuLoad(NamedTuple):
    """The utilization of a GPU. A value is None if the GPU does not report it.

    Attributes:
        device: The device string, such as ``"gpu:0"``.
        name: The model.
        load: The utilization in percent.
        memory_used: The used memory in bytes.
        memory_total: The total memory in bytes.
        temperature: The temperature in degrees Celsius.
    """

    device: str
    name: str
    load: int | None
    memory_used: int | None
    memory_total: int | None
    temperature: int | None


@run_eagerly
def gpu_utilization() -> tuple[GpuLoad, ...]:
    """Return the load, memory and temperature of each NVIDIA GPU.

    Returns:
        One `GpuLoad` per GPU; an empty tuple without an NVIDIA GPU.

    Example:
        >>> all(gpu.load is None or 0 <= gpu.load <= 100 for gpu in gpu_utilization())
        True
    """
    readings = [(gpu, hardware.read_gpu(gpu)) for gpu in hardware.gpus()]
    return tuple(
        GpuLoad(
            f"gpu:{gpu.index}",
            gpu.name,
            load=now.load,
            memory_used=now.used,
            memory_total=now.total,
            temperature=now.temperature,
        )
        for gpu, now in readings
    )
