"""Events of a trace, and the lines of user code that they are attributed to."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import Pipeline, TraceLog, convert_memory, device_map, prefetch, trace, trees
from arraybridge.testing import inject_oom
from arraybridge.tracing import trace_log as trace_module
from arraybridge.tracing.events import Event
from tests.helpers import require

SCRIPT = Path(__file__).parent / "scripts" / "three_things.py"


def line_of(label: str, file: Path | str = __file__) -> int:
    """Return the number of the line that ends in ``# MARK``."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {label}")]
    return number


def of_kind(log: TraceLog, kind: str) -> list[Event]:
    return [event for event in log.events if event.kind == kind]


@arraybridge.numpy
def increment(x: Any) -> Any:
    return x + 1


# ---- the examples of the guide ---------------------------------------------------------------------------


def test_script_with_loop_pipeline_and_oom() -> None:
    require("torch")
    require("tensorflow")
    with trace() as log:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    at = {label: line_of(label, SCRIPT) for label in ("LOOP", "INSIDE", "PIPELINE", "OOM")}
    assert {event.file for event in log.events} == {str(SCRIPT)}

    loop = [e for e in log.events if e.line == at["LOOP"]]
    assert [(e.name, e.nbytes, e.layout) for e in loop] == [("numpy → tensorflow", 192, "transposed")] * 5
    assert {e.reason for e in loop} == {"it is not C-contiguous"}
    assert {e.thread for e in loop} == {"MainThread"}
    assert len({e.array for e in loop}) == 1

    stages = of_kind(log, "stage")
    assert Counter((e.name, e.item, e.line) for e in stages) == {
        (name, item, at["PIPELINE"]): 1 for name in ("double", "flip", "shift") for item in (0, 1)
    }
    assert len({e.thread for e in stages}) == 3
    assert {e.thread for e in stages if e.name == "flip"} == {"arraybridge-1-0"}
    assert len({e.flow for e in stages}) == 2
    inside = [e for e in log.events if e.line == at["INSIDE"]]
    assert [(e.name, e.nbytes, e.reason) for e in inside] == [
        ("numpy → torch", 96, "torch does not support negative strides")
    ] * 2
    assert {e.thread for e in inside} == {"arraybridge-2-0"}
    assert {e.line for e in of_kind(log, "call") if e.name == "double"} == {at["PIPELINE"]}

    recovered = [e for e in log.events if e.line == at["OOM"]]
    steps = [e.kind for e in recovered if e.kind in ("clean-up", "retry", "split")]
    assert steps == ["clean-up", "retry", "clean-up", "split"]
    (split,) = of_kind(log, "split")
    assert "4 rows ran out of memory" in split.reason
    assert "2 rows at a time" in split.reason
    (call,) = [e for e in recovered if e.kind == "call"]
    assert (call.name, call.device) == ("half", "cpu")
    assert all(call.start <= e.start and e.start + e.seconds <= call.start + call.seconds for e in recovered)

    spots = {spot.line: spot for spot in log.hotspots()}
    assert next(iter(spots)) == at["LOOP"], "the line with the most bytes must come first"
    assert (spots[at["LOOP"]].nbytes, spots[at["LOOP"]].count) == (5 * 192, 5)
    assert "this array is transposed: make it C-contiguous once, before the loop" in spots[at["LOOP"]].advice
    assert (spots[at["OOM"]].retries, spots[at["OOM"]].splits) == (1, 1)
    assert spots[at["INSIDE"]].threads == ("arraybridge-2-0",)
    assert spots[at["INSIDE"]].nbytes == 2 * 96


# ---- attribution to user lines ---------------------------------------------------------------------------


def test_events_name_user_lines_through_decorators_and_frameworks() -> None:
    torch = require("torch")

    @arraybridge.torch
    def both(tree: Any) -> Any:
        return tree["a"]

    @arraybridge.torch
    async def later(x: Any) -> Any:
        await asyncio.sleep(0)
        return x + 1

    async def main() -> None:
        await later(np.zeros(2))  # AWAITED

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            return increment(x)  # FORWARD

    tree = {"a": np.zeros(3)[::-1], "b": [np.zeros(2)[::-1]]}
    for label, run in {
        "TREE": lambda: both(tree),  # TREE
        "CONVERTED": lambda: arraybridge.convert_tree(tree, "torch"),  # CONVERTED
        "AWAITED": lambda: asyncio.run(main()),
        "FORWARD": lambda: Model()(np.zeros(2)),
    }.items():
        with trace() as log:
            run()
        assert log.events
        assert {(e.file, e.line, e.library) for e in log.events} == {(__file__, line_of(label), "")}


def test_thread_events_name_the_line_that_submitted_the_work() -> None:
    require("torch")
    items = [np.zeros((2, 2)), np.ones((2, 2))]
    with trace() as log:
        results = device_map(increment, items, devices=["cpu"])  # MAPPED
        list(results)
        converted = prefetch(items, "torch")  # FETCHED
        list(converted)
        results = Pipeline(increment, increment).map(items)  # PIPED
        list(results)
    found = Counter((e.kind, e.name, e.line) for e in log.events if e.kind in ("item", "stage", "call"))
    assert found == {
        ("item", "increment", line_of("MAPPED")): 2,
        ("call", "increment", line_of("MAPPED")): 2,
        ("item", "read", line_of("FETCHED")): 2,
        ("item", "to torch", line_of("FETCHED")): 2,
        ("stage", "increment", line_of("PIPED")): 4,
        ("call", "increment", line_of("PIPED")): 4,
    }
    assert {e.device for e in of_kind(log, "item") if e.name == "increment"} == {"cpu"}


def test_events_name_the_library_and_the_user_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebody.py").write_text(
        "import arraybridge\ndef inside(x):\n    return arraybridge.to_torch(x)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(folder))
    import somebody  # type: ignore[import-not-found]

    with trace() as log:
        somebody.inside(np.zeros(2)[::-1])  # THEIRS
        arraybridge.to_torch(np.zeros(2)[::-1])
    assert [(e.file, e.library) for e in log.events] == [(__file__, "somebody"), (__file__, "")]
    assert log.events[0].line == line_of("THEIRS")
    assert sorted(spot.libraries for spot in log.hotspots()) == [("",), ("somebody",)]
    assert [spot.line for spot in log.hotspots(libraries=False)] == [log.events[1].line]
    sys.modules.pop("somebody")


def test_events_name_notebook_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a module that names cells as IPython's compiler does."""
    names = {"/x/ipykernel_99/123.py": ("Cell", "In[7]")}
    stand_in = ModuleType("IPython")
    stand_in.get_ipython = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        compile=SimpleNamespace(format_code_name=names.get)
    )
    monkeypatch.setitem(sys.modules, "IPython", stand_in)
    with trace() as log:
        for file in (*names, "<ipython-input-8-abc>"):  # as a notebook does
            exec(compile("\n\nincrement(np.zeros(2))", file, "exec"), {**globals()})  # noqa: S102
    assert [e.where for e in of_kind(log, "call")] == ["In[7]:3", "<ipython-input-8-abc>:3"]


# ---- fields of events ------------------------------------------------------------------------------------


def test_failed_calls_and_gpu_decisions_are_recorded() -> None:
    @arraybridge.numpy
    def fails(x: Any) -> Any:
        raise KeyError(1)

    with trace() as log, pytest.raises(KeyError):
        fails(np.zeros(1))
    (call,) = of_kind(log, "call")
    assert call.reason == "raised KeyError"
    with trace() as log, arraybridge.use_device("cpu"):
        arraybridge.gpu(np.sum)(np.ones(1 << 18))  # DECIDED
    (decision,) = of_kind(log, "decision")
    assert (decision.name, decision.device, decision.line) == ("sum", "cpu", line_of("DECIDED"))
    assert decision.reason


def test_cleanup_events_report_freed_bytes() -> None:
    pool = arraybridge.BufferPool(1 << 20)
    pool.give(pool.take((1000,), "float64", "numpy"))
    with trace() as log, inject_oom("numpy"):
        arraybridge.run_with_oom_recovery(np.add, np.ones(2), 1)
    (clean_up,) = of_kind(log, "clean-up")
    assert clean_up.nbytes == 8000
    assert log.total_bytes_copied == 0, "freed bytes must not count as copied"


def test_events_are_ordered_and_json_serializable() -> None:
    require("torch")
    with trace() as log:
        increment(np.zeros(2))
        convert_memory(np.zeros(2)[::-1], "torch")
    starts = [e.start for e in log.events]
    assert starts == sorted(starts)
    assert [e.kind for e in log.events] == ["call", "conversion", "conversion", "conversion"]
    assert [e.route for e in log.events if e.route] == log.records
    error_text = json.loads(json.dumps([e.to_dict() for e in log.events]))
    assert error_text[-1]["name"] == "numpy → torch"
    assert error_text[-1]["copies"] == 1


# ---- limits, threads and overhead ------------------------------------------------------------------------


def test_oldest_events_are_dropped_and_counted() -> None:
    require("torch")
    with trace(limit=3) as log:
        for n in range(2, 9):
            convert_memory(np.zeros(n)[::-1], "torch")
    assert log.dropped == 4
    assert [e.nbytes for e in log.events] == [48, 56, 64]
    assert [r.nbytes for r in log.records] == [48, 56, 64]
    assert log.total_bytes_copied == 8 * sum(range(2, 9)), "dropped events must still be counted"
    assert "4 events" in str(log)
    assert "oldest 4 events" in repr(log.hotspots())


@pytest.mark.parametrize(
    ("limit", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_invalid_event_limit_raises(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="limit"), trace(limit=limit):
        pass
    assert not trace_module.open_logs


def test_program_log_records_all_threads() -> None:
    def work() -> None:
        increment(np.zeros(1))  # THREAD

    with trace_module.everywhere() as log:
        thread = threading.Thread(target=work, name="of the user")
        thread.start()
        thread.join()
    assert {(e.thread, e.line) for e in log.events} == {("of the user", line_of("THREAD"))}
    assert not trace_module.open_logs


def test_nothing_is_measured_without_an_open_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> float:
        raise AssertionError("measured")

    with trace():
        increment(np.zeros(3))
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", clock)
        assert increment(np.zeros(3)).tolist() == [1, 1, 1]
        with pytest.raises(AssertionError, match="measured"), trace():
            pass


# PyTorch 2.14 warns so on Python 3.13.0.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python")
def test_torch_compile_works_without_an_open_trace() -> None:
    torch = require("torch")
    trees.kinds.clear()  # PyTorch inspects a type when it first traces it
    torch.compiler.reset()

    @arraybridge.torch(output_type="input")
    def double(x: Any) -> Any:
        return x * 2

    compiled = torch.compile(double, backend="eager")
    for _ in range(2):
        with trace() as log:
            assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        assert {e.kind for e in log.events} <= {"call", "conversion"}
        assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
