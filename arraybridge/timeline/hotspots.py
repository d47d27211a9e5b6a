"""The lines of a program by the bytes that they copy, and what would save the copies."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arraybridge.frameworks import registry
from arraybridge.show import Contents, Table, format_bytes, format_seconds
from arraybridge.timeline.events import CONVERSIONS, Event, source_line
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
            where, what = spot.where, spot.what
            if len(where) > place_width:  # the end of a path is the most informative part
                where = f"…{where[1 - place_width :]}"
            if len(where) + len(what) + 34 > width:  # 34: the figures and the blanks between
                what = what.partition(", ")[0] + ", …" * (", " in what)
            figures = format_bytes(spot.nbytes), format_seconds(spot.seconds), str(spot.count)
            rows.append((where, *figures, what))
            for mark, words in (("  ", spot.source), ("  because ", spot.reason), ("  → ", spot.advice)):
                wrapper = textwrap.TextWrapper(width, mark, break_long_words=False, break_on_hyphens=False)
                wrapper.subsequent_indent = " " * max(4, len(mark))
                if words:
                    rows.append((wrapper.fill(words),))  # a row of one cell runs over all columns
        plural = "" if self.lines == 1 else "s"
        copied, seconds = format_bytes(self.nbytes), format_seconds(self.seconds)
        parts = [f"{self.lines} line{plural}, {copied} copied, {seconds}"]
        if len(self) < self.lines:
            parts.append(f"the first {len(self)} are shown")
        if self.shared:
            parts.append(f"{self.shared} more share memory")
        if self.dropped:
            parts.append(f"without the oldest {self.dropped} events, which limit= has dropped")
        return _HEAD, rows, _HEAD[1:4], "; ".join(parts)

    def __repr__(self) -> str:
        return str(self) if self else "no copies" if self.shared else "no conversions"


def hotspots(events: Sequence[Event], dropped: int = 0, top: int | None = None) -> HotSpots:
    """The events by line, the hottest first; see `TraceLog.hotspots`."""
    if top is not None:
        whole_number("top", top, least=1, type_error=ValueError)
    counted = [event for event in events if event.kind in (*CONVERSIONS, *_STEPS)]
    lines = _grouped(counted, lambda event: (event.file, event.line))
    every = [_spot(line) for line in lines]
    nbytes, seconds = sum(spot.nbytes for spot in every), sum(spot.seconds for spot in every)
    hot = [spot for spot, line in zip(every, lines, strict=True) if spot.nbytes or _recovered(line)]
    hot.sort(key=lambda spot: (spot.in_library, -spot.nbytes, -spot.seconds))
    return HotSpots(tuple(hot[:top]), nbytes, seconds, len(hot), dropped, len(every) - len(hot))


def _recovered(events: list[Event]) -> bool:
    """Whether memory ran out at a line, or was freed there."""
    return any(event.kind in _STEPS for event in events)


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
        in_library=first.in_library,
    )


def _grouped(events: Sequence[Event], key: Callable[[Event], object]) -> list[list[Event]]:
    """The events that have a key in common, those of the most bytes first."""
    groups: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return sorted(groups.values(), key=lambda group: -sum(event.nbytes for event in group))


# -- what would save a copy, in words that can be followed ---------------------------------------------

_LAYOUTS = {
    "transposed": "this array is transposed",
    "reversed": "this array runs backwards",
    "broadcast": "this array repeats its elements (np.broadcast_to)",
    "sliced": "this array leaves elements out (a slice with a step, or a part of each row)",
    "": "this array is not in order",
}
#: What lays an array in order, by framework, and what copies one to where it can be shared.
_PACKED = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
_COPIED_THERE = "(y = aligned(x.shape, x.dtype); y[...] = x)"
#: Source and target → the frameworks' own call that shares.
_NATIVE = {
    ("numpy", "torch"): "torch.from_numpy(x)",
    ("torch", "numpy"): "x.numpy()",
    ("jax", "numpy"): "np.asarray(x)",
}


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
    case = f"{event.kind} to {event.device}, {event.layout or 'in order'}: {event.reason}"
    on_host = registry.facts(event.source).has_only_host and event.device.startswith("cpu")
    if on_host and registry.framework(event.target).alignment > 1:
        case = f"aligned memory for {case}"
    native = _NATIVE.get((event.source, event.target), "")
    words = next((words for pattern, words in _ADVICE.items() if re.search(pattern, case)), "")
    return words.format(
        e=event,
        once=once,
        order=_LAYOUTS[event.layout],
        packed=_PACKED.get(event.source, "np.ascontiguousarray(x)"),
        native=f"{native} or " if native and native.partition("(")[0] != event.name else "",
    )


_ORDER = (
    "C-contiguous|no permutation of a compact array|negative strides|multiples of the element size"
    "|whole numbers of elements|aligned to"
)
_DEVICE = "share no memory|memory of its own|is another device"

#: What is searched for in ``"aligned memory for foreign to cpu, transposed: it is not C-contiguous"`` and the
#: like → what to do about it; the first that fits.
_ADVICE = {
    "could be shared": "{native}arraybridge.to_{e.target}(x) shares it, if nobody writes to either",
    "narrowed from": "arraybridge.to_{e.target}(x) keeps all bits; or narrow it {once}, if that is enough",
    "in order: .*aligned to": "aligned(shape, dtype) would let arraybridge.to_{e.target}(x) share it: make"
    f" the array there, or copy it there {{once}} {_COPIED_THERE}",
    f"aligned memory.*({_ORDER})": "{order}: make it C-contiguous {once}, in memory of aligned(shape, dtype),"
    f" which {{e.target}} can share {_COPIED_THERE}",
    _ORDER: "{order}: make it C-contiguous {once} ({packed})",
    "read-only": "arraybridge.to_{e.target}(x, copy=False) shares it, if nobody writes to the result; or make"
    " the original writable (np.memmap(…, mode='c'))",
    "in the other order": "bring it into this machine's byte order {once}:"
    " x.astype(x.dtype.newbyteorder('='))",
    "conj or neg bit": "resolve it {once}: x.resolve_conj().resolve_neg()",
    "copy=True": "leave copy=True out, if nobody writes to the result or to the original",
    "a cast to": "make the array in that dtype, or cast it {once}",
    "may cache scalars": "pass a number (float(x)) in place of an array without axes",
    "float8": "use bfloat16, or convert float8 arrays once, before the loop",
    "by a copy alone": "{e.target} has memory of its own: convert {once}, and keep results there",
    "hold a part of it each": "gather it where it is made (jax.device_put(x, jax.devices()[0]))",
    # What the host needs once has no shorter way there.
    f"foreign to cpu.*({_DEVICE})": "",
    f"foreign.*({_DEVICE})": "prefetch(items, '{e.target}', device='{e.device}') moves the next one while"
    " this one is used",
    f"to cpu.*({_DEVICE})": "this brings it to the host each time: leave it in {e.source} between the steps"
    " (decorate them for {e.source}, output_type='{e.source}'), and convert the last result",
    _DEVICE: "this moves it to {e.device} each time: convert it {once}, keep results there between the steps,"
    " or let prefetch(items, '{e.target}') move the next item while this one is used",
}
