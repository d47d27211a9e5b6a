"""Synchronization of accelerator streams between threads.

The thread that makes an array records an event in its stream. The stream of the thread that reads the array
waits for that event. No thread waits for a GPU. Arrays that are being differentiated cannot be passed to
another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arraybridge.device import Device
from arraybridge.errors import GradientError
from arraybridge.interface import registry
from arraybridge.interface.framework import take_over
from arraybridge.interface.streams import StreamEvent
from arraybridge.trees import LEAF, arrays_with_owners, cached_kind, map_arrays


def record_stream_events(tree: Any) -> list[StreamEvent]:
    """Record and return the events after which another thread may read the arrays of a tree.

    There is one event per framework and device. JAX orders its own work, but raises errors from
    pending computations only when the result is read. This function therefore waits for JAX arrays, so that
    such an error is raised in the thread that caused it.
    """
    if type(tree) is np.ndarray or cached_kind(type(tree)) is LEAF:  # never computed asynchronously
        return []
    stream_events: dict[tuple[str, Device], StreamEvent | None] = {}
    for owner, x in arrays_with_owners(tree):
        if not owner.streams.has_streams:
            wait = owner.runtime.late_errors(type(x))
            if wait is not None:
                wait(x)
            continue
        device = owner.devices.device_of(x)
        if (owner.name, device) not in stream_events:
            stream_events[owner.name, device] = owner.streams.record_event(device)
    return list(filter(None, stream_events.values()))


def receive(result: Any, stream_events: Sequence[StreamEvent]) -> Any:
    """Make the streams of this thread wait for the events of a result, and return the result.

    This thread can then use the memory of the result and free it.
    """
    for event in stream_events:
        event.wait()
    recorded = {(event.streams, event.device) for event in stream_events}

    def take(x: Any) -> Any:
        owner = registry.find_owner(x)
        if owner is None or (owner.streams, owner.devices.device_of(x)) not in recorded:
            return x
        return take_over(owner, x)

    return map_arrays(result, take)


def record_reader_events(tree: Any) -> list[StreamEvent]:
    """Record and return events in all streams of this thread whose pending work may read arrays of a tree.

    A function may read an array in a framework other than the array's, so every framework that has
    initialized the GPU records an event.
    """
    if type(tree) is np.ndarray or cached_kind(type(tree)) is LEAF:  # never computed asynchronously
        return []
    stream_events: dict[tuple[str, Device], StreamEvent | None] = {}
    for owner, x in arrays_with_owners(tree):
        device = owner.devices.device_of(x)
        if device.kind == "cpu":
            continue
        for reader in (owner, *registry.loaded()):
            if not reader.streams.has_streams or (reader.name, device) in stream_events:
                continue
            if reader is owner or reader.devices.is_started():
                stream_events[reader.name, device] = reader.streams.record_event(device)
    return list(filter(None, stream_events.values()))


def block_until_ready(tree: Any) -> None:
    """Wait for the computation of the arrays of a tree."""
    for owner, x in arrays_with_owners(tree):
        owner.interchange.block_until_ready(x)


def wait_for_each_other(stream_events: list[StreamEvent]) -> None:
    """Make the streams of several frameworks wait for each other's queued work."""
    for event in stream_events:
        for other in stream_events:
            if other.streams is event.streams or other.device != event.device:
                continue
            handle = other.streams.handle(other.device)
            if handle is None:  # another framework can only wait for a stream that has a handle
                other.synchronize()
            else:
                event.streams.wait_for(event.device, handle)


# -- arrays that cannot be passed on ----------------------------------------------------------------


def check_not_differentiated(item: Any) -> None:
    """Raise `GradientError` if an array of the item is being differentiated or transformed in this thread."""
    if type(item) is np.ndarray or cached_kind(type(item)) is LEAF:  # never differentiated
        return
    for owner, x in arrays_with_owners(item):
        if owner.autodiff.is_bound_to_thread(x):
            raise GradientError(
                f"An array of {owner.name} is being differentiated or transformed in this thread, but the"
                " function runs in another thread, where the array would get no gradient.",
                source_type=owner.name,
                reason="differentiated in another thread",
                advice="Call the function directly, differentiate inside it, or pass the array without its"
                " graph, such as tf.stop_gradient(x).",
            )
