"""A simulated GPU, and a clock that advances only when a test lets time pass."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraybridge
from arraybridge.device import Device
from arraybridge.interface.component import component
from arraybridge.interface.framework import Framework
from arraybridge.interface.memory import Memory
from arraybridge.offload import records
from arraybridge.offload.gpu_search import BackendGpu, found_gpus
from arraybridge.offload.offloaded_call import Offload
from tests.fake_gpu import FAKE_GPUS, FakeGpuArray, FakeGpuFramework
from tests.helpers import require


class Clock:
    """The seconds that tests have let pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class GpuMemoryError(RuntimeError):
    """The error of a full fake GPU."""


class FakeGpuMemory(Memory):
    framework: FakeGpu

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, GpuMemoryError)

    def free_memory_of(self, device: Device) -> int:
        return self.framework.free_bytes


class FakeGpu(FakeGpuFramework):
    """A fake GPU whose transfers take a latency and a time per byte in both directions.

    Attributes:
        free_bytes: The number of free bytes, or 0 if it is not reported.
        rows: The rows of the largest array that fits, or None if all fit.
        moved: The direction and bytes of each transfer.
    """

    name = "fakecard"
    gpus = FAKE_GPUS[:1]
    memory = component(FakeGpuMemory)

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.free_bytes = 0
        self.moved: list[tuple[str, int]] = []
        self.rows: int | None = None

    def travel(self, where: str, nbytes: int) -> None:
        self.moved.append((where, nbytes))
        self.clock.sleep(20e-6 + nbytes / 10e9)

    def to_host(self, x: FakeGpuArray) -> np.ndarray:
        self.travel("host", x.nbytes)
        return x.values

    def from_host(self, view: np.ndarray, device: Device) -> FakeGpuArray:
        if self.rows is not None and view.shape and view.shape[0] > self.rows:
            raise GpuMemoryError(f"{view.shape[0]} rows do not fit")
        self.travel("gpu", view.nbytes)
        return FakeGpuArray(view)  # a view, since it is not modified and 64 MiB are moved faster this way


class Machine:
    """A simulated machine: the clock of a test, and GPUs that `@gpu` finds until fixtures remove them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = records.clock = clock

    def add_gpu(self, framework: Framework, device: Device, index: int = 0) -> None:
        found_gpus[framework.name, index] = BackendGpu(framework, device)


def offload(fn: Any, machine: Machine, backend: str = "fakecard", **options: Any) -> Any:
    """Return the function decorated with `@gpu` on this machine."""
    run = Offload(fn, backend, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    call.explain = run.explain  # type: ignore[attr-defined]
    call.history = run.chooser.history  # type: ignore[attr-defined]
    return call


def paying(clock: Any, body: Any, seen: list[str] | None = None) -> Any:
    """Return a function that takes one second in NumPy and no time on a GPU."""

    def fn(x: Any, *rest: Any) -> Any:
        if seen is not None:
            seen.append(arraybridge.detect_memory_type(x))
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        return body(x, *rest)

    return fn


def machine_with(name: str, *devices: str) -> Machine:
    """Create a machine that uses CPU devices of a real framework as GPUs."""
    require(name)
    machine = Machine(Clock())
    for index, device in enumerate(devices):
        machine.add_gpu(arraybridge.framework(name), Device.parse(device), index)
    return machine


def running_on(name: str, device: str, body: Any, seen: list[str]) -> Any:
    """Return a function that is slow in NumPy, with this device as the GPU."""
    machine = machine_with(name, device)
    return offload(paying(machine.clock, body, seen), machine, name)
