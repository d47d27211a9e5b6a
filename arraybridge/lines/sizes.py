"""CPU against GPU over sizes: the functions to try, and what was found, as a table and a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from arraybridge.devices.context import array_namespace
from arraybridge.lines.timings import Comparison
from arraybridge.show import format_seconds, html_table, text_table

__all__ = ["STANDARD", "SizeComparison", "SizeRow", "array_of"]

_COLUMNS = ("function", "elements", "cpu", "gpu", "speed-up")


def elementwise(x: Any) -> Any:
    return array_namespace(x).sqrt(x) * 2 + 1


def reduction(x: Any) -> Any:
    return array_namespace(x).sum(x)


def matmul(x: Any) -> Any:
    """A square matrix of about as many elements, times itself."""
    side = max(1, int(x.shape[0] ** 0.5))
    square = array_namespace(x).reshape(x[: side * side], (side, side))
    return square @ square


def fft(x: Any) -> Any:
    return array_namespace(x).fft.fft(x)


def mean_filter(x: Any) -> Any:
    """The mean of three neighbours."""
    return (x[:-2] + x[1:-1] + x[2:]) / 3


#: Functions of one 1-D array that run in NumPy, CuPy, PyTorch and JAX.
STANDARD: Mapping[str, Callable[[Any], Any]] = {
    "elementwise": elementwise,
    "reduction": reduction,
    "matmul": matmul,
    "fft": fft,
    "filter": mean_filter,
}


def array_of(size: int) -> np.ndarray:
    """The argument for a size: that many float32 between 0 and 1, 1-D, always the same."""
    return np.random.default_rng(0).random(size, dtype=np.float32)


class SizeRow(NamedTuple):
    """One function at one size; ``comparison`` is a `Comparison`."""

    name: str
    size: int
    comparison: Comparison


class SizeComparison(NamedTuple):
    """Functions over sizes, on the CPU and on the GPU; prints as a table, also in a notebook.

    Attributes:
        rows: a `SizeRow` for each function and size.
    """

    rows: tuple[SizeRow, ...]

    def crossover(self, name: str | None = None) -> int | None:
        """The smallest size from which on the GPU is the faster; None where it never is.

        Args:
            name: of the function; None: the first one.

        Raises:
            KeyError: there is no function of that name.
        """
        rows = self._of(self.rows[0].name if name is None else name)
        paying = list(takewhile(lambda row: (row.comparison.speedup or 0) >= 1, reversed(rows)))
        return paying[-1].size if paying else None

    def names(self) -> tuple[str, ...]:
        """The functions, in the order in which they were tried."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    def _of(self, name: str) -> list[SizeRow]:
        found = [row for row in self.rows if row.name == name]
        if not found:
            raise KeyError(f"{name!r} was not tried; there are {', '.join(self.names())}")
        return sorted(found, key=lambda row: row.size)

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for name, size, (cpu, gpu, _) in self.rows:
            speedup = "" if gpu is None else f"{cpu.median / gpu.median:.3g}"
            on_gpu = "" if gpu is None else format_seconds(gpu.median)
            cells.append((name, f"{size:,}".replace(",", " "), format_seconds(cpu.median), on_gpu, speedup))
        return cells

    def _summary(self) -> str:
        if all(row.comparison.gpu is None for row in self.rows):
            return self.rows[0].comparison.note
        words = []
        for name in self.names():
            size = self.crossover(name)
            words.append(f"{name}: {'never' if size is None else f'{size:,} elements'.replace(',', ' ')}")
        return f"the GPU is the faster from … on: {'; '.join(words)} ({self.rows[0].comparison.note})"

    def __str__(self) -> str:
        return f"{text_table(_COLUMNS, self._cells(), right=_COLUMNS[1:])}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._cells(), caption=self._summary())

    def as_dicts(self) -> list[dict[str, Any]]:
        """The medians in seconds, for JSON: a dictionary for each row."""
        return [
            dict(function=name, elements=size, cpu=cpu.median, gpu=None if gpu is None else gpu.median)
            for name, size, (cpu, gpu, _) in self.rows
        ]

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draw time against size, CPU dashed and GPU solid, and where the GPU begins to pay.

        Needs matplotlib; the suffix of the file says the form, ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot() draws with matplotlib; run pip install matplotlib") from error
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(self.names()):
            for place, style in (("cpu", "--o"), ("gpu", "-o")):
                timed = [(row.size, getattr(row.comparison, place)) for row in self._of(name)]
                points = [(size, timing.median) for size, timing in timed if timing is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=f"C{i % 10}", label=f"{name}, {place}")
            size = self.crossover(name)
            if size is not None:
                axes.axvline(size, color=f"C{i % 10}", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="seconds")
        axes.set_title(self._summary(), size=9, wrap=True)
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=150)


def named(fn: Any) -> dict[str, Callable[..., Any]]:
    """One function, several, or several by name, as a dictionary.

    Raises:
        TypeError: one is no function.
    """
    several = fn if isinstance(fn, Sequence) and not isinstance(fn, str) else [fn]
    functions = dict(fn) if isinstance(fn, Mapping) else {getattr(f, "__name__", repr(f)): f for f in several}
    for one in functions.values():
        if not callable(one):
            raise TypeError(f"compare takes functions, and {one!r} is none")
    return functions
