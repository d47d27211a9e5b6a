"""Where a pipeline's time went: a table, a file for Perfetto, and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from arraybridge.lines.threads import Span
from arraybridge.show import Contents, Table, format_seconds
from arraybridge.timeline.events import Event, began

__all__ = ["PipelineReport", "StageReport"]


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


@dataclass(frozen=True)
class PipelineReport(Table):
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

    def _table(self) -> Contents:
        head = ("stage", "device", "items", "busy", "starved", "blocked", "busy %")
        rows = []
        for name, device, items, busy, *waits, _ in self.stages:
            share = min(100.0, 100 * busy / (self.seconds or 1.0))
            times = map(format_seconds, (busy, *waits))
            rows.append((name, device, str(items), *times, f"{share:.0f} %"))
        items = self.stages[-1].items if self.stages else 0
        done = f"{items} item{'' if items == 1 else 's'} in {format_seconds(self.seconds)}"
        return head, rows, head[2:], f"{done}; bottleneck: {self.bottleneck}"

    def events(self) -> list[Event]:
        """The run as `trace` would have recorded it."""
        events = [
            Event(
                *("stage", name, start, end - start, f"stage {i}: {name}", device, "", 0),
                item=item,
                flow=str(item),
            )
            for i, (name, device, *_, spans) in enumerate(self.stages)
            for item, start, end in spans
        ]
        return sorted(events, key=began)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the run to a file: ``.json`` in the trace-event format, which Perfetto opens; else a picture.

        Raises:
            ImportError: a picture was asked for, and matplotlib is not installed.
        """
        if Path(file).suffix != ".json":
            self.plot(file)
            return
        from arraybridge.timeline.save import save

        save(file, self.events())

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draw the run: a row for each stage, a bar for each item; in the form that the suffix says.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from arraybridge.timeline.page import plot

        plot(self.events(), file)
