"""What would save a copy, in words that can be followed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from arraybridge.frameworks import registry
from arraybridge.timeline.events import Event

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
    case = f"{event.kind} to {event.device}, {event.layout or 'in order'}: {event.reason}"
    on_host = event.source == "numpy" and event.device.startswith("cpu")
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
