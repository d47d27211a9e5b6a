"""The lines of a program by the bytes that they copy, and what would save the copies."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arraybridge.show import format_bytes, format_seconds, html_table, text_table
from arraybridge.timeline.advice import advice_for
from arraybridge.timeline.events import CONVERSIONS, Event, source_line

__all__ = ["HotSpots", "hotspots"]

_COLUMNS = ("where", "copied", "time", "count", "what")
_STEPS = ("retry", "split", "clean-up")


@dataclass(frozen=True, slots=True)
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

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers and lists, ready for JSON."""
        return {**asdict(self), "threads": list(self.threads), "libraries": list(self.libraries)}


class HotSpots(Sequence[HotSpot]):
    """The hot spots of a trace, the hottest first; prints as a table, also in a notebook.

    Attributes:
        nbytes: bytes copied by all lines, also by those that ``top`` leaves out.
        seconds: of all conversions and clean-ups.
        lines: how many lines there are in all.
        dropped: events that are missing because of ``trace(limit=…)``.
    """

    def __init__(
        self, spots: Sequence[HotSpot], nbytes: int, seconds: float, lines: int, dropped: int
    ) -> None:
        self._spots = tuple(spots)
        self.nbytes, self.seconds, self.lines, self.dropped = nbytes, seconds, lines, dropped

    def __getitem__(self, index: Any) -> Any:
        return self._spots[index]

    def __len__(self) -> int:
        return len(self._spots)

    def __iter__(self) -> Iterator[HotSpot]:
        return iter(self._spots)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, ready for JSON."""
        return {
            "hotspots": [spot.to_dict() for spot in self._spots],
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "lines": self.lines,
            "dropped": self.dropped,
        }

    def _cells(self, spot: HotSpot) -> tuple[str, ...]:
        copied, seconds = format_bytes(spot.nbytes), format_seconds(spot.seconds)
        return spot.where, copied, seconds, str(spot.count), spot.what

    def summary(self) -> str:
        """One line: bytes, time, and what is left out."""
        plural = "" if self.lines == 1 else "s"
        words = (
            f"{self.lines} line{plural}, {format_bytes(self.nbytes)} copied, {format_seconds(self.seconds)}"
        )
        if len(self) < self.lines:
            words += f"; the first {len(self)} are shown"
        if self.dropped:
            words += f"; without the oldest {self.dropped} events, which limit= has dropped"
        return words

    def __repr__(self) -> str:
        if not self._spots:
            return "no conversions"
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        rows: list[tuple[str, ...]] = []
        for spot in self._spots:
            where, *figures, what = self._cells(spot)
            where = _shortened(where, width // 3)
            first, comma, _ = what.partition(", ")
            fits = len(where) + len(what) + 34 <= width  # 34: the figures and the blanks between
            rows.append((where, *figures, what if fits or not comma else f"{first}, …"))
            for mark, words in (("  ", spot.source), ("  because ", spot.reason), ("  → ", spot.advice)):
                # A row of one cell runs over all columns.
                rows.extend((line,) for line in _wrapped(words, mark, width))
        table = text_table(_COLUMNS, rows, right=_COLUMNS[1:4], rule=True)
        return f"{table}\n{self.summary()}"

    def _repr_html_(self) -> str:
        rows = [(*self._cells(spot), spot.source, spot.reason, spot.advice) for spot in self._spots]
        return html_table((*_COLUMNS, "code", "why", "what would save it"), rows, caption=self.summary())


def _shortened(where: str, width: int) -> str:
    """A path whose end says most."""
    while len(where) > width and "/" in where[2:]:
        where = f"…/{where[2:].partition('/')[2]}"
    return where


def _wrapped(words: str, mark: str, width: int) -> list[str]:
    """The words after a mark, in lines that are set in below it; no word is broken."""
    wrapper = textwrap.TextWrapper(width, mark, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * max(4, len(mark))
    return wrapper.wrap(words)


def hotspots(
    events: Sequence[Event], dropped: int = 0, top: int | None = None, libraries: bool = True
) -> HotSpots:
    """The events by line, the hottest first; see `TraceLog.hotspots`."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(f"top={top!r} must be a positive whole number of lines, or None")
    lines: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in (*CONVERSIONS, *_STEPS) and (libraries or not event.library):
            lines[event.file, event.line].append(event)
    spots = sorted(map(_spot, lines.values()), key=lambda spot: (-spot.nbytes, -spot.seconds))
    return HotSpots(
        spots[:top], sum(s.nbytes for s in spots), sum(s.seconds for s in spots), len(spots), dropped
    )


def _spot(events: list[Event]) -> HotSpot:
    """One line, from all that it did."""
    first = events[0]
    conversions = [event for event in events if event.kind in CONVERSIONS]
    steps = Counter(event.kind for event in events)
    what: Counter[str] = Counter()
    why: dict[tuple[str, ...], list[Event]] = defaultdict(list)
    for event in conversions:
        what[event.name] += event.nbytes
        if event.nbytes:
            why[event.reason, event.layout, event.source, event.target].append(event)
    groups = sorted(why.values(), key=lambda group: -sum(event.nbytes for event in group))
    reasons = [group[0].reason for group in groups]
    if not groups:
        reasons = [event.reason for event in conversions[:1]]
    advice = [advice_for(group) for group in groups]
    if steps["retry"] or steps["split"]:
        reasons.append(f"memory ran out here, with {steps['retry']} × a retry and {steps['split']} × a split")
        advice.append("pass fewer rows at a time, or free what is not needed before this line")
    return HotSpot(
        first.where,
        first.file,
        first.line,
        source_line(first.file, first.line),
        ", ".join(name for name, _ in what.most_common()),
        sum(event.nbytes for event in conversions),
        sum(event.seconds for event in events),
        len(conversions),
        "; ".join(dict.fromkeys(reasons)),
        "; ".join(dict.fromkeys(filter(None, advice))),
        steps["retry"],
        steps["split"],
        tuple(sorted({event.thread for event in events})),
        tuple(sorted({event.library for event in events})),
    )
