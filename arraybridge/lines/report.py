"""Where a pipeline's time went: a table, and a picture."""

from __future__ import annotations

import os
from typing import NamedTuple

from arraybridge.lines.line import Span
from arraybridge.show import format_seconds, html_table, text_table
from arraybridge.timeline.events import Event, began

__all__ = ["PipelineReport", "StageReport"]

_COLUMNS = ("stage", "device", "items", "busy", "starved", "blocked", "busy %")


class StageReport(NamedTuple):
    """One stage of a run. Times are in seconds, as the stage's thread saw them.

    Attributes:
        name, device: the stage, and where it runs.
        items: how many it has finished.
        busy: spent in the stage, waiting for its accelerator included.
        starved: spent waiting for an item.
        blocked: spent waiting for room in the queue of the next stage.
        spans: number, start and end of each item (the last 10 000).
    """

    name: str
    device: str
    items: int
    busy: float
    starved: float
    blocked: float
    spans: tuple[Span, ...] = ()


class PipelineReport(NamedTuple):
    """A run of a pipeline; prints as a table, also in a notebook.

    Attributes:
        stages: one `StageReport` each.
        seconds: from the start of the threads to the last result.
        most_in_flight: the most items that were on their way at one time.
    """

    stages: tuple[StageReport, ...]
    seconds: float
    most_in_flight: int

    @property
    def bottleneck(self) -> str:
        """The name of the stage that was busy the longest; making it faster makes the pipeline faster."""
        return max(self.stages, key=lambda stage: stage.busy).name

    def _rows(self) -> list[tuple[str, ...]]:
        whole = self.seconds or 1.0
        return [
            (
                s.name,
                s.device,
                str(s.items),
                *(format_seconds(value) for value in (s.busy, s.starved, s.blocked)),
                f"{min(100.0, 100 * s.busy / whole):.0f} %",
            )
            for s in self.stages
        ]

    def _summary(self) -> str:
        items = self.stages[-1].items
        done = f"{items} item{'' if items == 1 else 's'} in {format_seconds(self.seconds)}"
        return f"{done}; bottleneck: {self.bottleneck}"

    def __str__(self) -> str:
        table = text_table(_COLUMNS, self._rows(), right=_COLUMNS[2:], rule=True)
        return f"{table}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._summary())

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the run to a file: in the trace-event format, which Perfetto opens, or as a picture.

        Args:
            file: ends in ``.json``, or in the suffix of a picture; see `plot`.

        Raises:
            ImportError: a picture was asked for, and matplotlib is not installed.
        """
        from pathlib import Path  # costs 3 ms, which `import arraybridge` saves

        if Path(file).suffix != ".json":
            self.plot(file)
            return
        from arraybridge.timeline.save import save

        events = [
            Event(
                *("stage", stage.name, span.start, span.end - span.start, f"stage {i}: {stage.name}"),
                *(stage.device, "", 0),
                item=span.item,
                flow=str(span.item),
            )
            for i, stage in enumerate(self.stages)
            for span in stage.spans
        ]
        save(file, sorted(events, key=began))

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draw the run as a Gantt chart: a row for each stage, a bar for each item. Needs matplotlib.

        Args:
            file: where to write it; the suffix says the form, ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("report().plot() draws with matplotlib; run pip install matplotlib") from error
        rows = len(self.stages)
        figure = Figure(figsize=(8, 1.6 + 0.6 * rows), layout="constrained")
        axes = figure.subplots()
        colours = colormaps["tab10"]
        width = self.seconds or max((span.end for s in self.stages for span in s.spans), default=1.0)
        for row, stage in enumerate(self.stages):
            bars = [(span.start, span.end - span.start) for span in stage.spans]
            axes.broken_barh(
                bars,
                (row - 0.36, 0.72),
                facecolors=[colours(span.item % 10) for span in stage.spans],
                edgecolor="white",
                linewidth=0.6,
            )
            for span in stage.spans:
                if span.end - span.start > width / 50:
                    middle = (span.start + span.end) / 2
                    axes.text(middle, row, str(span.item), ha="center", va="center", size=8, color="white")
        axes.set_yticks(range(rows), [f"{s.name}\n{s.device}" for s in self.stages], size=8)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xlim(0, width)
        axes.set_xlabel("seconds; the numbers are those of the items")
        axes.set_title(self._summary(), size=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(file, dpi=150)
