"""A card that is none, and a clock that moves only when something is said to take time."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraybridge
from arraybridge.frameworks.base import Framework, Memory, component
from arraybridge.offload import gpu_call as module
from arraybridge.types import Device
from tests.fake_gpu import FAKE_GPUS, FakeGpuArray, FakeGpuFramework
from tests.helpers import require


class Clock:
    """Seconds that somebody has let pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class GpuMemoryError(RuntimeError):
    """The fake card is full."""


class FakeGpuMemory(Memory):
    framework: FakeGpu

    def is_oom(self, error: BaseException) -> bool:
        return isinstance(error, GpuMemoryError)

    def free_memory_of(self, device: Device) -> int:
        return self.framework.free_bytes


class FakeGpu(FakeGpuFramework):
    """Both directions take a latency and a time for each byte.

    Attributes:
        free_bytes: free bytes; 0: it does not tell.
        rows: of the largest array that fits; None: all fit.
        moved: direction and bytes of each transfer.
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
        self.travel("card", view.nbytes)
        return FakeGpuArray(view)  # nobody writes to it, and 64 MiB are quickly moved this way


class Machine:
    """What @gpu finds: a clock of the test's, and the cards that it plants. The fixtures take them away."""

    def __init__(self, clock: Clock) -> None:
        self.clock = module.clock = clock

    def plant(self, framework: Framework, device: Device, index: int = 0) -> None:
        module._found[framework.name, index] = module.BackendGpu(framework, device)


def offload(fn: Any, machine: Machine, backend: str = "fakecard", **options: Any) -> Any:
    """The function as @gpu makes it, on that machine."""
    run = module.Offload(fn, backend=backend, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    call.explain, call.history, call.proofs = run.explain, run.history, run.proofs  # type: ignore[attr-defined]
    return call


def paying(clock: Any, body: Any, seen: list[str] | None = None) -> Any:
    """The function, which takes a second in NumPy and none on a card."""

    def fn(x: Any, *rest: Any) -> Any:
        if seen is not None:
            seen.append(arraybridge.detect_memory_type(x))
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        return body(x, *rest)

    return fn


def pretended(name: str, *devices: str) -> Machine:
    """A machine on which CPU devices of a real framework are the cards."""
    require(name)
    machine = Machine(Clock())
    for index, device in enumerate(devices):
        machine.plant(arraybridge.framework(name), Device.parse(device), index)
    return machine


def running_on(name: str, device: str, body: Any, seen: list[str]) -> Any:
    """The function, which NumPy is slow at, with that device for a card."""
    machine = pretended(name, device)
    return offload(paying(machine.clock, body, seen), machine, name)
