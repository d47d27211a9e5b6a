"""Pipelines: results equal to those of the whole batch, stages on separate devices, errors, the report."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline
from tests.helpers import jax_with, require


def double(x: Any) -> Any:
    return x * 2


def shift(x: Any) -> Any:
    return x + 1


def rows(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 3))


# -- results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("n", [0, 1, 5, 12])
def test_results_equal_those_of_the_whole_batch(n: int, microbatches: int) -> None:
    x = rows(n)
    sizes: list[int] = []

    def note(x: Any) -> Any:
        sizes.append(len(x))
        return x * 2

    result = Pipeline(note, shift, microbatches=microbatches)(x)
    np.testing.assert_array_equal(result, x * 2 + 1)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert len(sizes) == max(1, min(n, microbatches))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_batches_are_split_along_another_axis(axis: int) -> None:
    x = np.arange(60).reshape(3, 4, 5)
    np.testing.assert_array_equal(Pipeline(double, axis=axis)(x), x * 2)


@pytest.mark.parametrize("n", [2, 8])
def test_last_stage_may_reuse_a_buffer(n: int) -> None:
    buffer = np.empty((2, 3))
    x = rows(n)
    pipeline = Pipeline(double, lambda part: np.add(part, 1, out=buffer), microbatches=n // 2)
    result, _ = pipeline(x), pipeline(x + 5)
    np.testing.assert_array_equal(result, x * 2 + 1)


class Model:
    """A model in two halves, each on a separate device."""

    def __init__(self) -> None:
        self.places: set[tuple[str, str, str]] = set()

    def _note(self, stage: str, x: Any) -> None:
        self.places.add((stage, threading.current_thread().name, str(arraybridge.device_of(x))))

    @arraybridge.jax(device="cpu:1")
    def encode(self, x: Any) -> Any:
        self._note("encode", x)
        return x * 2

    @arraybridge.jax(device="cpu:2", output_type="numpy")
    def decode(self, x: Any) -> Any:
        self._note("decode", x)
        return x + 1


def test_model_on_two_devices() -> None:
    jax_with(3)
    model, x = Model(), rows(10).astype(np.float32)
    pipeline = Pipeline(model.encode, model.decode, microbatches=5)
    result = pipeline(x)
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, x * 2 + 1)
    assert model.places == {("encode", "arraybridge-0-0", "cpu:1"), ("decode", "arraybridge-1-0", "cpu:2")}
    assert str(pipeline) == "Pipeline(encode, decode, microbatches=5)"


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


# -- errors ------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def scaled(x: Any, factor: Any) -> Any:
    return x * factor


@pytest.mark.parametrize("stage", [scaled, np.add, arraybridge.numpy(scaled)])
def test_errors_of_stages_with_two_parameters_state_what_a_stage_gets(stage: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Pipeline(double, stage)(np.arange(8))
    assert any("A stage gets one argument" in note for note in caught.value.__notes__)
    assert Pipeline(double, partial(scaled, factor=3))(np.arange(3)).tolist() == [0, 6, 12]


def test_other_type_errors_of_stages_get_no_note_about_arguments() -> None:
    with pytest.raises(TypeError) as caught:
        Pipeline(double, len)(np.arange(8)[0])
    assert "gets one argument" not in "".join(getattr(caught.value, "__notes__", ()))
    with pytest.raises(TypeError) as caught:
        list(Pipeline(len).map([5]))
    assert caught.value.__notes__ == ["in stage 0 (len), item 0"]


@pytest.mark.parametrize(("batch", "kind"), [("abc", "str"), ([1.0, 2.0], "list"), (5, "int")])
def test_batches_without_arrays_raise(batch: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"got a {kind} without arrays\. Pass an array") as caught:
        Pipeline(double)(batch)
    assert "pipeline.map(items)" in str(caught.value)


def test_batch_errors_name_stage_and_microbatch() -> None:
    def fail(x: Any) -> Any:
        if 6 in x:
            raise OwnError
        return x

    with pytest.raises(OwnError) as caught:
        Pipeline(double, fail, microbatches=4)(np.arange(8))
    assert "in stage 1 (fail), microbatch 1" in caught.value.__notes__


def test_jax_errors_are_raised_by_their_own_stage() -> None:
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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pipeline(), ValueError, "at least one stage"),
        (lambda: Pipeline([double, shift]), TypeError, r"use Pipeline\(\*stages\)"),  # type: ignore[arg-type]
        (lambda: Pipeline(double, 3), TypeError, "Stage 1 is 3"),  # type: ignore[arg-type]
        (lambda: Pipeline(double, Pipeline(shift)), TypeError, r"\*inner\.stages"),
        (lambda: Pipeline(double, microbatches=0), ValueError, "microbatches=0"),
        (lambda: Pipeline(double, microbatches=True), TypeError, "microbatches=True"),
        (lambda: Pipeline(double, queue_size=0), ValueError, "queue_size=0"),
        (lambda: Pipeline(double, axis="x"), TypeError, "axis='x'"),  # type: ignore[arg-type]
        (lambda: Pipeline(double).map(3), TypeError, "an iterable of items"),  # type: ignore[arg-type]
        (lambda: list(Pipeline(lambda x: None, double).map([1])), TypeError, "returned None"),
        (lambda: Pipeline(double)([1, 2]), TypeError, "list without arrays"),
        (lambda: Pipeline(double)(np.ones(4), np.ones(4)), TypeError, r"pipeline\(\(x, mask\)\)"),
        (lambda: Pipeline(double)(x=np.ones(4), mask=np.ones(4)), TypeError, r"pipeline\(\{'x': x"),
        (lambda: Pipeline(double)(np.ones(4), mask=np.ones(4)), TypeError, "takes one batch"),
        (lambda: Pipeline(double)(), TypeError, "takes one batch"),
        (lambda: Pipeline(double, axis=2)(np.zeros((2, 2))), ValueError, "axis 2. Pass an axis from -2 to 1"),
        (
            lambda: Pipeline(double)(np.array(1.0)),
            ValueError,
            r"axis 0\. Wrap the array in arraybridge\.fixed\(\)",
        ),
        (lambda: Pipeline(double)((np.zeros(3), np.zeros(4))), ValueError, r"\[3, 4\] rows"),
        (lambda: Pipeline(np.sum)(np.arange(8)), ValueError, "microbatches cannot be joined"),
        (lambda: Pipeline(lambda x: x if 0 in x else {"x": x})(np.arange(8)), ValueError, "different values"),
        (lambda: Pipeline(double).report(), RuntimeError, "has not run yet"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# -- report ------------------------------------------------------------------------------------------


def slow(x: Any) -> Any:
    time.sleep(0.01)
    return x


def test_report_names_the_bottleneck(tmp_path: Path) -> None:
    pipeline = Pipeline(double, slow, shift, microbatches=8)
    pipeline(np.arange(16))
    report = pipeline.report()
    assert report.bottleneck == "slow"
    first, middle, last = report.stages
    assert [s.items for s in report.stages] == [8, 8, 8]
    assert middle.busy >= 0.08
    assert first.blocked > 0.02  # the queue before the slow stage is full
    assert last.starved > 0.05
    assert [span.item for span in middle.spans] == list(range(8))
    assert [event.name for event in report.events()].count("slow") == 8
    assert "bottleneck: slow" in str(report)
    assert "<table>" in report._repr_html_()
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
