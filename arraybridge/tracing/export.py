"""Export of traces: to the trace-event format of Perfetto, and to a plot."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from arraybridge.formatting import format_bytes
from arraybridge.plots import COLORS, plot_axes
from arraybridge.tracing.events import CONVERSIONS, Event
from arraybridge.tracing.user_lines import source_line
from arraybridge.validation import file_path

__all__ = ["plot", "save"]

Json = dict[str, Any]

# -- trace viewers -----------------------------------------------------------------------------------

#: The groups of tracks, which viewers show as processes.
_THREADS, _DEVICES = 1, 2
#: The kinds of events that are also shown on the track of their device.
_ON_DEVICES = ("call", *CONVERSIONS, "stage", "item", "decision")
#: The fields of an event that viewers show as its details.
_FIELDS = ("where", "nbytes", "reason", "library", "item", "device", "layout")
#: The kinds of events without a duration.
_MOMENTS = ("retry", "split")


def save(path: str | os.PathLike[str], events: Sequence[Event], dropped: int = 0) -> None:
    """Write events, sorted by start, in the trace-event format; see `TraceLog.save`."""
    file = file_path("path", path)
    if file.suffix != ".json":
        raise ValueError(
            f"Expected a file name that ends in .json, got {file.name!r}. Pass {file.stem + '.json'!r}. For a"
            f" plot, call plot({file.stem + '.png'!r})."
        )
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
    # If starts are equal, viewers need the outer bar first, and an arrow after the bar that it leads to.
    traced.sort(key=_drawing_order)
    other = {"program": " ".join(sys.argv), "made by": "arraybridge", "dropped events": dropped}
    document = {"traceEvents": [*_names(tracks), *traced], "displayTimeUnit": "ms", "otherData": other}
    file.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _drawing_order(traced: Json) -> tuple[float, float]:
    return traced["ts"], -traced.get("dur", 0.0)


def _end(event: Event) -> float:
    return event.start + event.seconds


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(event: Event, group: int, track: int) -> Json:
    """Return a bar on a track, or an instant event for an event without a duration."""
    details = {name: getattr(event, name) for name in _FIELDS} | {"code": source_line(event.file, event.line)}
    details = {name: detail for name, detail in details.items() if detail not in ("", None)}
    begin = _micro(event.start)
    end = _micro(_end(event))
    name = f"start-up of {event.name}" if event.kind == "start-up" else event.name
    bar = {"name": name, "cat": event.kind, "pid": group, "tid": track, "ts": begin, "args": details}
    # Round the end, not the length, so that nested events stay nested.
    length = {"ph": "i", "s": "t"} if event.kind in _MOMENTS else {"ph": "X", "dur": round(end - begin, 3)}
    return bar | length


def _arrows(name: str, steps: list[Json]) -> list[Json]:
    """Return the arrows from each stage of an item to the next."""
    if len(steps) < 2:
        return []
    places = [{key: step[key] for key in ("pid", "tid", "ts")} for step in steps]
    arrows: list[Json] = [{"name": "item", "cat": "flow", "ph": "t", "id": name} | place for place in places]
    arrows[0]["ph"] = "s"
    arrows[-1].update(ph="f", bp="e")
    return arrows


#: The number of each track and the ends of its open bars, by the group, the name and number of the thread or
#: device, and the lane.
_Tracks = dict[tuple[int, str, int, int], tuple[int, list[float]]]


def _track(tracks: _Tracks, event: Event, group: int, name: str, number: int) -> int:
    """Return the number of the track for an event. Pass events in order of start time.

    Viewers require that the bars of a track are nested. An event that partly overlaps another, such as one of
    two asynchronous tasks in a thread, therefore gets another track: another lane of its thread or device.
    """
    begin = _micro(event.start)
    end = _micro(_end(event))
    lane = 0
    while True:
        track, ends = tracks.setdefault((group, name, number, lane), (len(tracks) + 1, []))
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return track
        lane += 1


def _names(tracks: _Tracks) -> list[Json]:
    """Return the metadata events that name the groups and the tracks."""
    names = {("process_name", _THREADS, 0): "threads", ("process_name", _DEVICES, 0): "devices"}
    for (group, name, _, lane), (track, _) in tracks.items():
        names["thread_name", group, track] = f"{name} ({lane + 1})" if lane else name
    common = {"cat": "__metadata", "ph": "M", "ts": 0}
    return [
        {**common, "name": what, "pid": group, "tid": track, "args": {"name": name}}
        for (what, group, track), name in names.items()
    ]


# -- plot ---------------------------------------------------------------------------------------------

#: The maximum number of bars per thread. The longest bars are drawn, and among equals those that copy most.
_BARS = 1500
#: The height of the bars of each kind, as a fraction of a row; outer bars are higher.
_HEIGHTS = {"stage": 0.84, "item": 0.84, "call": 0.6, "decision": 0.6, "conversion": 0.36, "foreign": 0.36}
_HEIGHT = 0.5


def _color(event: Event) -> str:
    """Return the name of an event's color: its kind, or ``"copy"`` for a conversion that copied."""
    return "copy" if event.kind in CONVERSIONS and event.nbytes else event.kind


def _rows(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Return the name and bars of each thread, the longest bar first, so that inner bars are on top."""
    rows: dict[tuple[str, int], list[Event]] = {(event.thread, event.thread_id): [] for event in events}
    for event in sorted(events, key=_longest_first):
        rows[event.thread, event.thread_id].append(event)
    return [(name, bars[:_BARS]) for (name, _), bars in rows.items()]


def _longest_first(event: Event) -> tuple[float, int]:
    return -event.seconds, -event.nbytes


def plot(events: Sequence[Event], path: str | os.PathLike[str] | None = None) -> Any:
    """Return a Matplotlib figure of events, and write it to ``path`` if given; see `TraceLog.plot`."""
    rows = _rows(events)
    instead = f" To write the events, call save({file_path('path', path or 'run').stem + '.json'!r})."
    with plot_axes(10, 1.6 + 0.5 * max(1, len(rows)), path, instead=instead) as (figure, axes):
        drawn: dict[str, Any] = {}
        for row, (_, bars) in enumerate(rows):
            for event in bars:
                color = _color(event)
                height = _HEIGHTS.get(event.kind, _HEIGHT)
                # The edge keeps very short bars visible.
                drawn[color] = axes.broken_barh(
                    [(event.start, event.seconds)],
                    (row - height / 2, height),
                    color=COLORS[color],
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
