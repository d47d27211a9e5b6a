"""Hot spots: the lines of a program, sorted by the bytes that they copy, with advice."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from arraybridge import copy_advice
from arraybridge.copy_advice import Copy
from arraybridge.formatting import Contents, Table, format_bytes, format_count, format_seconds
from arraybridge.interface import registry
from arraybridge.reasons import Reason
from arraybridge.tracing.events import CONVERSIONS, Event, start_up_lines
from arraybridge.tracing.user_lines import source_line
from arraybridge.validation import whole_number

__all__ = ["HotSpots", "hotspots"]

_HEAD = ("where", "copied", "time", "calls", "what")
_STEPS = ("retry", "split", "clean-up")
# A line that copies arrays of one size at least this often could reuse memory.
_OFTEN = 4


@dataclass(frozen=True)
class HotSpot:
    """The conversions and out-of-memory recoveries of one line of the user's code.

    Attributes:
        where: The file and line for display, such as ``"train.py:12"``.
        file: The file of the user's code; see `Event`.
        line: The line in ``file``.
        source: The text of the line; ``""`` if it is unavailable.
        what: The conversions, such as ``"numpy → jax"``; those that copy the most bytes come first.
        nbytes: The number of bytes copied.
        seconds: The time spent in conversions and clean-ups.
        count: The number of conversions.
        reason: The reasons for the copies; those with the most copied bytes come first.
        advice: Advice on avoiding the copies; ``""`` if nothing is copied or there is none.
        retries: The number of times that memory ran out and the call was retried.
        splits: The number of times that memory ran out and the input was split.
        threads: The names of the threads that ran the line.
        libraries: The other libraries that called arraybridge from the line; ``""`` for direct calls.
        in_library: Whether the line belongs to a library, in a thread that runs none of the user's code.
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
    """The hot spots of a trace, the hottest first; shown as a table in terminals and notebooks.

    Lines from libraries' threads that run none of the user's code come last. A line that only shares memory
    is not a hot spot.

    Attributes:
        hotspots: One `HotSpot` per line of code.
        nbytes: The number of bytes copied by all lines, including those that ``top`` omits.
        seconds: The time spent in all conversions and clean-ups.
        lines: The number of hot spots, including those that ``top`` omits.
        dropped: The number of events that ``trace(limit=…)`` dropped.
        shared: The number of other lines, which only shared memory.
        start_ups: The seconds that each framework took to start, which do not count as conversion time.
    """

    hotspots: tuple[HotSpot, ...]
    nbytes: int
    seconds: float
    lines: int
    dropped: int
    shared: int = 0
    start_ups: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, index: Any) -> Any:
        return self.hotspots[index]

    def __len__(self) -> int:
        return len(self.hotspots)

    def to_dict(self) -> dict[str, Any]:
        """Return the hot spots as dictionaries, sequences, strings and numbers that JSON can store."""
        return asdict(self)

    def _table(self) -> Contents:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        place_width = width // 3 - 5  # leaves space for times such as "123.45 ms" at 60 columns
        rows: list[tuple[str, ...]] = []
        has_users_lines = any(not spot.in_library for spot in self)
        for number, spot in enumerate(self):
            if spot.in_library and not (number and self[number - 1].in_library):
                rows += [("",)] * has_users_lines + [("in threads of libraries, without your code:",)]
            rows += _rows(spot, width, place_width)
        return _HEAD, rows, _HEAD[1:4], self._summary()

    def _summary(self) -> str:
        copied = format_bytes(self.nbytes)
        seconds = format_seconds(self.seconds)
        parts = [f"{format_count(self.lines, 'line')}, {copied} copied, {seconds}"]
        if len(self) < self.lines:
            parts.append(f"showing the first {len(self)}")
        if self.shared:
            parts.append(f"{self.shared} more share memory")
        if self.dropped:
            parts.append(f"the oldest {self.dropped} events were dropped because of limit=")
        return "; ".join(parts) + start_up_lines(self.start_ups)

    def __repr__(self) -> str:
        if self:
            return str(self)
        return "no copies" if self.shared else "no conversions"


def _rows(spot: HotSpot, width: int, place_width: int) -> list[tuple[str, ...]]:
    """Return the rows of a hot spot: its figures, then its source, reason and advice."""
    where = spot.where
    what = spot.what
    if len(where) > place_width:  # the end of a path is the most informative part
        where = f"…{where[1 - place_width :]}"
    if len(where) + len(what) + 34 > width:  # 34: the figures and the spaces between them
        what = what.partition(", ")[0] + ", …" * (", " in what)
    copied = format_bytes(spot.nbytes) if spot.nbytes else "-"  # lines that only retried copy nothing
    figures = copied, format_seconds(spot.seconds), str(spot.count)
    rows: list[tuple[str, ...]] = [(where, *figures, what)]
    for indent, text in (("  ", spot.source), ("  because ", spot.reason), ("  → ", spot.advice)):
        wrapper = textwrap.TextWrapper(width, indent, break_long_words=False, break_on_hyphens=False)
        wrapper.subsequent_indent = " " * max(4, len(indent))
        if text:
            rows.append((wrapper.fill(text),))  # a row with one cell spans all columns
    return rows


def hotspots(
    events: Sequence[Event], dropped: int, top: int | None, start_ups: Mapping[str, float]
) -> HotSpots:
    """Group events by line, with the hottest line first; see `TraceLog.hotspots`."""
    if top is not None:
        top = whole_number("top", top, least=1, type_error=ValueError)
    counted = [event for event in events if event.kind in (*CONVERSIONS, *_STEPS)]
    lines = _group(counted, lambda event: (event.file, event.line))
    every = [_spot(line) for line in lines]
    nbytes = sum(spot.nbytes for spot in every)
    seconds = sum(spot.seconds for spot in every)
    # The events of a line that are not conversions are steps of recoveries.
    hot = [spot for spot, line in zip(every, lines, strict=True) if spot.nbytes or len(line) > spot.count]
    hot.sort(key=lambda spot: (spot.in_library, -spot.nbytes, -spot.seconds))
    shared = len(every) - len(hot)
    return HotSpots(tuple(hot[:top]), nbytes, seconds, len(hot), dropped, shared, dict(start_ups))


def _spot(events: list[Event]) -> HotSpot:
    """Return the hot spot of one line, from its events."""
    first = events[0]
    kinds = Counter(event.kind for event in events)
    conversions = [event for event in events if event.kind in CONVERSIONS]
    reasons, advice = _reasons_and_advice(conversions)
    if kinds["retry"] or kinds["split"]:
        reasons.append(f"memory ran out here (retries: {kinds['retry']}, splits: {kinds['split']})")
        advice.append("pass fewer rows per call, or free unused memory before this line")
    return HotSpot(
        where=first.where,
        file=first.file,
        line=first.line,
        source=source_line(first.file, first.line),
        what=", ".join(group[0].name for group in _group(conversions, lambda event: event.name)),
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
    """Return the reasons for the copies of one line and the advice on avoiding them, most bytes first.

    If nothing was copied, return the reason for sharing memory, without advice.
    """
    groups = _group(conversions, lambda event: (event.reason, event.layout, event.source, event.target))
    copies = [group for group in groups if group[0].nbytes]
    reasons = [group[0].reason for group in copies or groups[:1]]
    return reasons, [advice_for_copies(group) for group in copies]


def _group(events: Sequence[Event], key: Callable[[Event], object]) -> list[list[Event]]:
    """Group events by key; the group with the most bytes comes first."""
    groups: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return sorted(groups.values(), key=lambda group: -sum(event.nbytes for event in group))


# -- advice --------------------------------------------------------------------------------------------


def advice_for_copies(copies: Sequence[Event]) -> str:
    """Return the advice for copies with the same line, reason and layout; ``""`` if there is none."""
    event = copies[0]
    most = max(Counter(e.array for e in copies if e.array is not None).values(), default=0)
    once = "once, before the loop" if 1 < most == len(copies) else "where it is created"
    # The user cannot change the calls that another library makes.
    advice = "" if event.kind == "foreign" and event.library else _by_reason(event, once)
    reuse = "" if most == len(copies) else _reuse_memory(copies)
    advice = "; or ".join(filter(None, (advice, reuse)))
    if most < 2:
        return advice
    which = f"these {most}" if most == len(copies) else f"{most} of these {len(copies)}"
    same = (
        f"{which} conversions convert the same array: convert it once, before the loop (if its values do not"
        " change)"
    )
    return f"{same}; or {advice}" if advice else same


def _reuse_memory(copies: Sequence[Event]) -> str:
    """Return the advice to pass ``out=``; ``""`` unless the line often copies arrays of the same size."""
    event = copies[0]
    if event.kind == "foreign" or event.library or event.code is Reason.INTO_OUTPUT:
        return ""
    if (event.route is not None and event.route.layout) or not registry.framework(event.target).mutable:
        return ""
    often, count = Counter(copy.nbytes for copy in copies).most_common(1)[0]
    if count < _OFTEN:
        return ""
    return (
        f"if it calls convert_memory, reuse memory: {count} of these copies have {format_bytes(often)}; write"
        " them to one array with convert_memory(x, out=buffer)"
    )


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
    return copy_advice.advice_for_copy(copy)
