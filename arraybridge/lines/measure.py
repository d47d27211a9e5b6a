"""Timing functions of any framework: warmed up, and until the arrays are really there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from arraybridge.conversion.convert import convert_memory
from arraybridge.devices.context import use_device
from arraybridge.devices.discovery import gpu_available
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, visible_devices
from arraybridge.frameworks.registry import loaded
from arraybridge.lines.on_device import working_on
from arraybridge.lines.sizes import SizeComparison, SizeRow, array_of, named
from arraybridge.lines.timings import Comparison, Timing
from arraybridge.placement import placement
from arraybridge.trees import arrays_of, map_arrays, source_of
from arraybridge.types import Device

__all__ = ["benchmark", "compare"]

# After how many waits, of which the shortest took hardly longer than one for nothing, none follows.
_ASKED, _NOTHING = 5, 1.2


def benchmark(
    fn: Callable[..., Any], *args: Any, warmup: int = 2, seconds: float = 0.5, runs: int | None = None
) -> Timing:
    """How long ``fn(*args)`` takes, until all that it has queued is computed.

    Each call is followed by what its frameworks need to be done with it: the arrays of its result are waited
    for, and then, whatever it returns, every loaded framework on every device that it has opened. What such a
    wait costs where there is nothing to wait for is measured before, and not counted.

    Args:
        fn: a function, decorated or not.
        args: its arguments; arrays that it changes stay changed.
        warmup: calls before the first that counts, for compilers and caches.
        seconds: how long to go on measuring, at least five calls.
        runs: exactly so many calls instead.

    Raises:
        TypeError: ``fn`` is no function.
        ValueError: a number is too small.
        Exception: what ``fn`` raises.

    >>> import numpy as np
    >>> timing = benchmark(np.sum, np.ones(1000), runs=5)
    >>> 0 < timing.minimum <= timing.median
    True
    """
    if not callable(fn):
        raise TypeError(f"benchmark takes a function and its arguments, not {fn!r}")
    if warmup < 0 or seconds <= 0 or (runs is not None and runs < 1):
        raise ValueError("warmup must be 0 or more, seconds positive, and runs 1 or more")
    for _ in range(warmup):
        fn(*args)
    clock = time.perf_counter
    idle = sorted(_synchronize() for _ in range(9))
    samples: list[float] = []
    waits: list[float] = []
    until = clock() + seconds
    while len(samples) < runs if runs is not None else len(samples) < 5 or clock() < until:
        start = clock()
        result = fn(*args)
        # A function may work in place and return nothing.
        _settle(args if result is None else result)
        samples.append(clock() - start)
        del result
        # A function that leaves nothing queued five times is not asked again: this wait costs more than many.
        if len(waits) < _ASKED or min(waits) > _NOTHING * idle[0]:
            waits.append(_synchronize())
            samples[-1] += max(0.0, waits[-1] - idle[4])
            until += min(waits[-1], idle[4])  # asking takes nothing from the seconds
    _synchronize()
    samples.sort()
    quarter = len(samples) // 4
    median = (samples[len(samples) // 2] + samples[(len(samples) - 1) // 2]) / 2
    return Timing(median, samples[0], samples[-1 - quarter] - samples[quarter], len(samples))


def _settle(values: Any) -> None:
    for x in arrays_of(values):
        owner = registry.find_owner(x)
        if owner is not None:
            owner.settle(x)


def _synchronize() -> float:
    """Wait for every loaded framework; the seconds that this took."""
    start = time.perf_counter()
    for one in loaded():
        if one.pool is not None:
            one.pool.synchronize()
    return time.perf_counter() - start


@overload
def compare(
    fn: Callable[..., Any], *args: Any, sizes: None = None, seconds: float = 0.5, runs: int | None = None
) -> Comparison: ...
@overload
def compare(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
    *,
    sizes: Iterable[int],
    make: Callable[[int], Any] = ...,
    seconds: float = 0.5,
    runs: int | None = None,
) -> SizeComparison: ...
def compare(
    fn: Any,
    *args: Any,
    sizes: Iterable[int] | None = None,
    make: Callable[[int], Any] = array_of,
    seconds: float = 0.5,
    runs: int | None = None,
) -> Comparison | SizeComparison:
    """The same call on the CPU and on the GPU, with the speed-up; on a machine without a GPU, the CPU alone.

    A decorated function or one with ``@gpu`` is called with the arguments as they are, once with each device
    as the one to use, so that its transfers count. For any other function the arrays are moved first, and the
    transfers do not count: arrays of a framework within it, NumPy's to CuPy, PyTorch or JAX, the first that
    has a card, so that the function must be written for both (see `array_namespace`).

    Args:
        fn: the function; with ``sizes`` also several, in a list or, by name, in a dictionary.
        args: its arguments.
        sizes: numbers of elements: the function is compared at each, and a `SizeComparison` comes back, with
            a table, a plot, and the size from which on the GPU is the faster.
        make: with ``sizes``: the function's argument for a size. Left out, that many float32, 1-D.
        seconds: as of `benchmark`, for each device.
        runs: as of `benchmark`, for each device.

    Raises:
        as `benchmark`.

    >>> import numpy as np
    >>> result = compare(np.sort, np.arange(100), runs=5)
    >>> result.cpu.runs
    5
    >>> print(compare(np.sort, sizes=[10, 1000], runs=5).crossover())  # on a machine without a GPU
    None
    """
    if sizes is not None:
        counts = sorted(set(sizes))
        if args or not counts or counts[0] < 1:
            raise ValueError("compare(fn, sizes=[…]) takes sizes over 0, and no arguments beside them")
        pairs = [(name, one, size) for name, one in named(fn).items() for size in counts]
        rows = (SizeRow(n, s, compare(f, make(s), seconds=seconds, runs=runs)) for n, f, s in pairs)
        return SizeComparison(tuple(rows))
    if not callable(fn):
        raise TypeError(f"compare takes a function and its arguments, not {fn!r}")
    known = placement(fn)
    placed = known is not None and known.converts

    def on(device: Device, values: tuple[Any, ...]) -> Timing:
        with use_device(device), working_on(device):
            return benchmark(fn, *values, seconds=seconds, runs=runs)

    cpu = on(CPU, args if placed else _moved(args, CPU, None))
    if not gpu_available():
        return Comparison(cpu, None, "there is no GPU here, so that only the CPU was measured")
    card = Device("gpu", 0)
    if placed:
        return Comparison(cpu, on(card, args), "transfers are included")
    target = _framework_with(card)
    if target is None and any(source_of(x)[0].name == "numpy" for x in arrays_of(args)):
        names = ", ".join(registry.for_numpy_code())
        note = f"none of {names} is installed for the card, so that only the CPU was measured"
        return Comparison(cpu, None, note)
    return Comparison(cpu, on(card, _moved(args, card, target)), "transfers are not included")


def _framework_with(device: Device) -> str | None:
    for name in registry.for_numpy_code():
        one = registry.usable(name)
        if one is not None and device in visible_devices(one):
            return name
    return None


def _moved(args: tuple[Any, ...], device: Device, instead_of_numpy: str | None) -> tuple[Any, ...]:
    def place(x: Any) -> Any:
        source, _ = source_of(x)
        name = instead_of_numpy if source.name == "numpy" and instead_of_numpy else source.name
        if device == CPU and not source.has_host:
            name = "numpy"  # CuPy's and pyclesperanto's arrays have no home on the host
        return convert_memory(x, name, device=None if name == "numpy" else device)

    moved: tuple[Any, ...] = map_arrays(args, place)
    return moved
