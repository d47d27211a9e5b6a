"""`@gpu`: a verified call covers only calls with exactly the same arguments."""

from __future__ import annotations

import datetime
import decimal
import enum
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from arraybridge.device import Device
from arraybridge.offload import verification
from arraybridge.offload.call_signature import NoSignatureError, signature_of
from arraybridge.settings import worker_device
from tests.fake_gpu import FakeGpuArray
from tests.offload.simulated_gpu import Clock, FakeGpu, Machine, offload

X = np.arange(64, dtype=np.float32)


class Mode(enum.Enum):
    PLAIN = 1
    WRAPPED = 2


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Window:
    low: float
    high: float


class Settings:
    """A class that no tree function knows."""

    def __init__(self, mode: str) -> None:
        self.mode = mode


class Slotted:
    __slots__ = ("__mode",)

    def __init__(self, mode: str) -> None:
        self.__mode = mode


class Metres(float):
    unit = "m"


# Pairs of arguments that a function may distinguish.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "floats": (0.5, -0.5),
    "zeros": (0.0, -0.0),
    "nan and a number": (float("nan"), 1.0),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "NumPy and Python scalar": (np.float64(1.0), 1.0),
    "precisions": (np.float32(1), np.float64(1)),
    "NumPy zeros": (np.float32(0.0), np.float32(-0.0)),
    "NumPy integers": (np.int64(0), np.int64(1)),
    "NumPy booleans": (np.True_, np.False_),
    "units of time": (np.timedelta64(1, "s"), np.timedelta64(1, "m")),
    "complex zeros": (complex(1, 0.0), complex(1, -0.0)),
    "None and zero": (None, 0),
    "None and Ellipsis": (None, ...),
    "enums": (Mode.PLAIN, Mode.WRAPPED),
    "enum and number": (Level.LOW, 1),
    "slices": (slice(1), slice(2)),
    "slices of floats": (slice(0.0), slice(-0.0)),
    "ranges": (range(3), range(4)),
    "dtypes": (np.dtype("f4"), np.dtype("f8")),
    "types": (np.float32, np.float64),
    "text and bytes": ("a", b"a"),
    "long texts": ("a" * 1000, "a" * 999 + "b"),
    "list and tuple": ([1.0], (1.0,)),
    "nesting": ([[X], X], [[X, X]]),
    "named tuple and tuple": (Point(1, 2), (1, 2)),
    "keys": ({"a": X}, {"b": X}),
    "types of keys": ({1: 0}, {True: 0}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "kinds of dict": ({"a": 1}, OrderedDict(a=1)),
    "sets": ({1}, {1.0}),
    "bounds of deques": (deque([1], 1), deque([1], 2)),
    "dataclasses": (Window(0.0, 1.0), Window(-0.0, 1.0)),
    "namespaces": (SimpleNamespace(a=1), SimpleNamespace(a=1.0)),
    "objects": (Settings("a"), Settings("b")),
    "objects with slots": (Slotted("a"), Slotted("b")),
    "subclasses of float": (Metres(1.0), Metres(2.0)),
    "subclass and float": (Metres(1.0), 1.0),
    "decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "dates": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    "bound arguments": (partial(max, 1), partial(max, 1.0)),
    "dtypes of arrays": (X, X.astype("f8")),
    "ranks": (X, X[None]),
    "matrix and array": (np.ones((1, 1)).view(np.matrix), np.ones((1, 1))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_arguments_have_different_signatures(what: str) -> None:
    one, other = DIFFERENT[what]
    assert signature_of([one]) != signature_of([other])
    assert hash(signature_of([one])) == hash(signature_of([one]))


def scaled_by(factor: float) -> Callable[[Any], Any]:
    return lambda x: factor * x


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: np.float32("nan"),
        lambda: {"a": [X + 1, (2.0, None)], "b": slice(None, 3)},
        lambda: Window(0.0, float("nan")),
        lambda: Settings("a"),
        lambda: Slotted("a"),
        lambda: decimal.Decimal("1.5"),
        lambda: scaled_by(2.0),
        lambda: partial(np.clip, a_min=0.0),
        lambda: Settings("a").__init__,  # type: ignore[misc]
        object,
    ],
)
def test_equal_arguments_have_equal_signatures(make: Callable[[], Any]) -> None:
    assert signature_of([make()]) == signature_of([make()])


def test_captured_variables_of_a_function_argument_count() -> None:
    assert signature_of(scaled_by(0.0)) != signature_of(scaled_by(-0.0))


def test_cyclic_containers_have_a_signature() -> None:
    def cycle(mode: str) -> Settings:
        settings = Settings(mode)
        settings.me = settings  # type: ignore[attr-defined]
        return settings

    assert signature_of(cycle("a")) == signature_of(cycle("a"))
    assert signature_of(cycle("a")) != signature_of(cycle("b"))


def test_too_many_values_have_no_signature() -> None:
    with pytest.raises(NoSignatureError, match="more than 1000 objects"):
        signature_of([0.5] * 1001)


# -- decisions per signature --------------------------------------------------------------------------


def differs_for(clock: Clock, is_wrong: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a function that is faster on the GPU, and returns other values there for some arguments."""

    def fn(x: Any, option: Any) -> Any:
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        if isinstance(x, np.ndarray):
            return x + 1
        return FakeGpuArray(x.values + (2 if is_wrong(option) else 1))

    return fn


def is_negative(value: Any) -> bool:
    return bool(np.signbit(value))


@pytest.mark.parametrize(
    ("right", "wrong", "is_wrong"),
    [
        (0.5, -0.5, is_negative),
        (0.0, -0.0, is_negative),
        (np.float32(0.0), np.float32(-0.0), is_negative),
        (np.int64(1), np.int64(-1), is_negative),
        (1.0, float("nan"), np.isnan),
        (np.False_, np.True_, bool),
        (1, True, lambda value: value is True),
        (1.0, 1, lambda value: isinstance(value, int)),
        (Mode.PLAIN, Mode.WRAPPED, lambda value: value is Mode.WRAPPED),
        (slice(0, 8), slice(0, 9), lambda value: value.stop == 9),
        ({"a": 1}, {"b": 1}, lambda value: "b" in value),
        ([(1, 2), 3], [(1,), (2, 3)], lambda value: len(value[0]) == 1),
        (Settings("a"), Settings("b"), lambda value: value.mode == "b"),
        (None, (), lambda value: value is not None),
    ],
)
def test_verification_covers_only_the_verified_value(
    machine: Machine, clock: Clock, right: Any, wrong: Any, is_wrong: Callable[[Any], bool]
) -> None:
    run = offload(differs_for(clock, is_wrong), machine)
    for _ in range(4):
        assert np.array_equal(run(X, right), X + 1)
    assert run.explain(X, right).on_gpu
    assert not run.explain(X, wrong).on_gpu
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            assert np.array_equal(run(X, wrong), X + 1)
    assert ["has a different result on the GPU" in str(one.message) for one in caught] == [True]


def test_attributes_of_self_that_a_method_reads_count(machine: Machine, clock: Clock) -> None:
    class Shift:
        def __init__(self, mode: str) -> None:
            self.mode, self.calls = mode, 0

        def run(self, x: Any) -> Any:
            clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
            if isinstance(x, np.ndarray):
                return x + 1
            return FakeGpuArray(x.values + (2 if self.mode == "b" else 1))

    run, a, b = offload(Shift.run, machine), Shift("a"), Shift("b")
    for _ in range(4):
        a.calls += 1  # the method does not read it
        assert np.array_equal(run(a, X), X + 1)
    assert run.explain(a, X).on_gpu
    assert run.explain(X).on_gpu  # explain() of a bound method is called without self
    assert np.array_equal(run(b, X), X + 1)
    with pytest.warns(RuntimeWarning, match="has a different result on the GPU"):
        assert np.array_equal(run(b, X), X + 1)


def test_numbers_that_change_on_every_call_are_not_verified(
    machine: Machine, gpu: FakeGpu, clock: Clock
) -> None:
    """Such calls are not verified: each runs once, on the CPU."""
    ran: list[type] = []

    def fn(x: Any, rate: float) -> Any:
        ran.append(type(x))
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        return x + 1

    run = offload(fn, machine)
    for _ in range(4):
        run(X, 0.5)
    ran.clear()
    gpu.moved.clear()
    for i in range(20):
        assert np.array_equal(run(X, 1.0 + i), X + 1)
    assert ran == [np.ndarray] * 20
    assert gpu.moved == []
    assert "has not run with exactly these arguments" in str(run.explain(X, 99.0))
    run(X, 0.5)
    assert ran[-1] is FakeGpuArray  # earlier verifications still apply


def test_remembered_signatures_are_bounded(
    machine: Machine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "MAX_PROOFS", 8)
    run = offload(differs_for(clock, lambda _: False), machine)
    for _ in range(4):
        run(X, 0.5)
    for i in range(50):
        run(X, 1.0 + i)
        run(X, 0.5)
    assert len(run.proofs) == 8
    assert run.explain(X, 0.5).on_gpu  # used in every round, so it was never evicted


def test_each_gpu_and_framework_is_verified(machine: Machine, gpu: FakeGpu, clock: Clock) -> None:
    machine.add_gpu(gpu, Device("gpu", 1), 1)
    run = offload(differs_for(clock, lambda _: False), machine)
    for _ in range(4):
        run(X, 0.5)
    assert "is a trial" not in str(run.explain(X, 0.5))
    token = worker_device.set(Device("gpu", 1))
    try:
        run(X, 0.5)
        assert "is a trial" in str(run.explain(X, 0.5))
    finally:
        worker_device.reset(token)


def test_arguments_without_a_signature_stay_on_the_cpu(machine: Machine, clock: Clock) -> None:
    run = offload(differs_for(clock, lambda _: True), machine)
    for _ in range(4):
        assert np.array_equal(run(X, [0.5] * 2000), X + 1)
    decision = run.explain(X, [0.5] * 2000)
    assert not decision.on_gpu
    assert "more than 1000 objects" in str(decision)


class _OwnRandom(random.Random):
    pass


@pytest.mark.parametrize("cls", [random.Random, _OwnRandom])
def test_state_of_classes_in_c_counts(cls: Any) -> None:
    assert signature_of(cls(1)) == signature_of(cls(1))
    assert signature_of(cls(1)) != signature_of(cls(2))
