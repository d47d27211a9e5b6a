"""What passes from thread to thread: work on accelerators, by streams for each and marks between them.

A thread that makes an array leaves a mark in its queue of work; the thread that reads the array lets its own
queue wait for that mark. Nobody waits for a card. What does not pass is an array that is being differentiated
in one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.errors import GradientError
from arraybridge.frameworks import registry
from arraybridge.frameworks.accelerators import StreamEvent
from arraybridge.trees import LEAF, arrays_of, kinds, map_arrays
from arraybridge.types import Device


def record_stream_events(tree: Any) -> list[StreamEvent]:
    """What another thread has to wait for before it reads the arrays of this thread; one mark a device.

    JAX orders its own work, but would raise an error of this thread's computation in the thread that reads
    the result: such arrays are waited for here.
    """
    if kinds.get(type(tree)) is LEAF:
        return []
    stream_events: dict[tuple[str, Device], StreamEvent | None] = {}
    for x in arrays_of(tree):
        owner = registry.find_owner(x)
        if owner is None:
            continue
        if not owner.streams.has_streams:
            wait = owner.runtime.late_errors(type(x))
            if wait is not None:
                wait(x)
            continue
        device = owner.devices.device_of(x)
        if (owner.name, device) not in stream_events:
            stream_events[owner.name, device] = owner.streams.record_event(device)
    return [event for event in stream_events.values() if event is not None]


def received(result: Any, stream_events: list[StreamEvent]) -> Any:
    """The result, for this thread to use and to free."""
    if not stream_events:
        return result
    for event in stream_events:
        event.wait()
    recorded = {(event.streams, event.device) for event in stream_events}

    def take_over(x: Any) -> Any:
        owner = registry.find_owner(x)
        if owner is None or (owner.streams, owner.devices.device_of(x)) not in recorded:
            return x
        return owner.streams.take_over(x)

    return map_arrays(result, take_over)


def record_reader_events(tree: Any) -> list[StreamEvent]:
    """Marks on all queues of this thread in which work may wait that reads the arrays.

    A function may read an array in another framework than the array's: each that has its cards open is asked.
    """
    if kinds.get(type(tree)) is LEAF:
        return []
    stream_events: dict[tuple[str, Device], StreamEvent | None] = {}
    for x in arrays_of(tree):
        owner = registry.find_owner(x)
        if owner is None or (device := owner.devices.device_of(x)).kind == "cpu":
            continue
        for reader in (owner, *registry.loaded()):
            if not reader.streams.has_streams or (reader.name, device) in stream_events:
                continue
            if reader is owner or reader.devices.is_started():
                stream_events[reader.name, device] = reader.streams.record_event(device)
    return [event for event in stream_events.values() if event is not None]


def wait_for_each_other(stream_events: list[StreamEvent]) -> None:
    """Let the queues of several frameworks wait for one another, as far as they have been filled."""
    for event in stream_events:
        for other in stream_events:
            if other.streams is event.streams or other.device != event.device:
                continue
            handle = other.streams.handle(other.device)
            if handle is None:  # it has no number by which another framework could wait for it
                other.synchronize()
            else:
                event.streams.wait_for(event.device, handle)


# -- what does not pass --------------------------------------------------------------------------------


def check_not_differentiated(item: Any) -> None:
    """Refuse an item for a function of another thread, which a tape or tracer of this one follows."""
    cls = type(item)
    if cls is np.ndarray or kinds.get(cls) is LEAF:
        return
    for x in arrays_of(item):
        owner = registry.find_owner(x)
        if owner is not None and owner.autodiff.stays_in_thread(x):
            raise GradientError(
                f"an array of {owner.name} is differentiated or transformed in this thread, and the function"
                " runs in another one, where it would get no gradient.",
                source_type=owner.name,
                reason="differentiated in another thread",
                advice="Call the function itself, differentiate inside of it, or pass the array without its"
                " graph, as by tf.stop_gradient(x).",
            )
