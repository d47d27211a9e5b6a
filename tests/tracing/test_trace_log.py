"""`explain` and `trace`: text and numbers. test_matrix.py checks that both agree."""

from __future__ import annotations

import asyncio
import html
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import TraceLog, convert_memory, convert_tree, explain, trace
from arraybridge.caches import empty_caches
from arraybridge.conversion import convert, decision, plan_cache
from arraybridge.tracing import trace_log as trace_module
from tests import matrix_data as data
from tests.helpers import require


@pytest.fixture(autouse=True)
def _no_log_stays_open() -> Any:
    yield
    assert not trace_module.open_logs


class Producer:
    """An array of another library, which exports its memory through DLPack."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


def aligned() -> np.ndarray[Any, Any]:
    memory: Any = arraybridge.aligned((2, 3), "float64")
    memory[...] = np.arange(6).reshape(2, 3)
    return memory


# ---- explain ---------------------------------------------------------------------------------------------


def test_route_fields() -> None:
    for name in ("torch", "jax", "pyclesperanto"):
        require(name)
    x, on_opencl = aligned(), convert_memory(aligned().astype("f4"), "pyclesperanto", 0)
    wide = np.broadcast_to(np.zeros(1), (1000,))
    for array, target, options, *expected in (
        (x, "torch", {}, "view", "cpu", True, 0, 48),
        (x, "jax", {}, "dlpack", "cpu", True, 0, 48),
        (x, "numpy", {}, "same", "cpu", True, 0, 48),
        (x, "numpy", {"copy": True}, "host", "cpu", False, 1, 48),
        (x[:, ::-1], "torch", {}, "host", "cpu", False, 1, 48),
        (x, "torch", {"dtype": "float32"}, "host", "cpu", False, 1, 48),
        (x.astype("f4"), "pyclesperanto", {"gpu_id": 0}, "device", "opencl:0", False, 1, 24),
        (on_opencl, "numpy", {}, "host", "cpu", False, 1, 24),
        (wide, "numpy", {}, "same", "cpu", True, 0, 8000),
    ):
        route = explain(array, target, **options)
        assert (route.source, route.target) == (data.framework_of(array), target)
        fields = [route.method, route.device, route.shares_memory, route.copies, route.nbytes]
        assert fields == expected
        assert route.reason
        assert route.seconds is None
        with trace() as log:
            convert_memory(array, target, **options)
        assert log.records == [route]
        assert (log.records[0].seconds or 0) > 0
        assert hash(route) == hash(explain(array, target, **options))
        with pytest.raises(AttributeError):
            route.copies = 3


def test_route_text_and_notebook_table() -> None:
    for target in ("numpy", "torch", "jax", "tensorflow"):
        require(target)
        for array in (aligned(), aligned()[::-1], aligned().T, np.array(1.0), np.zeros(0)):
            text = str(explain(array, target))
            assert re.fullmatch(rf"numpy → {target} on [^\n]+: [^\n]+, because [^\n]+\.", text), text
            assert text.count(".") - len(re.findall(r"\d\.\d", text)) == 1, text
            assert "None" not in text
    table = explain(np.zeros(4), "numpy")._repr_html_()
    assert table.startswith("<table>")
    assert "<th>method</th><td>same</td>" in table
    assert "<th>bytes</th><td>32 B</td>" in table
    assert "<th>time</th>" not in table  # no measured time


def test_explain_converts_nothing() -> None:
    """Check that `explain` does not copy the 32 MiB that the conversion would copy."""
    array = np.ones(2**22)
    peaks = []
    tracemalloc.start()
    try:
        for call in (explain, convert_memory):
            tracemalloc.reset_peak()
            call(array, "numpy", copy=True)
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[0] < 2**20
    assert peaks[1] > array.nbytes, "otherwise the previous check proves nothing"


# ---- trace -----------------------------------------------------------------------------------------------


def test_trace_counts_calls_and_bytes() -> None:
    """Short functions and trees are recorded as well, and an exception ends the trace as usual."""
    require("torch")
    x = aligned()
    logs: list[TraceLog] = []

    def interrupted() -> None:
        with trace() as log:
            logs.append(log)
            convert_memory(x, "torch")
            convert_memory(x, "torch", copy=True)
            arraybridge.to_torch(x[:, ::-1])
            arraybridge.to_cpu(x)
            convert_tree({"a": x, "b": [x, 1]}, "torch")
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    convert_memory(x, "torch")
    (log,) = logs
    assert [record.target for record in log.records] == ["torch"] * 3 + ["numpy"] + ["torch"] * 2
    assert [record.copies for record in log.records] == [0, 1, 1, 0, 0, 0]
    assert (log.total_bytes_copied, len(log), list(log)) == (96, 6, log.records)


def test_conversions_in_a_trace_run_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays with the same plan key are decided once. Their routes equal those of `explain`."""
    require("torch")
    decided: list[Any] = []

    def decide(data: Any, request: Any) -> Any:
        decided.append(data)
        return decision.decide(data, request)

    monkeypatch.setattr(convert, "decide", decide)
    arrays = [np.ones((rows, 7)) for rows in (1, 2, 3)]
    for options in ({}, {"copy": True}, {"dtype": "float16"}):
        decided.clear()
        with trace() as log:
            for x in arrays:
                convert_memory(x, "torch", **options)
        assert len(decided) <= 1  # none if an earlier test has cached the decision
        assert log.records == [explain(x, "torch", **options) for x in arrays]


def test_plans_that_forgot_a_plan_key_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    empty_caches()
    monkeypatch.setattr(plan_cache, "MOST_PLAN_KEYS", 2)
    shared, *read_only = (np.ones((4, 4))[:, :columns] for columns in (1, 2, 3))
    for x in read_only:
        x.flags.writeable = False  # it is copied, for a reason that depends on more than the plan key
    for x in (shared, *read_only):
        convert_memory(x, "torch")
    with trace() as log:
        convert_memory(shared, "torch")
    assert log.records == [explain(shared, "torch")]


def test_conversions_of_other_libraries_in_a_trace() -> None:
    """Objects with ``__dlpack__`` have no plan key, although the views of their memory have one."""
    require("torch")
    x = Producer(np.ones(3))
    with trace() as log:
        for _ in range(3):
            assert convert_memory(x, "torch").tolist() == [1, 1, 1]
        convert_memory(x, "torch", copy=True)
    convert_memory(x, "torch")
    with trace() as second:
        assert convert_memory(x, "torch").tolist() == [1, 1, 1]
    assert log.records == [explain(x, "torch")] * 3 + [explain(x, "torch", copy=True)]
    assert second.records == log.records[:1]


def test_a_log_can_be_indexed() -> None:
    with arraybridge.trace() as log:
        for x in (np.zeros(2), np.zeros(3)):
            arraybridge.to_numpy(x)
    assert [route.nbytes for route in log] == [16, 24]
    assert (log[0].nbytes, log[-1].nbytes, len(log[1:])) == (16, 24, 1)


def test_each_thread_has_its_own_trace() -> None:
    """Threads open and close nested traces at the same time."""

    def work(number: int) -> list[tuple[int, set[int]]]:
        counts = []
        for i in range(200):
            convert_memory(np.zeros(1), "numpy")  # while the other threads' logs are open
            with trace() as log, trace() as inner:
                for _ in range(i % 3):
                    convert_memory(np.zeros(number + 1), "numpy")
            assert log.records == inner.records
            counts.append((len(log), {record.nbytes for record in log.records} - {8 * (number + 1)}))
        return counts

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with trace() as outside, ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [[(i % 3, set()) for i in range(200)]] * 8
    finally:
        sys.setswitchinterval(before)
    assert outside.records == []


def test_each_task_has_its_own_trace() -> None:
    async def work(number: int) -> TraceLog:
        with trace() as log:
            for _ in range(3):
                convert_memory(np.zeros(number), "numpy")
                await asyncio.sleep(0)
        return log

    async def both() -> list[TraceLog]:
        return list(await asyncio.gather(work(1), work(2), work(3)))

    for number, log in enumerate(asyncio.run(both()), 1):
        assert [record.nbytes for record in log.records] == [8 * number] * 3


def test_trace_renders_as_a_table() -> None:
    require("torch")
    with trace() as log:
        convert_memory(aligned(), "torch")
        convert_memory(aligned()[:, ::-1], "torch")
    heads, *lines, summary = str(log).splitlines()
    columns = ("source", "target", "method", "device", "copies", "bytes", "time", "reason")
    assert [column for column in columns if column not in heads] == []
    rows = [line for line in lines if line.startswith("numpy")]
    start = heads.index("method")
    assert [row[start:].split()[0] for row in rows] == ["view", "host"], "columns are not aligned"
    assert "48 B" in rows[0]
    assert "2 conversions" in summary
    assert "48 B copied" in summary
    text = log._repr_html_()
    assert text.startswith("<table")
    assert text.endswith("</table>")
    assert text.count("<tr>") == 3
    cells = [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", text)]
    assert len(cells) == 3 * 9
    assert cells[9:12] == ["numpy", "torch", "view"]
    assert text.count("<th>") == 9 + 2  # the first cell of a row is its heading


def test_long_trace_is_abbreviated() -> None:
    x = aligned()
    with trace() as log:
        for _ in range(60):
            convert_memory(x, "numpy")
        convert_memory(x, "numpy", copy=True)
    for text in (str(log), log._repr_html_()):
        assert text.count("it is already there") == 20 + 19
        assert text.count("copy=True was passed") == 1
        assert "(21 more)" in text
        assert "61 conversions" in text


def test_trace_may_be_closed_in_another_thread_or_order() -> None:
    """Close traces out of order and in another thread, as a task that finalizes a generator may do."""
    first, second, third = trace(), trace(), trace()
    logs = [one.__enter__() for one in (first, second, third)]
    with ThreadPoolExecutor(1) as pool:
        for closing, one in enumerate((first, third, second)):
            convert_memory(np.zeros(closing + 1), "numpy")
            pool.submit(one.__exit__, None, None, None).result()
    convert_memory(np.zeros(9), "numpy")
    assert [[record.nbytes for record in log.records] for log in logs] == [[8], [8, 16, 24], [8, 16]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_array_without_strides_is_recorded() -> None:
    torch = require("torch")
    x = torch.eye(3).to_sparse_csr()
    with trace() as log:
        copied = arraybridge.convert_memory(x, "torch", copy=True)
    assert copied.to_dense().tolist() == torch.eye(3).tolist()
    assert [event.layout for event in log.events] == [""]
