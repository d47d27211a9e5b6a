"""`prefetch`: order, bounds, errors with the item's number, thread shutdown, and overlapping work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import prefetch
from tests.helpers import require
from tests.parallel.fake_streams import StreamFramework


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
@pytest.mark.parametrize("depth", [1, 5])
def test_items_are_converted_and_in_order(name: str, depth: int) -> None:
    require(name)
    items = [
        {"x": np.full(3, i, np.float32), "more": (np.ones(2, np.float32) * i, i), "name": str(i)}
        for i in range(9)
    ]
    results = list(prefetch(items, name, depth=depth))
    assert [r["name"] for r in results] == [str(i) for i in range(9)]
    for i, result in enumerate(results):
        assert arraybridge.detect_memory_type(result["x"]) == name
        np.testing.assert_array_equal(arraybridge.to_numpy(result["x"]), np.full(3, i, np.float32))
        np.testing.assert_array_equal(arraybridge.to_numpy(result["more"][0]), np.full(2, i, np.float32))
        assert result["more"][1] == i


def test_conversion_errors_name_the_item() -> None:
    results = prefetch([np.zeros(2), np.zeros(2), {"x": np.array(["a"])}], "torch")
    next(results), next(results)
    with pytest.raises(arraybridge.DtypeNotSupportedError) as caught:
        next(results)
    assert "while converting item 2 to torch" in caught.value.__notes__


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("numpy", {"copy": True}),
        ("torch", {"copy": True}),
        ("jax", {"copy": True}),
        ("tensorflow", {"copy": True}),
        ("torch", {"dtype": "int16"}),
        ("pyclesperanto", {}),
    ],
)
def test_source_may_refill_a_buffer_that_is_copied(name: str, options: dict[str, Any], depth: int) -> None:
    require(name)
    buffer = np.zeros((2, 8), np.float32)

    def items() -> Iterator[dict[str, np.ndarray]]:
        for i in range(30):
            buffer[:] = i
            yield {"x": buffer}

    results = list(prefetch(items(), name, depth=depth, **options))
    assert [np.unique(arraybridge.to_numpy(r["x"])).tolist() for r in results] == [[i] for i in range(30)]


def test_copies_use_a_separate_stream_ordered_by_events(framework: StreamFramework) -> None:
    for x in prefetch([np.full(2, float(i)) for i in range(4)], "streams", device="gpu:1"):
        assert x.gpu == 1
    converting = [(what, n) for name, what, n in framework.log if name == "arraybridge-0-0"]
    assert converting[0] == ("stream", 1)
    events = [n for what, n in converting if what == "mark"]
    assert [n for name, what, n in framework.log if name == "MainThread" and what == "wait"] == events
    assert len(events) == 4
    assert len(framework.taken_over) == 4


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, "numpy"), {}, TypeError, "an iterable of items"),
        (([], "toch"), {}, ValueError, "did you mean 'torch'"),
        (([], "torch"), {"depth": 0}, ValueError, "depth=0"),
        (([], "torch"), {"depth": True}, TypeError, "depth=True"),
        (([], "torch"), {"depth": 1.5}, TypeError, "depth=1.5"),
        (([], "torch", True), {}, ValueError, "gpu_id=True"),
        (([], "torch", 97), {}, arraybridge.DeviceNotFoundError, "gpu:97"),
        (([], "torch", 0), {"device": "cpu"}, ValueError, "not both"),
        (([], "torch"), {"device": "gpu 1"}, ValueError, "is not a device"),
    ],
)
def test_bad_input_raises_immediately(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    require("torch")
    with pytest.raises(error, match=message):
        prefetch(*arguments, **options)
