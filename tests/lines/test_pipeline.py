"""Pipelines: results as of the whole batch, order, bounds, errors, and threads that end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline
from tests.helpers import require
from tests.lines.conftest import our_threads


def double(x: Any) -> Any:
    return x * 2


def shift(x: Any) -> Any:
    return x + 1


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 3))


# -- results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("n", [0, 1, 5, 12])
def test_a_batch_comes_out_as_of_the_whole(n: int, microbatches: int) -> None:
    x = rows(n)
    result = Pipeline(double, shift, microbatches=microbatches)(x)
    np.testing.assert_array_equal(result, x * 2 + 1)
    assert result.dtype == x.dtype
    assert result.shape == x.shape


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_another_axis(axis: int) -> None:
    x = np.arange(60).reshape(3, 4, 5)
    np.testing.assert_array_equal(Pipeline(double, axis=axis)(x), x * 2)


def test_microbatches_are_as_even_as_can_be() -> None:
    sizes: list[int] = []

    def note(x: Any) -> Any:
        sizes.append(len(x))
        return x

    Pipeline(note, microbatches=4)(rows(10))
    assert sorted(sizes) == [2, 2, 3, 3]
    sizes.clear()
    Pipeline(note, microbatches=9)(rows(3))
    assert sizes == [1, 1, 1]


def test_tuples_and_dicts_of_arrays() -> None:
    def add(pair: Any) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1]["b"], "scale": pair[1]["scale"], "both": (pair[0], pair[1]["b"])}

    def scale(d: dict[str, Any]) -> dict[str, Any]:
        return {**d, "sum": d["sum"] * d["scale"]}

    a, b = rows(7), rows(7) + 1
    result = Pipeline(add, scale, microbatches=3)((a, {"b": b, "scale": 3}))
    assert list(result) == ["sum", "scale", "both"]
    np.testing.assert_array_equal(result["sum"], (a + b) * 3)
    assert result["scale"] == 3
    np.testing.assert_array_equal(result["both"][0], a)
    np.testing.assert_array_equal(result["both"][1], b)


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow"])
def test_batches_of_every_framework(name: str) -> None:
    require(name)
    x = rows(9).astype(np.float32)
    result = Pipeline(double, shift)(arraybridge.convert_memory(x, name))
    assert arraybridge.detect_memory_type(result) == name
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x * 2 + 1)


def test_64_bit_integers_of_jax_stay_exact() -> None:
    require("jax")
    x = np.arange(9) + 2**40
    result = Pipeline(lambda part: part)(arraybridge.to_jax(x))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x)


def test_integers_of_pyclesperanto_stay_exact() -> None:
    require("pyclesperanto")
    x = (np.arange(24, dtype=np.int32) + 2**30 + 1).reshape(6, 2, 2)
    result = Pipeline(lambda part: part, microbatches=3)(arraybridge.to_pyclesperanto(x))
    np.testing.assert_array_equal(arraybridge.to_numpy(result), x)


class Model:
    """A model in two halves, each on a device of its own."""

    def __init__(self) -> None:
        self.threads: dict[str, set[str]] = {"encode": set(), "decode": set()}
        self.devices: dict[str, set[str]] = {"encode": set(), "decode": set()}

    def _note(self, stage: str, x: Any) -> None:
        self.threads[stage].add(threading.current_thread().name)
        self.devices[stage].add(str(arraybridge.device_of(x)))

    @arraybridge.jax(device="cpu:1")
    def encode(self, x: Any) -> Any:
        self._note("encode", x)
        return x * 2

    @arraybridge.jax(device="cpu:2", output_type="numpy")
    def decode(self, x: Any) -> Any:
        self._note("decode", x)
        return x + 1


def test_a_model_over_two_devices() -> None:
    jax = require("jax")
    if len(jax.devices("cpu")) < 3:
        pytest.skip("XLA_FLAGS gives JAX fewer than three CPU devices")
    model, x = Model(), rows(10).astype(np.float32)
    pipeline = Pipeline(model.encode, model.decode, microbatches=5)
    result = pipeline(x)
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, x * 2 + 1)
    assert model.devices == {"encode": {"cpu:1"}, "decode": {"cpu:2"}}
    assert all(len(names) == 1 for names in model.threads.values())
    assert model.threads["encode"] != model.threads["decode"]
    text = str(pipeline)
    assert "encode  jax on cpu:1  waits for input" in text
    assert "decode  jax on cpu:2  waits for encode" in text


def test_two_logical_devices_of_tensorflow() -> None:
    tf = require("tensorflow")
    if len(tf.config.list_logical_devices("CPU")) < 2:
        pytest.skip("TensorFlow had started with one CPU device")
    seen = []

    @arraybridge.tensorflow(device="cpu:0")
    def first(x: Any) -> Any:
        return x * 2

    @arraybridge.tensorflow(device="cpu:1", output_type="numpy")
    def second(x: Any) -> Any:
        seen.append(str(arraybridge.device_of(x)))
        return x + 1

    x = rows(8).astype(np.float32)
    np.testing.assert_array_equal(Pipeline(first, second)(x), x * 2 + 1)
    assert set(seen) == {"cpu:1"}


def test_two_opencl_devices() -> None:
    cle = require("pyclesperanto")
    there = arraybridge.devices("pyclesperanto")
    if len(there) < 2:
        pytest.skip("POCL_DEVICES gives one device")
    seen = []

    @arraybridge.pyclesperanto(device="opencl:0")
    def first(x: Any) -> Any:
        return cle.add_image_and_scalar(x, scalar=1)

    @arraybridge.pyclesperanto(device="opencl:1", output_type="numpy")
    def second(x: Any) -> Any:
        seen.append(str(arraybridge.device_of(x)))
        return cle.multiply_image_and_scalar(x, scalar=2)

    x = np.arange(60, dtype=np.float32).reshape(6, 2, 5)
    np.testing.assert_array_equal(Pipeline(first, second, microbatches=3)(x), (x + 1) * 2)
    assert set(seen) == {"opencl:1"}


def test_stages_of_several_frameworks() -> None:
    for name in ("torch", "jax", "tensorflow"):
        require(name)
    stages = (
        arraybridge.torch(double),
        arraybridge.jax(shift),
        arraybridge.tensorflow(double),
        arraybridge.numpy(shift),
    )
    x = rows(11).astype(np.float32)
    result = Pipeline(*stages, microbatches=4)(x)
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, (x * 2 + 1) * 2 + 1)


def test_settings_and_traces_of_the_caller_hold_in_the_stages() -> None:
    require("torch")
    seen = []

    def look(x: Any) -> Any:
        seen.append(str(arraybridge.get_device()))
        return arraybridge.to_torch(x)

    with arraybridge.use_device("cpu"), arraybridge.trace() as log:
        Pipeline(look, microbatches=2)(rows(4))
    assert seen == ["cpu", "cpu"]
    assert len(log.records) >= 2


def test_what_frameworks_keep_for_a_thread_holds_in_the_stages() -> None:
    torch, jax = require("torch"), require("jax")
    weights = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        result = Pipeline(lambda x: x * weights)(torch.ones(2, 3))
    assert not result.requires_grad
    result = Pipeline(lambda x: x * weights)(torch.ones(2, 3))
    result.sum().backward()
    assert weights.grad.tolist() == [2.0, 2.0, 2.0]
    with torch.autocast("cpu", torch.bfloat16):
        assert Pipeline(lambda x: x @ x.T, microbatches=1)(torch.ones(2, 3)).dtype is torch.bfloat16
    with arraybridge.framework("jax").scopes.wide():
        assert Pipeline(lambda x: jax.numpy.ones(2) * x[0, 0])(np.ones((2, 3))).dtype == "float64"


def test_a_report_does_not_keep_results() -> None:
    pipeline = Pipeline(lambda i: np.zeros(10) + i)
    results = pipeline.map(range(20))
    kept = weakref.ref(next(results))
    results.close()
    gc.collect()
    assert kept() is None
    assert pipeline.report().stages[0].items >= 1


# -- map: lazy, ordered, bounded ---------------------------------------------------------------------


def test_map_keeps_the_order() -> None:
    rng = np.random.default_rng(0)
    pauses = rng.uniform(0, 0.002, 60)

    def wait(i: int) -> int:
        time.sleep(pauses[i])
        return i

    assert list(Pipeline(wait, shift, wait_again(pauses)).map(range(60))) == list(range(1, 61))


def wait_again(pauses: Any) -> Any:
    def wait(i: int) -> int:
        time.sleep(pauses[i - 1] / 2)
        return i

    return wait


@pytest.mark.parametrize(("stages", "queue_size"), [(1, 1), (2, 1), (3, 2), (4, 5)])
def test_map_is_bounded_and_lazy(stages: int, queue_size: int) -> None:
    read = handed = most = 0

    def items() -> Iterator[int]:
        nonlocal read, most
        for i in range(200):
            read += 1
            most = max(most, read - handed)
            yield i

    pipeline = Pipeline(*[lambda x: x] * stages, queue_size=queue_size)
    results = pipeline.map(items())
    assert read == 0  # nothing starts before the first result is asked for
    for _ in results:
        time.sleep(0.0005)
        handed += 1
    bound = stages * (queue_size + 1)
    assert most <= bound + 1  # the one that was handed out while the count stood still
    assert pipeline.report().most_in_flight <= bound


def test_an_endless_input() -> None:
    def forever() -> Iterator[int]:
        i = 0
        while True:
            yield i
            i += 1

    results = Pipeline(double, shift).map(forever())
    assert [next(results) for _ in range(5)] == [1, 3, 5, 7, 9]
    results.close()


def test_no_items() -> None:
    assert list(Pipeline(double).map([])) == []


def test_stages_overlap() -> None:
    def step(x: Any) -> Any:
        time.sleep(0.02)
        return x

    n, m = 3, 12
    pipeline = Pipeline(*[step] * n)
    list(pipeline.map(range(2)))
    start = time.perf_counter()
    list(pipeline.map(range(m)))
    taken = time.perf_counter() - start
    assert taken < 1.5 * 0.02 * (m + n - 1)  # one after the other it would be 0.72 s; benchmarks/ is stricter


# -- errors ------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def test_an_error_names_stage_and_microbatch_and_keeps_its_type() -> None:
    def fail(x: Any) -> Any:
        if x == 5:
            raise OwnError("five")
        return x

    with pytest.raises(OwnError, match="five") as caught:
        list(Pipeline(shift, fail, double).map(range(20)))
    assert "in stage 1 (fail), item 4" in caught.value.__notes__


def test_the_items_before_the_one_that_fails_come_first() -> None:
    """Also where they are still on their way when it fails."""
    failed = threading.Event()

    def fail(x: int) -> int:
        if x == 2:
            failed.set()
            raise OwnError("two")
        return x

    def wait(x: int) -> int:
        assert failed.wait(20)
        return x

    for _ in range(20):
        failed.clear()
        got: list[int] = []
        with pytest.raises(OwnError, match="two") as caught:
            got.extend(Pipeline(fail, wait, shift).map(range(100)))
        assert got == [1, 2]
        assert "in stage 0 (fail), item 2" in caught.value.__notes__
        wait_for_no_threads()


def test_the_first_of_the_items_that_fail_comes_out() -> None:
    failed = threading.Event()

    def later(x: int) -> int:
        if x == 2:
            failed.set()
            raise OwnError("two")
        return x

    def earlier(x: int) -> int:
        assert failed.wait(20)
        if x == 1:
            raise OwnError("one")
        return x

    got: list[int] = []
    with pytest.raises(OwnError, match="one") as caught:
        got.extend(Pipeline(later, earlier).map(range(100)))
    assert got == [0]
    assert "in stage 1 (earlier), item 1" in caught.value.__notes__
    wait_for_no_threads()


def test_an_error_that_came_out_holds_nothing_in_a_circle() -> None:
    def fail(x: Any) -> Any:
        raise OwnError

    gc.collect()
    gc.disable()
    try:
        item = np.zeros(3)
        kept = weakref.ref(item)
        with pytest.raises(OwnError):
            list(Pipeline(double, fail).map([item]))
        del item
        wait_for_no_threads()
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_in_a_batch() -> None:
    def fail(x: Any) -> Any:
        if 6 in x:
            raise OwnError
        return x

    with pytest.raises(OwnError) as caught:
        Pipeline(double, fail, microbatches=4)(np.arange(8))
    assert "in stage 1 (fail), microbatch 1" in caught.value.__notes__


def test_an_error_of_a_conversion_names_the_stage() -> None:
    require("pyclesperanto")

    @arraybridge.pyclesperanto
    def blur(x: Any) -> Any:
        return x

    with pytest.raises(arraybridge.DtypeNotSupportedError) as caught:
        Pipeline(blur)(np.zeros(4))
    assert any("stage 0 (blur)" in note for note in caught.value.__notes__)


def test_a_jax_error_comes_out_of_its_own_stage() -> None:
    jax = require("jax")

    @jax.jit
    def compute(x: Any) -> Any:
        def fail(_: Any) -> Any:
            raise OwnError("late")

        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def late(x: Any) -> Any:
        return compute(x)

    with pytest.raises(Exception, match="late") as caught:
        Pipeline(late, lambda x: x)(arraybridge.to_jax(np.zeros(4, np.float32)))
    assert any("stage 0 (late)" in note for note in caught.value.__notes__)


def test_system_exit_reaches_the_caller() -> None:
    def leave(x: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Pipeline(leave)(np.arange(3))


def test_stop_iteration_in_a_stage_does_not_end_the_results_silently() -> None:
    def stop(x: int) -> int:
        if x == 3:
            raise StopIteration
        return x

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Pipeline(stop).map(range(9)))


def test_a_stage_that_returns_nothing() -> None:
    with pytest.raises(TypeError, match=r"forget returned None"):
        list(Pipeline(forget, double).map([1]))


def forget(x: Any) -> None:
    return None


def test_an_input_that_raises() -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise OwnError("no more")

    got = []
    with pytest.raises(OwnError) as caught:
        got.extend(Pipeline(double).map(items()))
    assert got == [0, 2]
    assert "while reading item 2 of the input" in caught.value.__notes__


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pipeline(), ValueError, "one stage or more"),
        (lambda: Pipeline(double, 3), TypeError, "stage 1 is 3"),
        (lambda: Pipeline(double, Pipeline(shift)), TypeError, r"\*inner\.stages"),
        (lambda: Pipeline(double, microbatches=0), ValueError, "microbatches=0"),
        (lambda: Pipeline(double, microbatches=True), TypeError, "microbatches=True"),
        (lambda: Pipeline(double, microbatches=1.5), TypeError, "microbatches=1.5"),
        (lambda: Pipeline(double, queue_size=0), ValueError, "queue_size=0"),
        (lambda: Pipeline(double, axis="x"), TypeError, "axis='x'"),
        (lambda: Pipeline(double).map(3), TypeError, "items to iterate over"),
        (lambda: Pipeline(double)([1, 2]), TypeError, "no array in the batch"),
        (lambda: Pipeline(double)(np.array(1.0)), ValueError, "no axis 0"),
        (lambda: Pipeline(double, axis=2)(np.zeros((2, 2))), ValueError, "no axis 2"),
        (lambda: Pipeline(double)((np.zeros(3), np.zeros(4))), ValueError, r"\[3, 4\] rows"),
        (lambda: Pipeline(np.sum)(np.arange(8)), ValueError, "no arrays to join"),
        (lambda: Pipeline(double).report(), RuntimeError, "has not run yet"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_results_of_different_structure() -> None:
    def fickle(x: Any) -> Any:
        return (x, x) if x[0] == 0 else {"x": x}

    with pytest.raises(
        ValueError, match=r"microbatch 0 came out as a tuple of 2, and microbatch 1 as a dict"
    ):
        Pipeline(fickle)(np.arange(8))


def test_results_of_different_frameworks() -> None:
    require("torch")

    def fickle(x: Any) -> Any:
        return arraybridge.to_torch(x) if x[0] == 0 else x

    with pytest.raises(ValueError, match="torch"):
        Pipeline(fickle)(np.arange(8))


def test_scalars_that_cannot_be_joined() -> None:
    require("torch")
    with pytest.raises(ValueError, match="no axis 0 to join"):
        Pipeline(lambda x: x.sum())(arraybridge.to_torch(np.arange(8)))


def test_a_device_that_is_not_there() -> None:
    require("jax")

    @arraybridge.jax(device="gpu:7")
    def far(x: Any) -> Any:
        return x

    with pytest.raises(arraybridge.DeviceNotFoundError) as caught:
        Pipeline(far)(np.arange(4))
    assert any("stage 0 (far)" in note for note in caught.value.__notes__)


# -- ends --------------------------------------------------------------------------------------------


def wait_for_no_threads(seconds: float = 1.0) -> None:
    until = time.monotonic() + seconds
    while our_threads():
        assert time.monotonic() < until, our_threads()
        time.sleep(0.005)


def test_an_iterator_that_is_dropped_ends_the_threads() -> None:
    def use() -> None:
        for i, _ in enumerate(Pipeline(double, shift, double).map(range(10_000))):
            if i == 5:
                assert len(our_threads()) == 3
                break

    use()
    gc.collect()
    wait_for_no_threads()


def test_an_iterator_in_a_circle_ends_too() -> None:
    circle: list[Any] = []
    results = Pipeline(double, shift).map(range(10_000))
    next(results)
    circle += [circle, results]
    del circle, results
    gc.collect()
    wait_for_no_threads()


def test_an_iterator_that_never_starts_has_no_threads() -> None:
    results = Pipeline(double).map(range(5))
    assert our_threads() == []
    del results


def test_a_failure_ends_threads_that_wait() -> None:
    def fail(x: Any) -> Any:
        time.sleep(0.01)
        raise OwnError

    with pytest.raises(OwnError):
        list(Pipeline(double, double, fail, double).map(range(100)))
    wait_for_no_threads()


def test_a_pipeline_runs_again_and_in_several_threads() -> None:
    pipeline = Pipeline(double, shift)
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = pipeline(np.arange(10) + i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        np.testing.assert_array_equal(results[i], (np.arange(10) + i) * 2 + 1)


def test_a_pipeline_inside_a_stage() -> None:
    inner = Pipeline(double, microbatches=2)
    np.testing.assert_array_equal(Pipeline(shift, lambda x: inner(x))(np.arange(9)), (np.arange(9) + 1) * 2)


# -- report ------------------------------------------------------------------------------------------


def slow(x: Any) -> Any:
    time.sleep(0.01)
    return x


def test_the_report_names_the_bottleneck(tmp_path: Path) -> None:
    pipeline = Pipeline(double, slow, shift, microbatches=8)
    pipeline(np.arange(16))
    report = pipeline.report()
    assert report.bottleneck == "slow"
    first, middle, last = report.stages
    assert [s.items for s in report.stages] == [8, 8, 8]
    assert middle.busy >= 0.08
    assert middle.busy > first.busy
    assert first.blocked > 0.02  # the queue before the slow stage is full
    assert last.starved > 0.05
    assert [span.item for span in middle.spans] == list(range(8))
    assert all(a.end <= b.start for a, b in zip(middle.spans, middle.spans[1:], strict=False))
    assert "bottleneck: slow" in str(report)
    assert "<table>" in report._repr_html_()
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_html_is_escaped() -> None:
    assert "&lt;lambda&gt;" in Pipeline(lambda x: x)._repr_html_()
    assert "<lambda>" not in Pipeline(lambda x: x)._repr_html_()
