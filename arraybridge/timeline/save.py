"""A run in the trace-event format, which Perfetto, chrome://tracing and Speedscope open."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arraybridge.timeline.events import CONVERSIONS, Event, source_line

__all__ = ["save"]

Json = dict[str, Any]

#: The groups of tracks; the viewers call them processes.
_THREADS, _DEVICES = 1, 2
#: What takes place on a device, and has a track there besides that of its thread.
_ON_DEVICES = ("call", *CONVERSIONS, "stage", "item", "decision")
_STAGES = ("stage", "item")
#: Steps of a recovery, which have no length.
_MOMENTS = ("retry", "split", "grow")


def save(
    path: str | os.PathLike[str],
    events: Sequence[Event],
    memory: Iterable[tuple[float, str, int]] = (),
    dropped: int = 0,
) -> None:
    """Write events, in the order of their start, and readings of memory; see `TraceLog.save`."""
    file = Path(path)
    if file.suffix != ".json":
        raise ValueError(f"{file.name} must end in .json; log.plot({file.name!r}) draws a picture")
    file.write_text(json.dumps(document(events, memory, dropped), allow_nan=False), encoding="utf-8")


def document(
    events: Sequence[Event], memory: Iterable[tuple[float, str, int]] = (), dropped: int = 0
) -> Json:
    """The same, before it is written."""
    tracks = _Tracks()
    traced: list[Json] = []
    flows: dict[str, list[Json]] = defaultdict(list)
    copied = 0
    for event in events:
        written = _written(event, _THREADS, tracks.of(_THREADS, (event.thread, event.thread_id), event))
        traced.append(written)
        if event.device and event.kind in _ON_DEVICES:
            traced.append(_written(event, _DEVICES, tracks.of(_DEVICES, (event.device, 0), event)))
        if event.flow and event.kind in _STAGES:
            flows[event.flow].append(written)
    for event in sorted((e for e in events if e.kind in CONVERSIONS and e.nbytes), key=_end):
        copied += event.nbytes
        traced.append(_counter("bytes copied", _end(event), copied))
    traced.extend(_counter(f"memory in use, {device}", at, nbytes) for at, device, nbytes in memory)
    for name, steps in flows.items():
        traced.extend(_flow(name, steps))
    # What begins at the same time stands in its order: the outer one first, and an arrow in what it leads to.
    traced.sort(key=lambda one: (one["ts"], -one.get("dur", 0.0)))
    other = {"program": " ".join(sys.argv), "made by": "arraybridge", "dropped events": dropped}
    return {"traceEvents": [*tracks.names(), *traced], "displayTimeUnit": "ms", "otherData": other}


def _end(event: Event) -> float:
    return event.start + event.seconds


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _written(event: Event, group: int, track: int) -> Json:
    args: Json = {"where": event.where, "code": source_line(event.file, event.line)}
    for name in ("nbytes", "reason", "library", "item", "device", "layout"):
        value = getattr(event, name)
        if value not in ("", None, 0) or (name == "item" and value == 0):
            args[name] = value
    place = {"pid": group, "tid": track, "ts": _micro(event.start)}
    written: Json = {"name": event.name, "cat": event.kind, **place, "args": args}
    if event.kind in _MOMENTS:
        return {**written, "ph": "i", "s": "t"}
    # The end is rounded, not the length: so what lies inside of another does so here.
    return {**written, "ph": "X", "dur": round(_micro(_end(event)) - _micro(event.start), 3)}


def _counter(name: str, seconds: float, nbytes: int) -> Json:
    place = {"pid": _THREADS, "tid": 0, "ts": _micro(seconds)}
    return {"name": name, "cat": "counter", "ph": "C", **place, "args": {"bytes": nbytes}}


def _flow(name: str, steps: list[Json]) -> list[Json]:
    """Arrows from each stage of an item to the next."""
    arrows = [
        {"name": "item", "cat": "flow", "ph": "t", "id": name, **{k: step[k] for k in ("pid", "tid", "ts")}}
        for step in steps
    ]
    arrows[0]["ph"] = "s"
    arrows[-1].update(ph="f", bp="e")
    return arrows if len(arrows) > 1 else []


class _Tracks:
    """Numbers of tracks. What overlaps another without lying inside of it gets a track beside it.

    So it is with the tasks of one thread, and with the threads of one device: the viewers want all that is on
    a track to be nested.
    """

    def __init__(self) -> None:
        #: Group and key of a track → its number and those beside it, with the ends of what is open there.
        self._open: dict[tuple[int, tuple[str, int]], list[tuple[int, list[float]]]] = {}
        self._named: list[tuple[int, int, str]] = []

    def of(self, group: int, key: tuple[str, int], event: Event) -> int:
        """The number of the track on which an event goes; events come in the order of their start."""
        lanes = self._open.setdefault((group, key), [])
        begin, end = _micro(event.start), _micro(_end(event))
        for number, ends in lanes:
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return number
        number = len(self._named) + 1
        self._named.append((group, number, key[0] if not lanes else f"{key[0]} ({len(lanes) + 1})"))
        lanes.append((number, [end]))
        return number

    def names(self) -> list[Json]:
        """The events that name the groups and the tracks."""
        groups = [("process_name", _THREADS, 0, "threads"), ("process_name", _DEVICES, 0, "devices")]
        tracks = [("thread_name", *track) for track in self._named]
        common = {"ph": "M", "cat": "__metadata", "ts": 0}
        return [
            {**common, "name": what, "pid": group, "tid": track, "args": {"name": name}}
            for what, group, track, name in (*groups, *tracks)
        ]
