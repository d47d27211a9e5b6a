"""A run in files: the trace-event format of Perfetto and chrome://tracing, a page of HTML, and a picture."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from arraybridge import formatting
from arraybridge.formatting import COLOURS, format_bytes, format_seconds, picture
from arraybridge.tracing.events import CONVERSIONS, Event, source_line
from arraybridge.tracing.hotspots import HotSpots

__all__ = ["page", "plot", "save"]

Json = dict[str, Any]

# -- for viewers -------------------------------------------------------------------------------------

#: The groups of tracks; the viewers call them processes.
_THREADS, _DEVICES = 1, 2
#: What takes place on a device, and has a track there besides that of its thread.
_ON_DEVICES = ("call", *CONVERSIONS, "stage", "item", "decision")
#: What is told of each event besides its place.
_FIELDS = ("where", "nbytes", "reason", "library", "item", "device", "layout")
#: Steps of a recovery, which have no length.
_MOMENTS = ("retry", "split")


def save(path: str | os.PathLike[str], events: Sequence[Event], dropped: int = 0) -> None:
    """Write events, in the order of their start; see `TraceLog.save`."""
    file = Path(path)
    if file.suffix != ".json":
        raise ValueError(f"{file.name} must end in .json; log.plot({file.name!r}) draws a picture")
    tracks: _Tracks = {}
    traced: list[Json] = []
    flows: dict[str, list[Json]] = defaultdict(list)
    for event in events:
        traced.append(_slice(event, _THREADS, _track(tracks, event, _THREADS, event.thread, event.thread_id)))
        if event.flow:
            flows[event.flow].append(traced[-1])
        if event.device and event.kind in _ON_DEVICES:
            traced.append(_slice(event, _DEVICES, _track(tracks, event, _DEVICES, event.device, 0)))
    traced.extend(arrow for name, steps in flows.items() for arrow in _arrows(name, steps))
    copied = 0
    for event in sorted((e for e in events if e.kind in CONVERSIONS and e.nbytes), key=_end):
        copied += event.nbytes
        counter = {"name": "bytes copied", "cat": "counter", "ph": "C", "args": {"bytes": copied}}
        traced.append({**counter, "pid": _THREADS, "tid": 0, "ts": _micro(_end(event))})
    # What begins at the same time stands in its order: the outer one first, and an arrow in what it leads to.
    traced.sort(key=_drawing_order)
    other = {"program": " ".join(sys.argv), "made by": "arraybridge", "dropped events": dropped}
    document = {"traceEvents": [*_names(tracks), *traced], "displayTimeUnit": "ms", "otherData": other}
    file.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _drawing_order(one: Json) -> tuple[float, float]:
    return one["ts"], -one.get("dur", 0.0)


def _end(event: Event) -> float:
    return event.start + event.seconds


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(event: Event, group: int, track: int) -> Json:
    """A bar on a track, or a stroke for what has no length."""
    details = {name: getattr(event, name) for name in _FIELDS} | {"code": source_line(event.file, event.line)}
    details = {name: detail for name, detail in details.items() if detail not in ("", None)}
    begin = _micro(event.start)
    end = _micro(_end(event))
    bar = {"name": event.name, "cat": event.kind, "pid": group, "tid": track, "ts": begin, "args": details}
    # The end is rounded, not the length: so what lies inside of another does so here.
    length = {"ph": "i", "s": "t"} if event.kind in _MOMENTS else {"ph": "X", "dur": round(end - begin, 3)}
    return bar | length


def _arrows(name: str, steps: list[Json]) -> list[Json]:
    """From each stage of an item to the next."""
    if len(steps) < 2:
        return []
    places = [{key: step[key] for key in ("pid", "tid", "ts")} for step in steps]
    arrows: list[Json] = [{"name": "item", "cat": "flow", "ph": "t", "id": name} | place for place in places]
    arrows[0]["ph"] = "s"
    arrows[-1].update(ph="f", bp="e")
    return arrows


#: Group, name and number of a thread or device, and which of its tracks → the number of the track, and the
#: ends of what is open there.
_Tracks = dict[tuple[int, str, int, int], tuple[int, list[float]]]


def _track(tracks: _Tracks, event: Event, group: int, name: str, number: int) -> int:
    """The number of the track on which an event goes; events come in the order of their start.

    What overlaps another without lying inside of it gets a track beside it: the tasks of one thread, say, or
    the threads of one device. The viewers want all that is on a track to be nested.
    """
    begin = _micro(event.start)
    end = _micro(_end(event))
    beside = 0
    while True:
        track, ends = tracks.setdefault((group, name, number, beside), (len(tracks) + 1, []))
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return track
        beside += 1


def _names(tracks: _Tracks) -> list[Json]:
    """The events that name the groups and the tracks."""
    names = {("process_name", _THREADS, 0): "threads", ("process_name", _DEVICES, 0): "devices"}
    for (group, name, _, beside), (track, _) in tracks.items():
        names["thread_name", group, track] = f"{name} ({beside + 1})" if beside else name
    common = {"cat": "__metadata", "ph": "M", "ts": 0}
    places = ({"name": what, "pid": group, "tid": track} for what, group, track in names)
    return [
        common | place | {"args": {"name": name}} for place, name in zip(places, names.values(), strict=True)
    ]


# -- a page and a picture ----------------------------------------------------------------------------

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
        f'<span><i style="background:{COLOURS[color]}"></i>{color}</span>'
        for color in dict.fromkeys(map(_color, events))
    )
    return formatting.page(
        name,
        f'<div class="wide">{spots._repr_html_()}</div>',
        f'<h2>What happened when</h2>\n<p class="key">{key}</p>',
        f'<div class="wide">{_drawing(events)}</div>',
    )


def _color(event: Event) -> str:
    """What it is drawn as: its kind, or ``"copy"`` for a conversion that copied."""
    return "copy" if event.kind in CONVERSIONS and event.nbytes else event.kind


def _rows(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Name of each thread, and its bars, the longest first: what is inside of them is drawn over them."""
    rows: dict[tuple[str, int], list[Event]] = {(event.thread, event.thread_id): [] for event in events}
    for event in sorted(events, key=_longest_first):
        rows[event.thread, event.thread_id].append(event)
    return [(name, bars[:_BARS]) for (name, _), bars in rows.items()]


def _longest_first(event: Event) -> tuple[float, int]:
    return -event.seconds, -event.nbytes


def _drawing(events: Sequence[Event]) -> str:
    """The threads as rows, from the first event to the end of the last one."""
    begin = min((event.start for event in events), default=0.0)
    length = max((event.start + event.seconds for event in events), default=begin) - begin or 1e-6
    scale = (_WIDTH - _LABEL) / length
    rows = _rows(events)
    parts: list[str] = []
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
                f' fill="{COLOURS[_color(event)]}"><title>{title}</title></rect>'
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
                color = _color(event)
                height = _HEIGHTS.get(event.kind, _HEIGHT)
                # With an edge, the shortest can be seen too.
                drawn[color] = axes.broken_barh(
                    [(event.start, event.seconds)],
                    (row - height / 2, height),
                    color=COLOURS[color],
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
