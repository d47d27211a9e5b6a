"""What would save a copy, in words that can be followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from arraybridge.frameworks import registry
from arraybridge.timeline.events import Event

__all__ = ["advice_for"]

_PACKED = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
_ONCE = "once, before the loop"


def advice_for(copies: Sequence[Event]) -> str:
    """What would save these copies, all made by one line for one reason from arrays of one layout.

    ``""`` where nothing would.
    """
    event = copies[0]
    once = _ONCE if len(copies) > 1 else "where it is made"
    words = _by_reason(event, once)
    most = max(Counter(e.array for e in copies if e.array is not None).values(), default=0)
    if most > 1:
        which = f"these {most}" if most == len(copies) else f"{most} of these {len(copies)}"
        same = (
            f"{which} conversions convert the same array: convert it {_ONCE} (as long as its values"
            " stay the same)"
        )
        return f"{same}; or {words}" if words else same
    return words


def _by_reason(event: Event, once: str) -> str:
    for part, words in _ADVICE:
        if part in event.reason:
            return words(event, once)
    return ""


def _target(event: Event) -> str:
    return "" if event.route is None else event.route.target


def _source(event: Event) -> str:
    return "" if event.route is None else event.route.source


def _packed(event: Event, once: str) -> str:
    """The elements are not in order: lay them in order, in memory that the target can share."""
    call = _PACKED.get(_source(event), "np.ascontiguousarray(x)")
    what = {
        "transposed": "this array is transposed",
        "reversed": "this array runs backwards",
        "broadcast": "this array repeats its elements (np.broadcast_to)",
        "sliced": "this array leaves elements out (a slice with a step, or a part of each row)",
    }.get(event.layout, "this array is not in order")
    aligned = ""
    if _wants_alignment(event):
        aligned = f", in memory of aligned(shape, dtype), which {_target(event)} can share"
        call = "y = aligned(x.shape, x.dtype); y[...] = x"
    return f"{what}: make it C-contiguous {once}{aligned} ({call})"


def _wants_alignment(event: Event) -> bool:
    route = event.route
    if route is None or route.device.kind != "cpu" or route.source != "numpy":
        return False
    return registry.framework(route.target).alignment > 1


def _unaligned(event: Event, once: str) -> str:
    if event.layout:
        return _packed(event, once)
    bytes_ = registry.framework(_target(event)).alignment if event.route is not None else 64
    return (
        f"aligned(shape, dtype) would let {_target(event)} share it, which needs {bytes_} bytes: make the"
        f" array there, or copy it there {once} (y = aligned(x.shape, x.dtype); y[...] = x)"
    )


def _elsewhere(event: Event, once: str) -> str:
    route = event.route
    if route is not None and route.device.kind == "cpu":
        return (
            "this brings it from the card to the host each time: leave it there between the steps (decorate"
            f" them for {route.source}, output_type='{route.source}'), and convert the last result"
        )
    return (
        f"this moves it to {event.device} each time: convert it {once}, keep results there between the steps,"
        f" or let prefetch(items, '{_target(event)}') move the next item while this one is used"
    )


_Words = Callable[[Event, str], str]

#: Part of the reason of a route → what to do about it; the first that fits.
_ADVICE: tuple[tuple[str, _Words], ...] = (
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
            f"pass copy=False to share it, if nobody writes to the {_target(e)} array; or make the original"
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
    ("a cast to", lambda _, once: f"make the array in that dtype, or cast it {once}, and leave dtype= out"),
    ("may cache scalars", lambda *_: "pass a number (float(x)) in place of an array without axes"),
    ("packs this dtype", lambda *_: "use a dtype of whole bytes (int8 for int4), which can be shared"),
    ("float8 only by a copy", lambda *_: "use bfloat16, or convert float8 arrays once, before the loop"),
    (
        "by a copy alone",
        lambda e, once: (
            f"{_target(e)} has memory of its own: convert {once}, and keep results there between the steps"
        ),
    ),
    (
        "hold a part of it each",
        lambda *_: "gather it once, before the loop (jax.device_put(x, jax.devices()[0]))",
    ),
    ("share no memory", _elsewhere),
    ("memory of its own", _elsewhere),
    ("is another device", _elsewhere),
)
