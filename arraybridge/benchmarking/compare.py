"""Comparison of the same call on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arraybridge.benchmarking.timing import Timing, benchmark, check_function
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.device import Device
from arraybridge.devices.default_device import use_device
from arraybridge.devices.inventory import framework_for_numpy_code, gpu_available
from arraybridge.formatting import Table
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.parallel.current_device import working_on
from arraybridge.parallel.function_devices import placement
from arraybridge.trees import arrays_of, map_arrays
from arraybridge.validation import add_hints


@dataclass(frozen=True)
class Comparison(Table):
    """The timings of a call on the CPU and on the GPU. It prints as a table, including in notebooks.

    Attributes:
        cpu: The `Timing` on the CPU.
        gpu: The `Timing` on the GPU; None if the GPU was not measured.
        note: Whether transfers are included, or why the GPU was not measured.
    """

    cpu: Timing
    gpu: Timing | None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """The CPU median divided by the GPU median; None if the GPU was not measured."""
        return None if self.gpu is None else self.cpu.median / self.gpu.median

    def _table(self) -> Any:
        head = ("", "median", "minimum", "spread", "runs")
        rows = [(name, *timing.cells()) for name, timing in (("cpu", self.cpu), ("gpu", self.gpu)) if timing]
        if self.speedup is None:
            return head, rows, head, self.note
        name, times = ("GPU", self.speedup) if self.speedup >= 1 else ("CPU", 1 / self.speedup)
        return head, rows, head, f"the {name} is {times:.3g} times as fast; {self.note}"


@add_hints
def compare(fn: Callable[..., Any], *args: Any, seconds: float = 0.5, runs: int | None = None) -> Comparison:
    """Time a call on the CPU and on the GPU, or only on the CPU if there is no GPU.

    Framework decorators and ``@gpu`` transfer the arguments themselves, so the timings of such functions
    include transfers. For any other function, the arrays are moved to the device first, and the timings
    exclude transfers. Arrays of a framework stay in that framework. NumPy arrays are converted to the first
    framework among CuPy, PyTorch and JAX that finds a GPU. The function must then support both NumPy and that
    framework, for example with `array_namespace`.

    Args:
        fn: The function.
        *args: The arguments of the function.
        seconds: As for `benchmark`, per device.
        runs: As for `benchmark`, per device.

    Returns:
        A `Comparison`.

    Raises:
        TypeError: If ``fn`` is not a function, or ``runs`` is not an int.
        ValueError: If a number is too small.
        Exception: Any exception raised by ``fn``.

    Example:
        >>> import numpy as np
        >>> result = compare(np.sort, np.arange(100), runs=5)
        >>> result.cpu.runs
        5
    """
    check_function("compare", fn)
    placed = placement(fn)
    converts = placed is not None and placed.converts

    def on(device: Device, values: tuple[Any, ...]) -> Timing:
        with use_device(device), working_on(device):
            return benchmark(fn, *values, seconds=seconds, runs=runs)

    cpu = on(CPU, args if converts else _arguments_on(args, CPU, None))
    if not gpu_available():
        return Comparison(cpu, None, "no GPU is available, so only the CPU was measured")
    gpu = Device("gpu", 0)
    if converts:
        return Comparison(cpu, on(gpu, args), "transfers are included")
    target = framework_for_numpy_code(gpu)
    if target is None and any(source_of(x)[0].devices.has_only_host for x in arrays_of(args)):
        names = ", ".join(registry.numpy_like_names())
        return Comparison(
            cpu, None, f"none of {names} is installed for the GPU, so only the CPU was measured"
        )
    return Comparison(cpu, on(gpu, _arguments_on(args, gpu, target)), "transfers are not included")


def _arguments_on(args: tuple[Any, ...], device: Device, instead_of_numpy: str | None) -> tuple[Any, ...]:
    def place(x: Any) -> Any:
        source, _ = source_of(x)
        name = instead_of_numpy if source.devices.has_only_host and instead_of_numpy else source.name
        if device == CPU and not source.has_host:
            name = "numpy"  # CuPy and pyclesperanto have no host arrays
        has_only_host = registry.framework(name).devices.has_only_host
        return convert_memory(x, name, device=None if has_only_host else device)

    moved: tuple[Any, ...] = map_arrays(args, place)
    return moved
