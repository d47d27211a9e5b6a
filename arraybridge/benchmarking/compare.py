"""Comparison of the same call on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np

from arraybridge.benchmarking.reports import Comparison, SizeComparison
from arraybridge.benchmarking.standard_functions import array_of
from arraybridge.benchmarking.timing import Timing, benchmark
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.device import Device
from arraybridge.devices.default_device import use_device
from arraybridge.devices.inventory import framework_for_numpy_code, gpu_available
from arraybridge.frameworks import registry
from arraybridge.frameworks.device_access import CPU
from arraybridge.parallel.current_device import working_on
from arraybridge.parallel.function_devices import placement
from arraybridge.trees import arrays_of, map_arrays

_Functions: TypeAlias = "Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]]"
_Make: TypeAlias = "Callable[[int], Any]"


@overload
def compare(
    fn: Callable[..., Any], *args: Any, sizes: None = None, seconds: float = 0.5, runs: int | None = None
) -> Comparison: ...
@overload
def compare(
    fn: _Functions, *, sizes: Iterable[int], make: _Make = ..., seconds: float = 0.5, runs: int | None = None
) -> SizeComparison: ...
def compare(
    fn: Any,
    *args: Any,
    sizes: Iterable[int] | None = None,
    make: _Make = array_of,
    seconds: float = 0.5,
    runs: int | None = None,
) -> Comparison | SizeComparison:
    """Time a call on the CPU and on the GPU, or only on the CPU if there is no GPU.

    Framework decorators and ``@gpu`` transfer the arguments themselves, so the timings of such functions
    include transfers. For any other function, the arrays are moved to the device first, and the timings
    exclude transfers. Arrays of a framework stay in that framework. NumPy arrays are converted to the first
    framework among CuPy, PyTorch and JAX that finds a GPU. The function must then support both NumPy and that
    framework, for example with `array_namespace`.

    Args:
        fn: The function. With ``sizes``, also a list of functions, or a dict of functions by name.
        *args: The arguments of the function.
        sizes: The numbers of elements to compare. Defaults to None: one comparison with ``args``.
        make: A function that returns the argument for a size, used with ``sizes``. Defaults to a 1-D float32
            array of that many elements.
        seconds: As for `benchmark`, per device.
        runs: As for `benchmark`, per device.

    Returns:
        A `Comparison`; with ``sizes``, a `SizeComparison`.

    Raises:
        TypeError: If ``fn`` is not a function, or ``runs`` or a size is not an int.
        ValueError: If a number is too small, ``sizes`` is empty or combined with ``args``, or there are no
            functions.
        Exception: Any exception raised by ``fn``.

    Example:
        >>> import numpy as np
        >>> result = compare(np.sort, np.arange(100), runs=5)
        >>> result.cpu.runs
        5
        >>> print(compare(np.sort, sizes=[10, 1000], runs=5).crossover())  # on a machine without a GPU
        None
    """
    if sizes is None:
        return _compared(fn, args, seconds, runs)
    if args:
        raise ValueError(
            "compare() accepts arguments for the function or sizes=, not both. Pass a function that creates"
            " the argument for each size as make=."
        )
    if not callable(make):
        raise TypeError(
            f"make={make!r} must be a function that returns the argument for a size, such as make=np.ones."
        )
    counts = _valid_sizes(sizes)
    several = fn if isinstance(fn, Sequence) else [fn]
    functions = fn if isinstance(fn, Mapping) else {getattr(f, "__name__", repr(f)): f for f in several}
    if not functions:
        raise ValueError("compare() got no functions. Pass at least one, such as [np.sort].")
    pairs = [(name, one, size) for name, one in functions.items() for size in counts]
    rows = ((name, size, _compared(one, (make(size),), seconds, runs)) for name, one, size in pairs)
    return SizeComparison(tuple(rows))


def _valid_sizes(sizes: Any) -> list[int]:
    """Return the sizes as ints in ascending order, without duplicates.

    Raises:
        TypeError: If a size is not an int.
        ValueError: If there is no size, or a size is less than 1.
    """
    is_iterable = isinstance(sizes, Iterable) and not isinstance(sizes, str)
    counts = list(sizes) if is_iterable else []
    if not is_iterable or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in counts):
        raise TypeError(
            f"sizes={counts or sizes!r} must be a list of ints. Pass numbers of elements, such as"
            " sizes=[1000, 1_000_000]."
        )
    counts = sorted({int(n) for n in counts})
    if not counts or counts[0] < 1:
        wrong = f"contains {counts[0]}" if counts else "is empty"
        raise ValueError(
            f"sizes={counts} {wrong}. Pass one or more numbers of elements, each at least 1, such as"
            " sizes=[1000, 1_000_000]."
        )
    return counts


def _compared(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float, runs: int | None) -> Comparison:
    if not callable(fn):
        raise TypeError(
            f"compare() expected a function, got {type(fn).__name__}. Pass the function and its arguments:"
            " compare(fn, x)."
        )
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
