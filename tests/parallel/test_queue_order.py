"""Ordering between streams of several frameworks on one device."""

from __future__ import annotations

from typing import Any

from arraybridge.device import Device
from arraybridge.interface import keep_alives
from arraybridge.interface.streams import StreamEvent, Streams
from arraybridge.parallel.streams_between_threads import wait_for_each_other

GPU = Device("gpu", 0)


class Recorded(Streams):
    """Streams that record the streams they wait for."""

    has_streams = True

    def __init__(self, name: str, number: int | None, log: list[Any], error: Exception | None = None) -> None:
        self.name, self.number, self.log, self.error = name, number, log, error

    def handle(self, device: Device) -> int | None:
        return self.number

    def wait_for(self, device: Device, handle: int) -> None:
        if self.error is not None:
            raise self.error
        self.log.append((self.name, "waits for", handle))

    def record_event(self, device: Device) -> StreamEvent:
        return StreamEvent(
            self, device, lambda: None, lambda: self.log.append(("host waits for", self.name)), bool
        )


def test_each_stream_waits_for_those_of_other_frameworks() -> None:
    log: list[Any] = []
    wait_for_each_other([Recorded("a", 1, log).record_event(GPU), Recorded("b", 2, log).record_event(GPU)])
    assert log == [("a", "waits for", 2), ("b", "waits for", 1)]


def test_host_waits_for_a_stream_without_a_handle() -> None:
    log: list[Any] = []
    wait_for_each_other([Recorded("a", 1, log).record_event(GPU), Recorded("b", None, log).record_event(GPU)])
    assert log == [("host waits for", "b"), ("b", "waits for", 1)]


def test_streams_of_different_devices_do_not_wait() -> None:
    log: list[Any] = []
    wait_for_each_other(
        [Recorded("a", 1, log).record_event(GPU), Recorded("b", 2, log).record_event(Device("gpu", 1))]
    )
    assert log == []


def test_host_waits_at_the_end_of_an_unordered_export() -> None:
    log: list[Any] = []
    exporter = Recorded("lender", 1, log, RuntimeError("cudaErrorInvalidResourceHandle"))
    held = keep_alives.keep_alive(object(), exporter, Recorded("borrower", 2, log), GPU)
    del held
    assert log == [("host waits for", "borrower")]
