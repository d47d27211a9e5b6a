"""Results of `compare`, for one call or for several sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arraybridge.benchmarking.timing import Timing
from arraybridge.formatting import Table, format_seconds, one_of


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


@dataclass(frozen=True)
class SizeComparison(Table):
    """The timings of functions by size, on the CPU and on the GPU.

    It prints as a table, including in notebooks.

    ``result["sort", 1000]`` is the `Comparison` of one function at one size.

    Attributes:
        rows: The name of the function, the number of elements, and the `Comparison`, for each measurement.
    """

    __iter__ = None  # otherwise, Python would iterate by calling __getitem__ with 0, 1, …

    rows: tuple[tuple[str, int, Comparison], ...]

    @property
    def note(self) -> str:
        """Whether transfers are included, or why the GPU was not measured."""
        return self.rows[0][2].note

    def __getitem__(self, key: tuple[str, int]) -> Comparison:
        """Return the comparison of a function at a size, as in ``result["sort", 1000]``.

        Raises:
            KeyError: If this pair was not measured. The message names a measured pair.
        """
        for name, size, comparison in self.rows:
            if key == (name, size):
                return comparison
        pairs = ", ".join(f"[{name!r}, {size}]" for name, size, _ in self.rows)
        raise KeyError(f"{key!r} was not measured. Pass a function and a size: {pairs}.")

    def names(self) -> tuple[str, ...]:
        """Return the names of the functions, in the order of measurement."""
        return tuple(dict.fromkeys(name for name, _, _ in self.rows))

    def crossover(self, name: str | None = None) -> int | None:
        """Return the smallest measured size from which the GPU is at least as fast; None if there is none.

        Args:
            name: The name of the function. Defaults to the first function.

        Raises:
            KeyError: If there is no function of that name.
        """
        name = self.names()[0] if name is None else name
        if name not in self.names():
            raise KeyError(f"{name!r} was not measured. Pass {one_of(self.names())}.")
        rows = sorted((size, one.speedup or 0) for function, size, one in self.rows if function == name)
        smallest = None
        for size, speedup in reversed(rows):
            if speedup < 1:
                break
            smallest = size
        return smallest

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
            texts = (f"{n}: {'never' if size is None else f'{size:,} elements'}" for n, size in sizes)
            line = f"the GPU is faster from this size: {'; '.join(texts)} ({line})"
        return head, rows, head[1:], line

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return one dict per row, ready for JSON, with the medians in seconds."""
        return [
            {"function": name, "elements": size, "cpu": one.cpu.median, "gpu": one.gpu and one.gpu.median}
            for name, size, one in self.rows
        ]
