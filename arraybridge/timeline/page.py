"""The report of a run as one page of HTML, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from arraybridge.show import format_bytes, format_seconds
from arraybridge.timeline.events import Event
from arraybridge.timeline.hotspots import HotSpot, HotSpots
from arraybridge.timeline.plot import COLOURS

__all__ = ["page"]

#: Bars of a thread that are drawn at most: the longest, and those that copy the most.
_BARS = 1500
_ROW, _WIDTH = 22, 1000

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: light-dark(#555, #aaa); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.faint { color: var(--faint); }
article { border-top: 1px solid var(--line); padding: .7rem 0; }
article p { margin: .25rem 0; overflow-wrap: anywhere; }
.head { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-variant-numeric: tabular-nums; }
.bar { height: 4px; background: #e45756; border-radius: 2px; margin: .3rem 0; min-width: 1px; }
pre { margin: .3rem 0; padding: .4rem .6rem; background: #8882; border-radius: .3rem; overflow-x: auto; }
.advice::before { content: "→ "; }
.wide { overflow-x: auto; }
svg { display: block; min-width: 46rem; width: 100%; height: auto; }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; }
svg line { stroke: var(--line); }
.key span { white-space: nowrap; margin-right: 1rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .3rem; }
"""


def page(events: Sequence[Event], spots: HotSpots, name: str) -> str:
    """The hot spots, and below them the run as a drawing.

    Args:
        events: in the order of their start.
        spots: what `hotspots` has made of them.
        name: what was run, for the heading.
    """
    most = max((spot.nbytes for spot in spots), default=0)
    lines = "".join(_article(spot, most) for spot in spots) or "<p>No array was converted.</p>"
    kinds = dict.fromkeys(_kind(event) for event in events)
    key = "".join(f'<span><i style="background:{COLOURS[kind]}"></i>{kind}</span>' for kind in kinds)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(name)}</h1>
<p>{escape(spots.summary())}</p>
{lines}
<h2>What happened when</h2>
<p class="key">{key}</p>
<div class="wide">{_drawing(events)}</div>
</body>
</html>
"""


def _article(spot: HotSpot, most: int) -> str:
    width = 100 * spot.nbytes / most if most else 0
    figures = (f"{format_bytes(spot.nbytes)} copied", format_seconds(spot.seconds), f"{spot.count} ×")
    spans = "".join(f"<span>{words}</span>" for words in figures)
    what = f'<span class="faint">{escape(spot.what)}</span>'
    parts = [
        f'<div class="head"><b>{escape(spot.where)}</b>{spans}{what}</div>',
        f'<div class="bar" style="width:{width:.1f}%"></div>' if spot.nbytes else "",
        f"<pre>{escape(spot.source)}</pre>" if spot.source else "",
        f"<p>{escape(spot.reason)}</p>" if spot.reason else "",
        f'<p class="advice">{escape(spot.advice)}</p>' if spot.advice else "",
    ]
    others = [library for library in spot.libraries if library]
    if others:
        parts.append(f'<p class="faint">called by {escape(", ".join(others))}</p>')
    if spot.threads != ("MainThread",):
        parts.append(f'<p class="faint">in {escape(", ".join(spot.threads))}</p>')
    return f"<article>{''.join(parts)}</article>"


def _kind(event: Event) -> str:
    return "copy" if event.kind == "conversion" and event.nbytes else event.kind


def _drawing(events: Sequence[Event]) -> str:
    """The threads as rows, from the first event to the end of the last one."""
    if not events:
        return ""
    begin = min(event.start for event in events)
    length = max(event.start + event.seconds for event in events) - begin or 1e-6
    threads = list(dict.fromkeys((event.thread, event.thread_id) for event in events))
    label = 130
    scale = (_WIDTH - label) / length
    height = _ROW * len(threads) + 20
    parts = []
    for row, thread in enumerate(threads):
        top = row * _ROW
        parts.append(f'<text x="0" y="{top + 15}">{escape(thread[0][:20])}</text>')
        parts.append(f'<line x1="{label}" x2="{_WIDTH}" y1="{top + _ROW}" y2="{top + _ROW}"/>')
        mine = [event for event in events if (event.thread, event.thread_id) == thread]
        longest = sorted(mine, key=lambda event: (-event.seconds, -event.nbytes))[:_BARS]
        for event in longest:  # the longest first: what is inside of them is drawn over them
            inset = 4 if event.kind == "conversion" else 1
            parts.append(
                f'<rect x="{label + (event.start - begin) * scale:.2f}" y="{top + inset}"'
                f' width="{max(1.0, event.seconds * scale):.2f}" height="{_ROW - 2 * inset}"'
                f' fill="{COLOURS[_kind(event)]}"><title>{escape(_title(event))}</title></rect>'
            )
    foot = height - 4
    parts.append(f'<text x="{label}" y="{foot}">0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{foot}" text-anchor="end">{format_seconds(length)}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="threads">{"".join(parts)}</svg>'


def _title(event: Event) -> str:
    words = [f"{event.kind} {event.name}", event.where, format_seconds(event.seconds)]
    if event.nbytes:
        words.append(format_bytes(event.nbytes))
    return ", ".join([*words, *([event.reason] if event.reason else [])])
