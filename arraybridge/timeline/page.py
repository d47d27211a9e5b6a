"""The report of a run as one page of HTML, and its picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import Any

from arraybridge import pages
from arraybridge.pages import COLOURS
from arraybridge.show import format_bytes, format_seconds
from arraybridge.timeline.events import CONVERSIONS, Event
from arraybridge.timeline.hotspots import HotSpot, HotSpots

__all__ = ["page", "plot"]

#: Bars of a thread that are drawn at most: the longest, and those that copy the most.
_BARS = 1500
_ROW, _WIDTH, _LABEL = 22, 1000, 130
#: How much of a row each takes in the picture, the outer ones most.
_HEIGHTS = {"stage": 0.84, "item": 0.84, "call": 0.6, "decision": 0.6, "conversion": 0.36, "foreign": 0.36}


def page(events: Sequence[Event], spots: HotSpots, name: str) -> str:
    """The hot spots, and below them the run as a drawing.

    Args:
        events: in the order of their start.
        spots: what `hotspots` has made of them.
        name: what was run, for the heading.
    """
    most = max((spot.nbytes for spot in spots), default=0)
    key = "".join(
        f'<span><i style="background:{COLOURS[kind]}"></i>{kind}</span>'
        for kind in dict.fromkeys(event.colour for event in events)
    )
    return pages.page(
        name,
        f"<p>{escape(spots.summary())}</p>",
        "".join(_article(spot, most) for spot in spots) or "<p>No array was converted.</p>",
        f'<h2>What happened when</h2>\n<p class="key">{key}</p>',
        f'<div class="wide">{_drawing(events)}</div>',
    )


def _article(spot: HotSpot, most: int) -> str:
    figures = (f"{format_bytes(spot.nbytes)} copied", format_seconds(spot.seconds), f"{spot.count} ×")
    spans = "".join(f"<span>{escape(words)}</span>" for words in (*figures, spot.what))
    callers = [library for library in spot.libraries if library]
    parts = [f'<div class="head"><b>{escape(spot.where)}</b>{spans}</div>']
    if spot.nbytes:
        parts.append(f'<div class="bar" style="width:{100 * spot.nbytes / most:.1f}%"></div>')
    for opening, words, closing in (
        ("<pre>", spot.source, "</pre>"),
        ("<p>", spot.reason, "</p>"),
        ('<p class="advice">', spot.advice, "</p>"),
        ('<p class="soft">called by ', ", ".join(callers), "</p>"),
        ('<p class="soft">in ', ", ".join(set(spot.threads) - {"MainThread"}), "</p>"),
    ):
        if words:
            parts.append(f"{opening}{escape(words)}{closing}")
    return f"<article>{''.join(parts)}</article>"


def _drawing(events: Sequence[Event]) -> str:
    """The threads as rows, from the first event to the end of the last one."""
    if not events:
        return ""
    begin = min(event.start for event in events)
    length = max(event.start + event.seconds for event in events) - begin or 1e-6
    scale = (_WIDTH - _LABEL) / length
    parts = []
    rows = _by_thread(events)
    for row, (thread, of_thread) in enumerate(rows):
        top = row * _ROW
        parts.append(f'<text x="0" y="{top + 15}">{escape(thread[:20])}</text>')
        parts.append(f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{top + _ROW}" y2="{top + _ROW}"/>')
        # The longest first: what is inside of them is drawn over them.
        for event in sorted(of_thread, key=lambda event: (-event.seconds, -event.nbytes))[:_BARS]:
            inset = 4 if event.kind in CONVERSIONS else 1
            parts.append(
                f'<rect x="{_LABEL + (event.start - begin) * scale:.2f}" y="{top + inset}"'
                f' width="{max(1.0, event.seconds * scale):.2f}" height="{_ROW - 2 * inset}"'
                f' fill="{COLOURS[event.colour]}"><title>{escape(_title(event))}</title></rect>'
            )
    height = _ROW * len(rows) + 20
    parts.append(f'<text x="{_LABEL}" y="{height - 4}">0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{height - 4}" text-anchor="end">{format_seconds(length)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="threads">{"".join(parts)}</svg>'


def _by_thread(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Name of each thread, and its events."""
    rows: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        rows.setdefault((event.thread, event.thread_id), []).append(event)
    return [(name, of_thread) for (name, _), of_thread in rows.items()]


def _title(event: Event) -> str:
    words = [f"{event.kind} {event.name}", event.where, format_seconds(event.seconds)]
    copied = format_bytes(event.nbytes) if event.nbytes else ""
    return ", ".join(filter(None, [*words, copied, event.reason]))


def plot(events: Sequence[Event], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw events in the order of their start; see `TraceLog.plot`."""
    rows = _by_thread(events)
    with pages.picture(10, 1.6 + 0.5 * max(1, len(rows)), path) as (figure, axes):
        kinds: dict[str, Any] = {}
        for row, (_, of_thread) in enumerate(rows):
            for event in of_thread:
                colour, height = COLOURS[event.colour], _HEIGHTS.get(event.kind, 0.5)
                if event.seconds:
                    bar = [(event.start, event.seconds)]
                    # With an edge, the shortest can be seen too.
                    kinds[event.colour] = axes.broken_barh(
                        bar, (row - height / 2, height), color=colour, linewidth=0.8
                    )
                else:
                    (kinds[event.colour],) = axes.plot([event.start], [row], "|", color=colour, markersize=16)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        axes.set_xlabel("seconds")
        copied = sum(event.nbytes for event in events if event.kind in CONVERSIONS)
        axes.set_title(f"{len(events)} events, {format_bytes(copied)} copied", size=10)
        if kinds:
            figure.legend(kinds.values(), kinds, loc="outside lower center", fontsize=8, ncols=len(kinds))
    return figure
