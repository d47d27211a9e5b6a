"""explain foretells, trace records, and both tell the same."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    TraceLog,
    convert_memory,
    convert_tree,
    explain,
    trace,
)
from arraybridge.conversion import trace as trace_module
from tests import matrix_data as data
from tests.helpers import require, run_python

FIELDS = ("source", "target", "method", "device", "shares_memory", "copies", "nbytes", "reason")
SCRIPT = Path(__file__).parent / "scripts" / "explain_converts_nothing.py"


def aligned() -> np.ndarray[Any, Any]:
    memory = data.aligned_bytes(48).view(np.float64).reshape(2, 3)
    memory[...] = np.arange(6).reshape(2, 3)
    return memory


# ---- the fields, by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "target", "options", "expected"),
    [
        (lambda: aligned(), "torch", {}, ("view", "cpu", True, 0, 48)),
        (lambda: aligned(), "jax", {}, ("dlpack", "cpu", True, 0, 48)),
        (lambda: aligned(), "numpy", {}, ("same", "cpu", True, 0, 48)),
        (lambda: aligned(), "numpy", {"copy": True}, ("host", "cpu", False, 1, 48)),
        (lambda: aligned()[:, ::-1], "torch", {}, ("host", "cpu", False, 1, 48)),
        (lambda: aligned(), "torch", {"dtype": "float32"}, ("host", "cpu", False, 1, 48)),
        (
            lambda: aligned().astype("f4"),
            "pyclesperanto",
            {"gpu_id": 0},
            ("device", "opencl:0", False, 1, 24),
        ),
        (lambda: on_opencl(), "numpy", {}, ("host", "cpu", False, 1, 24)),
    ],
)
def test_a_route_in_its_fields(
    make: Callable[[], Any], target: str, options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    require(target)
    x = make()
    route = explain(x, target, **options)
    assert (route.source, route.target) == (data.framework_of(x), target)
    assert tuple(getattr(route, name) for name in FIELDS[2:-1]) == expected
    assert route.reason
    assert route.seconds is None
    with trace() as log:
        convert_memory(x, target, **options)
    assert log.records == [route]
    assert 0 < (log.records[0].seconds or 0) < 60


def on_opencl() -> Any:
    require("pyclesperanto")
    return convert_memory(aligned().astype(np.float32), "pyclesperanto", 0)


def test_nbytes_counts_elements_and_not_memory() -> None:
    assert explain(np.broadcast_to(np.zeros(1), (1000,)), "numpy").nbytes == 8000
    assert explain(np.zeros((0, 5)), "numpy").nbytes == 0
    assert explain(np.array(1, np.int16), "numpy").nbytes == 2


SENTENCE = re.compile(r"[^\n]+ → [^\n]+ on [^\n]+: [^\n]+, because [^\n]+\.")


def test_a_route_prints_as_one_plain_sentence() -> None:
    for target in ("numpy", "torch", "jax", "tensorflow"):
        require(target)
        for array in (aligned(), aligned()[::-1], aligned().T, np.array(1.0), np.zeros(0)):
            text = str(explain(array, target))
            assert SENTENCE.fullmatch(text), text
            assert text.count(".") - len(re.findall(r"\d\.\d", text)) == 1, text
            assert "numpy" in text
            assert target in text
            assert "None" not in text


def test_routes_compare_and_do_not_change() -> None:
    first, second = explain(aligned(), "numpy"), explain(aligned(), "numpy")
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(AttributeError):
        first.copies = 3  # type: ignore[misc]


# ---- explain converts nothing ----------------------------------------------------------------------------


def test_explain_converts_nothing_in_a_fresh_process() -> None:
    """Neither memory nor other frameworks: 256 MiB that would be copied stay uncopied."""
    require("torch")
    psutil = pytest.importorskip("psutil")
    assert psutil
    done = run_python(str(SCRIPT))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["copies"] == 1
    assert report["grown"] < 64 * 2**20
    assert report["grown by converting"] > 200 * 2**20, "else the line above proves nothing"
    assert report["loaded"] == ["torch"]


# ---- trace -----------------------------------------------------------------------------------------------


def test_a_trace_in_numbers() -> None:
    require("torch")
    x = aligned()
    with trace() as log:
        convert_memory(x, "torch")
        convert_memory(x, "torch", copy=True)
        convert_memory(x, "numpy")
        convert_memory(x[:, ::-1], "torch")
    assert isinstance(log, TraceLog)
    assert [record.copies for record in log.records] == [0, 1, 0, 1]
    assert log.total_bytes_copied == 96
    assert len(log) == 4
    assert list(log) == log.records


def test_short_forms_and_trees_are_recorded_too() -> None:
    require("torch")
    x = aligned()
    with trace() as log:
        arraybridge.to_torch(x)
        arraybridge.to_numpy(x)
        arraybridge.to_cpu(x)
        convert_tree({"a": x, "b": [x, 1]}, "torch")
    assert [record.target for record in log.records] == ["torch", "numpy", "numpy", "torch", "torch"]


def test_a_trace_ends_with_an_exception_too() -> None:
    require("torch")

    def interrupted(logs: list[TraceLog]) -> None:
        with trace() as log:
            logs.append(log)
            convert_memory(aligned(), "torch")
            raise KeyError

    logs: list[TraceLog] = []
    with pytest.raises(KeyError):
        interrupted(logs)
    convert_memory(aligned(), "torch")
    assert len(logs[0]) == 1
    assert not trace_module.open_logs


def test_each_thread_has_its_own_trace() -> None:
    require("torch")
    barrier = threading.Barrier(4)
    logs: dict[int, TraceLog] = {}

    def work(number: int) -> None:
        barrier.wait()
        with trace() as log:
            for _ in range(50 * (number + 1)):
                convert_memory(np.zeros(number + 1), "torch")
        logs[number] = log

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with trace() as outside:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outside.records == []
    for number in range(4):
        assert len(logs[number]) == 50 * (number + 1)
        assert {record.nbytes for record in logs[number].records} == {8 * (number + 1)}


def test_each_task_has_its_own_trace() -> None:
    require("torch")

    async def work(number: int) -> TraceLog:
        with trace() as log:
            for _ in range(3):
                convert_memory(np.zeros(number), "torch")
                await asyncio.sleep(0)
        return log

    async def both() -> list[TraceLog]:
        return list(await asyncio.gather(work(1), work(2), work(3)))

    for number, log in enumerate(asyncio.run(both()), 1):
        assert [record.nbytes for record in log.records] == [8 * number] * 3


def test_a_trace_is_a_table() -> None:
    require("torch")
    with trace() as log:
        convert_memory(aligned(), "torch")
        convert_memory(aligned()[:, ::-1], "torch")
    lines = str(log).splitlines()
    for column in ("source", "target", "method", "device", "copies", "bytes", "time", "reason"):
        assert column in lines[0]
    rows = [line for line in lines if line.startswith("numpy")]
    assert len(rows) == 2
    assert "view" in rows[0]
    assert "48 B" in rows[0]
    assert "host" in rows[1]
    start = lines[0].index("method")
    assert rows[0][start:].startswith("view"), "columns stand below their heads"
    assert rows[1][start:].startswith("host")
    assert "2 conversions" in lines[-1]
    assert "48 B copied" in lines[-1]


def test_a_trace_is_a_table_in_a_notebook() -> None:
    require("torch")
    with trace() as log:
        convert_memory(aligned(), "torch")
    text = log._repr_html_()
    assert text.startswith("<table")
    assert text.endswith("</table>")
    assert text.count("<tr>") == 2
    assert text.count("<th>") == text.count("<td>") > 5
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", text)]
    assert cells[:3] == ["numpy", "torch", "view"]


def test_a_route_is_a_table_in_a_notebook() -> None:
    html = explain(np.zeros(4), "numpy")._repr_html_()
    assert html.startswith("<table>")
    assert "<th>method</th><td>same</td>" in html
    assert "<th>bytes</th><td>32 B</td>" in html
    assert "<th>time</th>" not in html  # nothing was measured


def test_a_long_trace_shows_its_beginning_and_its_end() -> None:
    x = aligned()
    with trace() as log:
        for _ in range(60):
            convert_memory(x, "numpy")
        convert_memory(x, "numpy", copy=True)
    for text in (str(log), log._repr_html_()):
        assert text.count("it is there already") == 20 + 19
        assert text.count("copy=True was asked for") == 1
        assert "(21 more)" in text
        assert "61 conversions" in text


# ---- several threads, and logs that stay open --------------------------------------------------------------


@contextmanager
def in_another_thread(opened: AbstractContextManager[Any]) -> Iterator[Any]:
    """Opens it here and closes it in another thread, as a task may that runs the end of a generator."""
    log = opened.__enter__()
    yield log
    with ThreadPoolExecutor(1) as pool:
        pool.submit(opened.__exit__, None, None, None).result()


def test_a_trace_may_be_closed_in_another_thread() -> None:
    x = aligned()
    with in_another_thread(trace()) as log:
        convert_memory(x, "numpy")
    convert_memory(x, "numpy")
    assert len(log) == 1
    assert not trace_module.open_logs


def test_an_asynchronous_generator_may_end_in_another_task() -> None:
    async def rows(logs: list[TraceLog]) -> AsyncIterator[Any]:
        with trace() as log:
            logs.append(log)
            for _ in range(9):
                yield convert_memory(np.zeros(2), "numpy")

    async def first_row(logs: list[TraceLog]) -> Any:
        return await anext(rows(logs))  # the event loop ends the generator, in a task of its own

    logs: list[TraceLog] = []
    assert asyncio.run(first_row(logs)).tolist() == [0, 0]
    assert len(logs[0]) == 1
    assert not trace_module.open_logs


def test_logs_that_close_out_of_order_lose_nothing() -> None:
    first, second, third = trace(), trace(), trace()
    logs = [one.__enter__() for one in (first, second, third)]
    for closing, one in enumerate((first, third, second)):
        convert_memory(np.zeros(closing + 1), "numpy")
        one.__exit__(None, None, None)
    convert_memory(np.zeros(9), "numpy")
    assert [[record.nbytes for record in log.records] for log in logs] == [[8], [8, 16, 24], [8, 16]]
    assert not trace_module.open_logs


def test_traces_that_open_and_close_in_many_threads() -> None:
    def work(number: int) -> list[int]:
        counts = []
        for i in range(200):
            with trace() as log, trace() as inner:
                for _ in range(i % 3):
                    convert_memory(np.zeros(number + 1), "numpy")
            counts.append(len(log) + len(inner))
        return counts

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [[2 * (i % 3) for i in range(200)]] * 8
    finally:
        sys.setswitchinterval(before)
    assert not trace_module.open_logs


def test_a_log_that_stays_open_elsewhere_costs_nobody_the_fast_path() -> None:
    from contextvars import copy_context

    from tests.counting import functions_entered

    require("torch")
    x = np.zeros(4, np.float32)
    for _ in range(3):
        arraybridge.convert_memory(x, "torch")
    alone = functions_entered(lambda: arraybridge.convert_memory(x, "torch"))
    opened = arraybridge.trace()
    elsewhere = copy_context()
    log = elsewhere.run(opened.__enter__)
    try:
        beside = functions_entered(lambda: arraybridge.convert_memory(x, "torch"))
        assert [one for one in beside if one != "trace.py:listeners"] == alone
        assert len(log) == 0
        elsewhere.run(arraybridge.convert_memory, x, "torch")
        assert len(log) == 1
    finally:
        elsewhere.run(opened.__exit__, None, None, None)
    assert not trace_module.open_logs


def test_importing_a_framework_is_no_part_of_a_conversion() -> None:
    """In a process of its own, in which importing torch takes a second more than it does anyway."""
    require("torch")
    done = run_python(
        "-c",
        "import sys, time, importlib.abc, numpy as np, arraybridge\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': time.sleep(2)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "with arraybridge.trace() as log:\n"
        "    arraybridge.convert_memory(np.zeros(3), 'torch')\n"
        "print(log.records[0].seconds < 1.5)",
    )
    assert done.stdout.strip() == "True", done.stderr
