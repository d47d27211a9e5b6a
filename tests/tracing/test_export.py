"""Exports of a trace: hot spots in all formats, the trace-event format, and plots."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import MemoryConversionError, Pipeline, TraceLog, convert_memory, trace
from arraybridge.testing import inject_oom
from arraybridge.tracing.hotspots import advice_for_copies
from tests import matrix_data as data
from tests.helpers import require

#: Required fields of each phase of the format, in addition to name, phase, process and thread.
REQUIRED = {
    "X": {"ts", "dur", "cat"},
    "i": {"ts", "s", "cat"},
    "C": {"ts", "args"},
    "M": {"args"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the file's content as a strict JSON reader parses it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    events: list[dict[str, Any]]
    events = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)["traceEvents"]
    return events


@pytest.fixture(scope="module")
def log() -> TraceLog:
    """Record a pipeline of three stages, three copies, and an out-of-memory error."""
    require("torch")

    def stage(x: Any) -> Any:
        return x + 1

    @arraybridge.torch(oom_recovery="split")
    def half(x: Any) -> Any:
        return x / 2

    with trace() as log:
        Pipeline(stage, half, stage, microbatches=3)(np.ones((6, 2)))
        for _ in range(3):
            convert_memory(np.ones((2, 3))[::-1], "torch")
        with inject_oom("torch", above_rows=1):
            half(np.ones((2, 2)))
    return log


@pytest.fixture(scope="module")
def written(log: TraceLog, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("run") / "run.json"
    log.save(file)
    return read(file)


def test_events_follow_the_trace_event_format(written: list[dict[str, Any]]) -> None:
    for event in written:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert set(event) >= REQUIRED[event["ph"]], event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in written if event["ph"] != "M"]
    assert times == sorted(times)
    assert {event["ph"] for event in written} == set(REQUIRED)


def test_tracks_are_named_and_nested(written: list[dict[str, Any]]) -> None:
    groups = {e["pid"]: e["args"]["name"] for e in written if e["name"] == "process_name"}
    named = [e for e in written if e["name"] == "thread_name"]
    names = {(e["pid"], e["tid"]): (groups[e["pid"]], e["args"]["name"]) for e in named}
    assert set(names.values()) >= {
        *(("threads", f"arraybridge-{i}-0") for i in range(3)),
        *(("threads", "MainThread"), ("devices", "cpu")),
    }
    open_ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in written:
        if event["ph"] != "X":
            continue
        track = (event["pid"], event["tid"])
        assert track in names
        ends, end = open_ends[track], event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6, "events of a track must be nested"
        ends.append(end)


def test_flows_connect_stages(written: list[dict[str, Any]]) -> None:
    flows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in written:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) == 3, "there must be one flow per microbatch"
    stages = [e for e in written if e["ph"] == "X" and e["cat"] == "stage" and e["pid"] == 1]
    for steps in flows.values():
        assert [step["ph"] for step in steps] == ["s", "t", "f"]
        begun = [s for step in steps for s in stages if (s["tid"], s["ts"]) == (step["tid"], step["ts"])]
        assert [s["name"].rpartition(".")[2] for s in begun] == ["stage", "half", "stage"]
        assert len({s["args"]["item"] for s in begun}) == 1


def test_copied_bytes_are_exported_as_a_counter(written: list[dict[str, Any]]) -> None:
    assert [e["args"]["bytes"] for e in written if e["name"] == "bytes copied"] == [48, 96, 144]


def test_empty_log_can_be_exported_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with trace() as log:
        pass
    log.save(tmp_path / "run.json")
    assert {e["ph"] for e in read(tmp_path / "run.json")} == {"M"}
    log.plot(tmp_path / "run.png")
    assert repr(log.hotspots()) == "no conversions"
    assert len(log.hotspots().to_dict()["hotspots"]) == 0
    with pytest.raises(ValueError, match=r"got 'run\.txt'\. Pass 'run\.json'\. .* plot\('run\.png'\)\."):
        log.save(tmp_path / "run.txt")


def test_pipeline_report_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = Pipeline(abs, abs)
    assert list(pipeline.map([-1, -2, -3])) == [1, 2, 3]
    pipeline.report().save(tmp_path / "line.json")
    events = read(tmp_path / "line.json")
    assert len([e for e in events if e["ph"] == "X" and e["pid"] == 1]) == 6
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 3
    pipeline.report().save(tmp_path / "line.svg")
    assert "<svg" in (tmp_path / "line.svg").read_text()


@pytest.mark.parametrize(
    "write",
    [lambda log, report, file: log.plot(file), lambda log, report, file: report.save(file)],
    ids=["log.plot", "report.save"],
)
def test_wrong_suffixes_of_plots_raise_with_the_right_ones(write: Any, log: TraceLog, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = Pipeline(abs)
    assert list(pipeline.map([-1])) == [1]
    message = r"^Cannot plot to 'run\.txt': \.txt is not .* such as 'run\.png'\. .* save\('run\.json'\)\.$"
    with pytest.raises(ValueError, match=message):
        write(log, pipeline.report(), tmp_path / "run.txt")
    assert not list(tmp_path.iterdir())
    write(log, pipeline.report(), tmp_path / "run.PNG")
    assert (tmp_path / "run.PNG").read_bytes().startswith(b"\x89PNG")


def test_plot_shows_tracks_and_labels(log: TraceLog, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = log.plot(tmp_path / "run.svg").axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["arraybridge-0-0", "arraybridge-1-0", "arraybridge-2-0", "MainThread"]
    assert "144 B copied" in axes.get_title()
    assert "<svg" in (tmp_path / "run.svg").read_text()


# ---- hot spots -------------------------------------------------------------------------------------------


def test_lines_that_only_share_are_not_hot_spots() -> None:
    require("torch")
    with trace() as log:
        convert_memory(np.ones(4), "torch")
        convert_memory(np.ones((0, 4))[::-1], "torch")  # no copies
    assert list(log.hotspots()) == []
    assert log.hotspots().shared == 2
    assert repr(log.hotspots()) == "no copies"
    assert len(log.records) == 2


def test_hot_spots_add_up_bytes_and_times() -> None:
    require("torch")
    small, large = np.ones(4)[::-1], np.ones(400)[::-1]
    with trace() as log:
        for _ in range(3):
            convert_memory(small, "torch")
        convert_memory(large, "torch")
        convert_memory(np.ones(4), "torch")
        for image in np.ones((2, 1, 1))[:, ::-1]:
            convert_memory(image, "numpy", copy=True)
    spots = log.hotspots()
    assert [(s.nbytes, s.count) for s in spots] == [(3200, 1), (96, 3), (16, 2)]
    assert spots.shared == 1
    assert spots.nbytes == 3312 == log.total_bytes_copied
    assert spots[0].source == 'convert_memory(large, "torch")'
    assert spots[0].what == "numpy → torch"
    assert spots[0].where.endswith(f"test_export.py:{spots[0].line}")
    assert spots[1].reason == "torch does not support negative strides"
    assert "these 3 conversions convert the same array" in spots[1].advice
    assert "make it C-contiguous once, before the loop" in spots[1].advice
    assert not any("the same array" in spot.advice or "loop" in spot.advice for spot in (spots[0], spots[2]))
    assert [s.line for s in log.hotspots(top=1)] == [spots[0].line]
    assert log.hotspots(top=1).lines == 3
    assert "3 lines, 3.2 KiB copied" in repr(log.hotspots(top=1))
    assert "showing the first 1" in repr(log.hotspots(top=1))
    for top in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="top"):
            log.hotspots(top=top)  # type: ignore[arg-type]


def test_hot_spots_as_table_html_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch")
    monkeypatch.setenv("COLUMNS", "60")
    with trace() as log:
        convert_memory(np.ones(400)[::-1], "torch")
    spots = log.hotspots()
    text = repr(spots)
    assert "3.1 KiB" in text
    assert "→ this array is reversed: make it C-contiguous where" in text
    assert "1 line, 3.1 KiB copied" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 60
    page = html.unescape(spots._repr_html_())
    assert page.startswith("<table")
    assert re.findall(r"<td>(.*?)</td>", page)[0] == "3.1 KiB"  # in a table whose heading is the source line
    (error_text,) = json.loads(json.dumps(spots.to_dict()))["hotspots"]
    assert (error_text["reason"], error_text["threads"]) == (
        "torch does not support negative strides",
        ["MainThread"],
    )


def read_only() -> np.ndarray[Any, Any]:
    x = np.ones(4)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("make", "target", "options", "words"),
    [
        (lambda: np.ones((3, 4))[::-1], "torch", {}, "make it C-contiguous where it is created (np.asc"),
        (lambda: np.ones(4), "torch", {"copy": True}, "omit copy=True"),
        (lambda: np.ones(4), "torch", {"dtype": "float32"}, "create the array in that dtype"),
        (lambda: np.ones(4).astype(">f8"), "torch", {}, "newbyteorder('=')"),
        (lambda: np.broadcast_to(np.ones(4), (3, 4)), "jax", {}, "repeats its elements"),
        (lambda: np.ones(80, np.uint8)[1:65], "jax", {}, "then arraybridge.to_jax(x) shares it"),
        (read_only, "torch", {}, "to_torch(x, copy=False) shares it"),
    ],
)
def test_hot_spots_advise_how_to_avoid_the_copy(
    make: Any, target: str, options: dict[str, Any], words: str
) -> None:
    require(target)
    with trace() as log:
        convert_memory(make(), target, **options)
    (spot,) = log.hotspots()
    assert spot.nbytes > 0
    assert words in spot.advice


def test_advice_avoids_the_copy() -> None:
    """Follow the advice, and check that the conversion then shares memory."""
    require("tensorflow")
    x = np.ones((30, 40)).T
    with trace() as log:
        convert_memory(x, "tensorflow")
    assert "(y = aligned(x.shape, x.dtype); y[...] = x)" in log.hotspots()[0].advice
    y = arraybridge.aligned(x.shape, x.dtype)
    y[...] = x
    assert arraybridge.explain(y, "tensorflow").copies == 0


def test_every_copy_reason_has_advice() -> None:
    """Check each framework's arrays in each layout with each target: every reason has advice."""
    names = [name for name in data.FRAMEWORKS if require(name)]
    seen = set()
    for name, layout in itertools.product(names, data.LAYOUTS):
        for dtype in ("float32", "complex128", "bfloat16", "float8_e4m3fn"):
            if data.inexpressible(name, layout, dtype):
                continue
            array = data.build(name, layout, dtype).array
            for target, options in itertools.product(names, ({}, {"copy": True})):
                with trace() as log:
                    try:
                        convert_memory(array, target, **options)
                    except MemoryConversionError:
                        continue
                event = log.events[-1]
                if event.nbytes and event.reason not in seen:
                    seen.add(event.reason)
                    assert advice_for_copies([event]), event
    assert len(seen) >= 6
