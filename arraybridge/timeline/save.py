"""A run in the trace-event format, which Perfetto, chrome://tracing and Speedscope open."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arraybridge.timeline.events import CONVERSIONS, Event, source_line

__all__ = ["save"]

Json = dict[str, Any]

#: The groups of tracks; the viewers call them processes.
_THREADS, _DEVICES = 1, 2
#: What takes place on a device, and has a track there besides that of its thread.
_ON_DEVICES = ("call", *CONVERSIONS, "stage", "item", "decision")
#: What is told of each event besides its place.
_FACTS = ("where", "nbytes", "reason", "library", "item", "device", "layout")
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
        traced.append(_counter("bytes copied", _end(event), copied))
    # What begins at the same time stands in its order: the outer one first, and an arrow in what it leads to.
    traced.sort(key=lambda one: (one["ts"], -one.get("dur", 0.0)))
    other = {"program": " ".join(sys.argv), "made by": "arraybridge", "dropped events": dropped}
    document = {"traceEvents": [*_names(tracks), *traced], "displayTimeUnit": "ms", "otherData": other}
    file.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _end(event: Event) -> float:
    return event.start + event.seconds


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(event: Event, group: int, track: int) -> Json:
    """A bar on a track, or a stroke for what has no length."""
    facts: Json = {name: getattr(event, name) for name in _FACTS}
    facts["code"] = source_line(event.file, event.line)
    facts = {name: fact for name, fact in facts.items() if fact not in ("", None)}
    begin, end = _micro(event.start), _micro(_end(event))
    place = {"name": event.name, "cat": event.kind, "pid": group, "tid": track, "ts": begin, "args": facts}
    if event.kind in _MOMENTS:
        return {**place, "ph": "i", "s": "t"}
    # The end is rounded, not the length: so what lies inside of another does so here.
    return {**place, "ph": "X", "dur": round(end - begin, 3)}


def _counter(name: str, seconds: float, nbytes: int) -> Json:
    place = {"pid": _THREADS, "tid": 0, "ts": _micro(seconds)}
    return {"name": name, "cat": "counter", "ph": "C", **place, "args": {"bytes": nbytes}}


def _arrows(name: str, steps: list[Json]) -> list[Json]:
    """From each stage of an item to the next."""
    arrows = [
        {"name": "item", "cat": "flow", "ph": "t", "id": name, **{k: step[k] for k in ("pid", "tid", "ts")}}
        for step in steps
    ]
    arrows[0]["ph"] = "s"
    arrows[-1].update(ph="f", bp="e")
    return arrows if len(arrows) > 1 else []


#: Group, name and number of a thread or device, and which of its tracks → the number of the track, and the
#: ends of what is open there.
_Tracks = dict[tuple[int, str, int, int], tuple[int, list[float]]]


def _track(tracks: _Tracks, event: Event, group: int, name: str, number: int) -> int:
    """The number of the track on which an event goes; events come in the order of their start.

    What overlaps another without lying inside of it gets a track beside it: the tasks of one thread, say, or
    the threads of one device. The viewers want all that is on a track to be nested.
    """
    begin, end = _micro(event.start), _micro(_end(event))
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
    named = [("process_name", _THREADS, 0, "threads"), ("process_name", _DEVICES, 0, "devices")]
    for (group, name, _, beside), (track, _) in tracks.items():
        named.append(("thread_name", group, track, f"{name} ({beside + 1})" if beside else name))
    common = {"ph": "M", "cat": "__metadata", "ts": 0}
    return [
        {**common, "name": what, "pid": group, "tid": track, "args": {"name": name}}
        for what, group, track, name in named
    ]
