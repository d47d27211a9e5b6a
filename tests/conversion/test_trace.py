"""explain foretells, trace records, and both tell the same."""

from __future__ import annotations

import asyncio
import html
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    MemoryConversionError,
    Route,
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


def test_the_route_of_a_shared_array() -> None:
    require("torch")
    route = explain(aligned(), "torch")
    got = tuple(getattr(route, name) for name in FIELDS[:-1])
    assert got == ("numpy", "torch", "view", "cpu", True, 0, 48)
    assert isinstance(route, Route)
    assert route.reason


def test_the_route_of_a_copy() -> None:
    require("torch")
    route = explain(aligned()[:, ::-1], "torch")
    assert (route.method, route.shares_memory, route.copies, route.nbytes) == ("host", False, 1, 48)
    assert "negative" in route.reason


def test_the_route_through_dlpack() -> None:
    require("jax")
    route = explain(aligned(), "jax")
    assert (route.method, route.shares_memory, route.copies) == ("dlpack", True, 0)


def test_the_route_to_a_device_and_back() -> None:
    require("pyclesperanto")
    x = aligned().astype(np.float32)
    there = explain(x, "pyclesperanto")
    assert (there.method, there.copies, there.shares_memory, there.nbytes) == ("device", 1, False, 24)
    assert there.device.kind == "opencl"
    back = explain(convert_memory(x, "pyclesperanto"), "numpy")
    assert (back.method, back.copies, back.shares_memory, back.device) == ("host", 1, False, "cpu")


def test_the_route_of_the_same_object() -> None:
    route = explain(aligned(), "numpy")
    assert (route.method, route.shares_memory, route.copies, route.nbytes) == ("same", True, 0, 48)
    copied = explain(aligned(), "numpy", copy=True)
    assert (copied.shares_memory, copied.copies) == (False, 1)


def test_the_route_of_a_cast() -> None:
    require("torch")
    route = explain(aligned(), "torch", dtype="float32")
    assert (route.shares_memory, route.copies) == (False, 1)
    assert "cast" in route.reason


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


def test_explain_raises_what_the_conversion_would() -> None:
    require("torch")
    for array, options in (
        (np.array(["a"]), {}),
        (aligned()[::-1], {"copy": False}),
        (aligned(), {"gpu_id": 99}),
        (np.ma.masked_array([1]), {}),
    ):
        with pytest.raises(MemoryConversionError) as foretold:
            explain(array, "torch", **options)
        with pytest.raises(MemoryConversionError) as raised:
            convert_memory(array, "torch", **options)
        assert type(foretold.value) is type(raised.value)
        assert str(foretold.value) == str(raised.value)


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


def test_explain_leaves_source_and_log_alone() -> None:
    require("torch")
    x = aligned()
    before = x.tobytes()
    with trace() as log:
        explain(x, "torch", copy=True)
    assert x.tobytes() == before
    assert log.records == []


# ---- trace -----------------------------------------------------------------------------------------------


def test_records_are_the_routes_that_were_foretold() -> None:
    sources = []
    for name in data.FRAMEWORKS:
        require(name)
        for layout in ("aligned", "C", "transposed", "offset", "0-d", "zero-size"):
            if not data.inexpressible(name, layout, "float32"):
                sources.append(data.build(name, layout, "float32").array)  # noqa: PERF401
    count = 0
    for array in sources:
        for target in data.FRAMEWORKS:
            for options in ({}, {"copy": True}, {"dtype": "uint8"}):
                if "dtype" in options:
                    array = convert_memory(np.ones((2, 3), np.float32), data.framework_of(array))  # noqa: PLW2901
                try:
                    foretold = explain(array, target, **options)
                except MemoryConversionError:
                    continue
                with trace() as log:
                    convert_memory(array, target, **options)
                (record,) = log.records
                assert record == foretold
                for field in FIELDS:
                    assert getattr(record, field) == getattr(foretold, field)
                assert foretold.seconds is None
                assert isinstance(record.seconds, float)
                assert 0 < record.seconds < 60
                count += 1
    assert count > 150


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


def test_two_copies_count_twice() -> None:
    require("pyclesperanto")
    x = convert_memory(np.ones((2, 3), np.float32), "pyclesperanto")
    with trace() as log:
        convert_memory(x, "pyclesperanto", dtype="uint8")
    (record,) = log.records
    assert log.total_bytes_copied == record.copies * 24
    assert record.copies >= 1


def test_short_forms_and_trees_are_recorded_too() -> None:
    require("torch")
    x = aligned()
    with trace() as log:
        arraybridge.to_torch(x)
        arraybridge.to_numpy(x)
        arraybridge.to_cpu(x)
        convert_tree({"a": x, "b": [x, 1]}, "torch")
    assert [record.target for record in log.records] == ["torch", "numpy", "numpy", "torch", "torch"]


def test_nothing_is_recorded_outside_and_after() -> None:
    require("torch")
    x = aligned()
    convert_memory(x, "torch")
    with trace() as log:
        pass
    convert_memory(x, "torch")
    assert log.records == []
    assert not trace_module.open_logs


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


def test_what_fails_is_not_recorded() -> None:
    require("torch")
    with trace() as log, pytest.raises(CopyRequiredError):
        convert_memory(aligned()[::-1], "torch", copy=False)
    assert log.records == []


def test_nested_traces_record_each_for_itself() -> None:
    require("torch")
    x = aligned()
    with trace() as outer:
        convert_memory(x, "torch")
        with trace() as inner:
            convert_memory(x, "numpy")
        convert_memory(x, "torch", copy=True)
    assert [record.target for record in inner.records] == ["numpy"]
    assert [record.target for record in outer.records] == ["torch", "numpy", "torch"]


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


def test_an_empty_trace_prints() -> None:
    with trace() as log:
        pass
    assert str(log)
    assert log._repr_html_().startswith("<table")
    assert log.total_bytes_copied == 0
    assert "0" in repr(log)


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


def test_html_is_escaped() -> None:
    log = TraceLog()
    route = explain(aligned(), "numpy")
    log.records.append(Route("<b>", "&", route.method, route.device, True, 0, 1, "a < b"))
    assert "<b>" not in log._repr_html_()
    assert "&lt;b&gt;" in log._repr_html_()


def test_a_route_is_a_table_in_a_notebook() -> None:
    html = explain(np.zeros(4), "numpy")._repr_html_()
    assert html.startswith("<table>")
    assert "<th>method</th><td>same</td>" in html
    assert "<th>bytes</th><td>32 B</td>" in html
    assert "<th>time</th>" not in html  # nothing was measured


# ---- several threads, and logs that stay open --------------------------------------------------------------


def test_traces_that_open_and_close_in_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    start = Barrier(8)

    def work(number: int) -> list[int]:
        start.wait(60)
        counts = []
        for i in range(200):
            with arraybridge.trace() as log, arraybridge.trace() as inner:
                for _ in range(i % 3):
                    arraybridge.convert_memory(np.zeros(number + 1), "numpy")
            counts.append(len(log) - len(inner) + len(log))
        return counts

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert results == [[i % 3 for i in range(200)]] * 8
    assert not trace_module.open_logs


def test_a_log_that_closes_between_any_two_steps_of_closing_another_is_no_harm() -> None:
    """The race of the threads above, step by step: the older log closes just before the number-th one."""
    from contextvars import copy_context
    from types import FrameType

    def closes(number: int) -> bool:
        elsewhere = copy_context()
        older, newer = arraybridge.trace(), arraybridge.trace()
        elsewhere.run(older.__enter__)
        newer.__enter__()
        steps = 0

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal steps
            if frame.f_code.co_filename != trace_module.__file__:
                return None
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == number:
                elsewhere.run(older.__exit__, None, None, None)
            return step

        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 sends opcodes only if one asked before
        sys.settrace(step)
        try:
            newer.__exit__(None, None, None)
        finally:
            sys.settrace(before)
        if steps >= number:
            assert not trace_module.open_logs
            return True
        elsewhere.run(older.__exit__, None, None, None)
        return False

    number = 1
    while closes(number):
        number += 1
    assert number > 5


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
