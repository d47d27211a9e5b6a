"""Memory that one framework exports to another, and the order in which it is released. No GPU is needed."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import free_memory
from arraybridge.device import Device
from arraybridge.frameworks.numpy.framework import NumpyDevices, NumpyFramework, NumpyInterchange
from arraybridge.interface import keep_alives
from arraybridge.interface.component import component
from arraybridge.interface.streams import StreamEvent, Streams
from tests.helpers import require

GPU = Device("gpu", 0)


class FakeStreams(Streams):
    """A fake stream that records the streams it waits for. The test decides when its work is done."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.done = False
        self.waited: list[int] = []

    def handle(self, device: Device) -> int | None:
        return self.number

    def wait_for(self, device: Device, handle: int) -> None:
        self.waited.append(handle)

    def record_event(self, device: Device) -> StreamEvent | None:
        return StreamEvent(self, device, lambda: None, lambda: setattr(self, "done", True), lambda: self.done)


class Memory:
    """A stand-in for a framework's array."""


def collected(*steps: Callable[[], object]) -> None:
    for step in steps:
        step()
    gc.collect()


@pytest.mark.parametrize(
    ("exporter", "ended_on", "kept"),
    [
        (FakeStreams(1), 1, False),
        # In a pipeline, an export may end in another thread, and the memory returns to the first thread's
        # stream.
        (FakeStreams(1), 4, True),
        # The default stream of each thread is a different one, with the same handle.
        (FakeStreams(None), None, True),
        (Streams(), 0, True),
    ],
    ids=["same stream", "other stream", "per-thread stream", "no streams"],
)
@pytest.mark.parametrize("end", [keep_alives.release, keep_alives.block_until_ready, free_memory])
def test_exported_memory_is_released_when_the_stream_waits_or_the_read_is_done(
    exporter: Streams, ended_on: int | None, kept: bool, end: Callable[[], object]
) -> None:
    importer, memory = FakeStreams(3), Memory()
    before = exporter.number if isinstance(exporter, FakeStreams) else 0
    seen, keep_alive = weakref.ref(memory), [keep_alives.keep_alive(memory, exporter, importer, GPU)]
    del memory
    collected(keep_alives.release)
    assert seen() is not None, "the importer's array is alive"
    if isinstance(exporter, FakeStreams):
        exporter.number, exporter.waited = ended_on, []
    collected(keep_alive.clear)
    if isinstance(exporter, FakeStreams):
        assert exporter.waited == ([] if kept else [3])
        exporter.number = before
    assert (seen() is not None) == kept
    collected(keep_alives.release)
    assert (seen() is not None) == kept, "memory with unfinished reads must stay alive"
    importer.done = end is keep_alives.release
    collected(end)
    assert seen() is None
    assert importer.done == (kept or end is keep_alives.release), "block_until_ready() must wait for the read"


def test_the_host_waits_before_the_release_if_streams_cannot_be_ordered() -> None:
    class Refusing(FakeStreams):
        def wait_for(self, device: Device, handle: int) -> None:
            raise RuntimeError("cudaErrorInvalidResourceHandle")

    class Reader(FakeStreams):
        def record_event(self, device: Device) -> StreamEvent | None:
            def synchronize() -> None:
                self.done = gone() is not None

            return StreamEvent(self, device, lambda: None, synchronize, lambda: self.done)

    memory, reader = Memory(), Reader(2)
    gone = weakref.ref(memory)
    owner = keep_alives.keep_alive(memory, Refusing(1), reader, GPU)
    del memory, owner
    gc.collect()
    assert reader.done, "the memory was freed before the reader's work was done"
    assert gone() is None


def test_streams_without_queries_keep_only_their_own_exports() -> None:
    kept, memory, broken = keep_alives.KeepAlives(), Memory(), True
    seen = weakref.ref(memory)

    def is_done() -> bool:
        if broken:
            raise RuntimeError("an illegal memory access was encountered")
        return True

    kept.keep(memory, is_done, lambda: None)
    kept.keep(Memory(), lambda: True, lambda: None)
    del memory
    kept.release()
    assert len(kept.entries) == 1
    assert seen() is not None
    broken = False
    kept.release()
    assert len(kept.entries) == 0
    assert seen() is None


def test_streams_are_not_queried_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a fake driver that captures a graph, which a query by any framework would abort."""
    kept, recording, queries = keep_alives.KeepAlives(), True, 0

    def is_done() -> bool:
        nonlocal queries
        queries += 1
        return True

    def no_driver() -> bool:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(keep_alives, "captures", [lambda: recording])
    kept.keep(Memory(), is_done, lambda: None)
    kept.release()
    assert (len(kept.entries), queries) == (1, 0)
    recording = False
    monkeypatch.setattr(keep_alives, "captures", [lambda: recording, no_driver])
    kept.release()
    assert (len(kept.entries), queries) == (0, 1)


def test_memory_that_is_dropped_during_graph_capture_is_released_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that no stream waits and no event is recorded before the capture has ended."""
    recording, recorded = True, []

    class Reader(FakeStreams):
        def record_event(self, device: Device) -> StreamEvent | None:
            recorded.append(self.waited[:])
            return super().record_event(device)

    monkeypatch.setattr(keep_alives, "captures", [lambda: recording])
    keep_alives.block_until_ready()
    memory, exporter, reader = Memory(), FakeStreams(1), Reader(2)
    gone = weakref.ref(memory)
    owner = keep_alives.keep_alive(memory, exporter, reader, GPU)
    del memory, owner
    collected(keep_alives.release, keep_alives.block_until_ready)
    assert (gone() is not None, exporter.waited, recorded) == (True, [], [])
    recording = False
    collected(keep_alives.release)
    assert (gone() is not None, recorded) == (True, [[2]]), (
        "the event follows the work of the reader's stream"
    )
    reader.done = True
    collected(keep_alives.release)
    assert gone() is None


@pytest.mark.parametrize("has_is_ready", [True, False])
def test_work_without_events_is_done_when_a_later_result_is_ready(has_is_ready: bool) -> None:
    """Releases before the last result is ready would free memory that queued work still reads."""
    memory, array, ready = Memory(), Memory(), False
    waited: list[object] = []

    class Result:
        pass

    if has_is_ready:
        Result.is_ready = lambda self: ready  # type: ignore[attr-defined]
    gone = weakref.ref(memory)
    keep_alives.keep_until_done(array, memory, Result, waited.append)
    del memory
    del array
    collected(keep_alives.release)
    assert gone() is not None, "the computation has only begun"
    if has_is_ready:
        collected(keep_alives.release)
        assert gone() is not None, "its result is not ready"
        ready = True
    collected(keep_alives.release)
    assert gone() is None
    assert [type(result) for result in waited] == ([] if has_is_ready else [Result])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("jax", ""),
        ("jax", "inside jit"),
        ("jax", "donated"),
        ("tensorflow", ""),
        ("tensorflow", "inside jit"),
    ],
)
def test_exports_stay_alive_until_the_importers_stream_is_done(name: str, how: str) -> None:
    module, memory = require(name), Memory()
    arrays = importlib.import_module(f"arraybridge.frameworks.{name}.framework")
    exported = [module.device_put(np.arange(3)) if name == "jax" else module.constant([1, 2, 3])]
    seen = weakref.ref(memory)
    run_last = partial(arrays._run_last, module.devices("cpu")[0] if name == "jax" else "CPU:0")
    block_until_ready = arraybridge.framework(name).interchange.block_until_ready
    keep_alives.keep_until_done(exported[0], memory, run_last, block_until_ready)
    del memory
    collected(keep_alives.release)
    if how == "donated":  # donation deletes JAX's buffer, but not the array object
        module.jit(lambda x: x + 1, donate_argnums=0)(exported[0]).block_until_ready()
        assert exported[0].is_deleted()
        collected(keep_alives.release)
    assert seen() is not None, "the array that uses the memory is alive"
    collected(exported.clear)
    assert seen() is not None, "its stream has not been queried yet"
    if how == "inside jit":

        def traced(x: Any) -> Any:
            keep_alives.release()
            return x + 1

        assert float((module.jit if name == "jax" else module.function)(traced)(1.0)) == 2.0
    collected(keep_alives.release, keep_alives.block_until_ready)
    assert seen() is None


@pytest.mark.parametrize(
    ("name", "order"), [("jax", ["gpu:0", "left"]), ("tensorflow", ["gpu:0", "settled", "left"])]
)
def test_importers_without_streams_synchronize_the_source_and_keep_it_alive(
    name: str, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use host memory instead of GPU memory: PyTorch exports only from the current GPU."""
    require(name)
    done: list[str] = []

    class SourceDevices(NumpyDevices):
        @contextmanager
        def select(self, device: Device) -> Iterator[None]:
            done.append(str(device))
            yield
            done.append("left")

    class SourceInterchange(NumpyInterchange):
        def block_until_ready(self, x: Any) -> None:
            done.append("settled")

    class Source(NumpyFramework):
        """A source framework that records the calls on it."""

        devices = component(SourceDevices)
        interchange = component(SourceInterchange)

    framework = arraybridge.framework(name)
    kept: list[Any] = []
    monkeypatch.setattr(keep_alives, "keep_until_done", lambda imported, x, *_: kept.append(x))
    monkeypatch.setattr(framework.devices, "native_device", lambda device: None)
    memory = arraybridge.aligned((16,), "float32")
    memory[:] = np.arange(16)
    exported = framework.interchange.import_from(memory, Source(), GPU)
    assert done == order
    assert kept[0] is memory
    np.testing.assert_array_equal(np.asarray(exported), np.arange(16, dtype=np.float32))
