"""What would save a copy, in words that can be followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from arraybridge.frameworks import registry
from arraybridge.timeline.events import Event

_PACKED = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
_LAYOUTS = {
    "transposed": "this array is transposed",
    "reversed": "this array runs backwards",
    "broadcast": "this array repeats its elements (np.broadcast_to)",
    "sliced": "this array leaves elements out (a slice with a step, or a part of each row)",
    "": "this array is not in order",
}
#: Source and target → the frameworks' own call that shares.
_NATIVE = {
    "numpy → torch": "torch.from_numpy(x)",
    "torch → numpy": "x.numpy()",
    "jax → numpy": "np.asarray(x)",
}


def advice_for(copies: Sequence[Event]) -> str:
    """What would save these copies, all made by one line for one reason from arrays of one layout.

    ``""`` where nothing would.
    """
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
    for part, words in _ADVICE:
        if part in event.reason:
            return words(event, once)
    return ""


def _wants_alignment(event: Event) -> bool:
    on_host = event.source == "numpy" and event.device.startswith("cpu")
    return on_host and registry.framework(event.target).alignment > 1


def _packed(event: Event, once: str) -> str:
    """The elements are not in order: lay them in order, in memory that the target can share."""
    if _wants_alignment(event):
        place = f"in memory of aligned(shape, dtype), which {event.target} can share"
        return (
            f"{_LAYOUTS[event.layout]}: make it C-contiguous {once}, {place}"
            " (y = aligned(x.shape, x.dtype); y[...] = x)"
        )
    call = _PACKED.get(event.source, "np.ascontiguousarray(x)")
    return f"{_LAYOUTS[event.layout]}: make it C-contiguous {once} ({call})"


def _unaligned(event: Event, once: str) -> str:
    if event.layout:
        return _packed(event, once)
    bytes_ = registry.framework(event.target).alignment
    share = f"let {event.target} share it" if event.kind == "conversion" else _shared_by(event)
    return (
        f"aligned(shape, dtype) would {share}, which needs {bytes_} bytes: make the array there,"
        f" or copy it there {once} (y = aligned(x.shape, x.dtype); y[...] = x)"
    )


def _by_hand(event: Event) -> str:
    return "pass copy=False to" if event.kind == "conversion" else f"let to_{event.target}(x, copy=False)"


def _shared_by(event: Event) -> str:
    return f"let arraybridge.to_{event.target}(x) share it"


def _elsewhere(event: Event, once: str) -> str:
    to_host = event.device.startswith("cpu")
    if event.kind == "foreign":
        if to_host:
            return ""  # what the host needs once has no shorter way there
        index = event.device.partition(":")[2]
        items = f"prefetch(items, '{event.target}', gpu_id={index})"
        return f"{items} moves the next one while this one is used"
    if to_host:
        return (
            f"this brings it to the host each time: leave it in {event.source} between the steps (decorate"
            f" them for {event.source}, output_type='{event.source}'), and convert the last result"
        )
    return (
        f"this moves it to {event.device} each time: convert it {once}, keep results there between the steps,"
        f" or let prefetch(items, '{event.target}') move the next item while this one is used"
    )


def _narrowed(event: Event, once: str) -> str:
    dtype = event.reason.partition(" to ")[2].partition(",")[0]
    return f"arraybridge.to_{event.target}(x) keeps all bits; or make it {dtype} {once}, if that is enough"


def _shares_instead(event: Event, once: str) -> str:
    native = _NATIVE.get(f"{event.source} → {event.target}")
    call = f"{native} or " if native and native.partition("(")[0] != event.name else ""
    return f"{call}arraybridge.to_{event.target}(x) shares it, if nobody writes to either"


_Words = Callable[[Event, str], str]

#: Part of the reason of a copy → what to do about it; the first that fits.
_ADVICE: tuple[tuple[str, _Words], ...] = (
    ("copies what could be shared", _shares_instead),
    ("narrowed from", _narrowed),
    ("C-contiguous", _packed),
    ("no permutation of a compact array", _packed),
    ("negative strides", _packed),
    ("multiples of the element size", _packed),
    ("whole numbers of elements", _packed),
    ("complex128 aligned", lambda _, once: f"make the array by aligned(shape, dtype), {once}"),
    ("not aligned to", _unaligned),
    (
        "read-only",
        lambda e, _: (
            f"{_by_hand(e)} share it, if nobody writes to the {e.target} array; or make the original"
            " writable (np.memmap(…, mode='c'))"
        ),
    ),
    (
        "bytes are in the other order",
        lambda _, once: (
            f"bring it into this machine's byte order {once}: x.astype(x.dtype.newbyteorder('='))"
        ),
    ),
    ("conj or neg bit", lambda _, once: f"resolve it {once}: x.resolve_conj().resolve_neg()"),
    ("copy=True", lambda *_: "leave copy=True out, if nobody writes to the result or to the original"),
    ("a cast to", lambda _, once: f"make the array in that dtype, or cast it {once}"),
    ("may cache scalars", lambda *_: "pass a number (float(x)) in place of an array without axes"),
    ("float8 only by a copy", lambda *_: "use bfloat16, or convert float8 arrays once, before the loop"),
    (
        "by a copy alone",
        lambda e, once: f"{e.target} has memory of its own: convert {once}, and keep results there",
    ),
    ("hold a part of it each", lambda *_: "gather it where it is made (jax.device_put(x, jax.devices()[0]))"),
    ("share no memory", _elsewhere),
    ("memory of its own", _elsewhere),
    ("is another device", _elsewhere),
)
