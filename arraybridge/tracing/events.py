"""Events of a trace."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from arraybridge.carriers.sources import is_array, source_of
from arraybridge.formatting import format_seconds
from arraybridge.hooks import hooks
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.outcome import ask
from arraybridge.reasons import Reason
from arraybridge.strides import Steps, steps, stride_pattern
from arraybridge.tracing.user_lines import is_user_file
from arraybridge.trees import leaves_of

if TYPE_CHECKING:
    from arraybridge.route import Route

__all__ = [
    "Event",
    "Steps",
    "began",
    "device_text",
    "same_array",
    "start_devices",
    "start_up_lines",
    "steps",
    "stride_pattern",
    "wait_for",
]

#: The kinds of events that record the conversion of an array: by arraybridge, or by a framework's own call.
CONVERSIONS = ("conversion", "foreign")


class Event(NamedTuple):
    """An event that was recorded while a trace was open.

    Attributes:
        kind: ``"conversion"`` by arraybridge; ``"foreign"``, a conversion by a framework's own call;
            ``"call"``, a call to a decorated function; ``"decision"`` of `gpu`; ``"stage"`` of a `Pipeline`;
            ``"item"`` of `device_map` or `prefetch`; ``"retry"``, ``"split"`` and ``"clean-up"`` of an
            out-of-memory recovery; ``"start-up"`` of a framework, in ``log.start_ups`` only.
        name: The name of the function, stage or framework; for a conversion, its frameworks, such as
            ``"numpy → jax"``, or the framework's own call, such as ``"jnp.asarray"``.
        start: The start, in seconds since the trace was opened.
        seconds: The duration measured by the calling thread; 0 for instantaneous events. GPU work that the
            event queued may finish later.
        thread: The name of the thread.
        device: The device, such as ``"gpu:0"``; ``""`` if unknown.
        file: The file of the user's code; ``"In[3]"`` in a notebook. In a worker thread, the file that
            submitted the work. In a library's thread that runs none of the user's code, the innermost file of
            a library.
        line: The line in ``file``.
        nbytes: The number of bytes that a conversion copied, summed over its copies, or that a clean-up
            freed; 0 for other events.
        reason: The reason for a conversion, a decision or a recovery step; or the error that ended a call.
        library: The library, other than arraybridge, that made the call; ``""`` if the user's line made it.
        item: The number of the item or microbatch; None if the event does not belong to one.
        flow: An identifier that all events of one item share across the stages; or ``""``.
        thread_id: The identifier of the thread, which distinguishes threads of the same name.
        route: The route of a conversion by arraybridge, as in ``log.records``; None for other events.
        layout: The layout of a copied array: ``"transposed"``, ``"reversed"``, ``"broadcast"``,
            ``"sliced"``, or ``""`` if it is C-contiguous.
        array: A number that identifies the copied array, equal in all events that copied it; None if unknown.
        source: The name of the source framework of a conversion; ``""`` for other events.
        target: The name of the target framework of a conversion; ``""`` for other events.
        code: The reason for a conversion as a `Reason`; None for other events.
    """

    kind: str
    name: str
    start: float
    seconds: float
    thread: str
    device: str
    file: str
    line: int
    nbytes: int = 0
    reason: str = ""
    library: str = ""
    item: int | None = None
    flow: str = ""
    thread_id: int = 0
    route: Route | None = None
    layout: str = ""
    array: int | None = None
    source: str = ""
    target: str = ""
    code: Reason | None = None

    @property
    def in_library(self) -> bool:
        """Whether the line belongs to a library, in a thread that runs none of the user's code."""
        return bool(self.library) and not is_user_file(self.file)

    @property
    def where(self) -> str:
        """The file and line, such as ``"train.py:12"``; relative if the file is in the working directory."""
        if not self.file:
            return "?"
        from pathlib import Path  # imported here, since importing it takes 3 ms

        path = Path(self.file)
        with suppress(ValueError, OSError):  # the file is elsewhere, or the working directory was deleted
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as strings and numbers that JSON can store."""
        fields = self._asdict()
        route, _, _ = (fields.pop(name) for name in ("route", "array", "thread_id"))
        return fields if route is None else {**fields, "method": route.method, "copies": route.copies}


def start_up_lines(seconds: Mapping[str, float]) -> str:
    """Return the lines that tables show below their summary, one per framework that started."""
    return "".join(f"\nstart-up of {name}: {format_seconds(took)}" for name, took in seconds.items())


def began(event: Event) -> tuple[float, float]:
    """Return the sort key that orders events by start, and then by decreasing duration."""
    return event.start, -event.seconds


# -- the converted array -------------------------------------------------------------------------------

_numbers = count()
# The id() of each live array → a weak reference to the array, and its number.
_seen: dict[int, tuple[weakref.ref[Any], int]] = {}


def same_array(x: Any) -> int | None:
    """Return a number that identifies an array during its lifetime; None if it has no weak references."""
    key = id(x)
    seen = _seen.get(key)
    if seen is None or seen[0]() is not x:
        try:
            seen = weakref.ref(x, lambda _: _seen.pop(key, None)), next(_numbers)
        except TypeError:  # its class does not support weak references
            return None
        _seen[key] = seen
    return seen[1]


def wait_for(source: Framework, x: Any) -> None:
    """Wait for the pending computation of an array that is about to be read."""
    # If the computation failed, or ``x`` is a tracer, reading ``x`` raises the same error.
    ask(source.interchange.block_until_ready, x)


def start_devices(name: str) -> None:
    """Start the devices of a framework if its next array would start them, and record the start-up."""
    framework = registry.load_or_none(name)
    if framework is not None and framework.devices.starts_with_next_array():
        # If this fails, the conversion raises the same error.
        with suppress(Exception), hooks.start_up(name):
            framework.devices.available()


def device_text(tree: Any) -> str:
    """Return the device string of the first array in a tree; ``""`` if there is none."""
    for leaf in leaves_of(tree):
        if is_array(leaf):
            owner, data = source_of(leaf)
            return str(owner.devices.device_of(data))
    return ""
