"""A picture of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from arraybridge.show import format_bytes
from arraybridge.timeline.events import Event

__all__ = ["COLOURS", "plot"]

#: Kind → colour, also on the page that `arraybridge trace --html` writes. Copies are red, whatever they are.
COLOURS = {
    "stage": "#4c78a8",
    "item": "#4c78a8",
    "call": "#72b7b2",
    "decision": "#b279a2",
    "conversion": "#9ecae9",
    "clean-up": "#eeca3b",
    "retry": "#f58518",
    "split": "#f58518",
    "grow": "#f58518",
    "copy": "#e45756",
}
#: How much of a row each takes, the outer ones most.
_HEIGHTS = {"stage": 0.84, "item": 0.84, "call": 0.6, "decision": 0.6, "conversion": 0.36}


def plot(events: Sequence[Event], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw events in the order of their start; see `TraceLog.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            'log.plot() draws with matplotlib; run pip install matplotlib, or pip install ".[plot]" in a'
            " checkout of arraybridge"
        ) from error
    threads = list(dict.fromkeys((event.thread, event.thread_id) for event in events))
    figure = Figure(figsize=(10, 1.6 + 0.5 * max(1, len(threads))), layout="constrained")
    axes = figure.subplots()
    used: dict[str, str] = {}
    for row, thread in enumerate(threads):
        for event in events:
            if (event.thread, event.thread_id) != thread:
                continue
            kind = "copy" if event.kind == "conversion" and event.nbytes else event.kind
            used[kind] = COLOURS[kind]
            height = _HEIGHTS.get(event.kind, 0.5)
            if event.seconds:
                bar = [(event.start, event.seconds)]
                # With an edge, the shortest can be seen too.
                axes.broken_barh(bar, (row - height / 2, height), color=COLOURS[kind], linewidth=0.8)
            else:
                axes.plot([event.start], [row], "|", color=COLOURS[kind], markersize=16)
    axes.set_yticks(range(len(threads)), [name for name, _ in threads], size=8)
    axes.set_ylim(max(1, len(threads)) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    copied = sum(event.nbytes for event in events if event.kind == "conversion")
    axes.set_title(f"{len(events)} events, {format_bytes(copied)} copied", size=10)
    if used:
        handles = [Patch(color=colour, label=kind) for kind, colour in used.items()]
        figure.legend(handles=handles, loc="outside lower center", fontsize=8, ncols=len(used), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
