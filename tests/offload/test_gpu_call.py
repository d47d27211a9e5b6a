"""`@gpu` with a fake clock and a fake GPU: device choice, results, and calls without a GPU."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import arraybridge
from arraybridge import UnknownFrameworkError, array_namespace, use_device
from arraybridge.device import Device
from arraybridge.hardware import gpus
from arraybridge.offload.gpu_decorator import gpu
from arraybridge.settings import worker_device
from tests.fake_gpu import FakeGpuArray
from tests.helpers import require
from tests.offload.simulated_gpu import Clock, FakeGpu, Machine, machine_with, offload, paying, running_on

X = np.arange(64, dtype=np.float32)


def on_gpu(machine: Machine, clock: Clock, body: Any = lambda x: x + 1, *first: Any, **options: Any) -> Any:
    """Return a function that is faster on the GPU, warmed up with ``first`` or `X` until it runs there."""
    fn = offload(paying(clock, body), machine, **options)
    for _ in range(4):
        fn(*(first or (X,)))
    return fn


# -- device choice -----------------------------------------------------------------------------------


def test_numbers_and_strings_have_separate_signatures(machine: Machine, clock: Clock) -> None:
    def steps(x: Any, count: int, *, mode: str) -> Any:
        clock.sleep(count * (1e-3 if isinstance(x, np.ndarray) else 1e-6))
        return x + count

    fn = offload(steps, machine)
    for _ in range(6):
        fn(X, 100, mode="reflect")
        fn(X, 0, mode="reflect")
    assert fn.explain(X, 100, mode="reflect").on_gpu
    assert not fn.explain(X, 0, mode="reflect").on_gpu
    assert not fn.explain(X, 100, mode="wrap").on_gpu


def test_explain_reports_both_times(machine: Machine, clock: Clock) -> None:
    decision = on_gpu(machine, clock).explain(X)
    assert (decision.on_gpu, str(decision.device), decision.backend) == (True, "gpu:0", "fakecard")
    assert (decision.cpu_seconds, decision.gpu_seconds) == (pytest.approx(1.0), pytest.approx(5e-5, rel=0.1))
    assert str(decision).splitlines()[:3] == [
        "It would run on gpu:0 in fakecard.",
        "The GPU is faster.",
        "On the CPU, it takes 1.00 s (runs so far: 2).",
    ]


def test_arrays_that_do_not_fit_stay_on_the_cpu(machine: Machine, gpu: FakeGpu, clock: Clock) -> None:
    fn = on_gpu(machine, clock)
    gpu.free_bytes = 500
    clock.sleep(1.0)
    assert "500 B free" in str(fn.explain(X))
    assert not fn.explain(X).on_gpu
    gpu.free_bytes = 1 << 30
    clock.sleep(1.0)
    assert fn.explain(X).on_gpu


def test_calls_that_are_faster_than_the_transfer_alone_stay_on_the_cpu(
    machine: Machine, gpu: FakeGpu, clock: Clock
) -> None:
    on_gpu(machine, clock, lambda x: x + 1, np.zeros(10**6, np.float32))  # measures 9.5 GB/s

    def quick(x: Any) -> Any:
        clock.sleep(1e-3)
        return x + 1

    fn = offload(quick, machine)
    large = np.zeros(10**7, np.float32)
    gpu.moved.clear()
    for _ in range(3):
        fn(large)
    assert gpu.moved == []
    text = "The transfer of its arrays takes 4.20 ms, longer than the call on the CPU."
    assert text in str(fn.explain(large)).splitlines()


def test_default_device_and_worker_device_are_used(machine: Machine, clock: Clock) -> None:
    fn = on_gpu(machine, clock)
    with use_device("cpu"):
        assert "default device is the CPU" in str(fn.explain(X))
        assert fn(X).tolist() == (X + 1).tolist()
    token = worker_device.set(Device("gpu", 3))
    try:
        assert "fakecard has no gpu:3 (it has gpu:0)" in str(fn.explain(X))
    finally:
        worker_device.reset(token)
    assert fn.explain(X).on_gpu


# -- results and their devices -----------------------------------------------------------------------


def test_results_have_the_original_type(machine: Machine, clock: Clock) -> None:
    torch = require("torch")
    for x in (X, torch.from_numpy(X)):
        fn = on_gpu(machine, clock, lambda x: {"parts": [x * 2], "name": "cells"}, x)
        result = fn(x)
        assert type(result["parts"][0]) is type(x)
        assert (result["parts"][0].tolist(), result["name"]) == ((X * 2).tolist(), "cells")
        assert fn.explain(x).on_gpu


def test_arrays_on_the_gpu_stay_there(machine: Machine, gpu: FakeGpu, clock: Clock) -> None:
    fn = offload(paying(clock, lambda x: x + 1), machine)
    x = arraybridge.convert_memory(X, "fakecard")
    gpu.moved.clear()
    fn(x)
    assert gpu.moved == [("host", 256), ("host", 256)]  # the trial run: the argument, and the result
    gpu.moved.clear()
    assert isinstance(fn(x), FakeGpuArray)
    assert gpu.moved == []
    assert "already on the GPU" in str(fn.explain(x))


def test_nested_functions_run_where_the_outer_one_runs(machine: Machine, clock: Clock) -> None:
    seen: list[str] = []
    inner = offload(paying(clock, lambda x: x + 1, seen), machine)
    fn = on_gpu(machine, clock, lambda x: inner(x) * 2)
    assert fn(X).tolist() == ((X + 1) * 2).tolist()
    assert seen == ["numpy", "numpy", "fakecard", "fakecard", "fakecard", "fakecard"]


# -- calls that the GPU cannot run -------------------------------------------------------------------


def test_oom_falls_back_to_the_cpu_with_a_warning(machine: Machine, gpu: FakeGpu, clock: Clock) -> None:
    fn = on_gpu(machine, clock)
    gpu.rows = 20
    with pytest.warns(RuntimeWarning, match=r"fn\(\) ran out of memory on fakecard gpu:0"):
        result = fn(X)
    np.testing.assert_array_equal(result, X + 1)
    np.testing.assert_array_equal(fn(X), X + 1)  # without another attempt or warning
    assert "ran out of memory" in str(fn.explain(X))


def test_calls_that_fail_on_the_gpu_run_on_the_cpu(machine: Machine, clock: Clock) -> None:
    fn = offload(paying(clock, lambda x: x - 1), machine)  # the fake GPU cannot subtract
    fn(X)
    with pytest.warns(RuntimeWarning, match=r"fn\(\) cannot run in fakecard \(TypeError"):
        fn(X)
    np.testing.assert_array_equal(fn(X), X - 1)
    assert "cannot run in fakecard: TypeError" in str(fn.explain(X))


def test_errors_of_the_function_propagate(machine: Machine, clock: Clock) -> None:
    broken: list[int] = []

    def body(x: Any) -> Any:
        if broken:
            raise KeyError("no such cell")
        return x + 1

    fn = on_gpu(machine, clock, body)
    broken.append(1)
    with pytest.raises(KeyError, match="no such cell"):
        fn(X)
    broken.clear()
    assert fn.explain(X).on_gpu


# -- real frameworks, with a CPU device as the GPU ----------------------------------------------------


@pytest.mark.parametrize(("name", "device"), [("jax", "cpu:1"), ("torch", "cpu")])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int64"])
def test_real_frameworks_run_offloaded_functions(name: str, device: str, dtype: str) -> None:
    require(name)

    def body(x: Any, parts: list[Any]) -> Any:
        xp = array_namespace(x)
        return {"sum": xp.sum(x), "joined": xp.concat([x, *parts]) * 2}

    seen: list[str] = []
    fn = running_on(name, device, body, seen)
    x, part = np.arange(5000).astype(dtype), np.ones(3, dtype)
    for _ in range(5):
        result = fn(x, [part, part])
        assert result["joined"].dtype == dtype
        assert np.array_equal(result["joined"], np.concatenate([x, part, part]) * 2)
        assert isinstance(result["sum"], np.generic)
        assert result["sum"] == x.sum()
        result["joined"][0] = 1  # NumPy's results are writable
    assert (seen[0], seen[-1]) == ("numpy", name)
    assert fn.explain(x, [part, part]).backend == name


@pytest.mark.parametrize(("gpu_id", "place"), [(0, "cpu:1"), (1, "cpu:2")])
def test_gpu_and_framework_may_be_pinned(gpu_id: int, place: str) -> None:
    """Use two of JAX's CPU devices as GPUs."""
    machine = machine_with("jax", "cpu:1", "cpu:2")
    seen: list[str] = []

    def body(x: Any) -> Any:
        seen.append(str(arraybridge.device_of(x)))
        return x + 1

    fn = on_gpu(machine, machine.clock, body, backend="jax", gpu_id=gpu_id)
    assert set(seen) == {"cpu", place}
    assert (fn.explain(X).backend, fn.explain(X).device) == ("jax", place)


# -- the decorator, without a GPU ---------------------------------------------------------------------


@gpu
def smooth(image: Any, weight: float = 0.5) -> Any:
    """Average each element with its neighbors."""
    return weight * image[:-1] + (1 - weight) * image[1:]


class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @gpu
    def scale(self, x: Any) -> Any:
        return self.factor * x

    doubled = staticmethod(gpu(lambda x: (x * 2, type(x).__module__)))

    @gpu(backend="torch")
    @staticmethod
    def half(x: Any) -> Any:
        return x / 2

    @classmethod
    @gpu
    def name(cls, x: Any) -> Any:
        return x + len(cls.__name__)


def test_decorated_functions_keep_their_attributes() -> None:
    assert (smooth.__name__, smooth.__doc__) == ("smooth", "Average each element with its neighbors.")
    assert str(inspect.signature(smooth)) == "(image: 'Any', weight: 'float' = 0.5) -> 'Any'"
    assert pickle.loads(pickle.dumps(smooth)) is smooth
    assert pickle.loads(pickle.dumps(Scaler(2).scale))(np.ones(2)).tolist() == [2.0, 2.0]
    assert smooth(np.array([1.0, 3.0, 5.0])).tolist() == [2.0, 4.0]
    assert smooth(np.array([1.0, 3.0]), weight=1.0).tolist() == [1.0]
    assert Scaler(3.0).scale(np.array([1.0])).tolist() == [3.0]
    assert Scaler.half(np.array([3])).tolist() == [1.5]
    assert Scaler.name(np.array([1])).tolist() == [7]
    assert "It takes no arrays." in str(smooth.explain(1))


def test_functions_without_a_module_name_are_pickled_by_value() -> None:
    doubled: Any = gpu(lambda x: x * 2)
    doubled(np.ones(4))
    twin = cloudpickle.loads(cloudpickle.dumps(doubled))
    assert twin(np.ones(4)).tolist() == [2.0] * 4
    assert twin.explain(np.ones(4)).cpu_seconds > 0
    assert twin.explain(np.ones(99)).cpu_seconds is None


def test_array_of_a_static_method_is_not_taken_for_self() -> None:
    torch = require("torch")
    doubled, module = Scaler.doubled(torch.ones(2))
    assert module == "numpy"
    assert isinstance(doubled, torch.Tensor)
    assert doubled.tolist() == [2.0, 2.0]
    assert "GPU" in str(Scaler.doubled.explain(torch.ones(2)))


RESULTS = {
    "scalar": (np.float64(3.0), {"numpy": np.float64, "torch": "Tensor", "pandas": np.float64}),
    "array without axes": (np.asarray(3.0), {"numpy": np.ndarray, "torch": "Tensor", "pandas": np.ndarray}),
    "text": (np.str_("words"), dict.fromkeys(("numpy", "torch", "pandas"), np.str_)),
    "date": (np.datetime64("2024"), dict.fromkeys(("numpy", "torch", "pandas"), np.datetime64)),
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("caller", ["numpy", "torch", "pandas"])
@pytest.mark.parametrize("decorator", [arraybridge.numpy(output_type="input"), gpu], ids=["numpy", "gpu"])
def test_scalars_are_restored_as_by_the_decorators(decorator: Any, caller: str, kind: str) -> None:
    require("torch")
    pandas = pytest.importorskip("pandas")
    first = {"numpy": np.ones(2), "pandas": pandas.Series([1.0, 1.0])}.get(caller)
    if first is None:
        first = arraybridge.to_torch(np.ones(2))
    result, types = RESULTS[kind]
    restored = decorator(lambda x: [result])(first)[0]
    expected = types[caller]
    assert type(restored).__name__ == expected if isinstance(expected, str) else type(restored) is expected
    assert restored == result


@pytest.mark.parametrize("decorator", [arraybridge.numpy(output_type="input"), gpu], ids=["numpy", "gpu"])
def test_carriers_among_results_stay_unchanged(decorator: Any) -> None:
    pandas = pytest.importorskip("pandas")
    other = pandas.Series([5.0, 6.0], name="other")
    assert decorator(lambda x: other)(pandas.Series([1.0, 2.0], name="first")) is other


def test_explain_reports_why_no_gpu_is_used() -> None:
    if gpus():
        pytest.skip("requires a machine without a GPU")
    assert smooth(np.zeros(1 << 21)).shape == ((1 << 21) - 1,)  # without a warning
    decision = smooth.explain(np.zeros(1 << 22, np.uint8))
    assert (decision.on_gpu, str(decision.device), decision.backend) == (False, "cpu", "numpy")
    assert str(decision).startswith("It would run on the CPU in NumPy.")
    assert any(word in str(decision) for word in ("GPU", "accelerator", "CPU only"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpu_id": -1}, ValueError, "GPU number"),
        ({"backend": "tensorflow"}, ValueError, "'cupy', 'torch', 'jax'"),
        ({"backend": "pytorch"}, ValueError, "torch"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gpu(**options)


@pytest.mark.parametrize(
    ("name", "suggestion"), [("numpyy", "cupy"), ("trch", "torch"), ("nothing", ""), ("tensorflow", "")]
)
def test_wrong_backends_list_those_that_run_numpy_code(name: str, suggestion: str) -> None:
    hint = rf" \(did you mean '{suggestion}'\?\)" if suggestion else ""
    message = rf"^backend='{name}' .*{hint}\. Pass one of 'cupy', 'torch', 'jax'\.$"
    with pytest.raises(ValueError, match=message) as caught:
        gpu(backend=name)
    assert isinstance(caught.value, UnknownFrameworkError) == (name != "tensorflow")
    assert ("did you mean" in str(caught.value)) == bool(suggestion)


def test_bad_functions() -> None:
    async def later(x: Any) -> Any:
        return x

    def many(x: Any) -> Any:
        yield x

    for fn in (later, many):
        with pytest.raises(TypeError, match="coroutine or a generator"):
            gpu(fn)
    for wrong, message in ((Scaler, "Decorate the methods of the class"), (0, "options by keyword")):
        with pytest.raises(TypeError, match=message):
            gpu(wrong)  # type: ignore[arg-type]
