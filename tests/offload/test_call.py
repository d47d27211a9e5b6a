"""@gpu: what it decides with a fake clock and a fake card, and what it does where there is none."""

from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import array_namespace
from arraybridge.machine import cards
from arraybridge.offload.call import Offload
from arraybridge.offload.cards import Card
from arraybridge.offload.cards import Cards as Machine
from arraybridge.offload.decorator import gpu, stay_on_gpu
from arraybridge.placement import worker_device
from arraybridge.types import Device
from tests.cards import CardArray
from tests.helpers import require, run_script
from tests.offload.fakecard import Clock, FakeCard, Pretended, Work, offload, running_on

KIB, MIB = 1 << 10, 1 << 20


def floats(nbytes: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), nbytes // 4)  # as large as it is to be, without the memory


def test_numbers_among_the_arguments_are_told_apart(machine: Machine, clock: Clock) -> None:
    def steps(x: Any, count: int) -> Any:
        clock.sleep(count * (1e-3 if isinstance(x, np.ndarray) else 1e-6))
        return x + count

    fn = offload(steps, machine)
    for _ in range(6):
        fn(floats(MIB), 100)
        fn(floats(64 * KIB), 0)
    assert fn.explain(floats(MIB), 100).on_gpu
    assert not fn.explain(floats(64 * KIB), 0).on_gpu


def test_history_is_bounded_and_prints(machine: Machine, clock: Clock) -> None:
    fn = offload(lambda x, n: x + n, machine)
    for n in range(400):
        fn(np.zeros(4, np.float32), n)
    assert len(fn.history.entries) == 256
    line = str(fn.history).splitlines()[-1]
    assert "float32" in line
    assert "cpu" in line
    fn.history.clear()
    assert str(fn.history) == "no call has been measured yet"


# -- results, residence, memory -----------------------------------------------------------------------


def on_card(machine: Machine, clock: Clock, body: Any = None, **options: Any) -> Any:
    """A function that pays on the card, warmed up until it runs there."""

    def fn(x: Any, *rest: Any) -> Any:
        clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)
        return (body or (lambda y: y + 1))(x)

    return offload(fn, machine, **options)


def test_results_come_back_as_they_came(machine: Machine, clock: Clock) -> None:
    fn = on_card(machine, clock)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(5):
        result = fn(x)
        assert type(result) is np.ndarray
        assert result.dtype == np.float32
        assert result.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert fn.explain(x).on_gpu
    torch = require("torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    for _ in range(5):
        result = fn(tensor)
        assert isinstance(result, torch.Tensor)
        assert result.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert fn.explain(tensor).on_gpu


def test_chained_calls_keep_data_on_the_card(machine: Machine, card: FakeCard, clock: Clock) -> None:
    fn = on_card(machine, clock)
    x = np.zeros(1024, np.float32)
    for _ in range(4):
        fn(x)
    card.moved.clear()
    with stay_on_gpu():
        first = fn(x)
        assert isinstance(first, CardArray)
        result = fn(fn(first))
    assert card.moved == [("card", 4096)]
    assert arraybridge.to_numpy(result).tolist() == [3.0] * 1024
    card.moved.clear()
    assert isinstance(fn(x), np.ndarray)
    assert card.moved == [("card", 4096), ("host", 4096)]


def test_arrays_on_the_card_stay_there(machine: Machine, card: FakeCard, clock: Clock) -> None:
    fn = on_card(machine, clock)
    x = arraybridge.convert_memory(np.zeros(1024, np.float32), "fakecard")
    card.moved.clear()
    fn(x)
    assert card.moved == [("host", 4096), ("host", 4096)]  # the trial: the argument, and the result
    card.moved.clear()
    result = fn(x)
    assert isinstance(result, CardArray)
    assert card.moved == []
    assert "on the card already" in str(fn.explain(x[:5]))


def test_what_does_not_fit_stays_on_the_cpu(machine: Machine, card: FakeCard, clock: Clock) -> None:
    fn = on_card(machine, clock)
    x = np.zeros(1024, np.float32)
    for _ in range(4):
        fn(x)
    card.memory = 5000
    clock.sleep(1.0)
    decision = fn.explain(x)
    assert not decision.on_gpu
    assert "4.9 KiB free" in str(decision)
    card.memory = 1 << 30
    clock.sleep(1.0)
    assert fn.explain(x).on_gpu


@pytest.mark.parametrize(("others", "free"), [(0, 700), (450, 500)])
def test_jax_counts_its_cache_as_free_and_so_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, others: int, free: int
) -> None:
    """1000 bytes on the card, of which JAX may take 750: it has taken 150 and uses 50 of them."""
    require("jax")
    framework = arraybridge.framework("jax")  # complete, before something in it is replaced
    from arraybridge.frameworks.jax import memory as jax_devices

    class JaxCard:
        platform, local_hardware_id = "gpu", 0

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 750, "bytes_in_use": 50, "pool_bytes": 150, "peak_bytes_in_use": 50}

    card = JaxCard()
    monkeypatch.setattr(jax_devices, "jax_device", lambda device: card)
    monkeypatch.setattr(jax_devices.JaxPool, "_opened", lambda self: [card])
    monkeypatch.setattr(jax_devices.machine, "free_memory", lambda index: 1000 - 150 - others)
    assert Card(framework, Device("gpu", 0), lambda: 0.0).free() == free


def test_oom_is_split_where_rows_are_independent(
    machine: Machine, card: FakeCard, clock: Clock, recwarn: pytest.WarningsRecorder
) -> None:
    fn = on_card(machine, clock, split_axis=0)
    x = np.arange(100, dtype=np.float32).reshape(50, 2)
    for _ in range(4):
        fn(x)
    card.rows = 20
    card.moved.clear()
    assert np.array_equal(fn(x), x + 1)
    assert sum(n for where, n in card.moved if where == "card") == x.nbytes
    assert len(card.moved) >= 6
    assert not recwarn


def test_oom_falls_back_to_the_cpu_with_a_warning(machine: Machine, card: FakeCard, clock: Clock) -> None:
    centre = lambda x: x + 1  # noqa: E731
    fn = on_card(machine, clock, centre)
    x = np.arange(100, dtype=np.float32)
    for _ in range(4):
        fn(x)
    card.rows = 20
    with pytest.warns(RuntimeWarning, match=r"fn\(\) ran out of memory on fakecard gpu:0"):
        result = fn(x)
    assert np.array_equal(result, x + 1)
    assert np.array_equal(fn(x), x + 1)  # without another try, and another warning
    assert "ran out of memory" in str(fn.explain(x))


# -- functions that a card cannot run -----------------------------------------------------------------


def test_what_fails_on_the_card_runs_on_the_cpu(machine: Machine, clock: Clock) -> None:
    fn = on_card(machine, clock, lambda x: x - 1)  # the fake card cannot subtract
    x = np.ones(8)
    fn(x)
    with pytest.warns(RuntimeWarning, match=r"fn\(\) cannot run in fakecard \(TypeError"):
        assert fn(x).tolist() == [0.0] * 8
    for _ in range(5):
        assert fn(x).tolist() == [0.0] * 8
    assert "cannot run in fakecard: TypeError" in str(fn.explain(x))


def test_the_functions_own_errors_are_its_own(machine: Machine, clock: Clock) -> None:
    broken = [False]

    def body(x: Any) -> Any:
        if broken[0]:
            raise KeyError("no such cell")
        return x + 1

    fn = on_card(machine, clock, body)
    x = np.ones(8)
    for _ in range(4):
        fn(x)
    broken[0] = True
    with pytest.raises(KeyError, match="no such cell"):
        fn(x)
    broken[0] = False
    assert fn.explain(x).on_gpu


def test_nested_functions_run_where_the_outer_one_runs(machine: Machine, clock: Clock) -> None:
    seen: list[type] = []
    inner_work = Work(clock, lambda n: 1e-9, lambda n: 1.0)
    inner = offload(inner_work, machine)

    def outer(x: Any) -> Any:
        seen.append(type(x))
        clock.sleep(100.0 if isinstance(x, np.ndarray) else 1e-5)
        return inner(x) * 2

    fn = offload(outer, machine)
    for _ in range(5):
        assert fn(np.ones(4)).tolist() == [2.0] * 4
    assert seen[-1] is CardArray
    assert inner_work.ran[-1] == "card"


# -- real frameworks, with a device of the CPU for a card ---------------------------------------------


PRETENDED = [("jax", "cpu:1"), ("torch", "cpu")]


@pytest.mark.parametrize(("name", "device"), PRETENDED, ids=lambda v: str(v))
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int64"])
def test_real_frameworks_run_it(name: str, device: str, dtype: str) -> None:
    require(name)

    def body(x: Any, parts: list[Any]) -> Any:
        xp = array_namespace(x)
        return {"sum": xp.sum(x), "joined": xp.concat([x, *parts]) * 2}

    seen: list[str] = []
    fn = running_on(name, device, body, seen)
    x, part = np.arange(5000).astype(dtype), np.ones(3, dtype)
    for _ in range(5):
        result = fn(x, [part, part])
        assert type(result["joined"]) is np.ndarray
        assert result["joined"].dtype == dtype
        assert np.array_equal(result["joined"], np.concatenate([x, part, part]) * 2)
        assert isinstance(result["sum"], np.generic)
        assert result["sum"] == x.sum()
    assert seen[0] == "numpy"
    assert seen[-1] == name
    assert fn.explain(x, [part, part]).backend == name


# -- the decorator, without a card --------------------------------------------------------------------


@gpu
def smooth(image: Any, weight: float = 0.5) -> Any:
    """Average of neighbours."""
    return weight * image[:-1] + (1 - weight) * image[1:]


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @gpu
    def scale(self, x: Any) -> Any:
        return self.factor * x

    @gpu(backend="torch")
    @staticmethod
    def half(x: Any) -> Any:
        return x / 2

    @classmethod
    @gpu
    def name(cls, x: Any) -> Any:
        return x + len(cls.__name__)


def test_a_function_keeps_what_it_is() -> None:
    assert smooth.__name__ == "smooth"
    assert smooth.__doc__ == "Average of neighbours."
    assert str(inspect.signature(smooth)) == "(image: 'Any', weight: 'float' = 0.5) -> 'Any'"
    assert pickle.loads(pickle.dumps(smooth)) is smooth
    assert pickle.loads(pickle.dumps(Scaler(2).scale))(np.ones(2)).tolist() == [2.0, 2.0]


def test_functions_and_methods_run_in_numpy() -> None:
    assert smooth(np.array([1.0, 3.0, 5.0])).tolist() == [2.0, 4.0]
    assert smooth(np.array([1.0, 3.0]), weight=1.0).tolist() == [1.0]
    assert Scaler(3.0).scale(np.array([1.0])).tolist() == [3.0]
    assert Scaler.half(np.array([3])).tolist() == [1.5]
    assert Scaler.name(np.array([1])).tolist() == [7]
    assert not Scaler(3.0).scale.explain(np.ones(3)).on_gpu
    assert "It takes no arrays." in str(smooth.explain(1))


def test_without_a_card_explain_says_why() -> None:
    large = np.zeros(4 * MIB, np.uint8)
    assert (
        "too little to look for a card" in str(smooth.explain(np.zeros(3)))
        or not smooth.explain(large).on_gpu
    )
    decision = smooth.explain(large)
    if decision.on_gpu:
        pytest.skip("there is a card here")
    assert decision.device == "cpu"
    assert decision.backend == "numpy"
    text = str(decision)
    assert text.startswith("It would run on the CPU in NumPy.")
    assert "GPU" in text or "accelerator" in text or "card" in text or "CPU alone" in text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpu_id": -1}, ValueError, "GPU's number"),
        ({"gpu_id": True}, ValueError, "GPU's number"),
        ({"backend": "numpy"}, ValueError, "cupy, torch, jax"),
        ({"backend": "tensorflow"}, ValueError, "cupy, torch, jax"),
        ({"backend": "pytorch"}, ValueError, "torch"),
        ({"backend": 3}, TypeError, "string"),
        ({"split_axis": 1.5}, TypeError, "whole number"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gpu(**options)


def test_bad_functions() -> None:
    async def later(x: Any) -> Any:
        return x

    def many(x: Any) -> Any:
        yield x

    for fn, message in (
        (later, "coroutine or a generator"),
        (many, "coroutine or a generator"),
        (Scaler, "is a class"),
        (0, "gpu_id=0"),
    ):
        with pytest.raises(TypeError, match=message):
            gpu(fn)  # type: ignore[call-overload]


def test_use_device_cpu_is_plain_numpy(machine: Machine, clock: Clock) -> None:
    context = pytest.importorskip("arraybridge.devices.context")
    fn = on_card(machine, clock)
    x = np.ones(64)
    for _ in range(4):
        fn(x)
    assert fn.explain(x).on_gpu
    with context.use_device("cpu"):
        decision = fn.explain(x)
        assert not decision.on_gpu
        assert "default device is the CPU" in str(decision)
        assert fn(x).tolist() == [2.0] * 64
    assert fn.explain(x).on_gpu


def test_a_worker_with_a_device_of_its_own(machine: Machine, clock: Clock) -> None:
    fn = on_card(machine, clock)
    x = np.ones(64)
    for _ in range(4):
        fn(x)
    token = worker_device.set(arraybridge.Device("gpu", 3))
    try:
        assert "there is no gpu:3 here" in str(fn.explain(x)).lower()
        assert "fakecard has no gpu:3 (it has gpu:0)" in str(fn.explain(x))
    finally:
        worker_device.reset(token)
    assert fn.explain(x).on_gpu


def test_a_call_of_small_arrays_imports_nothing() -> None:
    done = run_script("offload_imports_nothing.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_without_a_driver_no_framework_is_imported_to_be_asked() -> None:
    require("torch")
    if cards():
        pytest.skip("there is a driver, and a card")
    done = run_script("offload_imports_nothing.py", "torch")
    assert done.returncode == 0, done.stderr
    assert "torch" in json.loads(done.stdout)
    assert not {"cupy", "jax", "tensorflow"} & set(json.loads(done.stdout))


@pytest.mark.parametrize(("gpu_id", "place"), [(0, "cpu:1"), (1, "cpu:2")])
def test_card_and_framework_may_be_pinned(gpu_id: int, place: str) -> None:
    """Two of JAX's CPU devices for the cards."""
    machine = Pretended("jax", "cpu:1")
    second = arraybridge.Device.parse("cpu:2")
    machine._found["jax", 1] = Card(arraybridge.framework("jax"), second, machine.clock)
    seen: list[str] = []

    def fn(x: Any) -> Any:
        seen.append(f"{arraybridge.detect_memory_type(x)} {arraybridge.device_of(x)}")
        machine.clock.sleep(1.0 if isinstance(x, np.ndarray) else 1e-5)  # type: ignore[attr-defined]
        return x + 1

    run = Offload(fn, backend="jax", gpu_id=gpu_id, cards=machine)
    x = np.arange(1 << 18, dtype=np.float32)
    for _ in range(4):
        np.testing.assert_array_equal(run((x,), {}), x + 1)
    assert set(seen) == {"numpy cpu", f"jax {place}"}
    assert (run.explain(x).backend, run.explain(x).device) == ("jax", place)
