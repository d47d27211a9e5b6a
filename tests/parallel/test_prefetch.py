"""`prefetch`: order, bounds, errors with the item's number, thread shutdown, and overlapping work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import prefetch
from arraybridge.device import Device
from arraybridge.host import buffers
from tests.helpers import registry_kept, require
from tests.memory.fake_framework import FakeFramework
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
    require("torch")
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


# -- page-locked memory --------------------------------------------------------------------------------


class SendingFramework(FakeFramework):
    """A framework with page-locked memory that records the addresses of the arrays that it copies."""

    has_host = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        self.sent.append(buffers.address(view))
        return super().from_host(view, device)

    def page_locked(self) -> list[bool]:
        """Return for each copied array whether it was in page-locked memory."""
        return [any(start == address for start, _ in self.locked) for address in self.sent]


@pytest.fixture
def sending() -> Iterator[SendingFramework]:
    one = SendingFramework()
    with registry_kept():
        arraybridge.register(one)
        yield one


def test_host_arrays_are_copied_from_page_locked_memory(sending: SendingFramework) -> None:
    torch = require("torch")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    read_only = x.astype(">i4")
    read_only.flags.writeable = False
    item = {"x": x, "more": [read_only, torch.arange(3)], "name": "a", "empty": np.ones(0)}
    (result,) = prefetch([item], "fake", 1)
    assert sending.page_locked() == [True, True, True, False]
    np.testing.assert_array_equal(result["x"].values, x)
    np.testing.assert_array_equal(result["more"][0].values, read_only)
    np.testing.assert_array_equal(result["more"][1].values, [0, 1, 2])
    assert (result["x"].gpu, result["name"]) == (1, "a")
    assert item["x"] is x


def test_arrays_in_other_layouts_and_of_subclasses_are_not_pinned(sending: SendingFramework) -> None:
    torch = require("torch")

    class Labeled(np.ndarray):
        pass

    x = np.arange(6.0).reshape(2, 3)
    items = [x.T, x[:, ::2], x.view(Labeled), torch.arange(6.0).reshape(2, 3).T, torch.ones(2) * 1j]
    items[-1] = items[-1].conj()
    results = list(prefetch(items, "fake", 0))
    assert sending.page_locked() == [False] * 5
    for result, item in zip(results, items, strict=True):
        np.testing.assert_array_equal(result.values, arraybridge.to_numpy(item, copy=True))


def test_arrays_that_cannot_be_converted_raise_the_error_of_the_conversion(sending: SendingFramework) -> None:
    torch = require("torch")
    scipy_sparse = pytest.importorskip("scipy.sparse")
    items = {
        "mask": np.ma.masked_less(np.arange(3), 1),
        "dtype": np.array([{}]),
        "text": np.array(["a"]),
        "grad": torch.ones(2, requires_grad=True),
        "meta": torch.ones(2, device="meta"),
        "sparse": scipy_sparse.csr_array(np.eye(2)),
    }
    for key, x in items.items():
        with pytest.raises(arraybridge.MemoryConversionError) as expected:
            arraybridge.convert_tree([{key: x}], "fake", 0)
        with pytest.raises(type(expected.value)) as caught:
            list(prefetch([np.ones(2), [{key: x}]], "fake", 0))
        assert str(caught.value) == str(expected.value)
        assert f"at [0][{key!r}]" in str(caught.value)
        assert "while converting item 1 to fake" in caught.value.__notes__


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}])
def test_arrays_that_stay_on_the_host_are_not_pinned(sending: SendingFramework, options: Any) -> None:
    x = np.ones(3)
    results = list(prefetch([x], "fake", **options))
    assert sending.locked == []
    assert np.shares_memory(results[0].values, x)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_items_are_shared_without_a_gpu(name: str) -> None:
    module = require(name)
    x, y = np.ones(3), module.ones(3)
    ((first, second),) = prefetch([[x, y]], name)
    assert np.shares_memory(arraybridge.to_numpy(first), x)
    assert second is y


def test_memory_is_not_pinned_before_a_gpu_is_open(
    sending: SendingFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the automatic choice of the GPU, for which allocating first might open another GPU."""
    monkeypatch.setattr(type(sending.devices), "is_started", lambda _: len(sending.sent) > 0)
    list(prefetch([np.full(3, i) for i in range(3)], "fake", "auto"))
    assert sending.page_locked() == [False, True, True]


def test_frameworks_without_page_locked_memory_are_queried_once(
    sending: SendingFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[int] = []
    monkeypatch.setattr(type(sending.memory), "allocate_pinned", lambda _, nbytes: queries.append(nbytes))
    x = np.ones(3)
    list(prefetch([x] * 4, "fake", 0))
    assert queries == [1]
    assert sending.sent == [buffers.address(x)] * 4


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
