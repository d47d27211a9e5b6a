"""What `compare` returns: a function on the CPU and on the GPU, at one size or at several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arraybridge.benchmarking.timing import Timing
from arraybridge.formatting import Table, format_seconds


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
            words = (f"{n}: {'never' if size is None else f'{size:,} elements'}" for n, size in sizes)
            line = f"the GPU is the faster from … on: {'; '.join(words)} ({line})"
        return head, rows, head[1:], line

    def as_dicts(self) -> list[dict[str, Any]]:
        """The medians in seconds, for JSON: a dictionary for each row."""
        return [
            {"function": name, "elements": size, "cpu": one.cpu.median, "gpu": one.gpu and one.gpu.median}
            for name, size, one in self.rows
        ]
