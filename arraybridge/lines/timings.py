"""Measured times, as a line and as a table."""

from __future__ import annotations

from typing import NamedTuple

from arraybridge.show import format_seconds, html_table, text_table

__all__ = ["Comparison", "Timing"]

_COLUMNS = ("", "median", "minimum", "spread", "runs")


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

    def __str__(self) -> str:
        median, minimum, spread, runs = self._row()
        return f"median {median}, minimum {minimum}, spread {spread}, {runs} runs"

    def _row(self) -> tuple[str, ...]:
        return (*(format_seconds(seconds) for seconds in self[:3]), str(self.runs))


class Comparison(NamedTuple):
    """A function on the CPU and on the GPU; prints as a table, also in a notebook.

    Attributes:
        cpu, gpu: a `Timing` each; ``gpu`` is None without a GPU.
        speedup: how many times as fast the GPU is, by the medians; None without a GPU.
        note: what was compared, or why there is no GPU.
    """

    cpu: Timing
    gpu: Timing | None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        return None if self.gpu is None else self.cpu.median / self.gpu.median

    def _rows(self) -> list[tuple[str, ...]]:
        cpu = ("cpu", *self.cpu._row())
        return [cpu] if self.gpu is None else [cpu, ("gpu", *self.gpu._row())]

    def _summary(self) -> str:
        if self.speedup is None:
            return self.note
        if self.speedup >= 1:
            return f"the GPU is {self.speedup:.3g} times as fast; {self.note}"
        return f"the CPU is {1 / self.speedup:.3g} times as fast; {self.note}"

    def __str__(self) -> str:
        return f"{text_table(_COLUMNS, self._rows(), right=_COLUMNS)}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._summary())
