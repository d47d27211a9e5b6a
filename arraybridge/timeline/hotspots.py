"""The lines of a program by the bytes that they copy, and what would save the copies."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arraybridge.show import Contents, Table, format_bytes, format_seconds
from arraybridge.timeline.advice import advice_for
from arraybridge.timeline.events import CONVERSIONS, Event, source_line

__all__ = ["HotSpots", "hotspots"]

_STEPS = ("retry", "split", "clean-up")


@dataclass(frozen=True)
class HotSpot:
    """What one line of the user's code has done.

    Attributes:
        where: file and line as they are shown, ``"train.py:12"``.
        file, line: of the user's code; see `Event`.
        source: the text of the line; ``""`` where it cannot be had.
        what: the conversions, ``"numpy → jax"``, most bytes first.
        nbytes: bytes copied.
        seconds: spent in conversions and clean-ups.
        count: conversions.
        reason: why it copied, most bytes first.
        advice: what would save the copies, in words; ``""`` where nothing is copied.
        retries, splits: how often memory ran out and the call was made again, or went on in halves.
        threads: the threads that it ran in.
        libraries: the other libraries that called arraybridge from there; ``""`` stands for the line itself.
    """

    where: str
    file: str
    line: int
    source: str
    what: str
    nbytes: int
    seconds: float
    count: int
    reason: str
    advice: str
    retries: int
    splits: int
    threads: tuple[str, ...]
    libraries: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class HotSpots(Table, Sequence[HotSpot]):
    """The hot spots of a trace, the hottest first; prints as a table, also in a notebook.

    Attributes:
        hotspots: one `HotSpot` a line.
        nbytes: bytes copied by all lines, also by those that ``top`` leaves out.
        seconds: of all conversions and clean-ups.
        lines: how many lines there are in all.
        dropped: events that are missing because of ``trace(limit=…)``.
    """

    hotspots: tuple[HotSpot, ...]
    nbytes: int
    seconds: float
    lines: int
    dropped: int

    def __getitem__(self, index: Any) -> Any:
        return self.hotspots[index]

    def __len__(self) -> int:
        return len(self.hotspots)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, sequences, strings and numbers, ready for JSON."""
        return asdict(self)

    def _table(self) -> Contents:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        rows: list[tuple[str, ...]] = []
        for spot in self:
            where, what = _shortened(spot.where, width // 3), spot.what
            if len(where) + len(what) + 34 > width:  # 34: the figures and the blanks between
                what = what.partition(", ")[0] + ", …" * (", " in what)
            figures = format_bytes(spot.nbytes), format_seconds(spot.seconds), str(spot.count)
            rows.append((where, *figures, what))
            for mark, words in (("  ", spot.source), ("  because ", spot.reason), ("  → ", spot.advice)):
                if words:
                    rows.append((_wrapped(words, mark, width),))  # a row of one cell runs over all columns
        return (
            ("where", "copied", "time", "count", "what"),
            rows,
            ("copied", "time", "count"),
            self._summary(),
        )

    def _summary(self) -> str:
        """One line: bytes, time, and what is left out."""
        plural = "" if self.lines == 1 else "s"
        copied, seconds = format_bytes(self.nbytes), format_seconds(self.seconds)
        parts = [f"{self.lines} line{plural}, {copied} copied, {seconds}"]
        if len(self) < self.lines:
            parts.append(f"the first {len(self)} are shown")
        if self.dropped:
            parts.append(f"without the oldest {self.dropped} events, which limit= has dropped")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return str(self) if self else "no conversions"


def _shortened(where: str, width: int) -> str:
    """A path whose end says most."""
    while len(where) > width and "/" in where[2:]:
        where = f"…/{where[2:].partition('/')[2]}"
    return where


def _wrapped(words: str, mark: str, width: int) -> str:
    """The words after a mark, in lines that are set in below it; no word is broken."""
    wrapper = textwrap.TextWrapper(width, mark, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * max(4, len(mark))
    return wrapper.fill(words)


def hotspots(
    events: Sequence[Event], dropped: int = 0, top: int | None = None, libraries: bool = True
) -> HotSpots:
    """The events by line, the hottest first; see `TraceLog.hotspots`."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(f"top={top!r} must be a positive whole number of lines, or None")
    counted = [
        event
        for event in events
        if event.kind in (*CONVERSIONS, *_STEPS) and (libraries or not event.library)
    ]
    lines = _grouped(counted, lambda event: (event.file, event.line))
    spots = sorted(map(_spot, lines), key=lambda spot: (-spot.nbytes, -spot.seconds))
    nbytes, seconds = sum(spot.nbytes for spot in spots), sum(spot.seconds for spot in spots)
    return HotSpots(tuple(spots[:top]), nbytes, seconds, len(spots), dropped)


def _spot(events: list[Event]) -> HotSpot:
    """One line, from all that it did."""
    first, kinds = events[0], Counter(event.kind for event in events)
    conversions = [event for event in events if event.kind in CONVERSIONS]
    groups = _grouped(conversions, lambda event: (event.reason, event.layout, event.source, event.target))
    copies = [group for group in groups if group[0].nbytes]
    reasons = [group[0].reason for group in copies or groups[:1]]
    advice = [advice_for(group) for group in copies]
    if kinds["retry"] or kinds["split"]:
        reasons.append(f"memory ran out here, with {kinds['retry']} × a retry and {kinds['split']} × a split")
        advice.append("pass fewer rows at a time, or free what is not needed before this line")
    return HotSpot(
        where=first.where,
        file=first.file,
        line=first.line,
        source=source_line(first.file, first.line),
        what=", ".join(group[0].name for group in _grouped(conversions, lambda event: event.name)),
        nbytes=sum(event.nbytes for event in conversions),
        seconds=sum(event.seconds for event in events),
        count=len(conversions),
        reason="; ".join(dict.fromkeys(reasons)),
        advice="; ".join(dict.fromkeys(filter(None, advice))),
        retries=kinds["retry"],
        splits=kinds["split"],
        threads=tuple(sorted({event.thread for event in events})),
        libraries=tuple(sorted({event.library for event in events})),
    )


def _grouped(events: Sequence[Event], key: Callable[[Event], object]) -> list[list[Event]]:
    """The events that have a key in common, those of the most bytes first."""
    groups: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return sorted(groups.values(), key=lambda group: -sum(event.nbytes for event in group))
