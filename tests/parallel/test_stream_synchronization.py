"""Synchronization between streams, with a fake framework that records its stream operations."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np

from arraybridge import Pipeline, device_map
from tests.fake_gpu import FakeGpuArray
from tests.parallel.fake_streams import StreamFramework


def test_each_stage_waits_for_the_events_of_the_previous_one(framework: StreamFramework) -> None:
    def first(x: FakeGpuArray) -> FakeGpuArray:
        return FakeGpuArray(x.values * 2, 0)

    def second(x: FakeGpuArray) -> FakeGpuArray:
        return FakeGpuArray(x.values + 1, 1)

    x = np.arange(12.0)
    result = Pipeline(first, second, microbatches=3)(FakeGpuArray(x))
    np.testing.assert_array_equal(result.values, x * 2 + 1)
    threads = {name: [e for e in framework.log if e[0] == name] for name in {e[0] for e in framework.log}}
    assert set(threads) == {"MainThread", "arraybridge-0-0", "arraybridge-1-0"}
    # One separate stream per GPU that a thread uses.
    for name in ("arraybridge-0-0", "arraybridge-1-0"):
        assert [what for _, what, _ in threads[name]].count("stream") == 1
    made = {name: [n for _, what, n in events if what == "mark"] for name, events in threads.items()}
    waited = {name: [n for _, what, n in events if what == "wait"] for name, events in threads.items()}
    assert waited["arraybridge-0-0"] == made["MainThread"]
    # A stage records two events per item: after producing the result, and after reading the input.
    assert waited["arraybridge-1-0"] == made["arraybridge-0-0"][0::2]
    # Its thread concatenates the parts on its stream; the caller waits for the result.
    assert ("arraybridge-1-0", "concatenate", 3) in framework.log
    assert waited["MainThread"] == made["arraybridge-1-0"][-2:-1]
    assert len(framework.taken_over) == 1


def test_each_device_map_worker_has_a_stream_on_its_gpu(framework: StreamFramework) -> None:
    barrier = threading.Barrier(4, timeout=10)

    def double(x: FakeGpuArray) -> FakeGpuArray:
        barrier.wait()
        return FakeGpuArray(x.values * 2, x.gpu)

    items = [FakeGpuArray(np.full(2, i), -1) for i in range(8)]
    results = list(device_map(double, items, ["gpu:0", "gpu:1"], per_device=2))
    assert [int(r.values[0]) for r in results] == [2 * i for i in range(8)]
    assert {r.gpu for r in results} == {0, 1}
    taken = [(name, number) for name, what, number in framework.log if what == "stream"]
    assert sorted(taken) == [(f"arraybridge-0-{w}", w // 2) for w in range(4)]


def test_few_inputs_stay_alive_while_their_events_are_pending(framework: StreamFramework) -> None:
    inputs: list[weakref.ref[FakeGpuArray]] = []
    alive = []

    def items() -> Iterator[FakeGpuArray]:
        for i in range(20):
            item = FakeGpuArray(np.full(2, i), 0)
            inputs.append(weakref.ref(item))
            yield item
            del item

    def count(x: FakeGpuArray) -> FakeGpuArray:
        alive.append(sum(one() is not None for one in inputs))
        return FakeGpuArray(x.values, x.gpu)

    assert len(list(device_map(count, items(), ["gpu:0"]))) == 20
    assert max(alive) < 12
