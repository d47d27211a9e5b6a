"""How long a call takes, until its arrays are really there; and whether CPU or GPU takes less.

`benchmark` times a call, `compare` the same call on both, at one size or at several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np

from arraybridge.carriers.carrier import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.devices.devices import (
    array_namespace,
    framework_for_numpy_code,
    gpu_available,
    use_device,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.registry import loaded
from arraybridge.lines.device_map import placement, working_on
from arraybridge.show import Table, format_seconds
from arraybridge.trees import arrays_of, map_arrays
from arraybridge.types import Device
from arraybridge.validation import whole_number

# After this many waits, of which the shortest took hardly longer than one for nothing, no more follow.
_TRIALS, _NOTHING = 5, 1.2


class Timing(NamedTuple):
    """Seconds that a call takes; prints as one line.

    Attributes:
        median, minimum: of all calls.
        spread: the range of the middle half of them (the third quartile less the first).
        runs: how many calls were timed.
    """

    median: float
    minimum: float
    spread: float
    runs: int

    def cells(self) -> tuple[str, ...]:
        """The numbers as words, for a table."""
        return (*(format_seconds(seconds) for seconds in self[:3]), str(self.runs))

    def __str__(self) -> str:
        return "median {}, minimum {}, spread {}, {} runs".format(*self.cells())


def benchmark(
    fn: Callable[..., Any], *args: Any, warmup: int = 2, seconds: float = 0.5, runs: int | None = None
) -> Timing:
    """How long ``fn(*args)`` takes, until all that it has queued is computed.

    Each call is followed by a wait for the arrays of its result and for every loaded framework on every
    device that it has opened. What such a wait costs where nothing is queued is measured and not counted.

    Args:
        fn: a function, decorated or not.
        args: its arguments; arrays that it changes stay changed.
        warmup: calls before the first that counts, for compilers and caches.
        seconds: how long to go on measuring, at least five calls.
        runs: exactly so many calls instead.

    Raises:
        TypeError: ``fn`` is not a function, or ``warmup`` or ``runs`` is not an int.
        ValueError: a number is too small.
        Exception: what ``fn`` raises.

    >>> import numpy as np
    >>> timing = benchmark(np.sum, np.ones(1000), runs=5)
    >>> 0 < timing.minimum <= timing.median
    True
    """
    if not callable(fn):
        raise TypeError(f"benchmark takes a function and its arguments, not {fn!r}")
    whole_number("warmup", warmup, least=0)
    if runs is not None:
        whole_number("runs", runs, least=1)
    if seconds <= 0:
        raise ValueError(f"seconds={seconds!r} must be greater than 0.")
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
        _settle(args if result is None else result)  # a function may work in place and return nothing
        samples.append(clock() - start)
        del result
        # A wait may cost more than many calls: where nothing was queued five times, none follows.
        if len(waits) < _TRIALS or min(waits) > _NOTHING * idle[0]:
            waits.append(_synchronize())
            samples[-1] += max(0.0, waits[-1] - idle[4])
            until += min(waits[-1], idle[4])  # waits for nothing take nothing from the seconds
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
    for framework in loaded():
        framework.synchronize()
    return time.perf_counter() - start


# -- CPU against GPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison(Table):
    """A function on the CPU and on the GPU; prints as a table, also in a notebook.

    Attributes:
        cpu, gpu: a `Timing` each; ``gpu`` is None without a GPU.
        note: what was compared, or why there is no GPU.
    """

    cpu: Timing
    gpu: Timing | None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times as fast the GPU is, by the medians; None without a GPU."""
        return None if self.gpu is None else self.cpu.median / self.gpu.median

    def _table(self) -> Any:
        head = ("", "median", "minimum", "spread", "runs")
        rows = [(name, *timing.cells()) for name, timing in (("cpu", self.cpu), ("gpu", self.gpu)) if timing]
        if self.speedup is None:
            return head, rows, head, self.note
        name, times = ("GPU", self.speedup) if self.speedup >= 1 else ("CPU", 1 / self.speedup)
        return head, rows, head, f"the {name} is {times:.3g} times as fast; {self.note}"


@dataclass(frozen=True)
class SizeComparison(Table):
    """Functions over sizes, on the CPU and on the GPU; prints as a table, also in a notebook.

    Attributes:
        rows: name of the function, number of elements, and the `Comparison`.
    """

    rows: tuple[tuple[str, int, Comparison], ...]

    @property
    def note(self) -> str:
        """What was compared, or why there is no GPU."""
        return self.rows[0][2].note

    def names(self) -> tuple[str, ...]:
        """The functions, in the order in which they were tried."""
        return tuple(dict.fromkeys(name for name, _, _ in self.rows))

    def crossover(self, name: str | None = None) -> int | None:
        """The smallest size from which on the GPU is the faster; None where it never is.

        ``name`` is that of the function; None: of the first one.
        """
        name = self.names()[0] if name is None else name
        if name not in self.names():
            raise KeyError(f"{name!r} was not tried; there are {', '.join(self.names())}")
        rows = sorted((size, one.speedup or 0) for function, size, one in self.rows if function == name)
        paying = [size for size, _ in takewhile(lambda row: row[1] >= 1, reversed(rows))]
        return paying[-1] if paying else None

    def _table(self) -> Any:
        head = ("function", "elements", "cpu", "gpu", "speed-up")
        rows = []
        for row in self.as_dicts():
            speedup = "" if row["gpu"] is None else f"{row['cpu'] / row['gpu']:.3g}"
            times = format_seconds(row["cpu"]), format_seconds(row["gpu"])
            rows.append((row["function"], f"{row['elements']:,}", *times, speedup))
        line = self.note
        if any(one.gpu for _, _, one in self.rows):
            sizes = ((name, self.crossover(name)) for name in self.names())
            words = (f"{n}: {'never' if size is None else f'{size:,} elements'}" for n, size in sizes)
            line = f"the GPU is the faster from … on: {'; '.join(words)} ({line})"
        return head, rows, head[1:], line

    def as_dicts(self) -> list[dict[str, Any]]:
        """The medians in seconds, for JSON: a dictionary for each row."""
        return [
            {"function": name, "elements": size, "cpu": one.cpu.median, "gpu": one.gpu and one.gpu.median}
            for name, size, one in self.rows
        ]


def _matmul(x: Any) -> Any:
    """A square matrix of about as many elements, times itself."""
    side = max(1, int(x.shape[0] ** 0.5))
    square = array_namespace(x).reshape(x[: side * side], (side, side))
    return square @ square


#: Functions of one 1-D array that run in NumPy, CuPy, PyTorch and JAX.
STANDARD: Mapping[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: array_namespace(x).sqrt(x) * 2 + 1,
    "reduction": lambda x: array_namespace(x).sum(x),
    "matmul": _matmul,
    "fft": lambda x: array_namespace(x).fft.fft(x),
    "filter": lambda x: (x[:-2] + x[1:-1] + x[2:]) / 3,  # the mean of three neighbours
}


def array_of(size: int) -> np.ndarray:
    """The argument for a size: that many float32 between 0 and 1, 1-D, always the same."""
    return np.random.default_rng(0).random(size, dtype=np.float32)


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
    """The same call on the CPU and on the GPU, with the speed-up; on a machine without a GPU, the CPU alone.

    A decorated function or one with ``@gpu`` gets the arguments as they are, so that its transfers count. For
    any other function the arrays are moved first, and the transfers do not count: arrays of a framework
    within it, NumPy's to CuPy, PyTorch or JAX, the first that has a card. Write such a function for both, as
    with `array_namespace`.

    Args:
        fn: the function; with ``sizes`` also several, in a list or, by name, in a dictionary.
        args: its arguments.
        sizes: numbers of elements to compare at; a `SizeComparison` comes back.
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
    if sizes is None:
        return _compared(fn, args, seconds, runs)
    counts = sorted(set(sizes))
    if args or not counts or counts[0] < 1:
        raise ValueError("compare(fn, sizes=[…]) takes sizes over 0, and no arguments beside them")
    several = fn if isinstance(fn, Sequence) else [fn]
    functions = fn if isinstance(fn, Mapping) else {getattr(f, "__name__", repr(f)): f for f in several}
    pairs = [(name, one, size) for name, one in functions.items() for size in counts]
    rows = ((name, size, _compared(one, (make(size),), seconds, runs)) for name, one, size in pairs)
    return SizeComparison(tuple(rows))


def _compared(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float, runs: int | None) -> Comparison:
    if not callable(fn):
        raise TypeError(f"compare takes a function and its arguments, or functions, and {fn!r} is none")
    placed = placement(fn)
    converts = placed is not None and placed.converts

    def on(device: Device, values: tuple[Any, ...]) -> Timing:
        with use_device(device), working_on(device):
            return benchmark(fn, *values, seconds=seconds, runs=runs)

    cpu = on(CPU, args if converts else _moved(args, CPU, None))
    if not gpu_available():
        return Comparison(cpu, None, "there is no GPU here, so that only the CPU was measured")
    card = Device("gpu", 0)
    if converts:
        return Comparison(cpu, on(card, args), "transfers are included")
    target = framework_for_numpy_code(card)
    if target is None and any(source_of(x)[0].name == "numpy" for x in arrays_of(args)):
        names = ", ".join(registry.for_numpy_code())
        return Comparison(cpu, None, f"none of {names} is installed for the card: only the CPU was measured")
    return Comparison(cpu, on(card, _moved(args, card, target)), "transfers are not included")


def _moved(args: tuple[Any, ...], device: Device, instead_of_numpy: str | None) -> tuple[Any, ...]:
    def place(x: Any) -> Any:
        source, _ = source_of(x)
        name = instead_of_numpy if source.name == "numpy" and instead_of_numpy else source.name
        if device == CPU and not source.has_host:
            name = "numpy"  # CuPy's and pyclesperanto's arrays have no home on the host
        return convert_memory(x, name, device=None if name == "numpy" else device)

    moved: tuple[Any, ...] = map_arrays(args, place)
    return moved
