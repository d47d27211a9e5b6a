"""The records of call signatures: means of the times, and the choice of the faster device."""

from __future__ import annotations

import numpy as np

from arraybridge.offload.call_signature import Call
from arraybridge.offload.records import CPU, GPU, History, Record


def test_times_are_means_without_the_first_run_because_it_may_compile() -> None:
    record = Record()
    for cpu, gpu in [(9.0, 50.0), (1.0, 0.1), (2.0, 0.3), (6.0, 0.2)]:
        record.add(CPU, cpu)
        record.add(GPU, gpu)
    assert record.seconds == {CPU: 3.0, GPU: 0.2}
    assert record.counts == {CPU: 4, GPU: 4}


def test_each_device_is_measured_before_the_faster_one_is_chosen() -> None:
    record = Record()
    record.add(CPU, 1.0)
    for seconds in (50.0, 0.1, 0.1):
        assert record.choose()[0] == GPU
        record.add(GPU, seconds)
    assert record.choose() == (GPU, "the GPU is faster")
    record.add(GPU, 5.0)
    assert record.choose() == (CPU, "the CPU is faster")


def test_the_least_recently_used_record_is_evicted() -> None:
    history = History()
    calls = [Call((), (np.ones(1), i), {}).inspect() for i in range(2 * History.LIMIT)]
    used = history.record(calls[0])
    for call in calls[1:]:
        history.record(call)
        assert history.record(calls[0]) is used
    assert len(history.records) == History.LIMIT
    assert history.find(calls[1]) is not history.find(calls[1])  # evicted
