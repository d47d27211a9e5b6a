"""`@gpu`: a call signature has dtypes, ranks, size, numbers and strings, and compares objects by identity."""

from __future__ import annotations

import datetime
import enum
import gc
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from arraybridge.device import Device
from arraybridge.offload.call_signature import Call
from arraybridge.offload.records import History
from arraybridge.settings import worker_device
from tests.fake_gpu import FAKE_GPUS, FakeGpuArray
from tests.helpers import require
from tests.offload.simulated_gpu import Clock, FakeGpu, Machine, offload

X = np.arange(64, dtype=np.float32)


def signature_of(*args: Any, **kwargs: Any) -> Any:
    return Call((), args, kwargs).inspect().signature


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


SETTINGS = Settings("a")

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
    "NumPy functions": (np.add, np.subtract),
    "text and bytes": ("a", b"a"),
    "long texts": ("a" * 1000, "a" * 999 + "b"),
    "list and tuple": ([1.0], (1.0,)),
    "nesting": ([[X], X], [[X, X]]),
    "named tuple and tuple": (Point(1, 2), (1, 2)),
    "keys": ({"a": X}, {"b": X}),
    "types of keys": ({1: 0}, {True: 0}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "kinds of dict": ({"a": 1}, OrderedDict(a=1)),
    "bounds of deques": (deque([1], 1), deque([1], 2)),
    "dataclasses": (Window(0.0, 1.0), Window(-0.0, 1.0)),
    "namespaces": (SimpleNamespace(a=1), SimpleNamespace(a=1.0)),
    "objects": (SETTINGS, Settings("a")),
    "dtypes of arrays": (X, X.astype("f8")),
    "ranks": (X, X[None]),
    "sizes": (X, X[:8]),
    "matrix and array": (np.ones((1, 1)).view(np.matrix), np.ones((1, 1))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_arguments_have_different_signatures(what: str) -> None:
    one, other = DIFFERENT[what]
    assert signature_of(one) != signature_of(other)
    assert signature_of(one) == signature_of(one) is not None
    assert hash(signature_of(one)) == hash(signature_of(one))


def test_names_of_arguments_count() -> None:
    assert signature_of(X, 1) != signature_of(X, a=1)
    assert signature_of(a=X, b=X) != signature_of(a=X, c=X)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: np.float32("nan"),
        lambda: {"a": [X + 1, (2.0, None)], "b": slice(None, 3)},
        lambda: Window(0.0, float("nan")),
        lambda: [SETTINGS, np.clip, Mode.PLAIN, "a" * 1000],
        lambda: X[:33] + 1,  # the same size, rounded to a power of two
    ],
)
def test_equal_arguments_have_equal_signatures(make: Callable[[], Any]) -> None:
    assert signature_of(make(), X) == signature_of(make(), X) is not None


def test_weakly_typed_jax_arrays_have_another_signature() -> None:
    jnp = require("jax").numpy
    assert signature_of(jnp.asarray(1.0)) != signature_of(jnp.ones(()))


def test_arrays_of_all_frameworks_have_the_same_signature() -> None:
    torch = require("torch")
    assert signature_of(torch.from_numpy(X), 0.5) == signature_of(X, 0.5)
    assert signature_of([torch.from_numpy(X)]) == signature_of([X])


def test_objects_are_not_kept_alive_and_a_new_object_at_the_same_address_is_another_one() -> None:
    first = Settings("a")
    observer = weakref.ref(first)
    signature = signature_of(first)
    address = id(first)
    del first
    gc.collect()
    assert observer() is None
    others = [Settings("b") for _ in range(1000)]
    second = next((x for x in others if id(x) == address), None)
    if second is None:
        pytest.skip("Python did not reuse the address")
    assert hash(signature) == hash(signature_of(second))
    assert signature != signature_of(second)
    assert signature_of(second) != signature


def test_bound_methods_that_are_created_for_a_call_are_different_objects() -> None:
    assert signature_of(SETTINGS.__init__) != signature_of(SETTINGS.__init__)  # type: ignore[misc]


class Slotted:
    __slots__ = ("mode",)


class Unhashable(int):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.5] * 2000, "its arguments contain more than 1000 values"),
        (datetime.date(2020, 1, 1), "an argument of type date cannot be compared between calls"),
        (Slotted(), "an argument of type Slotted cannot be compared between calls"),
        (Unhashable(3), "its arguments cannot be compared between calls (unhashable type: 'Unhashable')"),
        (slice(Slotted()), "an argument of type slice cannot be compared between calls"),
    ],
)
def test_arguments_without_a_signature_stay_on_the_cpu(
    machine: Machine, clock: Clock, value: Any, message: str
) -> None:
    run = offload(differs_for(clock, lambda _: True), machine)
    for _ in range(4):
        assert np.array_equal(run(X, value), X + 1)
    decision = run.explain(X, value)
    assert not decision.on_gpu
    assert message in decision.reasons
    assert len(run.history.records) == 0


def test_large_arguments_are_not_kept_alive(machine: Machine, clock: Clock) -> None:
    run = offload(differs_for(clock, lambda _: False), machine)
    text = "a" * 10_000_000
    data = text.encode()
    before = sys.getrefcount(text), sys.getrefcount(data)
    for _ in range(4):
        run(X, [text, data])
    assert (sys.getrefcount(text), sys.getrefcount(data)) == before


# -- decisions per signature --------------------------------------------------------------------------


def differs_for(clock: Clock, is_wrong: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a function that is faster on the GPU, and returns other values there for some arguments."""

    def fn(x: Any, option: Any) -> Any:
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        if isinstance(x, np.ndarray):
            return x + 1
        return FakeGpuArray(x.values + (2 if is_wrong(option) else 1))

    return fn


@pytest.mark.parametrize(
    ("right", "wrong", "is_wrong"),
    [
        (0.5, -0.5, lambda value: value < 0),
        (np.float32(0.0), np.float32(-0.0), np.signbit),
        (1, True, lambda value: value is True),
        (Mode.PLAIN, Mode.WRAPPED, lambda value: value is Mode.WRAPPED),
        ("a", "b", lambda value: value == "b"),
        ({"a": 1}, {"b": 1}, lambda value: "b" in value),
        ([(1, 2), 3], [(1,), (2, 3)], lambda value: len(value[0]) == 1),
        (SETTINGS, Settings("b"), lambda value: value.mode == "b"),
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


def test_self_is_compared_by_identity(machine: Machine, clock: Clock) -> None:
    class Shift:
        def __init__(self, mode: str) -> None:
            self.mode = mode

        def run(self, x: Any) -> Any:
            clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
            if isinstance(x, np.ndarray):
                return x + 1
            return FakeGpuArray(x.values + (2 if self.mode == "b" else 1))

    run, a, b = offload(Shift.run, machine), Shift("a"), Shift("b")
    for _ in range(4):
        assert np.array_equal(run(a, X), X + 1)
    assert run.explain(a, X).on_gpu
    assert run.explain(X).on_gpu  # explain() of a bound method is called without self
    assert not run.explain(b, X).on_gpu
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
    for i in range(2 * History.LIMIT):
        assert np.array_equal(run(X, 1.0 + i), X + 1)
        if i % 64 == 0:
            run(X, 0.5)  # earlier verifications still apply
    assert ran.count(np.ndarray) == 2 * History.LIMIT
    assert ran.count(FakeGpuArray) == 8
    assert len(run.history.records) == History.LIMIT
    assert "no timings for such arguments yet" in str(run.explain(X, 9999.0))


def test_each_gpu_is_verified(machine: Machine, gpu: FakeGpu, clock: Clock) -> None:
    gpu.gpus = FAKE_GPUS
    machine.add_gpu(gpu, Device("gpu", 1), 1)
    run = offload(differs_for(clock, lambda _: False), machine)
    for _ in range(4):
        run(X, 0.5)
    assert "is a trial" not in str(run.explain(X, 0.5))
    token = worker_device.set(Device("gpu", 1))
    try:
        assert "is a trial" in str(run.explain(X, 0.5))
        run(X, 0.5)
        assert "is a trial" not in str(run.explain(X, 0.5))
    finally:
        worker_device.reset(token)
