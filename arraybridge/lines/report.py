"""Where a pipeline's time went: a table, a file for Perfetto, and a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from arraybridge.lines.threads import Span
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
        starved, blocked: spent waiting for an item, and for room in the queue of the next stage.
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
        rows = []
        for s in self.stages:
            times = (format_seconds(value) for value in (s.busy, s.starved, s.blocked))
            share = min(100.0, 100 * s.busy / (self.seconds or 1.0))
            rows.append((s.name, s.device, str(s.items), *times, f"{share:.0f} %"))
        return rows

    def _summary(self) -> str:
        items = self.stages[-1].items
        done = f"{items} item{'' if items == 1 else 's'} in {format_seconds(self.seconds)}"
        return f"{done}; bottleneck: {self.bottleneck}"

    def __str__(self) -> str:
        table = text_table(_COLUMNS, self._rows(), right=_COLUMNS[2:], rule=True)
        return f"{table}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._summary())

    def events(self) -> list[Event]:
        """The run as `trace` would have recorded it."""
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
        return sorted(events, key=began)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the run to a file: in the trace-event format, which Perfetto opens, or as a picture.

        Args:
            file: ends in ``.json``, or in the suffix of a picture; see `plot`.

        Raises:
            ImportError: a picture was asked for, and matplotlib is not installed.
        """
        if Path(file).suffix != ".json":
            self.plot(file)
            return
        from arraybridge.timeline.save import save

        save(file, self.events())

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draw the run: a row for each stage, a bar for each item. Needs matplotlib.

        Args:
            file: where to write it; the suffix says the form, ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from arraybridge.timeline.page import plot

        plot(self.events(), file)
