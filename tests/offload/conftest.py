"""Fixtures: a fake clock, a fake GPU and a simulated machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arraybridge.device import Device
from arraybridge.interface import registry
from arraybridge.offload import records
from arraybridge.offload.gpu_search import found_gpus
from tests.helpers import registry_kept
from tests.offload.simulated_gpu import Clock, FakeGpu, Machine


@pytest.fixture(autouse=True)
def of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the state of `@gpu` after each test."""
    monkeypatch.setattr(records, "clock", records.clock)
    yield
    found_gpus.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gpu(clock: Clock) -> Iterator[FakeGpu]:
    framework = FakeGpu(clock)
    with registry_kept():
        registry.register(framework)
        yield framework


@pytest.fixture
def machine(clock: Clock, gpu: FakeGpu) -> Machine:
    machine = Machine(clock)
    machine.add_gpu(gpu, Device("gpu", 0))  # so that small arrays are measured as well
    return machine
