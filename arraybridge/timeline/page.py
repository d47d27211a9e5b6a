"""The report of a run as one page of HTML, and its picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import Any

from arraybridge import show
from arraybridge.show import COLOURS, format_bytes, format_seconds, picture
from arraybridge.timeline.events import CONVERSIONS, Event
from arraybridge.timeline.hotspots import HotSpots

__all__ = ["page", "plot"]

#: Bars of a thread that are drawn at most: the longest, and those that copy the most.
_BARS = 1500
_ROW, _WIDTH, _LABEL = 22, 1000, 130
#: How much of a row each takes in the picture, the outer ones most.
_HEIGHTS = {"stage": 0.84, "item": 0.84, "call": 0.6, "decision": 0.6, "conversion": 0.36, "foreign": 0.36}
_HEIGHT = 0.5


def page(events: Sequence[Event], spots: HotSpots, name: str) -> str:
    """The hot spots, and below them the run as a drawing.

    Args:
        events: in the order of their start.
        spots: what `hotspots` has made of them.
        name: what was run, for the heading.
    """
    key = "".join(
        f'<span><i style="background:{COLOURS[colour]}"></i>{colour}</span>'
        for colour in dict.fromkeys(map(_colour, events))
    )
    return show.page(
        name,
        f'<div class="wide">{spots._repr_html_()}</div>',
        f'<h2>What happened when</h2>\n<p class="key">{key}</p>',
        f'<div class="wide">{_drawing(events)}</div>',
    )


def _colour(event: Event) -> str:
    """What it is drawn as: its kind, or ``"copy"`` for a conversion that copied."""
    return "copy" if event.kind in CONVERSIONS and event.nbytes else event.kind


def _rows(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Name of each thread, and its bars, the longest first: what is inside of them is drawn over them."""
    rows: dict[tuple[str, int], list[Event]] = {(event.thread, event.thread_id): [] for event in events}
    for event in sorted(events, key=lambda event: (-event.seconds, -event.nbytes)):
        rows[event.thread, event.thread_id].append(event)
    return [(name, bars[:_BARS]) for (name, _), bars in rows.items()]


def _drawing(events: Sequence[Event]) -> str:
    """The threads as rows, from the first event to the end of the last one."""
    begin = min((event.start for event in events), default=0.0)
    length = max((event.start + event.seconds for event in events), default=begin) - begin or 1e-6
    scale = (_WIDTH - _LABEL) / length
    parts, rows = [], _rows(events)
    for row, (thread, bars) in enumerate(rows):
        top = row * _ROW
        parts.append(f'<text x="0" y="{top + 15}">{escape(thread[:20])}</text>')
        parts.append(f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{top + _ROW}" y2="{top + _ROW}"/>')
        for event in bars:
            height = _ROW * _HEIGHTS.get(event.kind, _HEIGHT)
            words = event.kind, event.name, event.where, format_seconds(event.seconds), event.reason
            title = escape(", ".join(filter(None, words)))
            parts.append(
                f'<rect x="{_LABEL + (event.start - begin) * scale:.2f}" y="{top + (_ROW - height) / 2:.1f}"'
                f' width="{max(1.0, event.seconds * scale):.2f}" height="{height:.1f}"'
                f' fill="{COLOURS[_colour(event)]}"><title>{title}</title></rect>'
            )
    bottom = _ROW * len(rows) + 16
    parts.append(f'<text x="{_LABEL}" y="{bottom}">0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{bottom}" text-anchor="end">{format_seconds(length)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + 4}" role="img" aria-label="threads">{"".join(parts)}</svg>'


def plot(events: Sequence[Event], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw events in the order of their start; see `TraceLog.plot`."""
    rows = _rows(events)
    with picture(10, 1.6 + 0.5 * max(1, len(rows)), path) as (figure, axes):
        drawn: dict[str, Any] = {}
        for row, (_, bars) in enumerate(rows):
            for event in bars:
                colour, height = _colour(event), _HEIGHTS.get(event.kind, _HEIGHT)
                # With an edge, the shortest can be seen too.
                drawn[colour] = axes.broken_barh(
                    [(event.start, event.seconds)],
                    (row - height / 2, height),
                    color=COLOURS[colour],
                    linewidth=0.8,
                )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xlabel("seconds")
        copied = sum(event.nbytes for event in events if event.kind in CONVERSIONS)
        axes.set_title(f"{len(events)} events, {format_bytes(copied)} copied", size=10)
        if drawn:
            figure.legend(drawn.values(), drawn, loc="outside lower center", fontsize=8, ncols=len(drawn))
    return figure
