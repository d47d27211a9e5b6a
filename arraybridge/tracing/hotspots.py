"""The lines of a program by the bytes that they copy, and what would save the copies."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arraybridge.formatting import Contents, Table, format_bytes, format_seconds
from arraybridge.tracing import copy_advice
from arraybridge.tracing.copy_advice import Copy
from arraybridge.tracing.events import CONVERSIONS, Event, source_line
from arraybridge.validation import whole_number

__all__ = ["HotSpots", "hotspots"]

_HEAD = ("where", "copied", "time", "count", "what")
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
        in_library: whether the line is a library's own, in a thread without the user's code.
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
    in_library: bool = False


@dataclass(frozen=True, repr=False)
class HotSpots(Table, Sequence[HotSpot]):
    """The hot spots of a trace, the hottest first; prints as a table, also in a notebook.

    Lines of libraries' own threads, which run none of the user's code, come after all lines of the user. A
    line that only shares memory is no hot spot.

    Attributes:
        hotspots: one `HotSpot` a line.
        nbytes: bytes copied by all lines, also by those that ``top`` leaves out.
        seconds: of all conversions and clean-ups.
        lines: how many hot spots there are in all.
        dropped: events that are missing because of ``trace(limit=…)``.
        shared: how many other lines only shared memory.
    """

    hotspots: tuple[HotSpot, ...]
    nbytes: int
    seconds: float
    lines: int
    dropped: int
    shared: int = 0

    def __getitem__(self, index: Any) -> Any:
        return self.hotspots[index]

    def __len__(self) -> int:
        return len(self.hotspots)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, sequences, strings and numbers, ready for JSON."""
        return asdict(self)

    def _table(self) -> Contents:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        place_width = width // 3 - 5  # leaves space for times such as "123.45 ms" in 60 columns
        rows: list[tuple[str, ...]] = []
        has_users_lines = any(not spot.in_library for spot in self)
        for number, spot in enumerate(self):
            if spot.in_library and not (number and self[number - 1].in_library):
                rows += [("",)] * has_users_lines + [("in threads of libraries, without a line of yours:",)]
            rows += _rows(spot, width, place_width)
        return _HEAD, rows, _HEAD[1:4], self._summary()

    def _summary(self) -> str:
        plural = "" if self.lines == 1 else "s"
        copied = format_bytes(self.nbytes)
        seconds = format_seconds(self.seconds)
        parts = [f"{self.lines} line{plural}, {copied} copied, {seconds}"]
        if len(self) < self.lines:
            parts.append(f"the first {len(self)} are shown")
        if self.shared:
            parts.append(f"{self.shared} more share memory")
        if self.dropped:
            parts.append(f"without the oldest {self.dropped} events, which limit= has dropped")
        return "; ".join(parts)

    def __repr__(self) -> str:
        if self:
            return str(self)
        return "no copies" if self.shared else "no conversions"


def _rows(spot: HotSpot, width: int, place_width: int) -> list[tuple[str, ...]]:
    """Return the rows of one hot spot: its figures, and below them its source, reason and advice."""
    where = spot.where
    what = spot.what
    if len(where) > place_width:  # the end of a path is the most informative part
        where = f"…{where[1 - place_width :]}"
    if len(where) + len(what) + 34 > width:  # 34: the figures and the blanks between
        what = what.partition(", ")[0] + ", …" * (", " in what)
    figures = format_bytes(spot.nbytes), format_seconds(spot.seconds), str(spot.count)
    rows: list[tuple[str, ...]] = [(where, *figures, what)]
    for indent, text in (("  ", spot.source), ("  because ", spot.reason), ("  → ", spot.advice)):
        wrapper = textwrap.TextWrapper(width, indent, break_long_words=False, break_on_hyphens=False)
        wrapper.subsequent_indent = " " * max(4, len(indent))
        if text:
            rows.append((wrapper.fill(text),))  # a row of one cell runs over all columns
    return rows


def hotspots(events: Sequence[Event], dropped: int = 0, top: int | None = None) -> HotSpots:
    """The events by line, the hottest first; see `TraceLog.hotspots`."""
    if top is not None:
        whole_number("top", top, least=1, type_error=ValueError)
    counted = [event for event in events if event.kind in (*CONVERSIONS, *_STEPS)]
    lines = _grouped(counted, lambda event: (event.file, event.line))
    every = [_spot(line) for line in lines]
    nbytes = sum(spot.nbytes for spot in every)
    seconds = sum(spot.seconds for spot in every)
    hot = [spot for spot, line in zip(every, lines, strict=True) if spot.nbytes or _recovered(line)]
    hot.sort(key=lambda spot: (spot.in_library, -spot.nbytes, -spot.seconds))
    return HotSpots(tuple(hot[:top]), nbytes, seconds, len(hot), dropped, len(every) - len(hot))


def _recovered(events: list[Event]) -> bool:
    """Whether memory ran out at a line, or was freed there."""
    return any(event.kind in _STEPS for event in events)


def _spot(events: list[Event]) -> HotSpot:
    """One line, from all that it did."""
    first = events[0]
    kinds = Counter(event.kind for event in events)
    conversions = [event for event in events if event.kind in CONVERSIONS]
    reasons, advice = _reasons_and_advice(conversions)
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
        in_library=first.in_library,
    )


def _reasons_and_advice(conversions: list[Event]) -> tuple[list[str], list[str]]:
    """Return why one line copied, and what would save these copies, most bytes first.

    If nothing was copied, the reason is why the memory was shared, without advice.
    """
    groups = _grouped(conversions, lambda event: (event.reason, event.layout, event.source, event.target))
    copies = [group for group in groups if group[0].nbytes]
    reasons = [group[0].reason for group in copies or groups[:1]]
    return reasons, [advice_for(group) for group in copies]


def _grouped(events: Sequence[Event], key: Callable[[Event], object]) -> list[list[Event]]:
    """The events that have a key in common, those of the most bytes first."""
    groups: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return sorted(groups.values(), key=lambda group: -sum(event.nbytes for event in group))


# -- what would save a copy, in words that can be followed ---------------------------------------------


def advice_for(copies: Sequence[Event]) -> str:
    """What would save these copies of one line, one reason and one layout; ``""`` where nothing would."""
    event = copies[0]
    most = max(Counter(e.array for e in copies if e.array is not None).values(), default=0)
    once = "once, before the loop" if 1 < most == len(copies) else "where it is made"
    # The calls of another library are not the user's to change.
    words = "" if event.kind == "foreign" and event.library else _by_reason(event, once)
    if most < 2:
        return words
    which = f"these {most}" if most == len(copies) else f"{most} of these {len(copies)}"
    same = (
        f"{which} conversions convert the same array: convert it once, before the loop (as long as its values"
        " stay the same)"
    )
    return f"{same}; or {words}" if words else same


def _by_reason(event: Event, once: str) -> str:
    if event.code is None:
        return ""
    call = event.name if event.kind == "foreign" else ""
    copy = Copy(
        event.code,
        source=event.source,
        target=event.target,
        device=event.device,
        layout=event.layout,
        call=call,
        once=once,
    )
    return copy_advice.advice_for(copy)
